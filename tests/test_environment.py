"""The lists of dependencies agree with each other."""

import re
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


@pytest.mark.parametrize("heavy", ["transformers", "wandb", "ranx", "datasets", "torch"])
def test_importing_the_package_is_light(heavy):
    import subprocess
    import sys

    code = f"import sparton, sys; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
