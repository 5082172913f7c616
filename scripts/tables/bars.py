"""The targets of the project against what was measured.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from head_benchmark.suites import (
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
from tables.records import Record, by_device, find, markdown, milliseconds, read_records

Verdict = tuple[str, bool | None]
MIB = 2**20
SCRATCH_MIB = 16
GROWTH = 1.1


class Bar(NamedTuple):
    """One target.

    Attributes:
        judge: records of the suite to what was measured, in words, and whether it is met; None
            where something is missing.
    """

    name: str
    shape: str
    target: str
    judge: Callable[[Sequence[Record]], Verdict]


def ratio(name: str, cell: Cell, rival: Cell, limit: float) -> Bar:
    """The time of a cell is at most this share of that of another of the same run."""

    def judge(records: Sequence[Record]) -> Verdict:
        ours, theirs = (find(records, **each._asdict()) for each in (cell, rival))
        times = f"{milliseconds(ours) or '?'} / {milliseconds(theirs) or '?'} ms"
        if "p50_ms" not in ours or "p50_ms" not in theirs:
            return times, None
        found = ours["p50_ms"] / theirs["p50_ms"]
        return f"{times} = {found:.3f}", found <= limit

    names = {GEMM: "the bare GEMM", "sparton_hybrid": "the hybrid", "sparton": "no padding"}
    return Bar(name, cell.shape, f"≤ {limit:.2f} of {names[rival.head]}", judge)


def against_hybrid(
    name: str, shape: str, limit: float, mode: str = FORWARD_BACKWARD, pattern: str = "random"
) -> Bar:
    ours, hybrid = (Cell(shape, head, mode, pattern) for head in ("sparton", "sparton_hybrid"))
    return ratio(name, ours, hybrid, limit)


def rate(records: Sequence[Record], least: float = 700) -> Verdict:
    record = find(records, **Cell(TABLE1, "sparton")._asdict())
    if "p50_ms" not in record:
        return record.get("status", "?"), None
    found = 2 * record["T"] * record["D"] * record["V"] / record["p50_ms"] / 1e9
    return f"{found:.0f} TFLOP/s", found >= least


def scratch(mode: str) -> Callable[[Sequence[Record]], Verdict]:
    """Peak memory beyond representations and argmax, and beyond gradients where there are any."""

    def judge(records: Sequence[Record]) -> Verdict:
        record = find(records, **Cell(TABLE1, "sparton", mode)._asdict())
        if "peak_bytes" not in record:
            return record.get("status", "?"), None
        N, T, D, V = (record[size] for size in "NTDV")
        gradients = 2 * (T + V) * D + 4 * V if mode == FORWARD_BACKWARD else 0
        found = (record["peak_bytes"] - 8 * N * V - gradients) / MIB
        return f"outputs + argmax + {found:.1f} MiB", found <= SCRATCH_MIB

    return judge


def linear(records: Sequence[Record]) -> Verdict:
    """Time per token at the longest length over that at the shortest; from the suite table2."""
    gpu = records[0]["gpu"]
    long = [record for record in read_records("head_table2") if record["gpu"] == gpu]
    cells = [Cell(shape, "sparton", FORWARD_BACKWARD) for shape in LONG]
    found = [find(long, **cell._asdict()) for cell in cells]
    if any("p50_ms" not in record for record in found):
        return ", ".join(milliseconds(record) or "?" for record in found), None
    per_token = [record["p50_ms"] / record["T"] for record in found]
    growth = per_token[-1] / per_token[0]
    times = f"{milliseconds(found[0])} to {milliseconds(found[-1])} ms"
    return f"{times}, per token x {growth:.2f}", growth <= GROWTH


BARS = (
    ratio("forward", Cell(TABLE1, "sparton"), Cell(TABLE1, GEMM), 0.90),
    ratio("in training", Cell(TABLE1, "sparton", TRAINING_FORWARD), Cell(TABLE1, GEMM), 0.90),
    Bar("forward", TABLE1, "≥ 700 TFLOP/s", rate),
    against_hybrid("all entries active", TABLE1, 0.45),
    against_hybrid("1 % active", TABLE1, 0.38, pattern="random_1pct"),
    against_hybrid("large vocabulary, forward", MULTILINGUAL, 0.40, FORWARD),
    against_hybrid("large vocabulary", MULTILINGUAL, 0.42),
    *(
        ratio(name, Cell("mix60", "sparton", mode), Cell(SHORT, "sparton", mode), 0.65)
        for name, mode in (("60 % real tokens, forward", FORWARD), ("60 % real", FORWARD_BACKWARD))
    ),
    Bar("memory, forward in training", TABLE1, "≤ 16 MiB of scratch", scratch(TRAINING_FORWARD)),
    Bar("memory beyond gradients", TABLE1, "≤ 16 MiB of scratch", scratch(FORWARD_BACKWARD)),
    Bar("long sequences", "128x1024 to 16384", "linear in S, within 10 %", linear),
)


def bars_table() -> str:
    return by_device("head", _table)


def _table(records: list[Record]) -> str:
    verdicts = [(bar, bar.judge(records)) for bar in BARS]
    words = {True: "yes", False: "**no**", None: "?"}
    rows = [[bar.name, bar.shape, bar.target, said, words[met]] for bar, (said, met) in verdicts]
    return markdown(["bar", "shape", "target", "measured", "met"], rows)
