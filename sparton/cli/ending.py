"""What a training says at its end: where everything is, and what to do with it."""

import logging
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from sparton.sweeps.cells import CELL_FILE
from sparton.training.picture import draw_run
from sparton.types import Kind

log = logging.getLogger(__name__)


def say_the_end(
    folder: Path, kinds: Collection[Kind], *, public: bool, own_head: str | None = None
) -> None:
    """Draw a run and print its files and, but for a cell of a sweep, some next commands.

    Args:
        folder: of the run.
        kinds: of its model's representations.
        public: whether it was trained on data of the hub, and not on a user's own.
        own_head: class of a user's own head, without which nothing loads the model.
    """
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())  # what can be typed here
    console = Console()

    def say(line: str, hint: str = "") -> None:
        console.print(f"{escape(line)}[dim]{hint}[/]", highlight=False, soft_wrap=True)

    model, results = folder / "model", folder / "results.json"
    for name, path in (("model", model), ("results", results), ("picture", draw(folder))):
        if path is not None and path.exists():
            say(f"{name:<8} {path}")
    if not model.exists() or (folder / CELL_FILE).exists():
        return
    compared = []
    if results.exists():
        compared = [(f"sparton compare {folder} OTHER_RUN", "is the difference significant?")]
    say("\nWhat to do next:")
    for command, purpose in [*(_uses(model, public) if own_head is None else ()), *compared]:
        say(f"  {command}", f"  # {purpose}")
    say("and in Python:")
    if own_head is not None:
        say(f"  import {own_head.rpartition('.')[0]}")
        say("  from sparton.models.folders import load_encoder")
        say(f'  encoder = load_encoder("{model}", head={own_head}())')
        return
    say(f'  import sparton; model = sparton.load("{model}")')
    say('  model.index(documents).search(["a question"], k=10)')
    shown = '"a text"' if "sparse" in kinds else '"a question", "a text"'
    say(f"  model.explain({shown})")


def _uses(model: Path, public: bool) -> list[tuple[str, str]]:
    """Commands that take a model, and what for."""
    tests = "small_beir" if public else "beir_folder evaluation.path=FOLDER"
    encoding = f"sparton encode model={model} data=FOLDER output=encoded"
    return [
        (f"sparton evaluate model={model} evaluation={tests}", "or folders, trec, ir_datasets"),
        (encoding, "for sparton search encoded"),
        (f"sparton push {model} USER/NAME", "to the Hugging Face hub"),
    ]


def draw(folder: Path) -> Path | None:
    """The picture of a run; that there is none spoils no training."""
    try:
        return draw_run(folder)
    except Exception as error:  # of matplotlib, its fonts, its files
        log.warning("no picture of this run: %s", error)
        return None
