"""Draw figures from the records: the paper's Figure 2 (time and memory over B, S and |V|), and the
roofline of MaxSim.

python scripts/plot_benchmarks.py   # docs/figures/figure2-<gpu>.svg, roofline-<gpu>.svg
"""

from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.head.suites import ALL_HEADS, SWEEPS
from benchmarks.maxsim.shapes import CROSS, FORWARD, OWN, PACKED, SHAPES
from sparton.training.picture import BLUE, GREEN, GREY, INK, ORANGE, STYLE
from tables.records import FIGURES, ROOT, Record, device_folders, find, read_file

COLOURS = (INK, "#8e5bb5", GREY, ORANGE, BLUE, GREEN, "#8fd0b4")
HEADS = dict(zip(ALL_HEADS, COLOURS, strict=True))
AXES = {"B": "sequences B", "S": "tokens S", "V": "vocabulary |V|"}
ROOFLINE = {
    "eager": (INK, "eager PyTorch"),
    "flash": (ORANGE, "flash-maxsim"),
    "lik": (BLUE, "late-interaction-kernels"),
    "sparton": (GREEN, "sparton"),
}
IN_16_BIT = (CROSS, OWN, PACKED)
# Written as text and without a date, a figure changes only when its records do.
DETERMINISTIC: dict[Any, Any] = {"svg.hashsalt": "sparton", "svg.fonttype": "none"}


def main() -> None:
    save("head_figure2", "figure2", figure2)
    save("maxsim", "roofline", roofline)


def save(study: str, name: str, draw: Callable[[list[Record]], plt.Figure]) -> None:
    """The figure of every device that has records of the study."""
    for folder in device_folders(study):
        FIGURES.mkdir(parents=True, exist_ok=True)
        with plt.rc_context(DETERMINISTIC | STYLE):
            output = FIGURES / f"{name}-{folder.name}.svg"
            draw(read_file(folder / f"{study}.jsonl")).savefig(output, metadata={"Date": None})
        print(output.relative_to(ROOT))


def figure2(records: list[Record]) -> plt.Figure:
    """Time above, memory below; one column for each size that grows."""
    figure, grid = plt.subplots(2, 3, figsize=(11, 6), sharex="col", layout="constrained")
    for column, (axis, sweep) in enumerate(SWEEPS.items()):
        sizes = [int(shape.split("x")["BSV".index(axis)]) for shape in sweep]
        for row, (key, scale) in enumerate((("p50_ms", 1.0), ("total_peak_bytes", 2.0**-30))):
            _panel(grid[row, column], records, sweep, sizes, key, scale)
        grid[1, column].set_xlabel(AXES[axis])
        grid[1, column].set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    grid[0, 0].set_title("Forward and backward, ms")
    grid[1, 0].set_title("Peak memory, GiB")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper")
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
        if points:
            axes.plot(*zip(*points), color=colour, marker="o", markersize=5, label=head)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def roofline(records: list[Record]) -> plt.Figure:
    """Forward passes in 16 bit: useful arithmetic per second over arithmetic per byte moved.

    Fused kernels move the operands and the scores. Eager PyTorch also writes and reads the
    similarities, so that it stands further left (late-interaction-kernels, appendix B).
    """
    ceilings = records[0]["ceilings"]
    bandwidth, peak = ceilings["terabytes_per_s"], ceilings["tflop_per_s"]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    intensities = [10.0, peak / bandwidth, 2e4]
    roof = [min(x * bandwidth, peak) for x in intensities]
    axes.plot(intensities, roof, color=GREY, linewidth=1.5)
    for provider, (colour, words) in ROOFLINE.items():
        found = [r for r in records if r["provider"] == provider and r["mode"] == FORWARD]
        timed = [r for r in found if "p50_ms" in r and SHAPES[r["shape"]].kind in IN_16_BIT]
        points = [(_intensity(r), r["flop"] / r["p50_ms"] / 1e9) for r in timed]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, "o", color=colour, markersize=7, label=words)
        for record, x, y in zip(timed, xs, ys, strict=True):
            if provider == "sparton":
                axes.annotate(
                    record["shape"], (x, y), (6, 5), textcoords="offset points", fontsize=7
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte moved")
    axes.set_title("MaxSim forward, TFLOP/s")
    axes.legend(frameon=False, loc="lower right")
    figure.suptitle(records[0]["gpu"], x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def _intensity(record: Record) -> float:
    moved = record["bytes"]
    if record["provider"] == "eager":
        # Every similarity once written and once read, 2 bytes each; 2 * E FLOPs made it.
        moved += 4 * record["flop"] / (2 * SHAPES[record["shape"]].E)
    return record["flop"] / moved


if __name__ == "__main__":
    main()
