"""A run at a glance: loss, effectiveness on the dev set, active terms and throughput over its
steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparton.training.loggers import Record, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panel = Callable[[Axes, Sequence[Record]], None]

BLUE, ORANGE, GREEN, GREY, INK = "#2563a8", "#d9772b", "#2f8f6b", "#8a8f98", "#23272e"
_LONGEST_TITLE = 90  # characters
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": "#c9cdd3",
    "axes.labelcolor": "#5a606a",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9ebee",
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "xtick.color": "#5a606a",
    "ytick.color": "#5a606a",
    "xtick.bottom": False,
    "ytick.left": False,
}


def draw_run(
    folder: Path | str,
    references: Mapping[str, float] | None = None,
    *,
    title: str | None = None,
    output: Path | str | None = None,
) -> Path:
    """Draw what a run's ``metrics.jsonl`` says.

    Args:
        folder: of the run.
        references: levels to compare the dev NDCG@10 with, by name.
        title: above the panels; by default the folder.
        output: the picture; by default ``run.png`` in the folder.

    Raises:
        ValueError: the run has logged nothing yet.
    """
    path = Path(folder) / "metrics.jsonl"
    records = read_log(path)
    if not records:
        raise ValueError(f"{path} has no line: the run has logged nothing yet")
    output = Path(output or Path(folder) / "run.png")
    title = title or f"{'…' * (len(str(folder)) > _LONGEST_TITLE)}{str(folder)[-_LONGEST_TITLE:]}"
    draw(records, references or {}, title).savefig(output, dpi=160)
    return output


def draw(records: Sequence[Record], references: Mapping[str, float], title: str) -> "Figure":
    """Panels over the steps of a run; those without a figure in any record are left out."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    panels: dict[str, Panel] = {
        "loss": _loss,
        "dev_ndcg@10": lambda axis, lines: _effectiveness(axis, lines, references),
        "document_active_terms": _active_terms,
        "examples_per_second": _throughput,
    }
    kept = [panel for key, panel in panels.items() if any(key in each for each in records)]
    columns = 2 if len(kept) > 3 else max(len(kept), 1)
    rows = math.ceil(len(kept) / columns) or 1
    with rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, hspace=0.04)
        figure = Figure(figsize=(5.5 * columns, 3.3 * rows), layout=layout)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for axis, panel in zip(axes.flat, kept):
            panel(axis, records)
            axis.margins(x=0.01)
            axis.grid(axis="x", visible=False)
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        for axis in axes[-1]:
            axis.set_xlabel("step")
    return figure


def _series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    kept = [record for record in records if key in record]
    return [record["step"] for record in kept], [record[key] for record in kept]


def _line(axis: "Axes", records: Sequence[Record], key: str, label: str, **style: Any) -> None:
    """A series with its name written behind its end, instead of a legend."""
    steps, values = _series(records, key)
    if not steps:
        return
    axis.plot(steps, values, **style)
    axis.annotate(
        label,
        (steps[-1], values[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color=style["color"],
        fontweight="bold",
        fontsize=9.5,
    )


def _loss(axis: "Axes", records: Sequence[Record]) -> None:
    axis.set_title("Loss")
    whole, ranking = (_series(records, key)[1][-1:] for key in ("loss", "loss_ranking"))
    regularized = ranking != [] and not math.isclose(*whole, *ranking, rel_tol=0.02)
    _line(axis, records, "loss", "with\nregularisation" if regularized else "", color=BLUE)
    if regularized:
        _line(axis, records, "loss_ranking", "ranking\nalone", color=GREY, linewidth=1.5)
    _logarithmic(axis)


def _effectiveness(
    axis: "Axes", records: Sequence[Record], references: Mapping[str, float]
) -> None:
    axis.set_title("NDCG@10 on the dev queries")
    steps, values = _series(records, "dev_ndcg@10")
    first, last = records[0]["step"], records[-1]["step"]
    axis.plot(steps, values, color=GREEN, marker="o", markersize=5)
    _above(axis, f"{values[-1]:.3f}", steps[-1], values[-1], GREEN)
    for name, level in references.items():
        axis.plot((first, last), (level, level), color=ORANGE, linestyle=(0, (4, 3)), linewidth=1.5)
        _above(axis, f"{name} {level:.3f}", last, level, ORANGE)
    highest = max([*values, *references.values(), 0.1])
    axis.set_ylim(0, min(1.02, math.ceil(highest * 11) / 10))


def _above(axis: "Axes", text: str, step: int, level: float, color: str) -> None:
    axis.annotate(
        text,
        (step, level),
        xytext=(0, 6),
        textcoords="offset points",
        ha="right",
        color=color,
        fontweight="bold",
        fontsize=9.5,
    )


def _active_terms(axis: "Axes", records: Sequence[Record]) -> None:
    axis.set_title("Active terms of a text")
    _line(axis, records, "document_active_terms", "documents", color=BLUE)
    _line(axis, records, "query_active_terms", "queries", color=ORANGE)
    _logarithmic(axis)


def _logarithmic(axis: "Axes") -> None:
    """Where all values are positive."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if any((np.asarray(line.get_ydata(), float) <= 0).any() for line in axis.lines):
        return
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _throughput(axis: "Axes", records: Sequence[Record]) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_title("Training examples per second")
    steps, values = _series(records, "examples_per_second")
    axis.plot(steps, values, color=GREEN)
    axis.fill_between(steps, values, color=GREEN, alpha=0.12, linewidth=0)
    axis.set_ylim(0, 1.15 * max(values))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
