"""What a run was: enough to repeat it and to compare it with another."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "sparton",
    "torch",
    "triton",
    "transformers",
    "datasets",
    "hydra-core",
    "ranx",
    "numpy",
)
_PATIENCE = 10  # seconds in which git and the driver are to answer; a broken driver may never
_DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def describe_environment() -> dict[str, Any]:
    """Command line, git state, versions and hardware of this process.

    Measurement records, which appear while measuring, do not make the tree dirty. Where the code
    is a copy of a commit, without its history or beside that of another, the environment variable
    SPARTON_COMMIT names it; whether the copy was changed is then not known.
    """
    return {
        "command": shlex.join(sys.argv),
        "git": _git_state(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "hardware": _hardware(),
    }


def installed_version(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    if named := os.environ.get("SPARTON_COMMIT"):
        return {"sha": named, "dirty": None}
    git = ("git", "--no-optional-locks", "-C", str(Path(__file__).resolve().parents[2]))
    sha = _output(*git, "rev-parse", "--verify", "HEAD")
    changes = _output(*git, "status", "--porcelain", "--", ".", ":(exclude)results")
    if sha is None:
        return None
    return {"sha": sha, "dirty": None if changes is None else bool(changes)}


def _output(*command: str) -> str | None:
    """Standard output of a command, None where it fails, does not exist or does not end."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


def _hardware() -> dict[str, Any]:
    hardware: dict[str, Any] = {"cpu": platform.processor() or platform.machine()}
    hardware["threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
        hardware["gpus"] = torch.cuda.device_count()
        hardware["cuda"] = torch.version.cuda
        hardware["driver"] = _output(*_DRIVER_QUERY)
    return hardware
