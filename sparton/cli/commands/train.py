"""``sparton train head=sparton batch=512``: one training, or a sweep; configs/ has every choice."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

INTERRUPTED = (
    "the same command goes on from the last checkpoint, or begins anew where there is none yet "
    "(checkpoint_every)"
)


def set_environment() -> None:
    """What PyTorch and others read when they are imported, unless a user has set it."""
    # Threads of OpenMP that spin while they wait would starve the processes that tokenise ahead.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Lengths change from batch to batch: blocks that cannot grow leave gaps in a GPU's memory.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def run_hydra_command(name: str, arguments: Sequence[str], script: Path | None) -> None:
    """Do what the words behind ``sparton train``, ``evaluate`` or ``encode`` ask for.

    Args:
        name: of the command.
        script: of a clone, which other processes of the same work start; None for ``-m sparton``.
    """
    from sparton.cli.command_line import read_request

    # What a full disk, or a reader who has left, does not take of a log hides no error.
    logging.raiseExceptions = False
    request = read_request(arguments, name)
    if request.shows:
        from sparton.cli.composing import show

        show(request, name)
        return
    from sparton.cli import entry

    program = ["-m", "sparton", name] if script is None else [str(script.resolve())]
    getattr(entry, name)(request, [sys.executable, *program])


def main(arguments: Sequence[str], script: Path | None = None) -> None:
    """Train as the arguments say; ``script`` as :func:`run_hydra_command` has it."""
    set_environment()
    run_hydra_command("train", arguments, script)
