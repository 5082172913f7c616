"""What a user can mend, in one sentence; HYDRA_FULL_ERROR=1 shows where it was raised."""

import torch
from hydra.errors import InstantiationException
from omegaconf import MissingMandatoryValue

from sparton.arguments import ArgumentError
from sparton.training.loop import NonFiniteLossError
from sparton.training.state import CheckpointError

EXPECTED_ERRORS = (
    ValueError,
    OSError,
    InstantiationException,
    MissingMandatoryValue,
    NonFiniteLossError,
    CheckpointError,
)

# Settings of the configuration that give arguments of those names.
_SETTINGS = {"on_error": "data.on_error", "warmup": "scheduler.warmup"}


def explain(error: Exception) -> str:
    """What went wrong in the words of who noticed: Hydra wraps errors of the objects it builds."""
    if isinstance(error, InstantiationException) and isinstance(error.__cause__, Exception):
        return explain(error.__cause__)
    if isinstance(error, ArgumentError):
        return error.told(_setting, lambda name, value: f"{_setting(name)}={value}")
    if isinstance(error, MissingMandatoryValue):  # ??? in a configuration
        group, in_group, _ = str(error.full_key).partition(".")
        place = f"the files in configs/{group}" if in_group else "the first files of configs"
        return f"{error.full_key} has no value: set {error.full_key}=..., see {place}"
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{error} Set micro_batch=N, which changes no gradient and bounds what is encoded at "
            "once, or backbone.gradient_checkpointing=true"
        )
    return str(error)


def _setting(argument: str) -> str:
    return _SETTINGS.get(argument, argument)
