"""What every record of a benchmark says of the machine and the code."""

import re
from typing import Any

from sparton.training.manifest import describe_environment


def record_environment(on_gpu: bool) -> dict[str, Any]:
    """Fields that all records of a run share; a tree without git names no commit."""
    found = describe_environment()
    git = found["git"] or {"sha": None, "dirty": None}
    return {
        "command": found["command"],
        "git_sha": git["sha"],
        "dirty": git["dirty"],
        "gpu": found["hardware"].get("gpu", "cpu") if on_gpu else "cpu",
        "driver": found["hardware"].get("driver"),
        "python": found["python"],
        "torch": found["packages"]["torch"],
        "triton": found["packages"]["triton"],
    }


def folder_of(gpu: str) -> str:
    """The name below results/ for a device."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
