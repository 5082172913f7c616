"""Docstrings can be read by themselves: none begins in the middle of a sentence."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "sparton"
# What is said of something that only the name of the function tells.
FRAGMENT = re.compile(r"(Of|Those of|That of|As there)\b|.*\blikewise\b", re.DOTALL)
WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> list[str]:
    """The first lines of docstrings that are fragments."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, WITH_DOCSTRINGS)]
    found = [ast.get_docstring(node) or "" for node in nodes]
    return [docstring.splitlines()[0] for docstring in found if FRAGMENT.match(docstring)]


def test_no_docstring_is_a_fragment():
    places = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := fragments(path.read_text(encoding="utf-8")))
    }
    assert not places


@pytest.mark.parametrize(
    "docstring", ["Of this rank.", "Those of all kernels.", "A sum.\n\n    x: `[N]`, likewise."]
)
def test_a_fragment_is_found(docstring):
    assert fragments(f'def f():\n    """{docstring}"""\n')
    assert not fragments('def f():\n    """Officially, the FLOPs of this rank."""\n')
