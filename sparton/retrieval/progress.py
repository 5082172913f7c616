"""Progress of work over whole collections."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(label: str | None, total: int | None) -> Iterator[Callable[[int], None]]:
    """A function that moves a bar on; the bar is on standard error, or, without a label, not at
    all. A terminal is cleared of it at the end, a log keeps the full bar. ``total`` is None where
    nobody knows it."""
    if label is None:
        yield lambda _: None  # a bar that is never shown would take longer than a query
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    brief = console.is_terminal
    with Progress(*columns, console=console, transient=brief) as bar:
        task = bar.add_task(label, total=total)
        yield lambda steps: bar.advance(task, steps)
