"""``sparton evaluate model=PATH evaluation=small_beir``: one model on the tasks of one split."""

import os
from collections.abc import Sequence
from pathlib import Path

from sparton.cli.commands.train import run_hydra_command


def main(arguments: Sequence[str], script: Path | None = None) -> None:
    """Evaluate as the arguments say; ``script`` as ``run_hydra_command`` has it."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    run_hydra_command("evaluate", arguments, script)
