"""Heads side by side: at one shape, and where the maxima lie."""

from collections.abc import Iterable
from functools import partial

from head_benchmark.suites import (
    ALL_HEADS,
    CAPTURED,
    FORWARD_BACKWARD,
    GEMM,
    GEMM_AS_IS,
    PASSES,
    PATTERNS,
    RIVALS,
    TABLE1,
    Cell,
)
from tables.records import Record, by_device, find, markdown, mebibytes, milliseconds

GEMMS = {
    GEMM: "bare GEMM, vocabulary padded to 64s",
    GEMM_AS_IS: "bare GEMM, vocabulary as it is",
}
PATTERN_WORDS = {
    "random": "random, every entry active",
    "random_1pct": "random, 1 % active",
    "concentrated": "three tokens win most, every entry active",
    "concentrated_1pct": "three tokens win most, 1 % active",
    CAPTURED: "a trained model's batch",
}


def heads_table() -> str:
    """Time and memory of every head, forward and forward with backward."""
    return by_device("head", _heads)


def _heads(records: list[Record]) -> str:
    rows = []
    for head in (*GEMMS, *ALL_HEADS):
        found = [find(records, **Cell(TABLE1, head, mode)._asdict()) for mode in PASSES]
        if any(found):
            name = GEMMS.get(head, f"**{head}**" if head == "sparton" else head)
            rows.append([name, *map(milliseconds, found), *map(mebibytes, found)])
    header = ["", "forward ms", "forward + backward ms", "forward MiB", "forward + backward MiB"]
    return markdown(header, rows)


def patterns_table() -> str:
    """Forward and backward of the two designs for each pattern of winners."""
    return by_device("head", partial(_patterns, patterns=PATTERNS))


def captured_table() -> str:
    """The same for a batch of a trained model."""
    return by_device("head_captured", partial(_patterns, patterns=(CAPTURED,)))


def _patterns(records: list[Record], patterns: Iterable[str]) -> str:
    rows = []
    for pattern in patterns:
        shape = CAPTURED if pattern == CAPTURED else TABLE1
        cells = [Cell(shape, head, FORWARD_BACKWARD, pattern) for head in RIVALS]
        hybrid, ours = (find(records, **cell._asdict()) for cell in cells)
        if not ours:
            continue
        name = PATTERN_WORDS[pattern]
        if pattern == CAPTURED:
            name += f": {ours['captured']}, T = {ours.get('T', 0):,}, D = {ours.get('D', 0)}"
        shares = [
            f"{100 * ours[key]:.3g} %" if key in ours else ""
            for key in ("active_share", "top3_share")
        ]
        times = [milliseconds(hybrid), milliseconds(ours)]
        both = "p50_ms" in ours and "p50_ms" in hybrid
        ratio = f"{ours['p50_ms'] / hybrid['p50_ms']:.2f}" if both else ""
        rows.append([name, *shares, *times, ratio])
    header = ["maxima", "active", "held by three tokens", *(f"{h} ms" for h in RIVALS), "ratio"]
    return markdown(header, rows)
