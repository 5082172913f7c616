"""Forward: one kernel, the logits stay in registers.

N sequences, T packed tokens, D hidden, V rows.

There are two kernels of the same plan: hopper.py, and portable.py for all other GPUs, for operands
that TMA cannot address, for full precision, and where a logarithm or a factor for every logit would
hold Hopper's warpgroups up. Here they are chosen and given buffers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import KEPT_PLANS, fits_descriptor
from sparton.kernels.segment_max.hopper import HopperConfig, plan_hopper
from sparton.kernels.segment_max.operands import check_operands, num_rows
from sparton.kernels.segment_max.portable import PortableConfig, plan_portable
from sparton.kernels.tuned import regime_of, tuned, tuned_configs

Config = PortableConfig | HopperConfig
CONFIG_KINDS = (PortableConfig, HopperConfig)
# The place of a configuration says what takes it by default, see _default: of each kind, and of
# those without descriptors, first the SPLADE head, then MaxSim, which sums whole queries, then sums
# of logarithms. Where there are fewer, the last one serves; further ones are for searches alone.
HOPPER: tuple[Config, ...] = (
    HopperConfig(),
    HopperConfig(128, 128, group_tokens=8192),
    PortableConfig(True, 128, 256, 64, num_warps=8, num_stages=3),
    PortableConfig(True, 128, 128, 64, num_warps=4, num_stages=3, group_tokens=2048),
    PortableConfig(True, 64, 128, 64, num_warps=4, num_stages=4),
)
PORTABLE: tuple[Config, ...] = (PortableConfig(False, 128, 128, 32, num_warps=8, num_stages=3),)
FULL_PRECISION: tuple[Config, ...] = (PortableConfig(False, 64, 64, 32, num_warps=4, num_stages=2),)
HOPPER_FP8: tuple[Config, ...] = (
    HopperConfig(num_stages=3),
    HopperConfig(64, 128, warpgroups=4),
    PortableConfig(True, 128, 128, 128, num_warps=4, num_stages=3, group_tokens=2048),
)
PORTABLE_FP8: tuple[Config, ...] = (PortableConfig(False, 128, 128, 64, num_warps=8, num_stages=3),)


@functools.cache
def forward_configs(dtype: torch.dtype, capability: tuple[int, int]) -> tuple[Config, ...]:
    """Every configuration meant for operands of ``dtype`` on a GPU of this compute capability;
    :func:`default_config` says which one is used."""
    if dtype == torch.float32:
        return FULL_PRECISION
    if dtype == torch.float8_e4m3fn:
        hopper, portable = HOPPER_FP8, PORTABLE_FP8
    else:
        hopper, portable = HOPPER, PORTABLE
    return hopper + portable if capability[0] == 9 else portable


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def fit_descriptors(hidden: Tensor, weight: Tensor) -> bool:
    """Whether descriptors can address both."""
    return fits_descriptor(hidden) and fits_descriptor(weight)


def tokens_scaled(scales: tuple[Tensor | None, Tensor] | None) -> bool:
    """Whether the tokens have factors, and not the rows of the weight alone."""
    return scales is not None and scales[0] is not None


@functools.cache
def _default(
    dtype: torch.dtype, capability: tuple[int, int], fits: bool, kind: type, place: int
) -> Config:
    """The configuration at this place, or the last one, among those of a kind with descriptors, or
    where there is none or operands do not fit them, among those without."""
    configs = forward_configs(dtype, capability)
    found = [x for x in configs if fits and x.descriptors and isinstance(x, kind)]
    found = found or [x for x in configs if not x.descriptors]
    return found[min(place, len(found) - 1)]


def default_config(
    dtype: torch.dtype,
    device: torch.device,
    fits: bool,
    pooling: str,
    activation: str,
    scaled: bool,
    *,
    portable: bool = False,
) -> Config:
    """The one of :func:`forward_configs` that serves operands which fit descriptors or do not,
    this variant of the kernel, and tokens that are ``scaled`` or are not; ``portable``: of the
    portable kernel in any case."""
    logarithms = (pooling, activation) == ("sum", "log1p_relu")
    # A logarithm for every logit: the Hopper kernel spills registers. A factor for every logit: it
    # takes none, its warpgroups would wait for them.
    kind = PortableConfig if portable or scaled or logarithms else HopperConfig
    place = 2 if logarithms else int(activation == "none")
    return _default(dtype, _capability(device), fits, kind, place)


def kernel_name(activation: str) -> str:
    """What a search calls the core: a part of the SPLADE head, or a product that keeps maxima."""
    return "maxsim_product" if activation == "none" else "splade_head"


def tuned_config(
    hidden: Tensor, weight: Tensor, num_sequences: int, activation: str, fits: bool
) -> Config | None:
    """The winner of a search of max pooling, if there is one that can address the operands."""
    if not tuned_configs():
        return None
    T, D, V = num_rows(hidden), hidden.shape[-1], num_rows(weight)
    length = T / max(num_sequences, 1)
    regime = regime_of(kernel_name(activation), hidden.device, hidden.dtype, D, V, length)
    winner = tuned(CONFIG_KINDS, regime)
    return winner if winner is not None and (fits or not winner.descriptors) else None


def select_config(
    hidden: Tensor,
    weight: Tensor,
    num_sequences: int,
    *,
    pooling: str = "max",
    activation: str = "relu",
    scales: tuple[Tensor | None, Tensor] | None = None,
) -> Config:
    """The winner of a search, if it verified this variant of the kernel, or else
    :func:`default_config`."""
    fits = fit_descriptors(hidden, weight)
    if (pooling, scales) == ("max", None) and activation != "log1p_relu":
        winner = tuned_config(hidden, weight, num_sequences, activation, fits)
        if winner is not None:
            return winner
    return default_config(
        hidden.dtype, hidden.device, fits, pooling, activation, tokens_scaled(scales)
    )


class ForwardPlan(NamedTuple):
    """A forward of known sizes.

    Attributes:
        launch: what :func:`~sparton.kernels.segment_max.hopper.plan_hopper` gives; None where there
            is nothing to look at.
        shape, winners_shape: of the results.
    """

    launch: Callable[..., None] | None
    shape: tuple[int, int]
    winners_shape: tuple[int, ...]

    def run(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cu_seqlens: Tensor,
        scales: tuple[Tensor | None, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """The results of contiguous operands on the current device."""
        reps = hidden.new_empty(self.shape, dtype=torch.float32)
        winners = cu_seqlens.new_empty(self.winners_shape)
        if self.launch is None:
            return reps.zero_(), winners.fill_(-1)
        self.launch(hidden, weight, bias, cu_seqlens, reps, winners, *(scales or (None, None)))
        return reps, winners


@functools.lru_cache(maxsize=KEPT_PLANS)
def plan_forward(
    config: Config | None, N: int, T: int, D: int, V: int, size: int, device: torch.device,
    fits: bool, pooling: str, activation: str, argmax: bool, summed: int,
) -> ForwardPlan:  # fmt: skip
    """The forward of N sequences, T tokens and V rows of D elements, of ``size`` bytes each.

    Args:
        config: as in :func:`segment_max_forward`; None for a forward with nothing to look at.
        fits: whether descriptors can address the operands.
        pooling, activation, argmax, summed: as in :func:`segment_max_forward`.

    Raises:
        ValueError: sizes that ``config`` does not serve.
    """
    shape = (N, V) if summed == 1 else (V // summed, N)
    winners_shape = (N, V) if argmax else (0,)
    if config is None or not (N and V and T):
        return ForwardPlan(None, shape, winners_shape)
    if config.descriptors and not fits:
        raise ValueError(
            f"{config} needs 16-byte aligned rows, got D = {D} of {size} bytes each; use a "
            "configuration without descriptors"
        )
    if isinstance(config, HopperConfig) and config.num_stages < 2:
        raise ValueError(f"a ring of buffers has two stages at least, got {config}")
    if pooling == "sum" and config.segment > 32:
        raise ValueError(f"sum pooling takes segments of at most 32 tokens, got {config}")
    if V % summed or config.block_v % summed:
        raise ValueError(f"summed must divide V = {V} and the block_v of {config}, got {summed}")
    variant: Any = {
        "size": size, "device": device, "pooling": pooling, "activation": activation,
        "argmax": argmax, "summed": summed,
    }  # fmt: skip
    if isinstance(config, HopperConfig):
        launch = plan_hopper(config, N, T, D, V, **variant)
    else:
        launch = plan_portable(config, N, T, D, V, **variant)
    return ForwardPlan(launch, shape, winners_shape)


def _check_scales(scales: tuple[Tensor | None, Tensor], hidden: Tensor, weight: Tensor) -> None:
    for name, factors, x in zip(("hidden", "weight"), scales, (hidden, weight), strict=True):
        if factors is not None and not (
            factors.shape == x.shape[:1]
            and factors.dtype == torch.float32
            and factors.device == x.device
            and factors.is_contiguous()
        ):
            raise ValueError(
                f"factors of {name} must be contiguous fp32 [{len(x)}] on {x.device}, got "
                f"{factors.dtype} {tuple(factors.shape)} on {factors.device}"
            )


@on_its_device
def segment_max_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    argmax: bool = True,
    pooling: str = "max",
    activation: str = "relu",
    summed: int = 1,
    scales: tuple[Tensor | None, Tensor] | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the fused forward.

    Args:
        hidden: ``[T, D]`` float16, bfloat16 or float32.
        weight: ``[V, D]``, the same dtype.
        bias: ``[V]`` any float dtype, or None.
        cu_seqlens: int32 ``[N + 1]``, from 0 to T.
        argmax: also return the winning tokens; sum pooling has none.
        pooling: "max" or "sum".
        activation: "relu" for ``log1p(relu(x))``, "log1p_relu" for that with a second log1p, or,
            with max pooling, "none".
        summed: with max pooling, return sums over so many neighbouring rows of ``reps.T``; a
            divisor of V and of the block_v of the configuration.
        scales: contiguous fp32 ``[T]`` and ``[V]``, positive factors of the rows of hidden (None
            if these have none) and weight, which may then be float8_e4m3fn, too.
        config: how to launch; see :func:`select_config` for the default.

    Returns:
        reps fp32 ``[N, V]``, or sums ``[V // summed, N]`` if that is not 1, and the absolute token
        index of each maximum, int32 ``[N, V]``, or without argmax an empty tensor. The index may be
        -1 where reps is 0, and is -1 in empty sequences and where every logit is NaN.

    Raises:
        ValueError: operands that do not fit together, or that the descriptors of ``config``
            cannot address; a name that does not exist.
    """
    check_operands(hidden, weight, bias, cu_seqlens)
    if hidden.dtype not in (torch.float16, torch.bfloat16, torch.float32) and (
        scales is None or hidden.dtype != torch.float8_e4m3fn
    ):
        raise ValueError(f"the kernel takes float16, bfloat16 or float32, got {hidden.dtype}")
    if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu", "none"):
        raise ValueError(
            "pooling must be 'max' or 'sum' and activation 'relu', 'log1p_relu' or 'none', got "
            f"{pooling!r} and {activation!r}"
        )
    if pooling != "max" and (scales is not None or activation == "none" or summed != 1):
        raise ValueError(f"scales, sums and activation='none' need pooling='max', got {pooling!r}")
    if scales is not None:
        _check_scales(scales, hidden, weight)
    if tokens_scaled(scales) and isinstance(config, HopperConfig):
        raise ValueError(f"factors of tokens need a PortableConfig, got {config}")
    hidden, weight, cu_seqlens = (x.contiguous() for x in (hidden, weight, cu_seqlens))
    bias = None if bias is None else bias.contiguous()
    return forward_of_checked(
        hidden, weight, bias, cu_seqlens, argmax=argmax and pooling == "max", pooling=pooling,
        activation=activation, summed=summed, scales=scales, config=config,
    )  # fmt: skip


def forward_of_checked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    argmax: bool,
    pooling: str = "max",
    activation: str,
    summed: int = 1,
    scales: tuple[Tensor | None, Tensor] | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`segment_max_forward` of operands that are known to fit together, to be contiguous and
    to lie on the current device: the host of a small call has no time to check again. The rows of
    hidden and weight may lie along several axes."""
    T, V, N = num_rows(hidden), num_rows(weight), cu_seqlens.shape[0] - 1
    if config is None and T and V and N:
        config = select_config(
            hidden, weight, N, pooling=pooling, activation=activation, scales=scales
        )
    plan = plan_forward(
        config, N, T, hidden.shape[-1], V, hidden.element_size(), hidden.device,
        fit_descriptors(hidden, weight), pooling, activation, argmax, summed,
    )  # fmt: skip
    return plan.run(hidden, weight, bias, cu_seqlens, scales)
