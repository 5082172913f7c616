"""What Linux says of a process: its time, its memory, its waits for the disk."""

import os
from multiprocessing import active_children
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Of one process, or of several together.

    Attributes:
        cpu_seconds: spent so far, of all threads.
        page_faults: pages read from disk so far.
        own_bytes: memory that nobody else needs and that no file stands for.
        mapped_bytes: its proportional share of files mapped into memory, which the system gives up
            whenever it needs the room, and of memory shared with other processes.
    """

    cpu_seconds: float = 0.0
    page_faults: int = 0
    own_bytes: int = 0
    mapped_bytes: int = 0

    def __add__(self, other: tuple) -> "Usage":
        return Usage(*(a + b for a, b in zip(self, other)))


def usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kibibytes = {name: int(value) for name, value, *_ in map(str.split, lines)}
    own = kibibytes["Pss_Anon:"]
    cpu = (int(fields[11]) + int(fields[12])) / TICKS
    return Usage(cpu, int(fields[9]), own << 10, (kibibytes["Pss:"] - own) << 10)


def usages() -> tuple[Usage, Usage]:
    """Of this process, and of its child processes together."""
    children = [usage(child.pid) for child in active_children() if child.pid]
    return usage(os.getpid()), sum(children, Usage())
