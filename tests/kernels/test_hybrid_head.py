"""The paper's hybrid head against float64: its kernels on the GPU or in Triton's interpreter, and
the operator on any device.

B sequences, S tokens of the longest, D hidden, V vocabulary.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sparton.kernels.hybrid_head import function, hybrid_head
from sparton.kernels.hybrid_head.backward import ScatterConfig, hybrid_head_backward
from sparton.kernels.hybrid_head.cpu import hybrid_head_backward_cpu, hybrid_head_forward_cpu
from sparton.kernels.hybrid_head.forward import ReductionConfig, hybrid_head_forward
from sparton.kernels.hybrid_head.logits import (
    _compiled_product,
    _product,
    logit_tiles,
    vocabulary_tile,
)
from sparton.kernels.splade_head import splade_head_reference
from tests.kernels.problems import DTYPES, error

SMALL = ReductionConfig(block_s=8, block_v=16, num_warps=1, num_stages=2)
CUT = ScatterConfig(block_v=8, block_b=2, block_d=16, num_warps=1)
LENGTHS = [5, 0, 17, 12, 1]


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    mask: Tensor


def make_problem(
    lengths: list[int],
    V: int,
    D: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    bias: float | None = -2.0,
) -> Problem:
    """Padding holds NaN: whoever reads it is noticed."""
    generator = torch.Generator().manual_seed(V * D + len(lengths))
    B, S = len(lengths), max(lengths, default=0)
    mask = torch.arange(S) < torch.tensor(lengths)[:, None]
    hidden = torch.randn(B, S, D, generator=generator).masked_fill(~mask[..., None], float("nan"))
    weight = torch.randn(V, D, generator=generator) * 2 / D**0.5
    shift = None if bias is None else (torch.randn(V, generator=generator) + bias).to(device)
    return Problem(hidden.to(device, dtype), weight.to(device, dtype), shift, mask.to(device))


def upstream_for(problem: Problem) -> Tensor:
    shape = (problem.hidden.shape[0], problem.weight.shape[0])
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator).to(problem.hidden.device)


def reference(hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor) -> Tensor:
    ends = mask.sum(1).cumsum(0).int()
    return splade_head_reference(hidden[mask], weight, bias, torch.cat((ends.new_zeros(1), ends)))


def with_gradients(problem: Problem, upstream: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in problem[:3]]
    reps = reference(*leaves, problem.mask)
    wanted = [x for x in leaves if x is not None]
    return reps.detach(), *torch.autograd.grad(reps, wanted, upstream.to(dtype))


def launch(problem: Problem, upstream: Tensor, *, tile: int | None = 16) -> tuple[Tensor, ...]:
    """Representations and gradients of the Triton kernels, and the argmax."""
    reps, argmax = hybrid_head_forward(*problem, tile=tile, config=SMALL)
    gradients = hybrid_head_backward(
        upstream, reps, argmax, problem.hidden, problem.weight, problem.bias, config=CUT
    )  # fmt: skip
    return reps, *(x for x in gradients if x is not None), argmax


def assert_close_to_truth(results: tuple[Tensor, ...], problem: Problem, upstream: Tensor) -> None:
    """No worse than eager PyTorch at the same precision, which rounds logits as the paper does."""
    truth = with_gradients(problem, upstream, torch.float64)
    eager = with_gradients(problem, upstream, problem.hidden.dtype)
    full = problem.hidden.dtype == torch.float32
    for actual, exact, same_precision in zip(results, truth, eager, strict=False):
        assert actual.shape == exact.shape
        assert error(actual, exact) <= 1.1 * error(same_precision, exact) + 5e-6
        if full:
            assert error(actual, exact) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "V", "D", "bias"),
    [
        (LENGTHS, 37, 24, -2.0),
        ([3, 0, 20], 37, 24, None),
        ([1], 1, 1, 3.0),
        ([0, 1, 0], 17, 7, 1.0),
        ([13] * 3, 61, 31, 0.0),
    ],
)
def test_values_and_gradients_against_float64(lengths, V, D, bias, dtype, device):
    problem = make_problem(lengths, V, D, device, dtype=dtype, bias=bias)
    upstream = upstream_for(problem)
    *results, argmax = launch(problem, upstream)
    assert results[0].dtype == torch.float32
    assert argmax.dtype == torch.int64
    assert [x.dtype for x in results[1:3]] == [dtype, dtype]
    assert_close_to_truth(tuple(results), problem, upstream)
    padding = ~problem.mask
    assert not results[1][padding].any()


def test_the_tolerances_notice_small_faults(device):
    problem = make_problem(LENGTHS, 37, 24, device, dtype=torch.float16)
    upstream = upstream_for(problem)
    *good, argmax = launch(problem, upstream)
    dropped_tile = good[0].clone()
    dropped_tile[3, :16] = 0
    neighbour = (argmax + 1) % problem.mask.sum(1)[:, None].clamp_min(1)
    wrong_winner = hybrid_head_backward(
        upstream, good[0], neighbour, problem.hidden, problem.weight, problem.bias, config=CUT
    )  # fmt: skip
    for bad in (
        (dropped_tile, *good[1:]),
        *((*good[:i], good[i] * 1.01, *good[i + 1 :]) for i in range(4)),
        (good[0], *wrong_winner),
    ):
        with pytest.raises(AssertionError):
            assert_close_to_truth(bad, problem, upstream)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_first_of_equal_logits_wins(on_cpu, device):
    problem = make_problem([11, 5, 0], 37, 16, device, bias=0.0)
    first = problem.hidden[:, :1].nan_to_num().expand_as(problem.hidden)
    last = torch.arange(11, device=device) >= torch.tensor([3, 4, 0], device=device)[:, None]
    hidden = torch.where(last[..., None], first, -first).masked_fill(~problem.mask[..., None], 9.0)
    operands = (hidden, problem.weight, problem.bias, problem.mask)
    if on_cpu:
        operands = tuple(x.cpu() for x in operands)
        reps, argmax = hybrid_head_forward_cpu(*operands)
    else:
        reps, argmax = hybrid_head_forward(*operands, tile=16, config=SMALL)
    exact = reference(*(x.double() for x in operands[:3]), operands[3])
    active = exact > 0
    logits = operands[0].double() @ operands[1].double().T + operands[2].double()
    logits = logits.masked_fill(~operands[3][..., None], 0.0)
    assert torch.equal(reps > 0, active)
    assert set(argmax[active].tolist()) == {0, 3, 4}
    assert torch.equal(argmax[0][active[0]], logits[0].float().argmax(0)[active[0]])
    assert not argmax[~active].any()


def test_tiles_have_one_shape_and_cover_the_vocabulary(device):
    problem = make_problem([5, 3], 37, 8, device)
    tiles = list(logit_tiles(*problem[:3], 16))
    assert [first for first, _ in tiles] == [0, 16, 21]
    assert {logits.shape for _, logits in tiles} == {(2, 5, 16)}
    expected = problem.hidden @ problem.weight.T + problem.bias
    torch.testing.assert_close(tiles[-1][1], expected[..., 21:], equal_nan=True)
    whole = list(logit_tiles(*problem[:3], None))
    assert [logits.shape[2] for _, logits in whole] == [37]


def test_the_tile_is_that_of_the_paper():
    sizes = {320 * 512: 512, 512 * 256: 512, 32 * 512: 2048, 10000: 3328, 1: 2**25, 0: 2**25}
    assert {tokens: vocabulary_tile(tokens) for tokens in sizes} == sizes


def test_without_argmax_the_values_are_the_same(device):
    problem = make_problem(LENGTHS, 37, 24, device)
    reps, argmax = hybrid_head_forward(*problem, tile=16, config=SMALL)
    alone, nothing = hybrid_head_forward(*problem, argmax=False, tile=16, config=SMALL)
    assert torch.equal(alone, reps)
    assert nothing.numel() == 0 < argmax.numel()


def test_a_mask_with_holes_and_one_of_nothing(device):
    problem = make_problem([7, 7, 7], 19, 8, device, bias=1.0)
    problem.mask[0, 2] = problem.mask[1, 0] = problem.mask[1, 5:] = problem.mask[2] = False
    upstream = upstream_for(problem)
    results = launch(problem, upstream)
    assert_close_to_truth(results[:4], problem, upstream)
    assert not results[0][2].any()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens(lengths, device):
    problem = make_problem(lengths, 9, 8, device, bias=5.0)
    reps, dhidden, dweight, dbias, argmax = launch(problem, upstream_for(problem))
    assert reps.shape == argmax.shape == (len(lengths), 9)
    assert not any(x.any() for x in (reps, dhidden, dweight, dbias, argmax))


def test_nan_stays_visible(device):
    problem = make_problem([3, 4], 8, 8, device)
    problem.hidden[1, 2] = float("nan")
    for results in (
        hybrid_head_forward(*problem, config=SMALL),
        hybrid_head_forward_cpu(*(x.cpu() for x in problem)),
    ):
        assert results[0][0].isfinite().all()
        assert results[0][1].isnan().all()


def test_upstream_strides_do_not_matter(device):
    problem = make_problem(LENGTHS, 37, 24, device)
    everywhere = torch.ones(1, 1, device=device).expand_as(upstream_for(problem))
    assert_close_to_truth(launch(problem, everywhere)[:4], problem, everywhere)


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_only_wanted_gradients(wanted, device):
    problem = make_problem([5, 3], 9, 8, device)
    reps, argmax = hybrid_head_forward(*problem, config=SMALL)
    arguments = (upstream_for(problem), reps, argmax, *problem[:3])
    names = ("hidden", "weight", "bias")
    needs = {f"need_{name}": name == wanted for name in names}
    for gradients in (
        hybrid_head_backward(*arguments, **needs, config=CUT),
        hybrid_head_backward_cpu(*(x.cpu() for x in arguments), **needs),
    ):
        assert [n for n, x in zip(names, gradients, strict=True) if x is not None] == [wanted]


def leaves_of(problem: Problem) -> list[Tensor]:
    assert problem.bias is not None
    return [x.nan_to_num(9.0).requires_grad_() for x in problem[:3]]


def test_the_operator_matches_the_reference(device):
    problem = make_problem(LENGTHS, 37, 24, device)
    leaves, upstream = leaves_of(problem), upstream_for(problem)
    reps = hybrid_head(*leaves, problem.mask)
    results = (reps.detach(), *torch.autograd.grad(reps, leaves, upstream))
    assert_close_to_truth(results, Problem(*leaves, problem.mask), upstream)


def test_registration(device):
    problem = make_problem(LENGTHS, 37, 24, device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    # Tracing with ATen compares gradients bit for bit, which atomics cannot promise.
    on_cpu = ("test_aot_dispatch_dynamic",) * (device.type == "cpu")
    arguments = (*leaves_of(problem), problem.mask, True)
    torch.library.opcheck(function._head.registered, arguments, test_utils=checks + on_cpu)


@pytest.fixture
def fresh_product() -> None:
    """The product as if no test had compiled it. Dynamo keeps 8 graphs of a function, here one for
    each dtype, absent bias, size of 1 and state of autograd, and runs uncompiled what asks for
    more. On a GPU that rounds elsewhere: compiled, the bias is added by cuBLAS."""
    torch._dynamo.reset()
    _compiled_product.cache_clear()


def test_compiles_into_one_graph(fresh_product, device):
    problem = make_problem(LENGTHS, 37, 24, device)
    leaves, upstream = leaves_of(problem), upstream_for(problem)

    def head(hidden, weight, bias):
        return hybrid_head(2 * hidden, weight, bias, problem.mask)

    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    expected, actual = head(*leaves), compiled(*leaves)
    assert torch.equal(actual, expected)
    gradients = (torch.autograd.grad(reps, leaves, upstream) for reps in (actual, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_compiled_product_is_the_plain_one(fresh_product, device):
    """One graph for all tiles and batches."""
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"]
    for tokens, rows in ((30, 16), (7, 16), (12, 40)):
        hidden, weight = torch.randn(tokens, 8, device=device), torch.randn(64, 8, device=device)
        bias = torch.randn(64, device=device)
        for first in (0, 5):
            part = slice(first, first + rows)
            with torch.no_grad():
                actual = _compiled_product()(hidden, weight[part], bias[part])
            torch.testing.assert_close(actual, _product(hidden, weight[part], bias[part]))
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (0, torch.zeros(5, 17, 25), r"\(5, 17, 25\) and \(37, 24\)"),
        (0, torch.zeros(85, 24), r"\(85, 24\)"),
        (1, torch.zeros(37, 24, dtype=torch.float16), "torch.float16"),
        (2, torch.zeros(38), r"\[37\], got \(38,\)"),
        (3, torch.zeros(5, 17), r"bool \[B, S\] = \[5, 17\], got torch.float32"),
        (3, torch.ones(5, 16, dtype=torch.bool), r"\(5, 16\)"),
    ],
)
def test_operands_that_do_not_fit(index, replacement, message, device):
    wrong = list(make_problem(LENGTHS, 37, 24, device))
    wrong[index] = replacement.to(device)
    with pytest.raises(ValueError, match=message):
        hybrid_head(*wrong)


def test_launchers_refuse_what_they_cannot_do(device):
    problem = make_problem([5, 3], 9, 8, device)
    with pytest.raises(ValueError, match="float64"):
        hybrid_head_forward(*(x.double() for x in problem[:3]), problem.mask)
    reps, argmax = hybrid_head_forward(*problem, config=SMALL)
    with pytest.raises(ValueError, match=r"\[2, 9\].*\(1, 9\)"):
        hybrid_head_backward(reps, reps, argmax[:1], *problem[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [0.0, -4.0])
def test_real_sizes_on_a_gpu(bias, dtype, device):
    """Several tiles, of an odd vocabulary, with the launch settings that are in use."""
    lengths = [n * 37 % 257 for n in range(140)]
    problem = make_problem(lengths, 5003, 768, device, dtype=dtype, bias=bias)
    leaves, upstream = leaves_of(problem), upstream_for(problem)
    reps = hybrid_head(*leaves, problem.mask)
    results = (reps.detach(), *torch.autograd.grad(reps, leaves, upstream))
    exact = with_gradients(problem, upstream, torch.float64)
    eager = with_gradients(problem, upstream, dtype)
    assert vocabulary_tile(problem.mask.numel()) < 5003
    # Near-ties of rounded logits fall differently, and each moves a whole entry of a gradient.
    slack = 5e-6, 1e-2, 1e-2, 1e-3
    faults = 1.02, 1.3, 1.3, 1.3
    columns = (results, exact, eager, slack, faults)
    for actual, truth, same_precision, more, fault in zip(*columns, strict=True):
        allowed = 1.1 * error(same_precision, truth) + more
        assert error(actual, truth) <= allowed < error(actual * fault, truth)
