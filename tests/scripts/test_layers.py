"""Scripts are leaves: nothing below imports them, and studies import the harness alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "scripts/benchmarks"
STUDIES = sorted(path.name for path in BENCHMARKS.iterdir() if (path / "__init__.py").exists())


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def starting_with(paths: Iterator[Path], names: set[str]) -> list[str]:
    found = ((path, module) for path in paths for module in imported(path))
    return [f"{path}: {module}" for path, module in found if module.split(".")[0] in names]


def test_the_package_imports_no_script():
    scripts = {path.stem for path in (ROOT / "scripts").iterdir() if path.suffix in ("", ".py")}
    assert {"benchmarks", "tables", "benchmark"} < scripts
    assert starting_with((ROOT / "sparton").rglob("*.py"), scripts) == []
    assert starting_with(BENCHMARKS.rglob("*.py"), scripts - {"benchmarks"}) == []


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_imports_no_other_and_the_harness_imports_none(study):
    assert len(STUDIES) == 7
    for other in STUDIES:
        for path in (BENCHMARKS / other).rglob("*.py") if other != study else ():
            wrong = [m for m in imported(path) if f"{m}.".startswith(f"benchmarks.{study}.")]
            assert not wrong, f"{path} imports {wrong}"
    for path in BENCHMARKS.glob("*.py"):
        assert not [m for m in imported(path) if f"{m}.".startswith(f"benchmarks.{study}.")], path
