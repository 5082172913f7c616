"""Checkpoints: complete, atomic, and never the only copy while the next one is written."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor, nn

from sparton.errors import CheckpointError
from sparton.writing import replacing, room

log = logging.getLogger(__name__)

_KEPT = 2


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``step-00000042.pt``: first under another name, then renamed once it is on the disk.

    Older checkpoints are removed afterwards, all but one.

    Raises:
        CheckpointError: the disk is full or not writable. Earlier checkpoints are untouched.
    """
    path = folder / f"step-{step:08d}.pt"
    try:
        with replacing(path) as fresh, fresh.open("wb") as file:
            torch.save({"step": step, **state}, file)
    except (OSError, RuntimeError, KeyboardInterrupt) as error:
        # torch.save makes an error of its own of an interrupt while it writes.
        if KeyboardInterrupt in (type(error), type(error.__context__)):
            raise KeyboardInterrupt from error
        earlier = [kept.name for kept in _newest_first(folder)]
        first = error.__cause__ or error.__context__ or error
        going_on = f"from {earlier[0]}" if earlier else "from step 0, as none exists yet"
        raise CheckpointError(
            f"the checkpoint {path} could not be written; {room(path)} and run the same command "
            f"again: it goes on {going_on}. ({first})"
        ) from error
    for old in _newest_first(folder)[_KEPT:]:
        old.unlink()
    return path


def load_checkpoint(folder: Path, keys: Collection[str] = ()) -> dict[str, Any] | None:
    """The newest checkpoint that is what was written, on the CPU; None where there is none.

    A file that is damaged (cut in half by a crash, or with a bit that has turned on the disk) is
    passed over with a warning for the one before it.

    Args:
        keys: of the state that must be there.

    Raises:
        CheckpointError: there are checkpoints and none can be read.
    """
    candidates = _newest_first(folder)
    for path in candidates:
        try:
            return _read(path, keys)
        except Exception as error:  # torch reports damage by half a dozen exception types
            why = str(error).partition("\n")[0].rstrip(".")
            log.warning("the checkpoint %s is damaged (%s); trying an earlier one", path, why)
    if candidates:
        names = ", ".join(path.name for path in candidates)
        raise CheckpointError(
            f"none of the checkpoints in {folder} can be read ({names}). Delete the folder to "
            "start from step 0, or put back a good copy"
        )
    return None


def learned_state(encoder: nn.Module) -> dict[str, Tensor]:
    """The state of an encoder without its frozen parameters, which are where it began."""
    frozen = frozen_state(encoder)
    return {name: value for name, value in encoder.state_dict().items() if name not in frozen}


def frozen_state(encoder: nn.Module) -> dict[str, Tensor]:
    """The parameters that do not learn, by every name that they have."""
    named = encoder.named_parameters(remove_duplicate=False)
    return {name: value.detach() for name, value in named if not value.requires_grad}


def load_learned_state(encoder: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Bring an encoder to what :func:`learned_state` gave.

    Raises:
        CheckpointError: the encoder learns something else.
    """
    differing = sorted(state.keys() ^ learned_state(encoder).keys())
    if differing:
        raise CheckpointError(
            f"the checkpoint and the model do not both have {', '.join(differing[:4])}"
            f"{' ...' if len(differing) > 4 else ''}: it was written by another version, go on "
            "with that, or give this run a folder of its own"
        )
    encoder.load_state_dict(state, strict=False)


def changes(stored: Mapping[str, object], fresh: Mapping[str, object]) -> list[str]:
    """What differs between the settings of a run that was stopped and those it would go on with,
    as ``name=fresh (was stored)``, in the order of the names."""
    return [
        f"{name}={fresh.get(name, 'absent')} (was {stored.get(name, 'absent')})"
        for name in sorted({*stored, *fresh})
        if stored.get(name) != fresh.get(name)
    ]


def _read(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """A checkpoint whose checksums, which torch.load does not look at, are right.

    Raises:
        Exception: it is damaged, or is not that of the step in its name.
    """
    with ZipFile(path) as archive:
        if changed := archive.testzip():
            raise ValueError(f"its part {changed} is not as it was written")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if missing := [key for key in ("step", *keys) if key not in state]:
        raise ValueError(f"it has no {', '.join(missing)}")
    if state["step"] != int(path.stem.removeprefix("step-")):
        raise ValueError(f"it is that of step {state['step']}")
    return state


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"), reverse=True)
