"""Checkpoints that all ranks write and read together, each its part, for any number of ranks.

A checkpoint is a folder: tensors in files of ``torch.distributed.checkpoint``, and one file with
all else and with the seals of those.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sparton.digests import Seal
from sparton.training.distributed import World
from sparton.training.state import (
    checkpoint_name,
    newest_good,
    read_file,
    remove_older,
    step_of,
    unwritten_told,
)
from sparton.writing import replacing_folder

_REST = "rest.pt"
Keys = tuple[Any, ...]  # of nested dictionaries, the outermost first


def save_sharded(folder: Path, step: int, state: Mapping[str, Any], world: World) -> None:
    """Write the folder ``step-00000042``: first under another name, then renamed once all of it is
    on the disk. Older checkpoints are removed afterwards, all but one.

    Args:
        state: nested dictionaries, whose tensors are sharded or the same on all ranks.

    Raises:
        CheckpointError: on every rank, where the disk is full or not writable. Earlier checkpoints
            are untouched.
    """
    path = folder / checkpoint_name(step)
    places = dict(_leaves(state))
    tensors = {keys: value for keys, value in places.items() if isinstance(value, Tensor)}
    rest = {keys: value for keys, value in places.items() if keys not in tensors}

    def begin() -> Path | None:
        return stack.enter_context(replacing_folder(path)) if world.is_main else None

    def finish(fresh: Path, seals: Mapping[str, Seal]) -> None:
        if world.is_main:
            content = {"step": step, "seals": {name: tuple(seal) for name, seal in seals.items()}}
            torch.save(content | {"rest": rest, "tensors": list(tensors)}, fresh / _REST)
            stack.close()  # flushes and renames
            remove_older(folder)

    with unwritten_told(path), ExitStack() as stack:
        fresh = world.each(begin)[0]
        assert fresh is not None
        with _failures_of_ranks():
            dcp.save(
                {_name(keys): value for keys, value in tensors.items()},
                storage_writer=FileSystemWriter(fresh),
                no_dist=world.size == 1,
            )
        own = sorted(fresh.iterdir())[world.rank :: world.size]
        sealed = world.each(lambda: {file.name: Seal.of(file) for file in own})
        seals = {name: seal for part in sealed for name, seal in part.items()}
        world.each(lambda: finish(fresh, seals))


def load_sharded(
    folder: Path, keys: Collection[str], like: Mapping[Keys, Tensor], world: World
) -> dict[str, Any] | None:
    """The newest checkpoint that is what was written; None where there is none. See
    :func:`~sparton.training.state.newest_good`.

    Args:
        keys: of the state that must be there.
        like: the first keys of a tensor to one that is sharded as it is to be, if it has the same
            shape; tensors of other shapes come whole.
    """

    def read(path: Path) -> dict[str, Any]:
        wanted = ("seals", "rest", "tensors")
        content = world.each(lambda: read_file(path / _REST, step_of(path), wanted))[world.rank]
        seals = sorted(content["seals"].items())[world.rank :: world.size]
        faults = world.each(lambda: [Seal(*seal).fault(path / name) for name, seal in seals])
        if found := [fault for part in faults for fault in part if fault is not None]:
            raise ValueError(found[0])
        tensors = _read_tensors(path, content["tensors"], like, world)
        state = _nested(content["rest"] | tensors)
        if missing := [key for key in keys if key not in state]:
            raise ValueError(f"it has no {', '.join(missing)}")
        return state | {"step": content["step"]}

    return newest_good(folder, read, sharded=True)


def _read_tensors(
    path: Path, places: Collection[Keys], like: Mapping[Keys, Tensor], world: World
) -> dict[Keys, Tensor]:
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    found = {}
    for keys in places:
        kind = stored[_name(keys)]
        assert isinstance(kind, TensorStorageMetadata)
        near = next((like[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in like), None)
        if near is not None and near.shape == kind.size:
            found[keys] = torch.zeros_like(near, dtype=kind.properties.dtype, requires_grad=False)
        else:
            found[keys] = torch.zeros(kind.size, dtype=kind.properties.dtype, device=world.device)
    with _failures_of_ranks():
        dcp.load(
            {_name(keys): value for keys, value in found.items()},
            storage_reader=reader,
            no_dist=world.size == 1,
        )
    return found


@contextmanager
def _failures_of_ranks() -> Iterator[None]:
    """The first of the errors that ``torch.distributed.checkpoint`` has collected, on all ranks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank has none
            yield
    except CheckpointException as error:
        (first, _), *_ = error.failures.values()
        raise OSError(str(first)) from first


def _leaves(value: object, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(below, (*keys, key))
    else:
        yield keys, value


def _nested(leaves: Mapping[Keys, Any]) -> dict[str, Any]:
    whole: dict[Any, Any] = {}
    for (*outer, last), value in leaves.items():
        place = whole
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    return whole


def _name(keys: Keys) -> str:
    return "/".join(map(str, keys))
