"""The library names its own arguments in what it says: overrides and commands are for ``cli``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GROUPS = "|".join(path.name for path in (ROOT / "configs").iterdir() if path.is_dir())
WORDS = re.compile(
    r"hydra|\boverrid|_target_|\bconfigs?/|\b(train|evaluate)\.py|\bnull\b"
    r"|=(?-i:true|false)\b"
    rf"|\b({GROUPS}|study|init_from)=[a-z]"  # a choice from a group
    r"|\b[a-z_]+\.[a-z_.]+=",  # a setting of a group
    re.IGNORECASE,
)


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """The string literals of a module that are no docstrings, and more than a name."""
    tree = ast.parse(source)
    own = (ast.Module, ast.ClassDef, ast.FunctionDef)
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, own) and ast.get_docstring(node) is not None:
            skipped.add(node.body[0].value)
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
            parts = [str(getattr(part, "value", "")) for part in node.values]
            text = "".join(
                part if isinstance(value, ast.Constant) else "{}"
                for part, value in zip(parts, node.values, strict=True)
            )
            yield node.lineno, text
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.lineno, node.value


def told_of(source: str) -> list[str]:
    """The literals that speak of what only the commands know."""
    found = [(line, text) for line, text in sentences(source) if " " in text or "=" in text]
    return [f"{line}: {text}" for line, text in found if WORDS.search(text)]


def test_no_message_below_the_commands_speaks_of_overrides():
    below = [path for path in (ROOT / "sparton").rglob("*.py") if "cli" not in path.parts]
    assert len(below) > 150
    found = {str(path): told for path in below if (told := told_of(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "message",
    [
        '"set head=sparton_colbert"',
        'f"{place}: set data.on_error=skip to go on"',
        '"see the files in configs/data"',
        '"query_expansion=false has none"',
        'f"a folder of train.py, {name}"',
        '"must be a number, or null"',
        "f'{name} is Hydra\\'s'",
    ],
)
def test_such_a_message_would_be_found(message):
    assert told_of(f"raise ValueError({message})")


def test_arguments_are_no_overrides():
    code = '"""Docstring of train.py"""\nraise ValueError(f"rank={rank} of {size}: head={x}")'
    assert not told_of(code)
