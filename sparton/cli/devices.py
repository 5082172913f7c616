"""Devices of a command's processes."""

import logging
import os
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sparton.retrieval.indexes.exact import IndexBuilder
    from sparton.training.distributed import World

log = logging.getLogger(__name__)


def check_gpus(gpus: int, device: str | None) -> None:
    """Refuse more processes than GPUs, where they would use some.

    Raises:
        ValueError: names both settings.
    """
    if device is not None and device != "cpu":
        raise ValueError(
            f"gpus={gpus} are as many devices, and device={device} is one: leave one out"
        )
    found = torch.cuda.device_count()
    if device is None and 0 < found < gpus:
        has = "1 GPU" if found == 1 else f"{found} GPUs"
        raise ValueError(f"gpus={gpus}, but this machine has {has}: set gpus={found}")


def shared_index(world: "World") -> "IndexBuilder":
    """Exact search on the GPUs of all processes of this machine: the main one searches, and the
    others wait for it."""
    from sparton.retrieval.indexes.exact import exact_index

    return partial(exact_index, more_devices=neighbours(world) if world.is_main else ())


def neighbours(world: "World") -> list[torch.device]:
    """The GPUs of the other processes on this machine that this one can use, too. Some machines
    keep a GPU for a single process."""
    if world.size == 1 or world.device.type != "cuda":
        return []
    found = []
    for number in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        device = torch.device("cuda", number)
        if device == world.device:
            continue
        try:
            torch.zeros(1, device=device)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            log.info("%s takes no part in the search of the main process (%s)", device, why)
        else:
            found.append(device)
    return found
