"""Attention within packed sequences against float64, on the GPU or in Triton's interpreter.

Tq and Tk packed tokens of queries and keys, H heads, d the width of a head. The judge of rounding
is the reference in the same 16 bits, which also rounds scores and weights.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from triton.runtime.errors import InterpreterError

from sparton.kernels.varlen_attention import (
    function,
    operands,
    shares,
    stacked,
    varlen_attention,
    varlen_attention_reference,
    varlen_self_attention,
)
from sparton.kernels.varlen_attention.backward import (
    BackwardTiling,
    backward_tiling,
    varlen_attention_backward,
)
from sparton.kernels.varlen_attention.forward import forward_tiling, varlen_attention_forward
from sparton.kernels.varlen_attention.shares import BLOCK
from sparton.kernels.varlen_attention.tiles import Tiling
from tests.kernels.problems import error

on_gpu = torch.cuda.is_available()
# The interpreter computes bfloat16 products wrongly.
DTYPES = [torch.float16, torch.bfloat16] if on_gpu else [torch.float16]
LENGTHS = (5, 0, 1, 33, 16)
SMALL = Tiling(16, 16, num_warps=4, num_stages=1)
EVEN = BackwardTiling(SMALL, SMALL)
UNEVEN = BackwardTiling(Tiling(16, 32, 4, 1), Tiling(32, 16, 4, 1))


class Problem(NamedTuple):
    """Operands of varlen_attention, and the upstream gradient."""

    states: tuple[Tensor, Tensor, Tensor]
    bounds: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    grad: Tensor

    def given(self) -> tuple:
        return *self.states, *self.bounds, *self.longest

    def with_states(self, *states: Tensor) -> "Problem":
        return self._replace(states=states)


def make_problem(
    lengths: tuple[int, ...] = LENGTHS,
    key_lengths: tuple[int, ...] | None = None,
    *,
    H: int = 2,
    d: int = 32,
    dtype: torch.dtype = torch.float16,
    sharpness: float = 2.0,
    device: torch.device | str = "cuda" if on_gpu else "cpu",
) -> Problem:
    """Uneven attention, so that every key counts."""
    key_lengths = lengths if key_lengths is None else key_lengths
    generator = torch.Generator().manual_seed(H + d + sum(lengths))

    def rows(counts: tuple[int, ...]) -> Tensor:
        return torch.randn(sum(counts), H, d, generator=generator)

    states = sharpness * rows(lengths), rows(key_lengths), rows(key_lengths), rows(lengths)
    query, key, value, grad = (x.to(device, dtype) for x in states)
    bounds = [
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        for counts in (lengths, key_lengths)
    ]
    longest = max(lengths, default=0), max(key_lengths, default=0)
    return Problem((query, key, value), (bounds[0], bounds[1]), longest, grad)


def results(problem: Problem, dtype: torch.dtype, scale: float | None = None) -> list[Tensor]:
    """Output and gradients of the reference at some precision."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in problem.states]
    out = varlen_attention_reference(*leaves, *problem.bounds, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.grad.to(dtype))]


def from_kernels(
    problem: Problem,
    forward: Tiling | None = SMALL,
    backward: BackwardTiling | None = UNEVEN,
    scale: float | None = None,
) -> list[Tensor]:
    scale = problem.states[0].shape[-1] ** -0.5 if scale is None else scale
    packed = operands.attention_operands(*problem.given(), scale)
    out, lse = varlen_attention_forward(packed, tiling=forward)
    assert lse is not None
    return [out, *varlen_attention_backward(problem.grad, packed, out, lse, tiling=backward)]


def check_norms(gradients: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
    """Those of heads: of numbers that were not rounded."""
    for gradient, found in zip(gradients, norms, strict=True):
        expected = torch.linalg.vector_norm(gradient.double(), dim=2).t()
        assert error(found, expected) < 2**-9
        if len(gradient) > 2 and gradient.any():
            assert error(found.roll(1, 1), expected) > 2**-5, "negative control"


def errors(actual: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Norms of the differences over those of the truth."""
    return [
        float((x.double() - y).norm() / y.norm().clamp_min(1e-30)) for x, y in zip(actual, truth)
    ]


def assert_as_exact_as_eager(actual: list[Tensor], problem: Problem, noticed: float = 0.01) -> None:
    """And any of the four, too large by so much, would not be."""
    truth = results(problem, torch.float64)
    found, allowed = (errors(x, truth) for x in (actual, results(problem, problem.grad.dtype)))
    allowed = [x + torch.finfo(problem.grad.dtype).eps / 4 for x in allowed]
    assert all(x <= y for x, y in zip(found, allowed)), (found, allowed)
    for x, y, limit in zip(actual, truth, allowed):
        if y.any():
            assert errors([(1 + noticed) * x.double()], [y])[0] > limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [EVEN, UNEVEN])
@pytest.mark.parametrize(
    ("lengths", "key_lengths"),
    [
        (LENGTHS, None),
        ((7, 3, 1, 40, 0, 9), (2, 0, 1, 35, 4, 17)),
        ((17,), (50,)),
        ((3, 2), (0, 0)),
        ((0, 4), (4, 0)),
    ],
)
def test_outputs_and_gradients(lengths, key_lengths, backward, dtype):
    problem = make_problem(lengths, key_lengths, dtype=dtype)
    assert_as_exact_as_eager(from_kernels(problem, backward=backward), problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "d"), [(1, 16), (12, 32), (1, 64), (2, 128)])
def test_head_widths_and_default_tilings(H, d, dtype):
    lengths = (70, 3, 150, 64) if on_gpu else (70, 3)
    problem = make_problem(lengths, H=H, d=d, dtype=dtype)
    assert_as_exact_as_eager(from_kernels(problem, None, None), problem)


def test_sequences_that_fill_one_tile_or_several():
    """Whatever the tiles, the same values."""
    problem = make_problem((33, 20, 1), H=1)
    wide = Tiling(32, 64, num_warps=4, num_stages=1)
    one = from_kernels(problem, wide, BackwardTiling(wide, wide))
    several = from_kernels(problem, SMALL, EVEN)
    assert all(x < 5e-4 for x in errors(several, [x.double() for x in one]))
    assert_as_exact_as_eager(one, problem)


def test_a_wrong_boundary_or_scale_is_no_rounding_error():
    problem = make_problem((16, 16, 16))
    truth = results(problem, torch.float64)
    allowed = errors(results(problem, torch.float16), truth)
    moved = problem.bounds[0].clone()
    moved[1] += 1
    unlike = [
        from_kernels(problem._replace(bounds=(moved, moved), longest=(17, 17))),
        from_kernels(problem._replace(bounds=(problem.bounds[0], moved), longest=(16, 17))),
        from_kernels(problem, scale=1.01 * 32**-0.5),
    ]
    for wrong in unlike:
        assert all(x > 2 * y for x, y in zip(errors(wrong, truth), allowed))
    assert_as_exact_as_eager(from_kernels(problem, scale=32**-0.5), problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [EVEN, UNEVEN])
def test_large_logits(dtype, backward):
    """Scores of several hundred, of either sign, and in some sequences all of one sign."""
    problem = make_problem((20, 33, 7), dtype=dtype, sharpness=40.0)
    query, key, value = problem.states
    query[20:] = query[20:].abs()
    key[20:53], key[53:] = key[20:53].abs(), -key[53:].abs()
    problem = problem.with_states(query, key, value)
    actual = from_kernels(problem, backward=backward)
    assert all(x.isfinite().all() for x in actual)
    # Weights of nearly 0 and 1 leave eager's scores few digits.
    assert_as_exact_as_eager(actual, problem, noticed=0.05 if dtype == torch.float16 else 0.2)


@pytest.mark.parametrize("lengths", [LENGTHS, (0,)])
def test_norms_of_gradients(lengths):
    problem = make_problem(lengths)
    given = operands.attention_operands(*problem.given(), 0.2)
    of_out = (problem.grad, given, *varlen_attention_forward(given, tiling=SMALL))
    norms = torch.full((3, *of_out[-1].shape), float("nan"), device=problem.grad.device)
    gradients = varlen_attention_backward(*of_out, tiling=UNEVEN, norms=norms)
    check_norms(gradients, norms.unbind(0))
    alone = varlen_attention_backward(*of_out, tiling=UNEVEN)
    assert all(map(torch.equal, gradients, alone))


def test_what_other_sequences_hold_does_not_matter():
    problem = make_problem((9, 20, 18))
    dirty = [x.clone() for x in (*problem.states, problem.grad)]
    for x in dirty:
        x[9:29] = float("nan")
    for backward in (EVEN, UNEVEN):
        expected = from_kernels(problem, backward=backward)
        changed = problem.with_states(*dirty[:3])._replace(grad=dirty[3])
        for x, y in zip(from_kernels(changed, backward=backward), expected):
            assert torch.equal(x[:9], y[:9])
            assert torch.equal(x[29:], y[29:])
            assert x[9:29].isnan().any()


def test_the_same_bits_every_time():
    problem = make_problem((33, 7, 18))
    for backward in (EVEN, UNEVEN):
        first, again = (from_kernels(problem, backward=backward) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, again))


def strided(x: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    if layout == "heads first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "part of a wider row":
        return torch.cat((x, x + 1), dim=1)[:, : x.shape[1]]
    if layout == "strided last":
        return x.repeat_interleave(2, dim=2)[:, :, ::2]
    return x[:1, :1, :1].expand(x.shape)


@pytest.mark.parametrize("layout", ["heads first", "part of a wider row", "strided last"])
def test_operands_and_upstream_gradients_are_read_where_they_are(layout):
    problem = make_problem((5, 0, 18))
    expected = from_kernels(problem)
    states = [strided(x, layout) for x in problem.states]
    grad = strided(problem.grad, layout)
    changed = problem.with_states(*states)._replace(grad=grad)
    read = operands.attention_operands(*changed.given(), 0.5)[:3]
    in_place = [x.data_ptr() == y.data_ptr() for x, y in zip(read, states)]
    assert in_place == [layout != "strided last"] * 3
    actual = from_kernels(changed)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected))
    assert all(x.is_contiguous() for x in actual)
    same = problem._replace(grad=strided(problem.grad, "expanded"))
    dense = problem._replace(grad=same.grad.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(from_kernels(same), from_kernels(dense)))


def with_gradients(problem: Problem, attend=varlen_attention) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in problem.states]
    out = attend(*problem.with_states(*leaves).given())
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.grad)]


def test_autograd():
    problem = make_problem()
    eager = with_gradients(problem)
    assert_as_exact_as_eager(eager, problem)
    compiled = torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(x, y) for x, y in zip(with_gradients(problem, compiled), eager))
    some = [x.detach().requires_grad_(i == 1) for i, x in enumerate(problem.states)]
    varlen_attention(*problem.with_states(*some).given()).backward(problem.grad)
    assert torch.equal(some[1].grad, eager[2])
    with torch.no_grad():
        assert torch.equal(varlen_attention(*problem.given()), eager[0])
    halved = varlen_attention(*problem.given(), scale=0.5 * 32**-0.5)
    expected = varlen_attention_reference(
        problem.states[0].double() / 2, *(x.double() for x in problem.states[1:]), *problem.bounds
    )
    assert errors([halved], [expected])[0] < 1e-3 < errors([eager[0]], [expected])[0]


def of_themselves(problem: Problem, attend=varlen_self_attention) -> list[Tensor]:
    """Output and gradient ``[T, 3, H, d]`` of self-attention."""
    states = torch.stack(problem.states, dim=1).requires_grad_()
    out = attend(states, problem.bounds[0], problem.longest[0])
    return [out.detach(), *torch.autograd.grad(out, states, problem.grad)]


def test_self_attention_is_attention_to_oneself():
    problem = make_problem()
    out, *gradients = with_gradients(problem)
    for attend in (
        varlen_self_attention,
        torch.compile(varlen_self_attention, backend="aot_eager", fullgraph=True),
    ):
        found, gradient = of_themselves(problem, attend)
        assert torch.equal(found, out) and gradient.is_contiguous()
        assert all(torch.equal(x, y) for x, y in zip(gradient.unbind(1), gradients))
    with torch.no_grad():
        given = (torch.stack(problem.states, dim=1), problem.bounds[0], problem.longest[0])
        assert torch.equal(varlen_self_attention(*given), out)
        halved = varlen_self_attention(*given, scale=0.5 * 32**-0.5)
    assert errors([halved], [out])[0] > 0.01
    empty = make_problem((0, 0))
    assert [x.shape for x in of_themselves(empty)] == [(0, 2, 32), (0, 3, 2, 32)]


def test_registration_of_self_attention():
    states = torch.stack(make_problem((3, 0, 18)).states, dim=1).requires_grad_()
    bounds = torch.tensor([0, 3, 3, 21], dtype=torch.int32, device=states.device)
    torch.library.opcheck(stacked._operator.registered, (states, bounds, 18, 0.2, -1, True))
    with torch.no_grad():
        torch.library.opcheck(stacked._operator.registered, (states, bounds, 18, 0.2, 4, False))
    with pytest.raises(ValueError, match=r"states must be \[T, 3, H, d\], got \(21, 2, 32\)"):
        varlen_self_attention(states[:, 0], bounds, 18)


def test_sums_only_when_a_gradient_can_follow(monkeypatch):
    asked = []

    def spy(operands, lse):
        asked.append(lse)
        return original(operands, lse=lse)

    original = function.forward_kernels()
    monkeypatch.setattr(function, "forward_kernels", lambda: spy)
    problem = make_problem((3, 4))
    with_gradients(problem)
    varlen_attention(*problem.given())
    with torch.no_grad():
        torch.compile(varlen_attention, backend="aot_eager")(*problem.given())
    assert asked == [True, False, False]


def test_registration():
    problem = make_problem((3, 0, 18), (3, 1, 17))
    leaves = [x.requires_grad_() for x in problem.states]
    given = problem.with_states(*leaves).given()
    torch.library.opcheck(function._operator.registered, (*given, 0.2, -1, True))
    with torch.no_grad():
        torch.library.opcheck(function._operator.registered, (*given, 0.2, -1, False))


@pytest.mark.parametrize("compiled", [False, True])
def test_second_derivatives_are_refused(compiled):
    problem = make_problem((3, 4))
    leaves = [x.requires_grad_() for x in problem.states]
    attend = varlen_attention
    if compiled:
        attend = torch.compile(attend, backend="aot_eager")
    out = attend(*problem.with_states(*leaves).given())
    with pytest.raises(RuntimeError):
        (first,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
        first.sum().backward()


@pytest.mark.quick(1)
@pytest.mark.parametrize("together", [False, True])
def test_one_graph_for_all_lengths(together):
    """A break would be an error, by fullgraph=True."""
    H, d = 2, 16
    counter = CompileCounterWithBackend("aot_eager")
    device = "cuda" if on_gpu else "cpu"
    projection = torch.nn.Linear(H * d, 3 * H * d, device=device).half()

    def layer(hidden: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        states = projection(hidden).unflatten(1, (3, H, d))
        if together:
            return varlen_self_attention(states, cu_seqlens, longest).flatten(1) + hidden
        bounds = (cu_seqlens, cu_seqlens)
        return varlen_attention(*states.unbind(1), *bounds, longest, longest).flatten(1) + hidden

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ((3, 5, 7), (10, 20), (2, 0, 4, 5, 33)):
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        hidden = torch.randn(sum(lengths), H * d, device=device).half()
        gradients = []
        for run in (layer, compiled):
            projection.zero_grad()
            out = run(hidden, bounds, max(lengths))
            out.float().square().sum().backward()
            gradients.append((out.detach(), projection.weight.grad.clone()))
        for x, y in zip(*gradients):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
    assert counter.frame_count == 1


def test_sequences_without_tokens():
    for lengths in ((), (0, 0)):
        problem = make_problem(lengths)
        assert [x.shape for x in from_kernels(problem)] == [(0, 2, 32)] * 4


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (0, torch.zeros(3, 2, 2, 32), r"\[Tq, H, d\].*\(3, 2, 2, 32\)"),
        (1, torch.zeros(55, 3, 32), r"\(55, 3, 32\)"),
        (2, torch.zeros(54, 2, 32), r"\(54, 2, 32\)"),
        (2, torch.zeros(55, 2, 32), "float16, torch.float16 and torch.float32"),
        (3, torch.zeros(6), r"query_cu_seqlens .* torch.float32 \(6,\)"),
        (4, torch.zeros(5, dtype=torch.int32), r"\(6,\) and \(5,\)"),
        (4, torch.zeros(6, dtype=torch.int32, device="meta"), "meta"),
    ],
)
def test_operands_that_do_not_fit(index, replacement, message):
    problem = make_problem()
    wrong = list(problem.given())
    if replacement.device.type != "meta":
        replacement = replacement.to(problem.grad.device)
    wrong[index] = replacement
    with pytest.raises(ValueError, match=message):
        varlen_attention(*wrong)


@pytest.mark.parametrize(("index", "name"), [(5, "queries"), (6, "keys")])
def test_longer_sequences_than_stated(index, name, device_assertions):
    """As many tokens fit, but one sequence has more than its share."""
    given = [*make_problem((9, 1, 4), (2, 9, 3)).given()]
    varlen_attention(*given)
    given[index] = 8
    with pytest.raises(InterpreterError, match=f"a sequence has more {name} than max_"):
        varlen_attention(*given)
    given[index] = 4
    with pytest.raises(ValueError, match="=4 allows 3 sequences 12 tokens at most, got 14"):
        varlen_attention(*given)
    states = torch.zeros(14, 3, 1, 16, dtype=torch.float16)
    varlen_self_attention(states, given[3], 9)
    with pytest.raises(InterpreterError, match="a sequence has more queries than max_query"):
        varlen_self_attention(states, given[3], 8)
    with pytest.raises(ValueError, match="=4 allows 3 sequences 12 tokens at most, got 14"):
        varlen_self_attention(states, given[3], 4)


def test_more_that_does_not_fit():
    problem = make_problem()
    with pytest.raises(ValueError, match=r"\(16, 32, 64, 128\), got 24"):
        varlen_attention(*make_problem(d=24).given())
    with pytest.raises(ValueError, match=r"positive, got -1\.0"):
        varlen_attention(*problem.given(), scale=-1.0)
    packed = operands.attention_operands(*problem.given(), 0.2)
    out, lse = varlen_attention_forward(packed)
    with pytest.raises(ValueError, match=r"lse \[H, Tq\], got .*\(2, 54\)"):
        varlen_attention_backward(problem.grad, packed, out, lse[:, 1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "longest"), [(16, 64), (32, 256), (64, 300), (64, 1000), (128, 512)])
def test_real_sizes(d, longest, dtype):
    generator = torch.Generator().manual_seed(longest)
    lengths = tuple(torch.randint(0, longest + 1, (40,), generator=generator).tolist())
    shorter = tuple(max(length - 40, 0) for length in lengths)
    for key_lengths in (None, shorter):
        problem = make_problem(lengths, key_lengths, H=12, d=d, dtype=dtype)
        actual = with_gradients(problem)
        assert_as_exact_as_eager(actual, problem, noticed=0.02)
        assert all(torch.equal(x, y) for x, y in zip(with_gradients(problem), actual))


@pytest.mark.alone
@pytest.mark.gpu
def test_more_than_two_billion_elements():
    """The last sequence lies beyond what 32 bits address."""
    H, d, length = 16, 128, 64
    sequences = 2**31 // (H * d * length) + 2
    bounds = torch.arange(0, sequences + 1, dtype=torch.int32, device="cuda") * length
    one = torch.randn(length, H, d, device="cuda").bfloat16()
    states = [one.repeat(sequences, 1, 1).requires_grad_() for _ in range(3)]
    out = varlen_attention(*states, bounds, bounds, length, length)
    gradients = torch.autograd.grad(out, states, torch.ones_like(out))
    for x in (out, *gradients):
        assert torch.equal(x[-length:], x[:length])
        assert x[-length:].isfinite().all()


def test_tilings_serve_every_width_and_length():
    for d in (16, 32, 64, 128):
        assert min(tile.block_q for tile in backward_tiling(d)) >= 16
        assert all(forward_tiling(d, longest).block_q >= 16 for longest in (1, 64, 65, 8192))


@pytest.mark.parametrize("H", [1, 3, 12])
@pytest.mark.parametrize("N", [0, 1, 7, BLOCK, 2 * BLOCK + 1])
def test_specialised_warps_share_the_work(N, H, monkeypatch):
    """Of the sequences in their order every group has as much as another, but for one sequence."""
    monkeypatch.setattr(shares, "multiprocessors", lambda device: 35)
    generator = torch.Generator().manual_seed(N + H)
    query_lengths, key_lengths = (
        tuple(torch.randint(0, 200, (N,), generator=generator).tolist()) for _ in range(2)
    )
    problem = make_problem(query_lengths, key_lengths, H=H, d=16)
    packed = operands.attention_operands(*problem.given(), 1.0)
    firsts = shares.share_out(packed, 64).tolist()
    groups = 35 // H
    assert len(firsts) == groups + 1
    assert firsts == sorted(firsts) and firsts[0] == 0 and firsts[-1] == N
    work = [
        -(-queries // 64) * (-(-keys // 64) + 1) + 2
        for queries, keys in zip(query_lengths, key_lengths)
    ]
    for first, end in pairwise(firsts):
        assert abs(sum(work[first:end]) - sum(work) / groups) <= max(work, default=0)
