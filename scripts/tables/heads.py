"""Heads side by side: at one shape, and where the maxima lie."""

from benchmarks.head.suites import (
    ALL_HEADS,
    FORWARD_BACKWARD,
    GEMM,
    GEMM_AS_IS,
    PASSES,
    RIVALS,
    TABLE1,
    Cell,
)
from tables.records import Record, bold, find, markdown, mebibytes, milliseconds, table

GEMMS = {
    GEMM: "bare GEMM, vocabulary padded to 64s",
    GEMM_AS_IS: "bare GEMM, vocabulary as it is",
}
PATTERNS = {
    "random": "random, every entry active",
    "random_1pct": "random, 1 % active",
    "concentrated": "three tokens win most, every entry active",
    "concentrated_1pct": "three tokens win most, 1 % active",
}


@table("heads", "head", command="head --suite heads")
def heads(records: list[Record]) -> str:
    """Time and memory of every head, forward and forward with backward."""
    rows = []
    for head in (*GEMMS, *ALL_HEADS):
        found = [find(records, Cell(TABLE1, head, mode)) for mode in PASSES]
        if any(found):
            name = GEMMS.get(head, bold(head))
            rows.append([name, *map(milliseconds, found), *map(mebibytes, found)])
    header = ["", "forward ms", "forward + backward ms", "forward MiB", "forward + backward MiB"]
    return markdown(header, rows)


@table("patterns", "head", command="head --suite patterns")
def patterns(records: list[Record]) -> str:
    """Forward and backward of the two designs for each pattern of winners."""
    rows = []
    for pattern, words in PATTERNS.items():
        cells = [Cell(TABLE1, head, FORWARD_BACKWARD, pattern) for head in RIVALS]
        hybrid, ours = (find(records, cell) for cell in cells)
        if not ours:
            continue
        shares = [
            f"{100 * ours[key]:.3g} %" if key in ours else ""
            for key in ("active_share", "top3_share")
        ]
        both = "p50_ms" in ours and "p50_ms" in hybrid
        ratio = f"{ours['p50_ms'] / hybrid['p50_ms']:.2f}" if both else ""
        rows.append([words, *shares, milliseconds(hybrid), milliseconds(ours), ratio])
    header = ["maxima", "active", "held by three tokens", *(f"{h} ms" for h in RIVALS), "ratio"]
    return markdown(header, rows)
