"""``sparton encode model=PATH data=FOLDER output=DOCS``: a collection, encoded once."""

import sys
from collections.abc import Sequence
from pathlib import Path

from sparton.cli.commands.train import set_environment

INTERRUPTED = "the same command goes on where it was"


def main(arguments: Sequence[str], script: Path | None = None) -> None:
    """Encode as the arguments say.

    Args:
        script: of a clone, which other processes of the same work start; None for ``-m sparton``.
    """
    set_environment()
    from sparton.cli.command_line import read_request

    request = read_request(arguments, "encode")
    if request.shows:
        from sparton.cli.composing import show

        show(request, "encode", arguments)
        return
    from sparton.cli import entry

    program = ["-m", "sparton", "encode"] if script is None else [str(script.resolve())]
    entry.encode(request, [sys.executable, *program, *arguments])
