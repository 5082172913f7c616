"""What the command lines of several scripts have in common."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def one_sentence(program: str, interrupted: str) -> Iterator[None]:
    """End a script on an error that a user can mend, or an interrupt, with a sentence."""
    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error).replace("data.on_error=skip", "--on-error skip")
        sys.exit(f"{program}: {message}")
    except KeyboardInterrupt:
        print(f"\ninterrupted: {interrupted}", file=sys.stderr)
        sys.exit(130)


def given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of the arguments that are not None."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def refuse(arguments: argparse.Namespace, names: Sequence[str], because: str) -> None:
    """Options that were given, and would be ignored.

    Raises:
        ValueError: names them.
    """
    if found := given(arguments, names):
        raise ValueError(f"{because} ignores {', '.join(map(flag, found))}: leave that out")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
