"""The paper's tables, measured here, with its own figures in brackets.

What the paper calls Sparton is sparton_hybrid here: its design, on today's software. N sequences,
S tokens of each, V vocabulary.
"""

from itertools import product

from head_benchmark.suites import FORWARD, FORWARD_BACKWARD, LONG, NO_HEAD, RIVALS, SWEEPS
from tables.records import (
    Record,
    beside,
    by_device,
    device_folders,
    drawing,
    find,
    gibibytes,
    markdown,
    mebibytes,
    milliseconds,
    paper,
)

COMPONENTS = {
    "backbone": {"eager": NO_HEAD, "compiled": NO_HEAD},
    "+ LM head": {"eager": "eager", "compiled": "compiled"},
    "+ tiled head": {"eager": "tiled", "compiled": "tiled_compiled"},
    "+ sparton_hybrid": {"eager": "sparton_hybrid", "compiled": "sparton_hybrid"},
    "+ **sparton**": {"eager": "sparton", "compiled": "sparton"},
}
PASS_WORDS = {FORWARD: "forward", FORWARD_BACKWARD: "forward + backward"}


def table1() -> str:
    """The head behind its backbone."""
    return by_device("head_table1", _table1)


def _table1(records: list[Record]) -> str:
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


def table2() -> str:
    """Long sequences, forward and backward."""
    return by_device("head_table2", _table2)


def _table2(records: list[Record]) -> str:
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
    """One size at a time, forward and backward; the drawings are those of plot_benchmarks.py, where
    it has drawn them."""
    drawings = [
        drawing(f"figure2-{folder.name}.svg", "Time and memory over B, S and V")
        for folder in device_folders("head_figure2")
    ]
    return "".join(drawings) + by_device("head_figure2", _figure2)


def _figure2(records: list[Record]) -> str:
    heads = ("tiled_compiled", *RIVALS)
    rows = []
    for axis, sweep in SWEEPS.items():
        for shape in sweep:
            found = [find(records, shape=shape, head=head) for head in heads]
            size = int(shape.split("x")["BSV".index(axis)])
            memory = [mebibytes(record, "total_peak_bytes") for record in found]
            rows.append([f"{axis} = {size:,}", *map(milliseconds, found), *memory])
    header = ["", *(f"{head} {unit}" for unit in ("ms", "MiB") for head in heads)]
    return markdown(header, rows)
