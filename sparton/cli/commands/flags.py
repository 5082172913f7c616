"""What the commands share: flags, in the place of the arguments of functions."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sparton.arguments import ArgumentError, refuse_below
from sparton.cli.errors import arguments_named


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


def add_reading(group: "argparse._ActionsContainer") -> None:
    """The flags that say how files are read; :func:`reading_of` has what they say."""
    group.add_argument(
        "--columns", nargs="+", metavar="NAME[=KNOWN]",
        help="question=query or docno=_id renames; for TSV: the names in order",
    )  # fmt: skip
    group.add_argument(
        "--on-error", choices=("stop", "skip"),
        help="what a malformed record does; default: stop",
    )  # fmt: skip


def reading_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """``columns`` and ``on_error`` of a :class:`~sparton.datasets.preparation.Reading`. Columns are
    a mapping if they are written NAME=KNOWN, else a list.

    Raises:
        ValueError: some are, and some are not.
    """
    columns = parsed.columns
    renames = [name for name in columns or () if "=" in name]
    if renames and len(renames) < len(columns):
        raise ValueError(
            f"--columns {' '.join(columns)}: all of them rename, as {renames[0]} does, or none"
        )
    if renames:
        columns = dict(name.split("=", 1) for name in columns)
    return {"columns": columns, "on_error": parsed.on_error or "stop"}


def add_precision(group: "argparse._ActionsContainer", words: str = "default: by device") -> None:
    """The flags that say where models compute, and in which precision."""
    group.add_argument("--precision", choices=("fp32", "bf16", "fp16", "fp8"), help=words)
    group.add_argument("--device", help="default: a GPU if there is one")


def check_query(query: str | None, k: int | None) -> None:
    """Refuse a query without text, and fewer hits than one; None is none.

    Raises:
        ArgumentError: names it.
    """
    refuse_below(1, k=k)
    if query is not None and not query.strip():
        raise ArgumentError("{query:name} has no text", query=query)


def refuse_existing(output: Path) -> None:
    """Refuse to write over a file.

    Raises:
        FileExistsError: names it.
    """
    if output.exists():
        raise FileExistsError(f"--output {output} exists: remove it, or name another")


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
