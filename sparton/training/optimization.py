"""Which parameters decay, and one optimizer update."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer


def build_optimizer(
    encoder: nn.Module, factory: Callable[[Iterable[dict]], Optimizer], weight_decay: float
) -> Optimizer:
    """An optimizer over the trainable parameters; vectors (biases, norms) do not decay.

    Args:
        factory: takes parameter groups, gives the optimizer; its learning rate is the base rate.

    Raises:
        ValueError: nothing is trainable.
    """
    trainable = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("the encoder has no trainable parameter: nothing to optimise")
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = factory([group for group in groups if group["params"]])
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]
    return optimizer


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
    norm = nn.utils.clip_grad_norm_(parameters, clip_norm or float("inf"))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm
