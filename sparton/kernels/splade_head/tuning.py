"""What is searched for the SPLADE head: its forward, and its backward at the sparsity of training.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparton.kernels.segment_max.backward import segment_max_backward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.forward import Config, segment_max_forward
from sparton.kernels.segment_max.tuning import (
    backward_candidates,
    forward_candidates,
    gradients_of_winners,
    regime,
)
from sparton.kernels.splade_head.reference import splade_head_reference
from sparton.kernels.tuned import Regime
from sparton.kernels.tuning import Problem, full_precision, random_bounds, wrong_gradients

ALLOWED_ERROR = 1e-3
ALLOWED_MEAN_ERROR = 1e-4
ACTIVE = 0.02  # of the entries, once a training has made them sparse


class Operands(NamedTuple):
    """``hidden [T, D]``, ``weight [V, D]``, ``bias [V]``, ``cu_seqlens [N + 1]``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    cu_seqlens: Tensor


Forward = Callable[[Any, Operands, bool], tuple[Tensor, Tensor]]


def launch_forward(
    config: Config | None, operands: Operands, argmax: bool
) -> tuple[Tensor, Tensor]:
    """reps ``[N, V]`` and argmax ``[N, V]`` (or nothing) of the forward kernel."""
    return segment_max_forward(*operands, argmax=argmax, config=config)


def example_operands(
    hidden_size: int,
    vocabulary: int,
    mean_length: int,
    dtype: torch.dtype,
    tokens: int,
    device: str,
) -> Operands:
    """Random operands of about ``tokens`` tokens, see
    :func:`~sparton.kernels.tuning.random_bounds`; about a sixth of the entries of single tokens is
    active."""
    cu_seqlens = random_bounds(mean_length, tokens)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    return Operands(
        normal(int(cu_seqlens[-1]), hidden_size).to(dtype),
        (normal(vocabulary, hidden_size) / hidden_size**0.5).to(dtype),
        normal(vocabulary) - 1,
        cu_seqlens.to(device),
    )


def head_problems(
    hidden_size: int,
    vocabulary: int,
    mean_length: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 2**16,
    device: str = "cuda",
) -> Iterator[Problem]:
    """Forward, then backward.

    Args:
        hidden_size, vocabulary, mean_length: D, V and the mean number of tokens of a sequence.
        dtype: of hidden states and weight.
        tokens: T of the batch that is measured.
    """
    operands = example_operands(hidden_size, vocabulary, mean_length, dtype, tokens, device)
    own = regime("splade_head", operands.hidden, operands.weight, mean_length)
    yield forward_problem(own, operands, forward_candidates(dtype, device))
    yield backward_problem(own, operands)


def forward_problem(
    regime: Regime, operands: Operands, configs: Sequence[Any], launch: Forward = launch_forward
) -> Problem:
    """What is verified is the kernel with winners, as in training, and without; the former is
    timed.

    Args:
        operands: half or full precision.
        configs: anything that ``launch`` understands.
        launch: ``launch(config, operands, argmax)`` to reps fp32 ``[N, V]`` and, where argmax is
            True, the winners int32 ``[N, V]``.
    """
    with full_precision():
        truth = splade_head_reference(
            operands.hidden.float(), operands.weight.float(), *operands[2:]
        )

    def fault(config: Any) -> str | None:
        reps, argmax = launch(config, operands, True)
        alone, _ = launch(config, operands, False)
        return (
            _wrong_values(reps, truth)
            or _wrong_winners(reps, argmax, operands)
            or _wrong_values(alone, truth)
        )

    return Problem(regime, configs, lambda config: launch(config, operands, True), fault)


def backward_problem(regime: Regime, operands: Operands) -> Problem:
    """All three gradients of representations of which :data:`ACTIVE` are not zero."""
    hidden, weight, _, cu_seqlens = operands
    reps, argmax = launch_forward(None, operands, True)
    least = reps[:64].flatten()[: 2**22].quantile(1 - ACTIVE)
    reps = torch.where(reps >= least.clamp_min(1e-6), reps, 0.0)
    grad = torch.randn_like(reps)
    given = grad * torch.exp(-reps) * (reps > 0)

    def gradients(config: BackwardConfig) -> tuple[Tensor | None, ...]:
        return segment_max_backward(
            grad, reps, argmax, hidden, weight, cu_seqlens, bias_dtype=torch.float32, config=config
        )

    truth = (*gradients_of_winners(given, argmax, hidden, weight), given.sum(0))
    return Problem(
        regime._replace(kernel=f"{regime.kernel}_backward"),
        backward_candidates(),
        gradients,
        lambda config: wrong_gradients(truth, gradients(config)),
    )


def _wrong_values(reps: Tensor, truth: Tensor) -> str | None:
    if reps.shape != truth.shape:
        return f"representations are {tuple(reps.shape)}, not {tuple(truth.shape)}"
    if bad := int((~reps.isfinite()).sum()):
        return f"{bad} of {reps.numel()} representations were not written or are not finite"
    difference = reps - truth
    largest, mean = float(difference.abs().max()), float(difference.norm() / truth.norm())
    if largest > ALLOWED_ERROR or mean > ALLOWED_MEAN_ERROR:
        return f"representations are wrong by up to {largest:.2g}, relatively by {mean:.2g}"
    return None


def _wrong_winners(reps: Tensor, argmax: Tensor, operands: Operands) -> str | None:
    """Each winner must be a token of its sequence (-1 where reps is 0) that attains reps."""
    if argmax.shape != reps.shape:
        return f"winners are {tuple(argmax.shape)}, not {tuple(reps.shape)}"
    hidden, weight, bias, cu_seqlens = operands
    inside = (argmax >= cu_seqlens[:-1, None]) & (argmax < cu_seqlens[1:, None])
    if bad := int((~inside & ((reps > 0) | (argmax != -1))).sum()):
        return f"{bad} of {argmax.numel()} winners lie outside their sequences"
    weight, worst = weight.float(), reps.new_zeros(())
    for row, winners in zip(reps, argmax.clamp_min(0), strict=True):
        attained = ((hidden[winners].float() * weight).sum(-1) + bias).relu().log1p()
        worst = torch.maximum(worst, ((attained - row) * (row > 0)).abs().max())
    if float(worst) > ALLOWED_ERROR:
        return f"winners miss the maximum by up to {float(worst):.2g}"
    return None
