"""Attention within a window of packed sequences against float64, on the GPU or in Triton's
interpreter.

H heads, d the width of a head.
"""

import pytest
import torch
from torch import Tensor

from sparton.kernels.varlen_attention import (
    operands,
    varlen_attention_reference,
    varlen_self_attention,
)
from sparton.kernels.varlen_attention.backward import (
    BackwardTiling,
    backward_tiling,
    varlen_attention_backward,
)
from sparton.kernels.varlen_attention.forward import forward_tiling, varlen_attention_forward
from sparton.kernels.varlen_attention.tiles import Tiling
from tests.kernels.test_varlen_attention import (
    DTYPES,
    EVEN,
    SMALL,
    UNEVEN,
    Problem,
    errors,
    make_problem,
)

LENGTHS = (50, 5, 0, 1, 33)
SMALL_TILES = [(SMALL, EVEN), (Tiling(16, 32, 4, 1), UNEVEN), (Tiling(32, 16, 4, 1), UNEVEN)]


def truth(problem: Problem, window: int | None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in problem.states]
    out = varlen_attention_reference(*leaves, *problem.bounds, window=window)
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.grad.to(dtype))]


def from_kernels(
    problem: Problem, window: int, forward: Tiling, backward: BackwardTiling
) -> list[Tensor]:
    d = problem.states[0].shape[-1]
    packed = operands.attention_operands(*problem.given(), d**-0.5, window)
    out, lse = varlen_attention_forward(packed, tiling=forward)
    assert lse is not None
    return [out, *varlen_attention_backward(problem.grad, packed, out, lse, tiling=backward)]


def from_autograd(problem: Problem, window: int | None) -> list[Tensor]:
    states = torch.stack(problem.states, dim=1).requires_grad_()
    out = varlen_self_attention(states, problem.bounds[0], problem.longest[0], window=window)
    (gradient,) = torch.autograd.grad(out, states, problem.grad)
    return [out.detach(), *gradient.unbind(1)]


def assert_right(found: list[Tensor], problem: Problem, window: int) -> None:
    """As exact as the reference in the same 16 bits; another window is no rounding error."""
    dtype = problem.grad.dtype
    exact = truth(problem, window)
    allowed = [x + torch.finfo(dtype).eps / 2 for x in errors(truth(problem, window, dtype), exact)]
    assert all(x <= y for x, y in zip(errors(found, exact), allowed, strict=True))
    for other in (window - 1, window + 1):
        if other >= 0:
            wrong = errors(found, truth(problem, other))
            assert all(x > 2 * y for x, y in zip(wrong, allowed, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("forward", "backward"), SMALL_TILES)
@pytest.mark.parametrize("window", [1, 7, 16, 31])
def test_outputs_and_gradients(window, forward, backward, dtype):
    problem = make_problem(LENGTHS, H=1, dtype=dtype)
    assert_right(from_kernels(problem, window, forward, backward), problem, window)


def test_a_token_that_sees_itself_alone_gets_its_value():
    problem = make_problem((20, 3), H=1)
    out, dquery, dkey, dvalue = from_kernels(problem, 0, SMALL, EVEN)
    assert torch.equal(out, problem.states[2]) and torch.equal(dvalue, problem.grad)
    assert max(float(x.abs().max()) for x in (dquery, dkey)) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_tilings(dtype):
    problem = make_problem((150, 70, 3), H=1, d=64, dtype=dtype)
    found = from_kernels(problem, 10, forward_tiling(64, 150), backward_tiling(64))
    assert_right(found, problem, 10)
    for x, y in zip(from_autograd(problem, 10), found, strict=True):
        assert torch.equal(x, y)


def test_a_window_that_reaches_every_token_is_none():
    problem = make_problem((20, 33), H=1)
    whole = from_autograd(problem, None)
    for window in (32, 33, 10**6):
        assert all(torch.equal(x, y) for x, y in zip(from_autograd(problem, window), whole))
    assert not torch.equal(from_autograd(problem, 31)[0], whole[0])


def test_what_lies_beyond_the_window_does_not_matter():
    problem = make_problem((60,), H=1)
    dirty = [x.clone() for x in problem.states]
    for x in dirty:
        x[40:] = float("nan")
    out, expected = (
        from_kernels(each, 8, SMALL, EVEN)[0] for each in (problem.with_states(*dirty), problem)
    )
    assert torch.equal(out[:16], expected[:16]) and out[40:].isnan().all()


def test_negative_windows_are_refused():
    problem = make_problem((3,), H=1)
    with pytest.raises(ValueError, match="window must be None or a distance from 0 on, got -1"):
        from_autograd(problem, -1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "longest"), [(32, 200), (64, 256), (64, 512), (128, 300)])
def test_real_sizes(d, longest, dtype):
    generator = torch.Generator().manual_seed(longest)
    lengths = tuple(torch.randint(0, longest + 1, (40,), generator=generator).tolist())
    problem = make_problem(lengths, H=12, d=d, dtype=dtype)
    found = from_autograd(problem, 64)
    assert all(torch.equal(x, y) for x, y in zip(from_autograd(problem, 64), found))
    exact = truth(problem, 64)
    allowed = [x + torch.finfo(dtype).eps / 2 for x in errors(truth(problem, 64, dtype), exact)]
    assert all(x <= y for x, y in zip(errors(found, exact), allowed, strict=True))
    wrong = errors(found, truth(problem, 56))
    assert all(x > 2 * y for x, y in zip(wrong, allowed, strict=True))
