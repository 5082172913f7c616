"""Kill trainings, and compare what they end with, bit by bit, with one that nobody has killed.

    python scripts/kill_storm.py                    # 20 kills, some minutes on two CPU cores
    python scripts/kill_storm.py --kills 100 --seed 1 -- head=colbert

Each run is killed (SIGKILL) once, every other one at a moment drawn from all of a rehearsal, and
its command is given again until it ends. Moments are counted in seconds of computing, which other
work on the machine does not stretch. A kill that comes too late, after the end of a run, does not
count: another run is tried. What follows ``--`` goes to every training.
"""

import argparse
import csv
import os
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

from sparton.datasets import quickstart
from sparton.training.status import OK, Status, read_status

ROOT = Path(__file__).resolve().parents[1]
MINIATURE = (
    "experiment=quickstart", "debug=tiny", "backbone.hidden_size=32", "data=text_files", "steps=6",
    "evaluation=quickstart", "evaluation.every=2", "checkpoint_every=1", "log_every=1",
    "hydra.job_logging.root.level=ERROR",
)  # fmt: skip
# What is there as soon as a moment has come, in a place that has a run and its cache of data.
MOMENTS = {
    "startup": "run/.lock",
    "preparation": "cache/sparton/*.partial",
    "first line": "run/metrics.jsonl",
    "checkpoint": "run/checkpoints/*.tmp",
    "after a checkpoint": "run/checkpoints/step-00000002.pt",
    "model save": "run/.model.*.tmp",
    "model swap": "run/.model.*.old",
    "evaluation": "run/model/config.json",
    "tests": "run/checkpoints/step-00000006.pt",
    "sweep": "run/checkpoints/*.pt",
}
KINDS = (*MOMENTS, "random")
LEFTOVERS = (".tmp", ".old", ".partial")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--kills", 20), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("overrides", nargs="*", help="of every training")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    tried, hit, clean, recovered = (Counter[str]() for _ in range(4))
    with tempfile.TemporaryDirectory() as root:
        overrides = [f"data.files={write_pairs(Path(root, 'pairs.csv'))}", *asked.overrides]
        whole = finished(Path(root, "whole"), overrides)
        began = sum(os.times()[2:4])  # of processes that have ended
        if finished(Path(root, "rehearsal"), [*overrides, "seed=1"]) == whole:
            sys.exit("two seeds end alike: the comparison sees nothing")
        length = sum(os.times()[2:4]) - began
        while (kills := hit.total()) < asked.kills:
            kind = KINDS[kills // 2 % len(MOMENTS)] if kills % 2 else "random"
            place = Path(root, f"try-{tried.total()}")
            if tried[kind] > 20 * (hit[kind] + 1):
                sys.exit(f"{tried[kind]} runs, and the moment of {kind} was met {hit[kind]} times")
            tried[kind] += 1
            limit = draw.uniform(0, length) if kind == "random" else float("inf")
            if not killed(place, overrides, kind, limit):
                continue
            hit[kind] += 1
            same = finished(place, overrides, sweep=kind == "sweep") == whole
            left = [path.name for path in place.rglob("*") if path.suffix in LEFTOVERS]
            recovered[kind] += same
            clean[kind] += not left
            found = "identical" if same else "DIFFERS"
            at = f" at {limit:.1f} s" if kind == "random" else ""
            print(f"{kills + 1:>4} {kind}{at}: {found} {left or ''}", flush=True)
    for kind in KINDS:
        late = tried[kind] - hit[kind]
        print(f"{kind}: tried {tried[kind]}, too late {late}, killed {hit[kind]}, ", end="")
        print(f"clean {clean[kind]}, recovered {recovered[kind]}")
    print(f"{hit.total()} kills: {clean.total()} clean, {recovered.total()} bit-identical")
    sys.exit(not clean == recovered == hit)


def write_pairs(path: Path) -> Path:
    pairs = quickstart.pairs()
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(pairs.example(row, 0, 0)[:2] for row in range(2000))
    return path


def start(place: Path, overrides: Sequence[str], sweep: bool = False) -> subprocess.Popen:
    """A training, alone or as the one cell of a sweep, in the same folder."""
    run = place / "run"
    words = ["-m", f"hydra.sweep.dir={run}", "hydra.sweep.subdir=."] if sweep else []
    words += [*MINIATURE, *([] if sweep else [f"hydra.run.dir={run}"]), *overrides]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        env=os.environ | {"HF_DATASETS_CACHE": str(place / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed(place: Path, overrides: Sequence[str], kind: str, limit: float) -> bool:
    """Start a run and kill it at its moment; whether it still ran."""
    with start(place, overrides, sweep=kind == "sweep") as process:
        while process.poll() is None and computed(process.pid) < limit:
            if kind != "random" and any(place.glob(MOMENTS[kind])):
                break
            time.sleep(0.0005)
        process.kill()
    return process.returncode == -signal.SIGKILL


def computed(process: int) -> float:
    """Seconds of computing that a process has taken so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def finished(place: Path, overrides: Sequence[str], sweep: bool = False) -> dict[str, object]:
    """Give the command until the end; what the run has left, bit by bit."""
    with start(place, overrides, sweep) as process:
        _, said = process.communicate()
    folder = place / "run"
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
