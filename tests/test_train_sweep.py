"""Sweeps of train.py as their users run them: each cell on its own, a report of all."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forking import environment
from tests.test_train import MINIATURE, ROOT, read_records

ENDS = ("torch.optim.AdamW", "tests.sweeps.broken.out_of_memory", "tests.sweeps.broken.killed")
SMALL = (*MINIATURE, "evaluation=none", "steps=2")


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "train.py", "-m", *SMALL, *overrides]
    command.append(f"hydra.sweep.dir={folder}")
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def cells(folder: Path) -> dict[str, dict]:
    """The lines of the report by their optimizer."""
    lines = [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]
    named = {}
    for line in lines:
        [end] = [each for each in line["overrides"] if each.startswith("optimizer._target_=")]
        named[end.split("=")[1]] = line
    return named


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("sweep")
    return folder, sweep(folder, f"optimizer._target_={','.join(ENDS)}")


@pytest.mark.slow
def test_cells_that_end_badly_are_rows_and_the_sweep_goes_on(ended):
    folder, process = ended
    assert process.returncode == 1, process.stderr
    found = cells(folder)
    assert [found[end]["status"] for end in ENDS] == ["ok", "oom", "killed"]
    assert found[ENDS[0]]["examples_per_second"] > 0
    for end in ENDS:
        assert found[end]["cell"].startswith(f"optimizer._target_-{end}/gpus-1/")
    assert "SIGKILL" in found[ENDS[2]]["message"]
    assert "report: " in process.stdout and "Traceback" not in process.stderr
    for name in ("sweep.md", "sweep.svg"):
        assert (folder / name).exists()


@pytest.mark.slow
def test_the_same_command_again_keeps_results_and_tries_the_rest(ended):
    folder, _ = ended
    before = {end: (folder / cells(folder)[end]["cell"] / "status.json").stat() for end in ENDS}
    process = sweep(folder, f"optimizer._target_={','.join(ENDS)}")
    assert process.returncode == 1
    after = {end: (folder / cells(folder)[end]["cell"] / "status.json").stat() for end in ENDS}
    changed = [before[end].st_mtime_ns != after[end].st_mtime_ns for end in ENDS]
    assert changed == [False, False, True]
    assert process.stdout.count("done already") == 2


@pytest.mark.slow
def test_a_sweep_that_is_ended_leaves_the_records_of_its_cells(tmp_path):
    command = [sys.executable, ROOT / "train.py", "-m", *SMALL, "seed=0,1,2"]
    process = subprocess.Popen([*command, f"hydra.sweep.dir={tmp_path}"], stdout=subprocess.DEVNULL)
    records, deadline = tmp_path / "sweep.jsonl", time.monotonic() + 200
    while not records.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.wait(60)
    assert not (tmp_path / "sweep.md").exists()
    [line] = map(json.loads, records.read_text().splitlines())
    assert (line["seed"], line["status"]) == (0, "ok") and line["examples_per_second"] > 0


@pytest.mark.slow
def test_a_sweep_over_the_number_of_processes(tmp_path):
    process = sweep(tmp_path, "gpus=1,2")
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [(line["gpus"], line["status"]) for line in lines] == [(1, "ok"), (2, "ok")]
    one, two = (read_records(tmp_path / line["cell"]) for line in lines)
    assert two[-1]["loss"] == pytest.approx(one[-1]["loss"], rel=1e-3)


PAPER = (
    "backbone=tiny", "backbone.hidden_size=32", "data=quickstart", "precision=fp32", "debug=tiny",
    "query_length=24", "document_length=64", "evaluation=none", "steps=2",
)  # fmt: skip


def run_experiment(folder: Path, name: str, *overrides: str) -> list[list[str]]:
    """The rows of the report of a table's miniature: one command, no -m."""
    command = [sys.executable, ROOT / "train.py", f"experiment={name}", *PAPER, *overrides]
    command.append(f"hydra.sweep.dir={folder}")
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert process.returncode == 0, process.stderr
    lines = [line for line in (folder / "sweep.md").read_text().splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_table_3_in_miniature_stands_beside_the_papers_figures(tmp_path):
    rows = "+experiment/table3=sparton_384,compiled_384"
    header, _, *body = run_experiment(tmp_path, "table3", rows, "head=sparton", "steps=1")
    assert "time for 25,930,752 examples" in header
    *own, splade_v3, compiled, larger = body
    assert [row[:3] for row in own] == [["sparton", "384", "ok"]] * 2
    assert all(row[header.index("examples/s")].endswith("(582)") for row in own)
    assert all(row[header.index("test NDCG@10")] == "(0.416)" for row in own)
    assert splade_v3[:3] == ["Splade-V3", "", "published"]
    assert (compiled[0], larger[1]) == ("Compiled LM", "512")


@pytest.mark.slow
def test_every_row_of_table_3_runs(tmp_path):
    _, _, *body = run_experiment(tmp_path, "table3", "batch=8")
    heads = ["compiled", "eager", "sparton", "sparton", "sparton_hybrid", "tiled"]
    assert [row[:3] for row in body[: len(heads)]] == [[head, "8", "ok"] for head in heads]
    assert {row[2] for row in body[len(heads) :]} == {"published"}


@pytest.mark.slow
def test_the_tasks_of_a_job_are_the_ranks_of_a_cell(tmp_path):
    """As on Slurm, but on this machine; the sweep's folder is that of its own overrides."""
    job = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=${gpus}"]
    command = [
        sys.executable,
        ROOT / "train.py",
        "-m",
        *job,
        *SMALL,
        "gpus=2",
        "head=sparton,eager",
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=environment()
    )
    assert process.returncode == 0, process.stderr
    [report] = tmp_path.rglob("sweep.jsonl")
    assert "head-sparton_eager" in report.parent.name
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [(line["head"], line["status"]) for line in lines] == [
        ("eager", "ok"),
        ("sparton", "ok"),
    ]
    eager, sparton = (read_records(report.parent / line["cell"]) for line in lines)
    assert sparton[-1]["loss"] == pytest.approx(eager[-1]["loss"], rel=1e-3)
    assert not list(report.parent.rglob("manifest-from-*"))


@pytest.mark.slow
def test_torchrun_does_not_sweep(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command = [*torchrun, str(ROOT / "train.py"), "-m", *SMALL, f"hydra.sweep.dir={tmp_path}"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert process.returncode == 1
    assert "start it without torchrun, and set gpus" in process.stderr
    assert not list(tmp_path.rglob("status.json"))
