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


def on_ranks(
    size: int, folder: Path, work: Callable[..., Any], *arguments: Any, device: str = "cpu"
) -> list[Any]:
    """What ``work(world, *arguments)`` gives on each rank, in rank order.

    Args:
        folder: where the ranks find each other; empty.
        device: of the world: cpu, or cuda for a GPU of its own on each rank.
    """
    context = multiprocessing.get_context("spawn")
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=_rank, args=(rank, size, folder, device, work, arguments))
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


def _rank(
    rank: int, size: int, folder: Path, device: str, work: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    own, backend = CPU, "gloo"
    if device == "cuda":
        own, backend = torch.device(device, rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(own)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    try:
        torch.save(work(World(rank, size, own), *arguments), folder / f"{rank}.pt")
    except Exception:
        traceback.print_exc()
        raise
    dist.destroy_process_group()
