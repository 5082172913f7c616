"""``sparton encode model=PATH data=FOLDER output=DOCS``: a collection, encoded once."""

from collections.abc import Sequence
from pathlib import Path

from sparton.cli.commands.train import run_hydra_command, set_environment

INTERRUPTED = "the same command goes on where it was"


def main(arguments: Sequence[str], script: Path | None = None) -> None:
    """Encode as the arguments say; ``script`` as ``run_hydra_command`` has it."""
    set_environment()
    run_hydra_command("encode", arguments, script)
