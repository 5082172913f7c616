"""How a command ends where a user can mend what went wrong: in one sentence, without a traceback.

The environment variable HYDRA_FULL_ERROR=1 shows where an error was raised.
"""

import errno
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hydra.errors import HydraException, InstantiationException
from omegaconf import MissingMandatoryValue
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from sparton.arguments import ArgumentError, Instance
from sparton.cli.overrides import written
from sparton.cli.shipped import shipped
from sparton.errors import (
    CheckpointError,
    DeviceMemoryError,
    MissingExtraError,
    NonFiniteLossError,
    OtherRunError,
    RunError,
)

EXPECTED_ERRORS = (
    ValueError,
    OSError,
    HydraException,
    OmegaConfBaseException,
    NonFiniteLossError,
    CheckpointError,
    DeviceMemoryError,
    MissingExtraError,
    RunError,
)

# The settings that give the arguments of these names.
_SETTINGS = {
    "alpha": "data.alpha",
    "at_start": "refresh.at_start",
    "attend_to_expansion": "head.attend_to_expansion",
    "attention": "backbone.attention",
    "center": "backbone.center",
    "config_args": "backbone.config_args",
    "decay": "averaging.decay",
    "depth": "refresh.rule.depth",
    "every": "refresh.every",
    "final": "scheduler.final",
    "format": "data.format",
    "forms": "data.forms",
    "freeze_backbone": "head.freeze_backbone",
    "homogeneous": "data.homogeneous",
    "limit": "data.limit",
    "logit_scale": "backbone.logit_scale",
    "lora": "backbone.lora",
    "margin": "refresh.rule.margin",
    "mode": "logger.wandb.mode",
    "model_args": "backbone.model_args",
    "normalize": "head.normalize",
    "on_error": "data.on_error",
    "on_unknown": "evaluation.on_unknown",
    "query_expansion": "head.query_expansion",
    "scaling": "data.teachers.scaling",
    "score_weights": "head.score_weights",
    "share": "refresh.rule.share",
    "skip": "refresh.rule.skip",
    "start": "averaging.start",
    "teacher_share": "data.teachers.share",
    "teacher_weights": "data.teachers.weights",
    "teachers": "data.teachers",
    "tokenizer_args": "backbone.tokenizer_args",
    "warmup": "scheduler.warmup",
    "weights": "data.weights",
    "widths": "head.widths",
}
# What overrides can do about an error, where its own words leave that open.
_REMEDIES = {
    BlockingIOError: ": wait for its end, or name another one (of a training, with name=NAME)",
    DeviceMemoryError: (
        ". Set micro_batch=N, which changes no gradient and bounds what is encoded at once, or "
        "backbone.gradient_checkpointing=true"
    ),
    NonFiniteLossError: " (optimizer.lr, clip_norm, precision, loss.temperature)",
    OtherRunError: " (name=NAME gives it one)",
}


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
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            sys.exit(128 + signal.SIGPIPE)
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if isinstance(error, RunError) and error.told:
            sys.exit(1)
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        who = f"{program}: rank {os.environ['RANK']}" if several else program
        sys.exit(f"{who}: {explain(error)}")


def _nobody_reads() -> bool:
    """Whether whoever read the standard output has left, as ``head`` does. What is still to be
    written goes nowhere then, or Python would complain at its end."""
    output, poll = sys.stdout.fileno(), select.poll()
    poll.register(output, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


@contextmanager
def arguments_named(
    name: Callable[[str], str], setting: Callable[[str, object], str]
) -> Iterator[None]:
    """What is said inside about arguments is said by ``name`` and, with their values, by
    ``setting``.

    Raises:
        ValueError: in the place of an ArgumentError.
    """
    try:
        yield
    except ArgumentError as error:
        raise ValueError(error.told(name, setting)) from error


def settings_named(**others: str) -> AbstractContextManager[None]:
    """What is said inside about arguments is said of a command's settings, which are called like
    them and not as those of a training are; see :func:`arguments_named`.

    Args:
        others: settings that are not called like the argument.
    """

    def name(argument: str) -> str:
        return others.get(argument, argument)

    return arguments_named(name, lambda argument, value: f"{name(argument)}={written(value)}")


def explain(error: Exception) -> str:
    """What went wrong, in the words of who noticed, with settings as overrides name them."""
    match error:
        case InstantiationException() if isinstance(error.__cause__, Exception):
            return _of_object(error, error.__cause__)
        case ArgumentError():
            return error.told(_setting, _override)
        case MissingMandatoryValue():  # ??? in a configuration
            group, in_group, _ = str(error.full_key).partition(".")
            own = "the first lines of the command's own file in configs"
            place = f"the files in configs/{group}" if in_group else own
            return f"{error.full_key} has no value: set {error.full_key}=..., see {place}"
        case OSError(errno=errno.EROFS | errno.ENOSPC | errno.EDQUOT):
            return f"{error}: make room there, make it writable, or write elsewhere"
        case OSError(errno=errno.EACCES | errno.EPERM, filename=str(path)):
            return f"{path}: permission denied; change who may use it, or name another place"
        case OSError(errno=errno.EEXIST | errno.ENOTDIR, filename=str(path)):
            leads_nowhere = Path(path).is_symlink() and not Path(path).exists()
            lying = "a link to nothing" if leads_nowhere else "a file"
            return f"{path}: {lying} lies where a folder is needed; name another place"
        case InterpolationResolutionError(full_key=str(key)) if key:
            why = str(error).splitlines()[0]
            return f"{key}: {why.partition(' raised while resolving interpolation: ')[2] or why}"
        case HydraException() | OmegaConfBaseException():
            return str(error).splitlines()[0]  # the rest is about types
    remedy = next((words for kind, words in _REMEDIES.items() if isinstance(error, kind)), "")
    return f"{error}{remedy}"


def _of_object(error: InstantiationException, cause: Exception) -> str:
    """What went wrong with an object that Hydra was to build, with the object's place where the
    words for it name no setting."""
    told, place = explain(cause), re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
    names_none = isinstance(cause, ValueError) and not isinstance(cause, ArgumentError)
    return f"{place[1]}: {told}" if place and names_none and place[1] not in told else told


def _setting(argument: str) -> str:
    return _SETTINGS.get(argument, argument)


def _override(argument: str, value: object) -> str:
    if isinstance(value, Instance):
        value = _option(argument, value.kind)
    return f"{_setting(argument)}={written(value)}"


def _option(group: str, kind: str) -> str:
    """The file of a group that makes an object of a class."""
    for path in sorted(shipped("configs").joinpath(group).glob("*.yaml")):
        if f".{kind}\n" in path.read_text(encoding="utf-8"):
            return path.stem
    return kind
