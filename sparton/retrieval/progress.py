"""Progress of work over whole collections."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(label: str | None, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A function that moves a bar on; the bar is on standard error, or, without a label, not at
    all. A terminal is cleared of it at the end, a log keeps the full bar. ``done`` of the ``total``
    were there before."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    brief = console.is_terminal
    with Progress(*columns, console=console, transient=brief, disable=label is None) as bar:
        task = bar.add_task(label or "", total=total, completed=done)
        yield lambda steps: bar.advance(task, steps)
