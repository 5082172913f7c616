"""The targets of the project against what was measured.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.head.suites import (
    FORWARD,
    FORWARD_BACKWARD,
    GEMM,
    LONG,
    MULTILINGUAL,
    SHORT,
    TABLE1,
    TRAINING_FORWARD,
    Cell,
)
from tables.records import Record, find, markdown, milliseconds, read_records, table

Verdict = tuple[str, bool | None]
MET = {True: "yes", False: "**no**", None: "?"}
MIB = 2**20
SCRATCH_MIB = 16
GROWTH = 1.1
RATE = 700  # TFLOP/s
RIVALS = {GEMM: "the bare GEMM", "sparton_hybrid": "the hybrid", "sparton": "no padding"}


class Bar(NamedTuple):
    """One target.

    Attributes:
        judge: records of the suite to what was measured, in words, and whether it is met; None
            where something failed. No words where a cell was not tried.
    """

    name: str
    shape: str
    target: str
    judge: Callable[[Sequence[Record]], Verdict]


def ratio(name: str, cell: Cell, limit: float, **rival: str) -> Bar:
    """The time of a cell is at most this share of that of one which differs in some fields."""
    other = cell._replace(**rival)

    def judge(records: Sequence[Record]) -> Verdict:
        ours, theirs = find(records, cell), find(records, other)
        if not (ours and theirs):
            return "", None
        times = f"{milliseconds(ours)} / {milliseconds(theirs)} ms"
        if "p50_ms" not in ours or "p50_ms" not in theirs:
            return times, None
        found = ours["p50_ms"] / theirs["p50_ms"]
        return f"{times} = {found:.3f}", found <= limit

    return Bar(name, cell.shape, f"≤ {limit:.2f} of {RIVALS[other.head]}", judge)


def rate(records: Sequence[Record]) -> Verdict:
    record = find(records, Cell(TABLE1, "sparton"))
    if "p50_ms" not in record:
        return record.get("status", ""), None
    found = 2 * record["T"] * record["D"] * record["V"] / record["p50_ms"] / 1e9
    return f"{found:.0f} TFLOP/s", found >= RATE


def scratch(mode: str, records: Sequence[Record]) -> Verdict:
    """Peak memory beyond representations and argmax, and beyond gradients where there are any."""
    record = find(records, Cell(TABLE1, "sparton", mode))
    if "peak_bytes" not in record:
        return record.get("status", ""), None
    N, T, D, V = (record[size] for size in "NTDV")
    gradients = 2 * (T + V) * D + 4 * V if mode == FORWARD_BACKWARD else 0
    found = (record["peak_bytes"] - 8 * N * V - gradients) / MIB
    return f"outputs + argmax + {found:.1f} MiB", found <= SCRATCH_MIB


def linear(records: Sequence[Record]) -> Verdict:
    """Time per token at the longest length over that at the shortest; from the suite table2."""
    gpu = records[0]["gpu"]
    long = [record for record in read_records("head_table2") if record["gpu"] == gpu]
    found = [find(long, Cell(shape, "sparton", FORWARD_BACKWARD)) for shape in LONG]
    if any("p50_ms" not in record for record in found):
        return ", ".join(milliseconds(record) for record in found if record), None
    per_token = [record["p50_ms"] / record["T"] for record in found]
    growth = per_token[-1] / per_token[0]
    times = f"{milliseconds(found[0])} to {milliseconds(found[-1])} ms"
    return f"{times}, per token x {growth:.2f}", growth <= GROWTH


BOTH = Cell(TABLE1, "sparton", FORWARD_BACKWARD)
LARGE = Cell(MULTILINGUAL, "sparton", FORWARD)
MIXED = Cell("mix60", "sparton", FORWARD)
MEMORY = "≤ 16 MiB of scratch"
BARS = (
    ratio("forward", Cell(TABLE1, "sparton"), 0.90, head=GEMM),
    ratio("in training", Cell(TABLE1, "sparton", TRAINING_FORWARD), 0.90, head=GEMM, mode=FORWARD),
    Bar("forward", TABLE1, f"≥ {RATE} TFLOP/s", rate),
    ratio("all entries active", BOTH, 0.45, head="sparton_hybrid"),
    ratio("1 % active", BOTH._replace(pattern="random_1pct"), 0.38, head="sparton_hybrid"),
    ratio("large vocabulary, forward", LARGE, 0.40, head="sparton_hybrid"),
    ratio("large vocabulary", LARGE._replace(mode=FORWARD_BACKWARD), 0.42, head="sparton_hybrid"),
    ratio("60 % real tokens, forward", MIXED, 0.65, shape=SHORT),
    ratio("60 % real", MIXED._replace(mode=FORWARD_BACKWARD), 0.65, shape=SHORT),
    Bar("memory, forward in training", TABLE1, MEMORY, partial(scratch, TRAINING_FORWARD)),
    Bar("memory beyond gradients", TABLE1, MEMORY, partial(scratch, FORWARD_BACKWARD)),
    Bar("long sequences", "128x1024 to 16384", "linear in S, within 10 %", linear),
)


@table("bars", "head", command="head --suite bars")
def bars(records: list[Record]) -> str:
    verdicts = [(bar, bar.judge(records)) for bar in BARS]
    rows = [
        [bar.name, bar.shape, bar.target, said, MET[met]] for bar, (said, met) in verdicts if said
    ]
    return markdown(["bar", "shape", "target", "measured", "met"], rows)
