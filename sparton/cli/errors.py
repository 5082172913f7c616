"""How a command ends where a user can mend what went wrong: in one sentence, without a traceback.

The environment variable HYDRA_FULL_ERROR=1 shows where an error was raised.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, InstantiationException
from omegaconf import MissingMandatoryValue
from omegaconf.errors import OmegaConfBaseException

from sparton.arguments import ArgumentError
from sparton.errors import CheckpointError, DeviceMemoryError, NonFiniteLossError, RunError

EXPECTED_ERRORS = (
    ValueError,
    OSError,
    HydraException,
    OmegaConfBaseException,
    NonFiniteLossError,
    CheckpointError,
    DeviceMemoryError,
    RunError,
)

# Settings of the configuration that give arguments of those names.
_SETTINGS = {"on_error": "data.on_error", "warmup": "scheduler.warmup"}


@contextmanager
def one_sentence(program: str, interrupted: str = "") -> Iterator[None]:
    """End this process with a sentence where an error is expected, or where it is interrupted.

    Args:
        interrupted: what becomes of the work then.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{program}: interrupted{'; ' if interrupted else ''}{interrupted}\n")
        sys.exit(130)
    except EXPECTED_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if isinstance(error, RunError) and error.told:
            sys.exit(1)
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        who = f"{program}: rank {os.environ['RANK']}" if several else program
        sys.exit(f"{who}: {explain(error)}")


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
    if isinstance(error, DeviceMemoryError):
        return (
            f"{error} Set micro_batch=N, which changes no gradient and bounds what is encoded at "
            "once, or backbone.gradient_checkpointing=true"
        )
    if isinstance(error, HydraException | OmegaConfBaseException):  # the rest is about its types
        return str(error).splitlines()[0]
    return str(error)


def _setting(argument: str) -> str:
    return _SETTINGS.get(argument, argument)
