"""Packed attention against attention written out in fp64, one sequence after the other."""

import pytest
import torch
from torch import Tensor, nn

from sparton.models import attention
from sparton.models.attention import packed_attention
from sparton.types import TokenBatch, TokenRows

LENGTHS = (5, 0, 1, 150, 64, 33)
WIDTH = 32
on_gpu = torch.cuda.is_available()
DEVICE, HALF = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float16)


def inputs(dtype=torch.float32, device="cpu") -> tuple[list[Tensor], TokenBatch]:
    """Query, key and value ``[1, H, T, d]``, rounded to ``dtype`` but kept exactly comparable."""
    tokens = TokenBatch.from_lists([[0] * length for length in LENGTHS]).to(device)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 1, 2, tokens.num_tokens, WIDTH, generator=generator)
    states[:2] *= 2  # uneven attention, so that every key counts
    return [state.to(dtype).to(device) for state in states], tokens


def packed(
    states: list[Tensor],
    tokens: TokenBatch,
    sliding_window: int | None,
    keys: TokenRows | None = None,
) -> Tensor:
    output, weights = packed_attention(
        nn.Identity(),
        *states,
        None,
        sliding_window=sliding_window,
        cu_seq_lens_q=tokens.cu_seqlens,
        max_length_q=tokens.max_seqlen,
        cu_seq_lens_k=keys.cu_seqlens if keys else tokens.cu_seqlens,
        max_length_k=keys.max_seqlen if keys else tokens.max_seqlen,
        key_rows=keys.rows if keys else None,
    )
    assert weights is None
    return output


def first_halves(tokens: TokenBatch) -> TokenRows:
    """Of each sequence the first half, rounded up, so that windows leave some tokens without."""
    counts = [(length + 1) // 2 for length in LENGTHS]
    starts = tokens.cu_seqlens[:-1].tolist()
    rows = [start + s for start, count in zip(starts, counts) for s in range(count)]
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    return TokenRows(torch.tensor(rows), bounds, max(counts)).to(tokens.cu_seqlens.device)


def reference(states: list[Tensor], sliding_window: int | None, halves: bool = False) -> Tensor:
    query, key, value = (state.double() for state in states)
    pieces = []
    for q, k, v in zip(*(state.split(LENGTHS, dim=2) for state in (query, key, value))):
        scores = q @ k.transpose(2, 3) / WIDTH**0.5
        if halves:
            scores[..., (k.shape[2] + 1) // 2 :] = float("-inf")
        if sliding_window is not None:
            steps = torch.arange(q.shape[2], device=q.device)
            far = (steps[:, None] - steps).abs() >= sliding_window
            scores = scores.masked_fill(far, float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0)
        pieces.append((weights @ v).transpose(1, 2))
    return torch.cat(pieces, dim=1)


def error(actual: Tensor, truth: Tensor) -> float:
    return float((actual.double() - truth).detach().abs().max())


@pytest.mark.parametrize("window", [None, 1, 9, 200])
def test_outputs_on_any_machine(window):
    states, tokens = inputs()
    assert error(packed(states, tokens, window), reference(states, window)) < 1e-5
    if window == 9:
        assert error(packed(states, tokens, window + 1), reference(states, window)) > 0.1


@pytest.mark.parametrize("window", [None, 9])
def test_gradients_on_any_machine(window):
    states, tokens = inputs()
    upstream = torch.randn(1, tokens.num_tokens, 2, WIDTH)
    for state in states:
        state.requires_grad_()
    truth = torch.autograd.grad(reference(states, window), states, upstream.double())
    actual = torch.autograd.grad(packed(states, tokens, window), states, upstream)
    for left, right in zip(actual, truth):
        assert error(left, right.double()) < 1e-4
        assert error(left * 1.01, right.double()) > 1e-4


@pytest.mark.parametrize("window", [None, 9, 200])
def test_tokens_that_nobody_attends_to(window):
    states, tokens = inputs()
    upstream = torch.randn(1, tokens.num_tokens, 2, WIDTH)
    for state in states:
        state.requires_grad_()
    output = packed(states, tokens, window, first_halves(tokens))
    truth = reference(states, window, halves=True)
    assert error(output, truth) < 1e-5
    assert error(packed(states, tokens, window), truth) > 0.1
    expected = torch.autograd.grad(truth, states, upstream.double())
    for left, right in zip(torch.autograd.grad(output, states, upstream), expected):
        assert error(left, right.double()) < 1e-4


def test_dropout_and_masks_are_refused():
    states, tokens = inputs()
    layer = nn.Identity()
    boundaries = {f"cu_seq_lens_{side}": tokens.cu_seqlens for side in "qk"}
    boundaries |= {f"max_length_{side}": tokens.max_seqlen for side in "qk"}
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        packed_attention(layer, *states, None, dropout=0.1, **boundaries)
    with pytest.raises(ValueError, match="no attention mask"):
        packed_attention(layer, *states, torch.ones(1, 1), **boundaries)


@pytest.fixture(params=["ours", "FlashAttention"])
def kernels(request, monkeypatch):
    """Which of the two serves short sequences."""
    monkeypatch.setattr(attention, "SHORT", 512 if request.param == "ours" else 0)


@pytest.mark.parametrize("halves", [False, True])
def test_our_kernels_serve_short_sequences(halves, monkeypatch):
    """On the GPU or, chosen there as if it were one, in Triton's interpreter."""
    monkeypatch.setattr(attention, "SHORT", 512)
    states, tokens = inputs(HALF, DEVICE)
    upstream = torch.randn(1, tokens.num_tokens, 2, WIDTH, device=DEVICE).to(HALF)
    for state in states:
        state.requires_grad_()
    keys = first_halves(tokens) if halves else None
    expected = torch.autograd.grad(reference(states, None, halves), states, upstream.double())
    calls = []

    def spy(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    original = attention.varlen_attention
    monkeypatch.setattr(attention, "varlen_attention", spy)
    if not on_gpu:
        assert packed(states, tokens, None, keys).dtype == HALF
        assert not calls, "the padded view"
        monkeypatch.setattr(attention, "has_short_kernel", lambda x, dtype, width: True)
    output = packed(states, tokens, None, keys)
    assert len(calls) == 1
    assert error(output, reference(states, None, halves)) < 0.05
    for left, right in zip(torch.autograd.grad(output, states, upstream), expected):
        assert error(left, right.double()) < 0.02 * float(right.abs().max())
        assert error(left * 1.05, right.double()) > 0.02 * float(right.abs().max())
    monkeypatch.setattr(attention, "SHORT", 149)
    packed(states, tokens, 9, keys)
    packed(states, tokens, None, keys)
    assert len(calls) == 1, "too long, or with a window"


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 9, 65])
def test_the_fused_kernel_is_as_exact_as_the_padded_view(dtype, window):
    states, tokens = inputs(dtype, "cuda")
    truth = reference(states, window)
    # In fp32 on the same rounded inputs the padded view is taken; rounded once, it is the best
    # that this precision can hold.
    eager = packed([state.float() for state in states], tokens, window).to(dtype)
    slack = 4 * torch.finfo(dtype).eps
    assert error(packed(states, tokens, window), truth) < 2 * error(eager, truth) + slack
    if window == 9:
        for off in (8, 10):
            assert error(packed(states, tokens, off), truth) > 2 * error(eager, truth) + slack


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("window", [None, 9])
def test_gradients_of_the_fused_kernel(window):
    states, tokens = inputs(torch.bfloat16, "cuda")
    upstream = torch.randn(1, tokens.num_tokens, 2, WIDTH, device="cuda").bfloat16()
    for state in states:
        state.requires_grad_()
    truth = torch.autograd.grad(reference(states, window), states, upstream.double())
    actual = torch.autograd.grad(packed(states, tokens, window), states, upstream)
    for left, right in zip(actual, truth):
        scale = float(right.abs().max())
        assert error(left, right.double()) < 0.02 * scale
        assert error(left * 1.05, right.double()) > 0.02 * scale


@pytest.mark.gpu
def test_head_widths_without_a_fused_kernel_take_the_padded_view():
    states, tokens = inputs(torch.bfloat16, "cuda")
    odd = [state[..., :20].contiguous() for state in states]
    assert packed(odd, tokens, None).shape == (1, tokens.num_tokens, 2, 20)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("window", [None, 9, 200])
def test_tokens_that_nobody_attends_to_in_the_fused_kernel(window):
    states, tokens = inputs(torch.bfloat16, "cuda")
    upstream = torch.randn(1, tokens.num_tokens, 2, WIDTH, device="cuda").bfloat16()
    for state in states:
        state.requires_grad_()
    output, truth = (
        packed(states, tokens, window, first_halves(tokens)),
        reference(states, window, True),
    )
    assert error(output, truth) < 0.05 < error(packed(states, tokens, window), truth)
    expected = torch.autograd.grad(truth, states, upstream.double())
    for left, right in zip(torch.autograd.grad(output, states, upstream), expected):
        assert error(left, right.double()) < 0.02 * float(right.abs().max())
