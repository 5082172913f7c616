"""The paper's tables, measured here, with its own figures in brackets.

What the paper calls Sparton is sparton_hybrid here: its design, on today's software. N sequences,
S tokens of each, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

from benchmarks.head.suites import (
    ALL_HEADS,
    FORWARD,
    FORWARD_BACKWARD,
    LONG,
    NO_HEAD,
    RIVALS,
    SWEEPS,
)
from tables.records import (
    TABLES,
    Record,
    beside,
    bold,
    by_device,
    drawings,
    find,
    gibibytes,
    markdown,
    mebibytes,
    milliseconds,
    paper,
    table,
)

COMPONENTS = {
    "backbone": {"eager": NO_HEAD, "compiled": NO_HEAD},
    "+ LM head": {"eager": "eager", "compiled": "compiled"},
    "+ tiled head": {"eager": "tiled", "compiled": "tiled_compiled"},
    "+ sparton_hybrid": {"eager": "sparton_hybrid", "compiled": "sparton_hybrid"},
    "+ **sparton**": {"eager": "sparton", "compiled": "sparton"},
}
PASS_WORDS = {FORWARD: "forward", FORWARD_BACKWARD: "forward + backward"}


@table("table1", "head_table1", command="head --suite table1")
def table1(records: list[Record]) -> str:
    """The head behind its backbone."""
    printed = paper("table1")["rows"]
    rows = []
    for (mode, words), (component, heads) in product(PASS_WORDS.items(), COMPONENTS.items()):
        cells = [f"{words}: {component}"]
        for execution, head in heads.items():
            record = find(records, backbone=execution, head=head, mode=mode)
            theirs = find(printed, mode=mode, component=component).get(execution, {})
            cells.append(beside(milliseconds(record), theirs.get("ms")))
            cells.append(beside(mebibytes(record, "total_peak_bytes"), theirs.get("mib")))
        rows.append(cells)
    return markdown(["", "eager ms", "eager MiB", "compiled ms", "compiled MiB"], rows)


@table("table2", "head_table2", command="head --suite table2")
def table2(records: list[Record]) -> str:
    """Long sequences, forward and backward."""
    printed = paper("table2")["rows"]
    heads = ("tiled", "tiled_compiled", *RIVALS)
    rows = []
    for shape in LONG:
        S = int(shape.split("x")[1])
        cells = [f"{S:,}"]
        for head in heads:
            record = find(records, shape=shape, head=head)
            theirs = find(printed, S=S).get(head, {})
            cells.append(beside(milliseconds(record), theirs.get("ms")))
            cells.append(beside(gibibytes(record), theirs.get("gb")))
        rows.append(cells)
    header = ["S", *(f"{head} {unit}" for head in heads for unit in ("ms", "GiB (GB)"))]
    return markdown(header, rows)


def figure2() -> str:
    """One size at a time, forward and backward."""
    drawn = drawings("head_figure2", "figure2", "Time and memory over B, S and V")
    return drawn + by_device("head_figure2", _figure2, command="head --suite figure2")


def _figure2(records: list[Record]) -> str:
    heads = [head for head in ALL_HEADS if find(records, head=head)]
    measured: dict[str, list[Record]] = {}
    for axis, sweep in SWEEPS.items():
        for shape in sweep:
            found = [find(records, shape=shape, head=head) for head in heads]
            if any(found):
                size = int(shape.split("x")["BSV".index(axis)])
                measured[f"{axis} = {size:,}"] = found
    figures: dict[str, Callable[[Record], str]] = {"ms": milliseconds}
    figures["MiB"] = partial(mebibytes, key="total_peak_bytes")
    return "\n".join(
        markdown(
            [f"forward + backward, {unit}", *map(bold, heads)],
            [[point, *map(words, found)] for point, found in measured.items()],
        )
        for unit, words in figures.items()
    )


TABLES["figure2"] = figure2
