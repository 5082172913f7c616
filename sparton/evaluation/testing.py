"""All test tasks with one model, one after the other."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from sparton.datasets.collection import read_before
from sparton.evaluation.results import (
    TaskResult,
    check_task_names,
    results_table,
    write_results,
    write_task_run,
)
from sparton.types import RetrievalTask

_WIDE = 120  # columns at least: narrower terminals wrap lines, and no figure is cut off


def run_tests(
    evaluate: Callable[[RetrievalTask], TaskResult],
    tasks: Mapping[str, Callable[[], RetrievalTask]],
    folder: Path,
    description: Mapping[str, Any],
    *,
    title: str,
    quiet: bool = False,
) -> list[TaskResult]:
    """Evaluate one task after the other, and show a table with that ``title`` at the end.

    After each task ``results.json`` and the runs in ``folder`` hold what was found so far. The
    tasks were built before, to check them, and several are built again one at a time. A ``quiet``
    process writes and shows nothing: another does.

    Raises:
        ValueError: two tasks would be written to one file.
    """
    check_task_names(tasks)
    results: list[TaskResult] = []
    for name, build in tasks.items():
        with read_before():
            task = build()
        results.append(evaluate(task._replace(name=name)))
        if not quiet:
            write_task_run(results[-1], folder)  # of which results.json tells
            write_results(results, folder, description)
    if quiet:
        return results
    console = Console(width=max(Console().width, _WIDE))
    console.print(results_table(results, title=title))
    return results
