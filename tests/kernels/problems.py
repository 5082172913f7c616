"""Problems for the SPLADE head. N sequences, T packed tokens, D hidden, V vocabulary."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparton.kernels.segment_max.portable import PortableConfig
from sparton.kernels.splade_head import splade_head_reference

# The interpreter computes bfloat16 products wrongly.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# Small tiles of segment_max cut sequences more often, and run faster in the interpreter.
SMALL = PortableConfig(False, 16, 32, 16, num_warps=4, num_stages=2, segment=16, group_tokens=40)
LENGTHS = [5, 0, 17, 64, 1, 3, 0, 0, 33, 2, 0]
# Lengths, V, D, and what is added to the bias, or None for no bias.
SHAPES = [
    (LENGTHS, 37, 24, -1.0),
    ([3, 0, 20], 37, 24, None),
    ([1], 1, 1, 3.0),
    ([0, 1, 0], 17, 7, 1.0),
    ([128], 16, 16, -3.0),
    ([13] * 7, 61, 31, 0.0),
]


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    cu_seqlens: Tensor


def make_problem(
    lengths: list[int],
    V: int,
    D: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    bias: float | None = -2.0,
) -> Problem:
    generator = torch.Generator().manual_seed(V * D + len(lengths))
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    hidden = torch.randn(sum(lengths), D, generator=generator).to(device, dtype)
    weight = (torch.randn(V, D, generator=generator) * 2 / D**0.5).to(device, dtype)
    shift = None if bias is None else torch.randn(V, generator=generator).to(device) + bias
    return Problem(hidden, weight, shift, cu_seqlens.to(device))


def upstream_for(problem: Problem) -> Tensor:
    shape = (problem.cu_seqlens.numel() - 1, problem.weight.shape[0])
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator).to(problem.hidden.device)


def with_gradients(
    problem: Problem, upstream: Tensor, dtype: torch.dtype, **variant: Any
) -> tuple[Tensor, ...]:
    """Representations and gradients of the reference at some precision."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in problem[:3]]
    reps = splade_head_reference(*leaves, problem.cu_seqlens, **variant)
    wanted = [x for x in leaves if x is not None]
    return reps.detach(), *torch.autograd.grad(reps, wanted, upstream.to(dtype))


def error(actual: Tensor, truth: Tensor) -> float:
    """Root mean square of the difference over that of the truth."""
    actual, truth = actual.detach().double(), truth.detach().double()
    return float((actual - truth).norm() / truth.norm().clamp_min(1e-30))


def tolerances(problem: Problem) -> tuple[float, ...]:
    """Of reps, dhidden, dweight, dbias: half a unit in the last place of what is stored, and the
    rounding of sums in fp32 (tensor cores truncate)."""
    stored = torch.finfo(problem.hidden.dtype).eps / 2 + 1e-5
    return 1e-5, stored, stored, 1e-5


def assert_close_to_truth(
    results: tuple[Tensor, ...], problem: Problem, upstream: Tensor, **variant: Any
) -> None:
    """Near float64 by :func:`tolerances`, and no worse than the reference at this precision;
    on a GPU, whose eager kernels round elsewhere, but for the luck of few elements."""
    truth = with_gradients(problem, upstream, torch.float64, **variant)
    eager = with_gradients(problem, upstream, problem.hidden.dtype, **variant)
    for actual, exact, same_precision, allowed in zip(
        results, truth, eager, tolerances(problem), strict=False
    ):
        assert error(actual, exact) <= allowed
        luck = allowed / max(actual.numel(), 1) ** 0.5 if actual.is_cuda else 0
        assert error(actual, exact) <= error(same_precision, exact) + 5e-6 + luck


def first_of(values: Sequence[Any]) -> list[Any]:
    """For parameters: the first value, and the others in the slow tests."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.slow) for value in values[1:])]
