"""Loops that hold no lock of Python, in several threads.

Those that numba would start itself end the process where two threads of Python search at once, or
where it was forked.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

# Starting threads takes longer than many a search. They are kept, but not in a forked process.
_threads = functools.cache(ThreadPoolExecutor)
os.register_at_fork(after_in_child=_threads.cache_clear)


def thread_ranges(units: int, least: int = 1) -> list[tuple[int, int]]:
    """Ranges that cover so many units of work, one for each of torch's threads, or fewer, so that
    each has at least ``least`` units."""
    threads = max(min(torch.get_num_threads(), units // max(least, 1)), 1)
    return list(pairwise(units * thread // threads for thread in range(threads + 1)))


def run_ranges(run: Callable[[int, int, int], None], ranges: list[tuple[int, int]]) -> None:
    """Call ``run(number, first, last)`` for each range, all at the same time."""
    if len(ranges) == 1:
        run(0, *ranges[0])
    else:
        threads = _threads(torch.get_num_threads())
        list(threads.map(run, range(len(ranges)), *zip(*ranges, strict=True)))
