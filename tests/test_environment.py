"""The lists of dependencies agree with each other."""

import ast
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def pinned() -> dict[str, str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    entries = [line.split(";")[0].strip() for line in lines if line and not line.startswith("#")]
    return dict(entry.split("==") for entry in entries)


def test_conda_environment_has_the_pinned_versions():
    entries = re.findall(r"^ {6}- (\S+)==(\S+)$", (ROOT / "environment.yml").read_text(), re.M)
    assert dict(entries) == pinned()


def test_ranges_admit_the_pinned_versions_and_cover_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    requirements = {r.name: r for r in map(Requirement, ranges)}
    versions = pinned()
    assert set(requirements) == set(versions)
    for name, requirement in requirements.items():
        assert requirement.specifier.contains(versions[name]), f"{name}=={versions[name]}"


def imported(path: Path) -> set[str]:
    """Names of the packages that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(x.module) for x in nodes if isinstance(x, ast.ImportFrom) and not x.level]
    return {name.partition(".")[0] for name in names}


def test_what_is_imported_is_listed():
    files = [*(ROOT / "sparton").rglob("*.py"), ROOT / "train.py", ROOT / "evaluate.py"]
    packages = set().union(*map(imported, files)) - sys.stdlib_module_names - {"sparton"}
    own = {"hydra": "hydra-core", "seismic": "pyseismic-lsr", "yaml": "pyyaml"}
    listed = {own.get(name, name).replace("_", "-") for name in packages}
    assert {"torch", "hydra-core", "pandas"} <= listed <= set(pinned())


@pytest.mark.parametrize("heavy", ["transformers", "wandb", "ranx", "datasets", "torch"])
def test_importing_the_package_is_light(heavy):
    import subprocess

    code = f"import sparton, sys; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
