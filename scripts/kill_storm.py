"""Kill trainings, and compare what they end with, bit by bit, with one that nobody has killed.

    python scripts/kill_storm.py                    # 20 kills, some minutes on two CPU cores
    python scripts/kill_storm.py --kills 100 --seed 1 -- head=colbert

Each run is killed (SIGKILL) once at a chosen moment, or after a random time, and its command is
given again until it ends. What follows ``--`` goes to every training. A summary comes last.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from sparton.training.status import OK, Status, read_status

ROOT = Path(__file__).resolve().parents[1]
MINIATURE = (
    "experiment=quickstart", "debug=tiny", "backbone.hidden_size=32", "steps=6",
    "checkpoint_every=1", "evaluation.every=3", "log_every=1", "hydra.job_logging.root.level=ERROR",
)  # fmt: skip
# What is in a run's folder as soon as its moment has come.
MOMENTS = {
    "startup": ".lock",
    "preparation": "status.json",
    "first line": "metrics.jsonl",
    "checkpoint": "checkpoints/*.tmp",
    "after a checkpoint": "checkpoints/step-00000002.pt",
    "model save": ".model.*.tmp",
    "model swap": ".model.*.old",
    "evaluation": "model/config.json",
    "tests": "checkpoints/step-00000006.pt",
}
KINDS = (*MOMENTS, "sweep", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--kills", 20), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("overrides", nargs="*", help="of every training")
    asked = parser.parse_args()
    draw, tries, wrong = random.Random(asked.seed), 0, 0
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        began = time.monotonic()
        whole = finished(Path(root, "whole"), asked.overrides)
        length = time.monotonic() - began
        while counts.total() < asked.kills:
            kind, run = KINDS[tries % len(KINDS)], Path(root, f"run-{tries}")
            tries += 1
            limit = draw.uniform(0.1, 0.6) * length if kind == "random" else 4 * length
            counts[kind] += killed(run, asked.overrides, kind, limit)
            same = finished(run, asked.overrides) == whole
            same &= not [*run.rglob("*.tmp"), *run.rglob("*.old")]
            wrong += not same
            print(f"{counts.total():>4} {kind}: {'identical' if same else 'DIFFERS'}", flush=True)
    kinds = ", ".join(f"{kind} {counts[kind]}" for kind in KINDS)
    print(f"{counts.total()} kills in {tries} runs ({kinds}): {tries - wrong} of {tries} identical")
    sys.exit(bool(wrong))


def start(folder: Path, overrides: Sequence[str], sweep: bool = False) -> subprocess.Popen:
    """A training, alone or as the one cell of a sweep, in the same folder."""
    words = ["-m", f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."] if sweep else []
    words += [*MINIATURE, *([] if sweep else [f"hydra.run.dir={folder}"]), *overrides]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def killed(folder: Path, overrides: Sequence[str], kind: str, limit: float) -> bool:
    """Start a run and kill it at its moment; whether it still ran."""
    pattern, deadline = MOMENTS.get(kind, "checkpoints/*.pt"), time.monotonic() + limit
    with start(folder, overrides, sweep=kind == "sweep") as process:
        while process.poll() is None and time.monotonic() < deadline:
            if kind != "random" and any(folder.glob(pattern)):
                break
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
    return process.returncode == -signal.SIGKILL


def finished(folder: Path, overrides: Sequence[str]) -> dict[str, object]:
    """Give the command until the end; what the run has left, bit by bit."""
    with start(folder, overrides) as process:
        _, said = process.communicate()
    if process.returncode or read_status(folder) != Status(OK):
        sys.exit(f"{folder} does not end well: {said}")
    state = torch.load(max(folder.glob("checkpoints/*.pt")), weights_only=True)
    parts = {name: state[name] for name in ("step", "best")} | state["encoder"]
    for number, moments in state["optimizer"]["state"].items():
        parts |= {f"{number}.{name}": value for name, value in moments.items()}
    files = [folder / "model" / "model.safetensors", *sorted(folder.rglob("*.trec"))]
    parts |= {str(file.relative_to(folder)): file.read_bytes() for file in files}
    tensors = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    return parts | {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


if __name__ == "__main__":
    main()
