"""``sparton compare``: is one run better than another, or is it chance?"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparton.cli.commands.flags import command_parser

if TYPE_CHECKING:
    from rich.table import Table

    from sparton.evaluation.comparison import TaskComparison

_WIDE = 140  # columns at least: narrower terminals wrap lines, and no figure is cut off


def main(arguments: Sequence[str]) -> None:
    """Compare runs query by query: means, paired tests, and the queries that change most."""
    parser = command_parser("compare", main.__doc__)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folders of trainings or evaluations; the first is what the others are compared with",
    )
    parser.add_argument("--metric", default="ndcg@10", help="default: %(default)s")
    parser.add_argument(
        "--task", action="append", default=[], help="may be repeated; default: all in common"
    )
    parser.add_argument(
        "--queries",
        type=int,
        default=3,
        metavar="N",
        help="show the N largest gains and losses of each task; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    if options.queries < 0:
        raise ValueError(f"--queries={options.queries}: must not be negative")
    if len(options.runs) < 2:
        raise ValueError(f"there is nothing to compare {options.runs[0]} with: name two runs")

    from rich.console import Console

    from sparton.evaluation.comparison import compare_systems
    from sparton.evaluation.results import read_queries

    names = run_names(options.runs)
    systems = {
        name: read_queries(results_folder(run))
        for name, run in zip(names, options.runs, strict=True)
    }
    compared = compare_systems(systems, options.metric, options.task)
    console = Console(width=max(Console().width, _WIDE))
    for name, rows in compared.items():
        console.print(_table(f"{options.metric}: {name} against {names[0]}", rows))
        if options.queries:
            for line in _changes(rows, options.queries):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(_legend(sum(map(len, compared.values()))), highlight=False)


def results_folder(run: Path) -> Path:
    """Where the results of a run are; of a model's folder, those of its training."""
    inside = not (run / "results.json").is_file() and (run.parent / "results.json").is_file()
    return run.parent if inside and run.is_dir() else run


def run_names(runs: Sequence[Path]) -> list[str]:
    """What sets the folders apart, without the parts that all of them begin or end with.

    Raises:
        ValueError: the same results twice.
    """
    parts = [run.resolve().parts for run in runs]
    places = [results_folder(run.resolve()) for run in runs]
    if twice := next((run for place, run in enumerate(places) if run in places[:place]), None):
        raise ValueError(f"{twice} is there twice")
    while all(len(own) > 1 for own in parts) and len({own[0] for own in parts}) == 1:
        parts = [own[1:] for own in parts]
    while all(len(own) > 1 for own in parts) and len({own[-1] for own in parts}) == 1:
        parts = [own[:-1] for own in parts]
    return [str(Path(*own)) for own in parts]


def _table(title: str, rows: "Sequence[TaskComparison]") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("task", no_wrap=True)
    columns = ("queries", "baseline", "mean", "difference", "interval", "t-test", "random.", "Holm")
    for column in (*columns, "wins/ties/losses"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.task,
            f"{row.queries:,}",
            f"{row.baseline:.4f}",
            f"{row.other:.4f}",
            f"{row.difference:+.4f}",
            f"{row.interval[0]:+.4f} to {row.interval[1]:+.4f}",
            *(_p(value) for value in (row.t_test, row.randomization, row.adjusted)),
            f"{row.wins:,}/{row.ties:,}/{row.losses:,}",
        )
    return table


def _legend(tests: int) -> str:
    return (
        "p: paired t-test; paired randomisation test; the latter after Holm's correction for "
        f"{tests} {'tests' if tests > 1 else 'test'}. Interval: 95 %, paired bootstrap."
    )


def _p(value: float) -> str:
    if math.isnan(value):
        return "-"  # a single query has no t-test
    return "<0.0001" if value < 1e-4 else f"{value:.4f}"


def _changes(rows: "Sequence[TaskComparison]", count: int) -> list[str]:
    """The largest gains and losses of each task."""
    lines = []
    for row in rows:
        gains = [each for each in row.changes[:count] if each.other > each.baseline]
        losses = [each for each in row.changes[::-1][:count] if each.other < each.baseline]
        for word, changes in (("gains", gains), ("losses", losses)):
            shown = [f"{each.query} ({each.baseline:.3f} to {each.other:.3f})" for each in changes]
            if shown:
                lines.append(f"{row.task}, largest {word}: {', '.join(shown)}")
    return lines
