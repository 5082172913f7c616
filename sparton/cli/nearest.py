"""The name that was meant, where one was typed that does not exist."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

# What other trainers call a setting of this one.
_ELSEWHERE = {
    "batch_size": "batch",
    "dataset": "data",
    "learning_rate": "lr",
    "max_grad_norm": "clip_norm",
    "max_length": "document_length",
    "max_steps": "steps",
    "model": "backbone",
    "output_dir": "name",
    "pretrained": "backbone",
    "train_batch_size": "batch",
    "warmup_ratio": "warmup",
}


def nearest(typed: str, names: Collection[str]) -> str | None:
    """The one of the names that is most like what was typed; None where none is.

    A name of other trainers stands for the one it has here.
    """
    elsewhere = _ELSEWHERE.get(typed)
    if elsewhere in names:
        return elsewhere
    close = get_close_matches(typed, names, n=1)
    return close[0] if close else None


def did_you_mean(guesses: Iterable[str | None]) -> str:
    """``; did you mean a or b?``, or nothing where there is no guess."""
    named = " or ".join(filter(None, guesses))
    return f"; did you mean {named}?" if named else ""
