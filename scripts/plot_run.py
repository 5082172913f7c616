"""Draw a run: loss, NDCG@10 on the dev set, active terms and throughput, from its metrics.jsonl.

python scripts/plot_run.py RUN_FOLDER --reference BM25=0.40
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from plot_style import BLUE, GREEN, GREY, ORANGE, STYLE
from sparton.training.loggers import whole_lines

Records = list[dict[str, Any]]


def read_records(folder: Path) -> Records:
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in whole_lines(path)]
    if not records:
        raise ValueError(f"{path} has no line: the run has logged nothing yet")
    return records


def draw(records: Records, references: dict[str, float], title: str) -> plt.Figure:
    """Four panels over the steps of a run.

    Args:
        references: levels to compare the dev NDCG@10 with, by name.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11, 6.6), sharex=True, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12, hspace=0.04)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        _loss(axes[0, 0], records)
        _effectiveness(axes[0, 1], records, references)
        _active_terms(axes[1, 0], records)
        _throughput(axes[1, 1], records)
        for axis in axes[1]:
            axis.set_xlabel("step")
        for axis in axes.flat:
            axis.margins(x=0.01)
            axis.grid(axis="x", visible=False)
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def _series(records: Records, key: str) -> tuple[list[int], list[float]]:
    kept = [record for record in records if key in record]
    return [record["step"] for record in kept], [record[key] for record in kept]


def _line(axis: Axes, records: Records, key: str, label: str, **style: Any) -> None:
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


def _loss(axis: Axes, records: Records) -> None:
    axis.set_title("Loss")
    _line(axis, records, "loss", "with\nregularisation", color=BLUE)
    _line(axis, records, "loss_ranking", "ranking\nalone", color=GREY, linewidth=1.5)
    _logarithmic(axis)


def _effectiveness(axis: Axes, records: Records, references: dict[str, float]) -> None:
    axis.set_title("NDCG@10 on the dev queries")
    steps, values = _series(records, "dev_ndcg@10")
    first, last = records[0]["step"], records[-1]["step"]
    if steps:
        axis.plot(steps, values, color=GREEN, marker="o", markersize=5)
        axis.annotate(
            f"{values[-1]:.3f}",
            (steps[-1], values[-1]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="right",
            color=GREEN,
            fontweight="bold",
        )
    for name, level in references.items():
        axis.plot((first, last), (level, level), color=ORANGE, linestyle=(0, (4, 3)), linewidth=1.5)
        axis.annotate(
            f"{name} {level:.3f}",
            (last, level),
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            color=ORANGE,
            fontweight="bold",
            fontsize=9.5,
        )
    highest = max([*values, *references.values(), 0.1])
    axis.set_ylim(0, min(1.02, math.ceil(highest * 11) / 10))


def _active_terms(axis: Axes, records: Records) -> None:
    axis.set_title("Active terms of a text")
    _line(axis, records, "document_active_terms", "documents", color=BLUE)
    _line(axis, records, "query_active_terms", "queries", color=ORANGE)
    _logarithmic(axis)


def _logarithmic(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _throughput(axis: Axes, records: Records) -> None:
    axis.set_title("Training examples per second")
    steps, values = _series(records, "examples_per_second")
    axis.plot(steps, values, color=GREEN)
    axis.fill_between(steps, values, color=GREEN, alpha=0.12, linewidth=0)
    axis.set_ylim(0, 1.15 * max(values, default=1))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def parse_reference(text: str) -> tuple[str, float]:
    name, equals, level = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} should read NAME=LEVEL, such as BM25=0.40")
    return name, float(level)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of a run of train.py")
    parser.add_argument("--reference", type=parse_reference, action="append", default=[])
    parser.add_argument("--output", type=Path, help="default: RUN_FOLDER/run.png")
    parser.add_argument("--title", help="default: the folder")
    arguments = parser.parse_args()
    output = arguments.output or arguments.folder / "run.png"
    records = read_records(arguments.folder)
    figure = draw(records, dict(arguments.reference), arguments.title or str(arguments.folder))
    figure.savefig(output, dpi=160)


if __name__ == "__main__":
    main()
