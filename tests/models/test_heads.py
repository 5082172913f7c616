"""Every head computes the same function; torch.compile needs a C++ compiler."""

from functools import partial

import hydra.utils
import pytest
import torch

from sparton.kernels.splade_head import splade_head_reference
from sparton.models.heads import CompiledHead, EagerHead, HybridHead, SpartonHead, TiledHead
from sparton.types import TokenBatch
from tests.composing import composed

V, D = 61, 16
HEADS = {
    "eager": EagerHead(),
    "tiled": TiledHead(tile=7),
    "tiled_default": TiledHead(),
    "sparton": SpartonHead(),
    "sparton_hybrid": HybridHead(),
    "compiled": CompiledHead(),
    "tiled_compiled": TiledHead(tile=32, compiled=True),
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if "compiled" in name else []) for name in HEADS
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(bias: bool = True):
    tokens = TokenBatch.from_lists([[1] * n for n in (5, 0, 9, 1)]).to(DEVICE)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(15, D, generator=generator).to(DEVICE).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(DEVICE).requires_grad_()
    shift = torch.randn(V, generator=generator).to(DEVICE).requires_grad_()
    return hidden, weight, shift if bias else None, tokens


def results(head, hidden, weight, bias, tokens):
    reps = head(hidden, weight, bias, tokens)
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    upstream = torch.randn(4, V, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    return [reps, *torch.autograd.grad(reps, leaves, upstream)]


def assert_agrees_with_the_reference(head, *leaves_and_tokens, **variant):
    *leaves, tokens = leaves_and_tokens
    actual = results(head, *leaves, tokens)
    double = [None if x is None else x.detach().double().requires_grad_() for x in leaves]

    def reference(hidden, weight, bias, tokens):
        return splade_head_reference(hidden, weight, bias, tokens.cu_seqlens, **variant)

    truth = results(reference, *double, tokens)
    assert actual[0].dtype == torch.float32
    for a, b in zip(actual, truth, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(a.double() * 1.01, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_heads_agree_with_the_reference(name, bias):
    assert_agrees_with_the_reference(HEADS[name], *problem(bias))


VARIANTS = [("max", "log1p_relu"), ("sum", "relu"), ("sum", "log1p_relu")]
BUILDERS = {
    "eager": EagerHead,
    "tiled": partial(TiledHead, tile=7),
    "sparton": SpartonHead,
    "compiled": CompiledHead,
    "tiled_compiled": partial(TiledHead, tile=32, compiled=True),
}


@pytest.mark.parametrize(("pooling", "activation"), VARIANTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name.values[0] in BUILDERS])
def test_other_poolings_and_activations(name, pooling, activation):
    variant = {"pooling": pooling, "activation": activation}
    assert_agrees_with_the_reference(BUILDERS[name](**variant), *problem(), **variant)


def truth_of_token_topk(k, pooling, activation):
    """In the dtype of the operands: all but the k largest of a token's logits become 0."""

    def reference(hidden, weight, bias, tokens):
        rows = []
        for states in hidden.split(tokens.cu_seqlens.diff().tolist()):
            logits = (states @ weight.T + bias).relu()
            kept = logits.detach().sort(descending=True, stable=True).indices[:, :k]
            values = (logits * torch.zeros_like(logits).scatter(1, kept, 1.0)).log1p()
            values = values.log1p() if activation == "log1p_relu" else values
            values = torch.cat([values, values.new_zeros(1, V)])
            rows.append(values.sum(0) if pooling == "sum" else values.max(0).values)
        return torch.stack(rows)

    return reference


@pytest.mark.parametrize(("pooling", "activation"), [("max", "relu"), *VARIANTS])
@pytest.mark.parametrize(
    "name", ["eager", "tiled", "sparton", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_the_largest_terms_of_each_token(name, pooling, activation):
    variant = {"pooling": pooling, "activation": activation}
    if (name, pooling) == ("sparton", "sum"):
        with pytest.raises(ValueError, match=r"token_topk=4 for max pooling.*TiledHead"):
            BUILDERS[name](**variant, token_topk=4)
        return
    hidden, weight, shift, tokens = problem()
    head = BUILDERS[name](**variant, token_topk=4)
    actual = results(head, hidden, weight, shift, tokens)
    double = [x.detach().double().requires_grad_() for x in (hidden, weight, shift)]
    truth, other = (
        results(truth_of_token_topk(k, pooling, activation), *double, tokens) for k in (4, 3)
    )
    assert actual[0].dtype == torch.float32
    for a, b, c in zip(actual, truth, other, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=1e-5)
    values, indices = head.topk(hidden, weight, shift, tokens, 7)
    expected = actual[0].detach().sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :7])
    assert torch.equal(indices, expected.indices[:, :7])
    assert not values.requires_grad


@pytest.mark.parametrize("name", ["eager", "tiled", "sparton"])
def test_equal_logits_of_a_token(name):
    """Of a token the first terms are kept, and of equal tokens the first has the gradient."""
    tokens = TokenBatch.from_lists([[1, 1], [1]]).to(DEVICE)
    hidden = torch.ones(3, 2, device=DEVICE, requires_grad=True)
    weight = torch.ones(20, 2, device=DEVICE)
    reps = BUILDERS[name](token_topk=9)(hidden, weight, None, tokens)
    assert reps.count_nonzero(1).tolist() == [9, 9]
    assert reps[:, :9].all()
    reps.sum().backward()
    expected = torch.tensor([[3.0, 3], [0, 0], [3, 3]], device=DEVICE)  # 9 / (1 + 2)
    torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_number_of_terms_is_checked_when_a_head_is_built(name):
    with pytest.raises(ValueError, match=r"token_topk must be a whole number .* got 0"):
        BUILDERS[name](token_topk=0)


@pytest.mark.parametrize("name", BUILDERS)
def test_names_are_checked_when_a_head_is_built(name):
    with pytest.raises(ValueError, match="pooling must be one of max, sum, got 'mean'"):
        BUILDERS[name](pooling="mean")
    with pytest.raises(ValueError, match="activation must be one of relu, log1p_relu, got 'exp'"):
        BUILDERS[name](activation="exp")


def test_fp8_is_for_the_maximum():
    with pytest.raises(ValueError, match="fp8 serves max pooling alone"):
        SpartonHead(pooling="sum", fp8=True)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("name", ["eager", "sparton"])
def test_topk_of_a_head(name, pooling):
    operands = problem()
    head = BUILDERS[name](pooling=pooling)
    values, indices = head.topk(*operands, 7)
    reps = head(*operands).detach()
    torch.testing.assert_close(values, reps.topk(7).values)
    torch.testing.assert_close(values, reps.gather(1, indices))
    assert not values.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_heads_under_autocast(name):
    hidden, weight, bias, tokens = problem()
    exact = results(HEADS["eager"], hidden, weight, bias, tokens)
    with torch.autocast(DEVICE, torch.bfloat16):
        reps = HEADS[name](hidden, weight, bias, tokens)
    assert reps.dtype == torch.float32
    error = (reps - exact[0]).norm() / exact[0].norm()
    assert 1e-5 < error < 1e-2, "products must be rounded to bfloat16, and no more than that"
    leaves = (hidden, weight, bias)
    for leaf, gradient in zip(leaves, torch.autograd.grad(reps.sum(), leaves), strict=True):
        assert gradient.dtype == leaf.dtype


def test_the_fp8_head_is_close_to_the_plain_one():
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 tensor cores")
    hidden, weight, bias, tokens = problem()
    with torch.autocast(DEVICE, torch.bfloat16):
        reps = SpartonHead(fp8=True)(hidden, weight, bias, tokens)
        plain = SpartonHead()(hidden, weight, bias, tokens)
    assert 1e-6 < (reps - plain).norm() / plain.norm() < 2e-2
    with pytest.raises(ValueError, match=r"float32; run under torch\.autocast"):
        SpartonHead(fp8=True)(hidden, weight, bias, tokens)


@pytest.mark.parametrize("other", [{"pooling": "sum"}, {"activation": "log1p_relu"}])
def test_the_papers_kernels_know_one_variant(other):
    ((name, value),) = other.items()
    with pytest.raises(ValueError, match=f"HybridHead.* got .*{name}={value!r}.*SpartonHead"):
        HybridHead(**other)
    with pytest.raises(ValueError, match=r"HybridHead.* token_topk=3: take another"):
        HybridHead(token_topk=3)
    assert (HybridHead("max", "relu").pooling, HybridHead().activation) == ("max", "relu")


def test_a_tile_needs_rows():
    with pytest.raises(ValueError, match="got 0"):
        TiledHead(tile=0)


@pytest.mark.parametrize("name", [name for name in HEADS if name != "tiled_default"])
def test_head_configs(name):
    head = hydra.utils.instantiate(composed(f"head={name}").head)
    assert list(head.parameters()) == []
    assert type(head) is type(HEADS[name])
