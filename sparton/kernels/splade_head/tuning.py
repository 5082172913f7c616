"""Search for the fastest configuration of the forward, among those whose results are right.

N sequences, T packed tokens, D hidden, V vocabulary.

Compilers have been seen to return zeros in record time. So no configuration is timed before its
representations and winners were compared with full-precision products at the very shape that is
measured, in outputs that held NaN before the launch; one that fails is named and never chosen.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from sparton.kernels.segment_max.forward import (
    CONFIG_KINDS,
    Config,
    forward_configs,
    segment_max_forward,
    tuned_configs,
)
from sparton.kernels.segment_max.tuning_cache import read_winners, regime_of, write_winner
from sparton.kernels.splade_head.reference import splade_head_reference

ALLOWED_ERROR = 1e-3
ALLOWED_MEAN_ERROR = 1e-4


class Operands(NamedTuple):
    """``hidden [T, D]``, ``weight [V, D]``, ``bias [V]``, ``cu_seqlens [N + 1]``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    cu_seqlens: Tensor


class Trial(NamedTuple):
    """One configuration: why it was refused (None: it was not), and its time, then infinite."""

    config: Any
    fault: str | None
    milliseconds: float


Forward = Callable[[Any, Operands, bool], tuple[Tensor, Tensor]]
Timer = Callable[[Callable[[], object]], float]


def launch_forward(config: Config, operands: Operands, argmax: bool) -> tuple[Tensor, Tensor]:
    """reps ``[N, V]`` and argmax ``[N, V]`` (or nothing) of the forward kernel."""
    return segment_max_forward(*operands, argmax=argmax, config=config)


def cuda_milliseconds(run: Callable[[], object]) -> float:
    """Median time of 20 calls after 5, between CUDA events."""
    for _ in range(5):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def neighbours(config: Config) -> list[Config]:
    """The configuration and what one other setting makes of it; tiles stay as they are."""
    changes: list[dict[str, Any]] = [
        *({"segment": n} for n in (32, 64, 128)),
        *({"group_tokens": n} for n in (1024, 2048, 4096, 16384)),
        *({"band": n} for n in (8, 16, 32, 66)),
        *({"num_stages": n} for n in (2, 3, 4)),
    ]
    return list(dict.fromkeys([config, *(config._replace(**change) for change in changes)]))


def example_operands(
    hidden_size: int,
    vocabulary: int,
    mean_length: int,
    dtype: torch.dtype,
    tokens: int,
    device: str,
) -> Operands:
    """Random operands of about ``tokens`` tokens. Lengths lie between a half and one and a half of
    the mean, one sequence is empty, and about a sixth of the entries of single tokens is active."""
    generator = torch.Generator().manual_seed(0)
    low, high = max(mean_length // 2, 1), mean_length + mean_length // 2
    lengths = torch.randint(low, high + 1, (max(tokens // mean_length, 2),), generator=generator)
    lengths[lengths.numel() // 2] = 0
    cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    on_device = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=on_device, device=device)

    return Operands(
        normal(int(lengths.sum()), hidden_size).to(dtype),
        (normal(vocabulary, hidden_size) / hidden_size**0.5).to(dtype),
        normal(vocabulary) - 1,
        cu_seqlens.to(device),
    )


def search(
    operands: Operands,
    configs: Sequence[Any],
    *,
    launch: Forward = launch_forward,
    timer: Timer = cuda_milliseconds,
) -> list[Trial]:
    """Verify, then time, every configuration on these operands; in the order given. What is
    verified is the kernel with winners, as in training, and without; the former is timed.

    Args:
        operands: half or full precision.
        configs: anything that ``launch`` understands.
        launch: ``launch(config, operands, argmax)`` to reps fp32 ``[N, V]`` and, where argmax is
            True, the winners int32 ``[N, V]``.
        timer: milliseconds of a call.
    """
    with _full_precision():
        truth = splade_head_reference(
            operands.hidden.float(), operands.weight.float(), *operands[2:]
        )
        trials = []
        for config in configs:
            fault = _fault(config, operands, truth, launch)
            time = math.inf if fault else timer(lambda: launch(config, operands, True))  # noqa: B023
            trials.append(Trial(config, fault, time))
    return trials


def tune_splade_head(
    hidden_size: int,
    vocabulary: int,
    mean_length: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 2**16,
    device: str = "cuda",
    configs: Sequence[Any] | None = None,
    launch: Forward = launch_forward,
    timer: Timer = cuda_milliseconds,
) -> list[Trial]:
    """Search one regime, use its winner from now on and keep it in the user's cache.

    Args:
        hidden_size, vocabulary, mean_length: D, V and the mean number of tokens of a sequence.
        dtype: of hidden states and weight.
        tokens: T of the batch that is measured.
        configs: by default those of :func:`~sparton.kernels.segment_max.forward.forward_configs`
            and their :func:`neighbours`.
        launch, timer: see :func:`search`.

    Returns:
        All trials, the fastest first, the refused ones last.

    Raises:
        RuntimeError: no configuration gave right results.
    """
    operands = example_operands(hidden_size, vocabulary, mean_length, dtype, tokens, device)
    if configs is None:
        listed = forward_configs(dtype, torch.cuda.get_device_capability(device))
        configs = list(dict.fromkeys(near for config in listed for near in neighbours(config)))
    trials = search(operands, configs, launch=launch, timer=timer)
    trials.sort(key=lambda trial: trial.milliseconds)
    if all(trial.fault for trial in trials):
        faults = "; ".join(f"{trial.config}: {trial.fault}" for trial in trials)
        raise RuntimeError(f"no configuration gave right results: {faults or 'none was given'}")
    config, _, milliseconds = trials[0]
    regime = regime_of(operands.hidden.device, dtype, hidden_size, vocabulary, mean_length)
    tuned_configs()[regime] = config
    write_winner(regime, config, milliseconds)
    return trials


def use_tuned_configs() -> None:
    """Launch with the winners of earlier searches from now on; SPARTON_TUNED=1 does the same."""
    tuned_configs().update(read_winners(CONFIG_KINDS))


def _fault(config: Any, operands: Operands, truth: Tensor, launch: Forward) -> str | None:
    """Why a configuration must not be used, or None."""
    try:
        with _poisoned_allocations():
            reps, argmax = launch(config, operands, True)
            alone, _ = launch(config, operands, False)
        return (
            _wrong_values(reps, truth)
            or _wrong_winners(reps, argmax, operands)
            or _wrong_values(alone, truth)
        )
    except (TritonError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


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


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """PyTorch fills uninitialised memory with NaN, or integers that index nothing."""
    settings: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)


@contextmanager
def _full_precision() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
