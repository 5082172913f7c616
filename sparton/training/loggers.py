"""Where the figures of a run go beside the screen."""

import json
import logging
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console

from sparton.arguments import ArgumentError
from sparton.training.sources import LOSS_OF
from sparton.writing import replacing

log = logging.getLogger(__name__)
Record = dict[str, Any]
WandbMode = Literal["online", "offline", "disabled"]


class Logger(Protocol):
    """``describe`` gets the manifest once, ``log`` a flat record of numbers per step, ``conclude``
    such a record of the trained model's tests. Of what a logger does not say, it does nothing."""

    def describe(self, manifest: Record) -> None:
        return None

    def log(self, record: Record, step: int) -> None: ...

    def conclude(self, record: Record, step: int) -> None:
        return None

    def close(self) -> None:
        return None


class OpenLogger(Protocol):
    """What a logger's settings make; ``start_step``: steps completed before, 0 for a new run."""

    def __call__(self, *, start_step: int) -> Logger: ...


class JsonlLogger(Logger):
    """One JSON object per line, the file that reports and plots are made from; the manifest and
    the results of the tests are files beside it.

    Lines beyond ``start_step``, the number of steps completed, are dropped when a run resumes
    there: the file of a resumed run holds every step once.
    """

    def __init__(self, path: Path, start_step: int = 0):
        kept = [record for record in read_log(path) if record["step"] <= start_step]
        with replacing(path) as fresh:
            fresh.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._path = path
        self._file = path.open("ab", buffering=0)

    def log(self, record: Record, step: int) -> None:
        line = json.dumps({"step": step, **record}) + "\n"
        try:
            whole = self._file.write(line.encode()) == len(line)
        except OSError as error:  # training goes on: its checkpoints tell whether it can
            log.warning("step %d is missing in %s: %s", step, self._path, error)
        else:
            if not whole:
                log.warning("step %d is cut short in %s: is the disk full?", step, self._path)

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[Record]:
    """The records of a ``metrics.jsonl``; a line that holds none, of a damaged disk or another
    program, is passed over with a warning."""
    records = []
    for number, line in enumerate(whole_lines(path), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and type(record.get("step")) is int:
            records.append(record)
        else:
            log.warning("%s, line %d: no record of a step, passed over", path, number)
    return records


def whole_lines(path: Path) -> list[str]:
    """Lines of a file that may end in half a line, where a run was killed while writing."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


class ScreenLogger(Logger):
    """One readable line per record, with the time that the steps left will take at this rate; a
    table shows the results of the tests."""

    def __init__(self, console: Console, steps: int):
        self._console = console
        self._steps = steps
        self._started = False

    def describe(self, manifest: Record) -> None:
        hardware, git = manifest["hardware"], manifest["git"] or {}
        device = hardware.get("gpu", f"{hardware['cpu']}, {hardware['threads']} threads")
        self._console.print(
            f"[dim]{device}, git {git.get('sha', 'unknown')[:9]}[/]", highlight=False
        )

    def log(self, record: Record, step: int) -> None:
        shown = [f"[bold]{step:>{len(str(self._steps))}}[/]/{self._steps}"]
        shown += [
            f"[dim]{label}[/] {record[key]:{form}}" for key, label, form in _SHOWN if key in record
        ]
        shown += [
            f"[dim]{key.removeprefix(LOSS_OF)}[/] {value:.3f}"
            for key, value in record.items()
            if key.startswith(LOSS_OF)
        ]
        # The first step holds compilation and warm-up, and says nothing of those to come.
        if "step_ms" in record and step < self._steps and self._started:
            left = timedelta(seconds=round((self._steps - step) * record["step_ms"] / 1e3))
            shown.append(f"[dim]left[/] {left}")
        self._started = True
        self._console.print("  ".join(shown), highlight=False, soft_wrap=True)


_SHOWN = (
    ("loss", "loss", ".4f"),
    ("query_active_terms", "q terms", ",.0f"),
    ("document_active_terms", "d terms", ",.0f"),
    ("gradient_norm", "grad", ".2f"),
    ("learning_rate", "lr", ".2e"),
    ("examples_per_second", "ex/s", ",.0f"),
    ("step_ms", "ms", ",.0f"),
    ("memory_allocated_mib", "MiB", ",.0f"),
    ("mfu", "MFU", ".1%"),
    ("dev_ndcg@10", "dev NDCG@10", ".4f"),
)


def wandb_logger(directory: str, project: str, mode: WandbMode | None = None) -> OpenLogger:
    """Weights & Biases, which is asked for an account at once.

    Args:
        directory: the run folder, which keeps the run's id.
        project: name of the project there.
        mode: "online", "offline" to write to the folder alone, without an account, or "disabled".
            None for what WANDB_MODE says, or else "online".

    Raises:
        ValueError: the package is missing, or there is no account.
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "Weights & Biases needs the package wandb: pip install 'sparton[wandb]'"
        ) from error
    if mode in (None, "online"):
        with _wandb_errors():
            wandb.login(verify=False)
    return partial(WandbLogger, directory, project, mode)


@contextmanager
def _wandb_errors() -> Iterator[None]:
    """In one sentence, with what a user can do."""
    import wandb

    try:
        yield
    except wandb.Error as error:
        raise ArgumentError(
            "Weights & Biases cannot log in or begin a run ({}): set WANDB_API_KEY, run "
            "`wandb login`, choose {mode}, or do without",
            " ".join(str(error).split()),
            mode="offline",
        ) from error


class WandbLogger(Logger):
    """A run of Weights & Biases; the parts of one that was stopped and resumed are one run there.

    Args:
        directory, project, mode: see :func:`wandb_logger`.
        start_step: steps completed before; 0 for a new run.
    """

    def __init__(
        self, directory: str, project: str, mode: WandbMode | None = None, start_step: int = 0
    ):
        import wandb

        kept = Path(directory) / "wandb-id.txt"
        if not start_step or not kept.exists():
            kept.write_text(uuid.uuid4().hex[:8])
        with _wandb_errors():
            self._run = wandb.init(
                dir=directory, project=project, mode=mode, id=kept.read_text(), resume="allow"
            )

    def describe(self, manifest: Record) -> None:
        self._run.config.update(manifest, allow_val_change=True)

    def log(self, record: Record, step: int) -> None:
        self._run.log(record, step=step)

    def conclude(self, record: Record, step: int) -> None:
        self._run.summary.update(record)

    def close(self) -> None:
        self._run.finish()


def tensorboard_logger(directory: str) -> OpenLogger:
    """TensorBoard event files in a folder.

    Raises:
        ValueError: the package is missing.
    """
    try:
        import torch.utils.tensorboard  # noqa: F401, seen before any work
    except ImportError as error:
        raise ValueError(
            "TensorBoard is a package of its own: pip install 'sparton[tensorboard]'"
        ) from error
    return partial(TensorBoardLogger, directory)


class TensorBoardLogger(Logger):
    """TensorBoard event files in a folder; what a resumed run had written beyond ``start_step``,
    the number of steps completed, is not shown."""

    def __init__(self, directory: str, start_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, purge_step=start_step + 1 if start_step else None)

    def describe(self, manifest: Record) -> None:
        self._writer.add_text("manifest", f"```\n{json.dumps(manifest, indent=2)}\n```")

    def log(self, record: Record, step: int) -> None:
        for key, value in record.items():
            self._writer.add_scalar(key, value, step)

    def conclude(self, record: Record, step: int) -> None:
        self.log(record, step)

    def close(self) -> None:
        self._writer.close()


def open_loggers(
    folder: Path,
    manifest: Record,
    steps: int,
    start: int,
    others: Iterable[Logger] = (),
    console: Console | None = None,
) -> list[Logger]:
    """Screen, ``metrics.jsonl`` and ``others``, each told the manifest of a run in ``folder``; a
    part of a run that trains, from step ``start`` on, leaves the manifest there too. The screen is
    standard output where no other ``console`` is given."""
    if start < steps:
        name = f"manifest-from-step-{start}.json" if start else "manifest.json"
        with replacing(folder / name) as fresh:
            fresh.write_text(json.dumps(manifest, indent=2) + "\n")
    console = console or Console()
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
    metrics = JsonlLogger(folder / "metrics.jsonl", start)
    loggers: list[Logger] = [ScreenLogger(console, steps), metrics, *others]
    for logger in loggers:
        logger.describe(manifest)
    return loggers
