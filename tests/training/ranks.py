"""Functions of tests that run in several processes of gloo at once."""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparton.training.distributed import World

CPU = torch.device("cpu")


def on_ranks(size: int, folder: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``work(world, *arguments)`` gives on each rank, in rank order.

    Args:
        folder: where the ranks find each other; empty.
    """
    context = multiprocessing.get_context("spawn")
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=_rank, args=(rank, size, folder, work, arguments))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    for rank in ranks:
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * size
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, folder: Path, work: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    try:
        torch.save(work(World(rank, size, CPU), *arguments), folder / f"{rank}.pt")
    except Exception:
        traceback.print_exc()
        raise
    dist.destroy_process_group()
