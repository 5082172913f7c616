"""Throughput, memory and NDCG@10 of a sweep's cells over batch, one line for each head."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparton.sweeps.tables import QUALITY, Record, line_names
from sparton.training.status import OOM

# The title of each panel, its key in a record, and the unit.
_PANELS = (
    ("examples per second", "examples_per_second", 1.0),
    ("peak memory, GiB", "peak_memory_mib", 1 / 1024),
    *((name, key, 1.0) for name, key in QUALITY.items()),
)


def draw(records: Sequence[Record], path: Path) -> Path | None:
    """Write the figure, if a cell has something to draw. Seeds are averaged; crosses below, a row
    for each line, mark batches that did not fit into memory."""
    records = [record for record in records if record["batch"] > 0]
    panels = [panel for panel in _PANELS if any(panel[1] in record for record in records)]
    if not panels:
        return None
    figure = Figure(figsize=(4.6 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, key, scale) in zip(axes, panels, strict=True):
        _lines(axis, records, key, scale)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("batch")
        batches = sorted({record["batch"] for record in records})
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [f"{batch:,}" for batch in batches], rotation=45)
        axis.minorticks_off()
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize=8)
    figure.savefig(path)
    return path


def _lines(axis: Axes, records: Sequence[Record], key: str, scale: float) -> None:
    names = line_names(records)
    for place, name in enumerate(dict.fromkeys(names)):
        own = [record for each, record in zip(names, records, strict=True) if each == name]
        points: dict[int, list[float]] = {}
        for record in own:
            if key in record:
                points.setdefault(record["batch"], []).append(record[key] * scale)
        batches = sorted(points)
        heights = [fmean(points[batch]) for batch in batches]
        [line] = axis.plot(batches, heights, marker="o", label=name)
        for record in own:
            if record["status"] == OOM:
                axis.plot(
                    record["batch"], 0.02 + 0.03 * place, "x", markersize=5,
                    color=line.get_color(), transform=axis.get_xaxis_transform(),
                )  # fmt: skip
    if key not in QUALITY.values():
        axis.set_ylim(bottom=0)
