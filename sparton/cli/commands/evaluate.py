"""``sparton evaluate model=PATH evaluation=small_beir``: one model on the tasks of one split."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str], script: Path | None = None) -> None:
    """Evaluate as the arguments say.

    Args:
        script: of a clone, which other processes of the same work start; None for ``-m sparton``.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from sparton.cli.command_line import read_request

    request = read_request(arguments, "evaluate")
    if request.shows:
        from sparton.cli.composing import show

        show(request, "evaluate", arguments)
        return
    from sparton.cli import entry

    program = ["-m", "sparton", "evaluate"] if script is None else [str(script.resolve())]
    entry.evaluate(request, [sys.executable, *program])
