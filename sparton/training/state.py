"""Checkpoints: complete, atomic, and never the only copy while the next one is written."""

import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor, nn

from sparton.errors import CheckpointError, OtherRunError
from sparton.models.identity import weights_digest
from sparton.writing import replacing, room

log = logging.getLogger(__name__)

_KEPT = 2
_NAME = re.compile(r"step-\d+(\.pt)?")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``step-00000042.pt``: first under another name, then renamed once it is on the disk.

    Older checkpoints are removed afterwards, all but one.

    Raises:
        CheckpointError: the disk is full or not writable. Earlier checkpoints are untouched.
    """
    path = folder / f"{checkpoint_name(step)}.pt"
    with unwritten_told(path), replacing(path) as fresh, fresh.open("wb") as file:
        torch.save({"step": step, **state}, file)
    remove_older(folder)
    return path


def checkpoint_name(step: int) -> str:
    """How the checkpoint after so many steps is called, without what tells its form."""
    return f"step-{step:08d}"


@contextmanager
def unwritten_told(path: Path) -> Iterator[None]:
    """Say of a checkpoint that cannot be written what to do, and where the run goes on.

    Raises:
        CheckpointError: in the place of the error within.
    """
    try:
        yield
    except (OSError, RuntimeError, KeyboardInterrupt) as error:
        # torch.save makes an error of its own of an interrupt while it writes.
        if KeyboardInterrupt in (type(error), type(error.__context__)):
            raise KeyboardInterrupt from error
        earlier = [kept.name for kept in newest_first(path.parent)]
        first = error.__cause__ or error.__context__ or error
        going_on = f"from {earlier[0]}" if earlier else "from step 0, as none exists yet"
        raise CheckpointError(
            f"the checkpoint {path} could not be written; {room(path, first)} and run the same "
            f"command again: it goes on {going_on}. ({first})"
        ) from error


def remove_older(folder: Path) -> None:
    """Remove all checkpoints but the last two."""
    for old in newest_first(folder)[_KEPT:]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()


def load_checkpoint(folder: Path, keys: Collection[str] = ()) -> dict[str, Any] | None:
    """The newest checkpoint that is what was written, on the CPU; None where there is none. See
    :func:`newest_good`.

    Args:
        keys: of the state that must be there.
    """
    return newest_good(folder, lambda path: read_file(path, step_of(path), keys), sharded=False)


def newest_good(
    folder: Path, read: Callable[[Path], dict[str, Any]], *, sharded: bool
) -> dict[str, Any] | None:
    """What ``read`` makes of the newest checkpoint that is what was written; None where there is
    none.

    One that is damaged (cut in half by a crash, or with a bit that has turned on the disk) is
    passed over with a warning for the one before it.

    Args:
        read: fails with any error at a checkpoint that is damaged.
        sharded: whether checkpoints are folders, as those of sharded trainings are, or files.

    Raises:
        CheckpointError: there are checkpoints and none can be read.
        OtherRunError: they are of a training that is sharded where this is not, or the other way
            round.
    """
    candidates = newest_first(folder)
    for path in candidates:
        if path.is_dir() != sharded:
            began, now = ("", "not ") if path.is_dir() else ("not ", "")
            raise OtherRunError(
                f"{path} is of a training whose weights were {began}sharded, and here they are "
                f"{now}to be: go on as it began, or give this run a folder of its own"
            )
        try:
            return read(path)
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


def frozen_identity(encoder: nn.Module) -> dict[str, str]:
    """What tells whether weights that no checkpoint has are those of an earlier run."""
    frozen = frozen_state(encoder)
    return {"frozen_weights": weights_digest(frozen)} if frozen else {}


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


def refuse_other_run(
    folder: Path, stored: Mapping[str, object], fresh: Mapping[str, object]
) -> None:
    """Refuse to go on with the checkpoints in the folder of a run.

    Raises:
        OtherRunError: they are of a run with other settings or data; names what differs.
    """
    if changed := changes(stored, fresh):
        raise OtherRunError(
            f"{folder} holds the checkpoints of a run with other settings or data: "
            f"{', '.join(changed)}. Give this run a folder of its own, or delete that one"
        )


def changes(stored: Mapping[str, object], fresh: Mapping[str, object]) -> list[str]:
    """What differs between the settings of a run that was stopped and those it would go on with,
    as ``name=fresh (was stored)``, in the order of the names."""
    # Of a group that was empty, or is now, the settings tell all there is.
    sides = ((stored, fresh), (fresh, stored))
    emptied = {
        name
        for one, other in sides
        for name, value in one.items()
        if value == "{}" and any(each.startswith(f"{name}.") for each in other)
    }
    return [
        f"{name}={fresh.get(name, 'absent')} (was {stored.get(name, 'absent')})"
        for name in sorted({*stored, *fresh} - emptied)
        if stored.get(name) != fresh.get(name)
    ]


def read_file(path: Path, step: int, keys: Collection[str]) -> dict[str, Any]:
    """The state after ``step`` steps in a file whose checksums, which torch.load does not look at,
    are right.

    Args:
        keys: of the state that must be there.

    Raises:
        Exception: it is damaged, or of another step.
    """
    with ZipFile(path) as archive:
        if changed := archive.testzip():
            raise ValueError(f"its part {changed} is not as it was written")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if missing := [key for key in ("step", *keys) if key not in state]:
        raise ValueError(f"it has no {', '.join(missing)}")
    if state["step"] != step:
        raise ValueError(f"it is that of step {state['step']}")
    return state


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a folder; what a user has put there under another name is none."""
    named = (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
    found = (path for path in named if path.suffix or path.is_dir())
    return sorted(found, key=step_of, reverse=True)
