"""What the commands share: flags, in the place of the arguments of functions."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sparton.arguments import ArgumentError


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of ``sparton NAME`` whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        f"sparton {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The arguments that are not None, by name."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def flag(name: str) -> str:
    """The flag that gives an argument of this name."""
    return "--" + name.replace("_", "-")


@contextmanager
def flags_named(**others: str) -> Iterator[None]:
    """What is said inside about arguments is said of the flags that give them.

    Args:
        others: flags that are not called like the argument.

    Raises:
        ValueError: in the place of an ArgumentError.
    """

    def name(argument: str) -> str:
        return others.get(argument) or flag(argument)

    def setting(argument: str, value: object) -> str:
        return name(argument) if value is True else f"{name(argument)} {value}"

    try:
        yield
    except ArgumentError as error:
        raise ValueError(error.told(name, setting)) from error
