"""The core without an activation, as MaxSim uses it; with one, test_splade_head*.py test it."""

from itertools import pairwise

import pytest
import torch

from sparton.kernels.segment_max import backward as backward_module
from sparton.kernels.segment_max import forward, row_sums
from sparton.kernels.segment_max.backward import segment_max_backward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.forward import segment_max_forward
from sparton.kernels.segment_max.hopper import HopperConfig
from sparton.kernels.segment_max.operands import check_operands
from sparton.kernels.varlen_attention.operands import attention_operands
from tests.kernels.problems import SMALL, error

CUT = BackwardConfig(chunk=32, share=4, block_e=2, block_t=2)
LENGTHS = [5, 0, 26, 1, 45, 0, 17]


def make_operands(device, *, D=24, V=19, shift=0.0, seed=0):
    """Tokens with unit variance, all shifted along one direction: a negative ``shift`` makes every
    product with the rows negative."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(sum(LENGTHS), D, generator=generator)
    rows = torch.randn(V, D, generator=generator)
    if shift:
        tokens, rows = tokens.abs() * shift, rows.abs()
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return tokens.to(device), rows.to(device), cu_seqlens.to(device)


def reference(tokens, rows, cu_seqlens):
    """Maxima in float64 (0 for an empty segment) and the first winning tokens (-1)."""
    maxima = tokens.new_zeros(len(LENGTHS), rows.shape[0], dtype=torch.float64)
    winners = torch.full(maxima.shape, -1, device=tokens.device)
    parts = []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        if start == stop:
            parts.append(maxima[n])
            continue
        products = tokens[start:stop].double() @ rows.double().T
        winners[n] = products.argmax(0) + start
        parts.append(products.max(0).values)
    return torch.stack(parts), winners


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_maxima_of_any_sign(shift, device):
    tokens, rows, cu_seqlens = make_operands(device, shift=shift)
    maxima, winners = segment_max_forward(
        tokens, rows, None, cu_seqlens, activation="none", config=SMALL
    )
    expected, expected_winners = reference(tokens, rows, cu_seqlens)
    assert (expected[0] < 0).all() == (shift < 0)
    assert error(maxima, expected) < 1e-6
    assert torch.equal(winners.long(), expected_winners)
    assert error(maxima.relu(), expected) > 0.1, "an activation would show"


@pytest.mark.parametrize("activation", ["relu", "none"])
@pytest.mark.parametrize("summed", [2, 8, 16])
def test_sums_of_neighbouring_rows(summed, activation, device):
    """The last block of rows is not full."""
    tokens, rows, cu_seqlens = make_operands(device, V=48 - summed)
    options = {"activation": activation, "config": SMALL._replace(block_v=32)}
    maxima, winners = segment_max_forward(tokens, rows, None, cu_seqlens, **options)
    sums, same = segment_max_forward(tokens, rows, None, cu_seqlens, summed=summed, **options)
    expected = maxima.double().view(len(LENGTHS), -1, summed).sum(2).T
    assert error(sums, expected) < 1e-6 < error(sums * 1.001, expected)
    assert error(sums, expected.roll(1, 0)) > 0.01
    assert torch.equal(same, winners)
    alone, _ = segment_max_forward(
        tokens, rows, None, cu_seqlens, summed=summed, argmax=False, **options
    )
    assert torch.equal(alone, sums)


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_gradients_of_maxima_of_any_sign(shift, device):
    tokens, rows, cu_seqlens = make_operands(device, shift=shift)
    maxima, winners = segment_max_forward(
        tokens, rows, None, cu_seqlens, activation="none", config=SMALL
    )
    upstream = torch.randn(maxima.shape, generator=torch.Generator().manual_seed(1)).to(device)
    leaves = [x.double().requires_grad_() for x in (tokens, rows)]
    truth = torch.autograd.grad(reference(*leaves, cu_seqlens)[0], leaves, upstream.double())

    def backward(grad):
        return segment_max_backward(
            grad, maxima, winners, tokens, rows, cu_seqlens,
            bias_dtype=None, activation="none", config=CUT,
        )[:2]  # fmt: skip

    gradients = backward(upstream)
    for actual, expected, wrong in zip(gradients, truth, backward(upstream * 1.01), strict=True):
        assert error(actual, expected) < 1e-6
        assert error(wrong, expected) > 5e-3
    for first, again in zip(gradients, backward(upstream), strict=True):
        assert torch.equal(first, again)
    # One gradient for all tokens of a sequence, read by strides of 0.
    shared = upstream[:, :1].expand_as(upstream)
    for actual, expected in zip(backward(shared), backward(shared.contiguous()), strict=True):
        assert error(actual, expected.double()) < 1e-6


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("V", "D", "workspace", "joint"),
    [
        (100, 24, 2**20, 1),
        (150, 24, 6000, 0),
        pytest.param(150, 24, 20_000, 1, marks=pytest.mark.slow),
        pytest.param(150, 2, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_both_gradients_in_one_launch_and_in_two(V, D, workspace, joint, device, monkeypatch):
    """Of few chunks and of many, all sequences or some at a time; in two launches where the lists
    lie in the memory of a gradient, which must hold one at least."""
    tokens, rows, cu_seqlens = make_operands(device, D=D, V=V)
    maxima, winners = segment_max_forward(
        tokens, rows, None, cu_seqlens, activation="none", config=SMALL
    )
    upstream = torch.randn(maxima.shape, generator=torch.Generator().manual_seed(1)).to(device)
    launched = []
    run_steps = backward_module.run_steps

    def noted(steps, tensors):
        launched.extend(step.launch.kernel for step in steps)
        run_steps(steps, tensors)

    monkeypatch.setattr(backward_module, "run_steps", noted)

    def backward(**wanted):
        launched.clear()
        return segment_max_backward(
            upstream, None, winners, tokens, rows, cu_seqlens, bias_dtype=None, activation="none",
            config=CUT._replace(workspace=workspace), **wanted,
        )[:2]  # fmt: skip

    leaves = [x.double().requires_grad_() for x in (tokens, rows)]
    truth = torch.autograd.grad(reference(*leaves, cu_seqlens)[0], leaves, upstream.double())
    together = backward()
    assert launched.count(row_sums.gradients_kernel) == joint
    assert launched.count(row_sums.dweight_direct_kernel) == 1 - joint
    apart = (backward(need_weight=False)[0], backward(need_hidden=False)[1])
    for actual, alone, expected in zip(together, apart, truth, strict=True):
        assert error(actual, expected) < 1e-6
        assert torch.equal(actual, alone)


def same(actual, expected):
    """The same bits in the interpreter. For a GPU, other strides of the upstream gradient may give
    a sum another order."""
    pairs = list(zip(actual, expected, strict=True))
    if torch.cuda.is_available():
        return all(error(x, y.double()) < 1e-6 for x, y in pairs)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "none"])
def test_rows_that_share_a_column_of_the_upstream_gradient(activation, device):
    tokens, rows, cu_seqlens = make_operands(device)
    reps, winners = segment_max_forward(
        tokens, rows, None, cu_seqlens, activation=activation, config=SMALL
    )
    reps[2, 5], winners[2, 5] = 0, -1
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(4, len(LENGTHS), generator=generator).to(device).T
    columns = torch.randint(4, (rows.shape[0],), generator=generator, dtype=torch.int32).to(device)

    def backward(grad, reps, **options):
        return segment_max_backward(
            grad, reps, winners, tokens, rows, cu_seqlens,
            bias_dtype=torch.float32, activation=activation, config=CUT, **options,
        )  # fmt: skip

    own = reps if activation == "relu" else None
    expected = backward(upstream.index_select(1, columns), reps)
    actual = backward(upstream, own, columns=columns)
    assert same(actual, expected)
    shifted = backward(upstream, own, columns=(columns + 1) % 4)
    assert all(error(x, y) > 0.1 for x, y in zip(shifted, expected, strict=True))
    one = torch.full((1,), 3, dtype=torch.int32, device=device).expand(rows.shape[0])
    actual = backward(upstream, own, columns=one)
    expected = backward(upstream[:, 3:].expand_as(reps), reps)
    assert same(actual, expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("activation", ["relu", "none"])
def test_neighbours_that_share_a_column_of_the_upstream_gradient(activation, device):
    """As where the forward summed them."""
    tokens, rows, cu_seqlens = make_operands(device)
    reps, winners = segment_max_forward(
        tokens, rows, None, cu_seqlens, activation=activation, config=SMALL
    )
    V = rows.shape[0] // 4 * 4
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(V // 4, len(LENGTHS), generator=generator).to(device).T

    def backward(grad, **options):
        parts = (x[:, :V].contiguous() for x in (reps, winners))
        gradients = segment_max_backward(
            grad, *parts, tokens, rows[:V], cu_seqlens, activation=activation, config=CUT, **options
        )
        return [x for x in gradients if x is not None]

    for options in (
        {"bias_dtype": torch.float32},
        {"bias_dtype": None},
        {"bias_dtype": None, "need_hidden": False},
        {"bias_dtype": torch.float32, "need_hidden": False, "need_weight": False},
    ):
        expected = backward(upstream.repeat_interleave(4, 1), **options)
        actual = backward(upstream, summed=4, **options)
        assert same(actual, expected)
        shifted = backward(upstream.roll(1, 1), summed=4, **options)
        assert all(error(x, y) > 0.1 for x, y in zip(shifted, expected, strict=True))
    for summed in (-4, 0, 2, 3, 8):
        with pytest.raises(ValueError, match="summed="):
            backward(upstream, summed=summed, bias_dtype=None)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [0, 1, 45, 10**9])
def test_whatever_the_longest_sequence_is_said_to_be(longest, device):
    tokens, rows, cu_seqlens = make_operands(device)
    reps, winners = segment_max_forward(tokens, rows, None, cu_seqlens, config=SMALL)
    arguments = (torch.ones_like(reps), reps, winners, tokens, rows, cu_seqlens)
    expected = segment_max_backward(*arguments, bias_dtype=None, config=CUT)[0]
    actual = segment_max_backward(*arguments, bias_dtype=None, longest=longest, config=CUT)[0]
    assert error(actual, expected.double()) < 1e-6


def strided(x):
    """The same values with other elements between them."""
    return torch.stack((x, torch.full_like(x, 7)), -1)[..., 0]


@pytest.mark.parametrize("activation", ["relu", "none"])
def test_operands_with_strides(activation, device):
    tokens, rows, cu_seqlens = make_operands(device)
    bias = torch.randn(rows.shape[0], generator=torch.Generator().manual_seed(2)).to(device)
    plain = (tokens, rows, bias, cu_seqlens)
    results = segment_max_forward(*plain, activation=activation, config=SMALL)
    again = segment_max_forward(*map(strided, plain), activation=activation, config=SMALL)
    assert all(torch.equal(x, y) for x, y in zip(results, again, strict=True))
    upstream = torch.randn_like(results[0])
    arguments = (upstream, *results, tokens, rows, cu_seqlens)
    options = {"bias_dtype": torch.float32, "activation": activation, "config": CUT}
    gradients = segment_max_backward(*arguments, **options)
    again = segment_max_backward(*map(strided, arguments), **options)
    for x, y in zip(gradients, again, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_infinite_logits(device):
    tokens, rows, cu_seqlens = make_operands(device)
    bias = torch.zeros(rows.shape[0], device=device)
    bias[3] = float("inf")
    reps, _ = segment_max_forward(tokens, rows, bias, cu_seqlens, config=SMALL)
    assert (reps[[0, 2, 3, 4, 6], 3] == float("inf")).all()
    assert (reps[[1, 5]] == 0).all()
    assert reps[:, :3].isfinite().all()


def test_what_the_core_refuses(device):
    operands = make_operands(device)
    arguments = (*operands[:2], None, operands[2])
    with pytest.raises(ValueError, match="at most 32 tokens"):
        segment_max_forward(*arguments, pooling="sum", config=SMALL._replace(segment=64))
    with pytest.raises(ValueError, match="need pooling='max', got 'sum'"):
        segment_max_forward(*arguments, pooling="sum", activation="none", config=SMALL)
    with pytest.raises(ValueError, match="sums and activation='none' need pooling='max'"):
        segment_max_forward(*arguments, pooling="sum", summed=19, config=SMALL)
    for summed in (4, 19):
        with pytest.raises(ValueError, match=rf"must divide V = 19 and the block_v.*got {summed}"):
            segment_max_forward(*arguments, summed=summed, config=SMALL)
    with pytest.raises(ValueError, match=r"of a float dtype, got torch\.int64"):
        bias = torch.zeros(operands[1].shape[0], dtype=torch.int64, device=device)
        segment_max_forward(*operands[:2], bias, operands[2], config=SMALL)

    reps, winners = segment_max_forward(*arguments, config=SMALL)

    def backward(grad=reps, reps=reps, **options):
        segment_max_backward(grad, reps, winners, *operands, bias_dtype=None, **options)

    with pytest.raises(ValueError, match=r"\[N, V\] with V = 19, got \(7, 18\)"):
        backward(reps[:, 1:])
    columns = torch.zeros(19, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"columns must be int32 \[V\] = \[19\], got torch.int64"):
        backward(columns=columns.long())
    with pytest.raises(ValueError, match=r"must all be \[N, V\]"):
        backward(reps[1:], columns=columns)
    with pytest.raises(ValueError, match="activation='relu' needs reps"):
        backward(reps=None)


HEAD, MAXSIM, LOGARITHMS = ("max", "relu"), ("max", "none"), ("sum", "log1p_relu")


@pytest.mark.parametrize(
    ("capability", "dtype", "fits", "variant", "scaled", "portable", "expected"),
    [
        ((9, 0), torch.bfloat16, True, HEAD, False, False, forward.HOPPER[0]),
        ((9, 0), torch.bfloat16, True, ("sum", "relu"), False, False, forward.HOPPER[0]),
        ((9, 0), torch.bfloat16, True, MAXSIM, False, False, forward.HOPPER[1]),
        ((9, 0), torch.bfloat16, True, HEAD, False, True, forward.HOPPER[2]),
        ((9, 0), torch.bfloat16, True, MAXSIM, True, False, forward.HOPPER[3]),
        ((9, 0), torch.bfloat16, True, LOGARITHMS, False, False, forward.HOPPER[4]),
        ((9, 0), torch.bfloat16, False, LOGARITHMS, False, False, forward.PORTABLE[0]),
        ((9, 0), torch.bfloat16, False, MAXSIM, False, False, forward.PORTABLE[0]),
        ((9, 0), torch.float8_e4m3fn, True, MAXSIM, False, False, forward.HOPPER_FP8[1]),
        ((9, 0), torch.float8_e4m3fn, True, MAXSIM, True, False, forward.HOPPER_FP8[2]),
        ((9, 0), torch.float8_e4m3fn, False, HEAD, True, False, forward.PORTABLE_FP8[0]),
        ((9, 0), torch.float32, True, MAXSIM, False, False, forward.FULL_PRECISION[0]),
        ((8, 0), torch.bfloat16, True, HEAD, False, False, forward.PORTABLE[0]),
        ((10, 0), torch.float16, True, MAXSIM, False, True, forward.PORTABLE[0]),
    ],
)
def test_the_default_configuration(
    monkeypatch, capability, dtype, fits, variant, scaled, portable, expected
):
    monkeypatch.setattr(forward, "_capability", lambda device: capability)
    given = (dtype, torch.device("cuda"), fits, *variant, scaled)
    assert forward.default_config(*given, portable=portable) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "gelu"}, "activation 'relu', 'log1p_relu' or 'none', got 'max' and 'gelu'"),
        ({"pooling": "mean"}, "pooling must be 'max' or 'sum'"),
        ({"scales": (None, torch.ones(2))}, r"factors of weight must be contiguous fp32 \[19\]"),
        ({"scales": (torch.ones(94).double(), torch.ones(19))}, r"of hidden must .* torch.float64"),
        ({"config": HopperConfig(num_stages=1)}, "a ring of buffers has two stages at least"),
    ],
)
def test_what_the_kernel_would_read_past_or_wait_for_is_refused(options, message):
    tokens, rows, cu_seqlens = make_operands(torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        segment_max_forward(tokens, rows, None, cu_seqlens, **options)


def test_more_tokens_than_int32_counts_are_refused():
    tokens, cu_seqlens = torch.zeros(1, 8).expand(2**31, 8), torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="hidden states have 2147483648 tokens"):
        check_operands(tokens, torch.zeros(3, 8), None, cu_seqlens)
    query = torch.zeros(1, 1, 16, dtype=torch.float16).expand(2**31, 1, 16)
    operands = (query, query, query, cu_seqlens, cu_seqlens, 2**31, 2**31, 1.0)
    with pytest.raises(ValueError, match="queries have 2147483648 tokens"):
        attention_operands(*operands)
