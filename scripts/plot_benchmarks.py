"""Draw the paper's Figure 2 from the records: time and memory over B, S and |V|.

python scripts/plot_benchmarks.py   # docs/figures/figure2-<gpu>.svg
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from head_benchmark.suites import RIVALS, SWEEPS
from plot_style import BLUE, GREEN, ORANGE, STYLE
from tables.records import FIGURES, ROOT, Record, device_folders, find, read_file

HEADS = dict(zip(("tiled_compiled", *RIVALS), (ORANGE, BLUE, GREEN), strict=True))
AXES = {"B": "sequences B", "S": "tokens S", "V": "vocabulary |V|"}
# Written as text and without a date, a figure changes only when its records do.
DETERMINISTIC = {"svg.hashsalt": "sparton", "svg.fonttype": "none"}


def main() -> None:
    for folder in device_folders("head_figure2"):
        figure = draw(read_file(folder / "head_figure2.jsonl"))
        FIGURES.mkdir(parents=True, exist_ok=True)
        output = FIGURES / f"figure2-{folder.name}.svg"
        with plt.rc_context(DETERMINISTIC):
            figure.savefig(output, metadata={"Date": None})
        print(output.relative_to(ROOT))


def draw(records: list[Record]) -> plt.Figure:
    """Time above, memory below; one column for each size that grows."""
    with plt.rc_context(STYLE | DETERMINISTIC):
        figure, grid = plt.subplots(2, 3, figsize=(11, 6), sharex="col", layout="constrained")
        for column, (axis, sweep) in enumerate(SWEEPS.items()):
            sizes = [int(shape.split("x")["BSV".index(axis)]) for shape in sweep]
            for row, (key, scale) in enumerate((("p50_ms", 1.0), ("total_peak_bytes", 2.0**-30))):
                _panel(grid[row, column], records, sweep, sizes, key, scale)
            grid[1, column].set_xlabel(AXES[axis])
            grid[1, column].set_xticks(sizes, [f"{size:,}" for size in sizes])
        grid[0, 0].set_title("Forward and backward, ms")
        grid[1, 0].set_title("Peak memory, GiB")
        grid[0, 0].legend(frameon=False)
        figure.suptitle(records[0]["gpu"], x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def _panel(
    axes: Axes,
    records: list[Record],
    sweep: tuple[str, ...],
    sizes: list[int],
    key: str,
    scale: float,
) -> None:
    for head, colour in HEADS.items():
        found = [find(records, shape=shape, head=head) for shape in sweep]
        points = [(size, r[key] * scale) for size, r in zip(sizes, found, strict=True) if key in r]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, color=colour, marker="o", markersize=5, label=head)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


if __name__ == "__main__":
    main()
