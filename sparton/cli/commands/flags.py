"""What the commands share: flags, in the place of the arguments of functions."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from sparton.arguments import ArgumentError, refuse_below
from sparton.cli.errors import arguments_named

if TYPE_CHECKING:
    from sparton.datasets.tables import Columns

ON_ERROR = "what a malformed record does; default: stop"


class _Formatter(argparse.HelpFormatter):
    """Fills the paragraphs of a description, and leaves indented ones, examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(
            part if part[0].isspace() else fill(part, width, indent)
            for part in text.strip().split("\n\n")
        )


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of ``sparton NAME`` whose help fills the description, but for its examples."""
    return argparse.ArgumentParser(
        f"sparton {name}", description=description, formatter_class=_Formatter
    )


def given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The arguments that are not None, by name."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def add_columns(group: "argparse._ActionsContainer") -> None:
    """The flag that says what the columns of files are; :func:`named_columns` reads it."""
    group.add_argument(
        "--columns", nargs="+", metavar="NAME[=KNOWN]",
        help="question=query or docno=_id renames; for TSV: the names in order",
    )  # fmt: skip


def named_columns(names: list[str] | None) -> "Columns | None":
    """A mapping if the names are written NAME=KNOWN, else a list."""
    if names and all("=" in name for name in names):
        return dict(name.split("=", 1) for name in names)
    return names


def check_query(query: str | None, k: int | None) -> None:
    """Refuse a query without text, and fewer hits than one; None is none.

    Raises:
        ArgumentError: names it.
    """
    refuse_below(1, k=k)
    if query is not None and not query.strip():
        raise ArgumentError("{query:name} has no text", query=query)


def flag(name: str) -> str:
    """The flag that gives an argument of this name."""
    return "--" + name.replace("_", "-")


def flags_named(**others: str) -> AbstractContextManager[None]:
    """What is said inside about arguments is said of the flags that give them; see
    :func:`~sparton.cli.errors.arguments_named`.

    Args:
        others: flags that are not called like the argument.
    """

    def name(argument: str) -> str:
        return others.get(argument) or flag(argument)

    def setting(argument: str, value: object) -> str:
        return name(argument) if value is True else f"{name(argument)} {value}"

    return arguments_named(name, setting)
