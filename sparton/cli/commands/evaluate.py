"""``sparton evaluate model=PATH evaluation=small_beir``: one model on the tasks of one split."""

import os
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Evaluate as the arguments say."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from sparton.cli.command_line import read_request

    request = read_request(arguments, "evaluate")
    if request.shows:
        from sparton.cli.composing import show

        show(request, "evaluate", arguments)
        return
    from sparton.cli import entry

    entry.evaluate(request)
