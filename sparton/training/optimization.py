"""Which parameters decay and how fast they learn, and one optimizer update."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from sparton.sharded import whole

Optimizer = torch.optim.Optimizer


def build_optimizer(
    encoder: nn.Module,
    factory: Callable[[Iterable[dict]], Optimizer],
    weight_decay: float,
    own_rates: Mapping[str, float] | None = None,
) -> Optimizer:
    """An optimizer over the trainable parameters; vectors (biases, norms) do not decay.

    Args:
        factory: takes parameter groups, gives the optimizer; its learning rate is the base rate.
        own_rates: other learning rates by the prefix of the parameters' names, of which the longest
            counts; see :meth:`~sparton.models.encoder.Encoder.learning_rates`.

    Raises:
        ValueError: nothing is trainable, a rate is not positive, or a prefix fits no trainable
            parameter.
    """
    named = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the encoder has no trainable parameter: nothing to optimise")
    own_rates = own_rates or {}
    prefixes = _prefixes(named, own_rates)
    groups = []
    for prefix in ("", *own_rates):
        settings = {"prefix": prefix} | ({"lr": own_rates[prefix]} if prefix else {})
        own = [p for name, p in named.items() if prefixes[name] == prefix]
        matrices, vectors = [p for p in own if p.ndim > 1], [p for p in own if p.ndim <= 1]
        groups.append({"params": matrices, "weight_decay": weight_decay, **settings})
        groups.append({"params": vectors, "weight_decay": 0.0, **settings})
    optimizer = factory([group for group in groups if group["params"]])
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]
    return optimizer


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """The rates of the last update, for the log: ``learning_rate``, and one more for every prefix
    that has its own."""
    return {
        f"learning_rate_{group['prefix']}" if group["prefix"] else "learning_rate": group["lr"]
        for group in optimizer.param_groups
    }


def update(
    optimizer: Optimizer, scaler: torch.amp.GradScaler, rate_factor: float, clip_norm: float | None
) -> Tensor:
    """Clip, step, and clear the gradients.

    Args:
        rate_factor: the schedule's factor on every group's base learning rate.
        clip_norm: largest norm of the whole gradient; None for no clipping.

    Returns:
        The gradient norm before clipping, still on the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * rate_factor
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = whole(
        nn.utils.clip_grad_norm_(parameters, float("inf") if clip_norm is None else clip_norm)
    )
    scaler.step(optimizer)
    # Fused optimizers do not count what they change, and others need not: who keeps what was made
    # of weights looks at their versions.
    torch.autograd.graph.increment_version(parameters)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _prefixes(names: Iterable[str], own_rates: Mapping[str, float]) -> dict[str, str]:
    """For each parameter the longest prefix of ``own_rates`` that fits it, or ""."""
    prefixes = {}
    for name in names:
        fitting = [prefix for prefix in own_rates if f"{name}.".startswith(f"{prefix}.")]
        prefixes[name] = max(fitting, key=len, default="")
    for prefix, rate in own_rates.items():
        if not 0 < rate < math.inf:
            raise ValueError(
                f"the learning rate of {prefix} must be positive and finite, got {rate}"
            )
        if prefix not in prefixes.values():
            raise ValueError(
                f"{prefix} has a learning rate of its own, {rate}, but no trainable parameter "
                "besides those of longer prefixes: take the rate away or unfreeze the parameters"
            )
    return prefixes
