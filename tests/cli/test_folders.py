"""Folders of runs: what they are called, what leads to the latest, and that refusals leave none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sparton
from sparton.cli.folders import existing, kept_if_begun, mark_latest
from sparton.training.status import read_status
from tests.forking import environment

pytestmark = pytest.mark.usefixtures("here")

MINIATURE = ("experiment=quickstart", "debug=tiny", "backbone.hidden_size=32", "evaluation=none")


def names_in(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.slow
def test_runs_have_the_names_that_they_are_given_and_the_latest_is_marked(tmp_path):
    first = sparton.train(*MINIATURE, steps=1, name="first")
    assert first.folder == tmp_path / "runs/quickstart/first/seed-0"
    assert Path("runs/latest").resolve() == first.folder
    assert Path("runs/latest/model/config.json").exists()
    second = sparton.train(*MINIATURE, steps=1, seed=3, name="first", study="other")
    assert Path("runs/latest").resolve() == second.folder == tmp_path / "runs/other/first/seed-3"
    assert Path("runs/latest").readlink() == Path("other/first/seed-3")
    sparton.train(*MINIATURE, "hydra.run.dir=elsewhere/run", steps=1)
    assert Path("runs/latest").resolve() == second.folder
    assert names_in("runs") == ["latest", "other", "quickstart"]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("folder", "lost"), [("mine", "model"), (".", "own.tmp")])
def test_no_run_writes_over_what_is_somebody_elses(folder, lost, tmp_path):
    for name in ("mine/model/config.json", "mine/results.json", "own.tmp"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match=rf"{folder} has '{lost}', which no run"):
        sparton.train(*MINIATURE, f"hydra.run.dir={folder}", steps=1)
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("mine/results.json").read_text() == "precious"


@pytest.mark.slow
def test_a_folder_that_loses_nothing_and_that_of_a_run_are_taken(tmp_path):
    for made in ("mine/model", "scratch"):
        Path(made).mkdir(parents=True)
    Path("mine/slurm-1.out").touch()
    Path("mine/checkpoints").symlink_to(tmp_path / "scratch")
    for batch in (4, 4, 8):  # the last is another run, where no checkpoint is left
        run = sparton.train(
            *MINIATURE, "hydra.run.dir=mine", steps=1, batch=batch, checkpoint_every=None
        )
        assert run.folder == tmp_path / "mine" and (run.model / "config.json").exists()


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "refused",
    [
        ["batch=0"],
        ["bacth=3"],
        ["loss=joint"],
        ["name=a/b"],
        ["study=latest"],
        ["study=../../outside"],
        ["study=/outside"],
        ["study=a//b"],
        [f"study={'a' * 300}"],
        ["data=text_files", "data.files={mine: nowhere.jsonl}"],
        ["init_from=./nowhere"],
        ["document_length=1000"],
        ["query_regularizer.flops.weight=-1"],
        ["hydra.run.dir="],
    ],
)
def test_refused_runs_leave_nothing(refused, tmp_path):
    with pytest.raises((ValueError, OSError)):
        sparton.train(*MINIATURE, *refused)
    assert not list(tmp_path.iterdir())


def test_refused_runs_leave_what_was_there(tmp_path):
    for folder in ("runs/quickstart/mine/seed-0", "out"):
        Path(folder).mkdir(parents=True)
    for place in (["name=mine"], ["hydra.run.dir=out"], ["name=mine", "seed=1"]):
        with pytest.raises(ValueError, match="leaves no room"):
            sparton.train(*MINIATURE, "query_length=1", *place)
    assert {str(path) for path in Path().rglob("seed-*")} == {"runs/quickstart/mine/seed-0"}
    assert read_status(Path("out")).state == "failed"


def test_a_folder_is_kept_once_training_has_begun(tmp_path):
    run, found = tmp_path / "runs" / "a" / "b", tmp_path
    for begun in (False, True):
        run.mkdir(parents=True)
        (run / "train.log").touch()
        with pytest.raises(KeyboardInterrupt), kept_if_begun(run, found):
            if begun:
                (run / "metrics.jsonl").touch()
            raise KeyboardInterrupt
        assert run.exists() == begun
        assert Path("runs").exists() == begun
    Path("runs/another").touch()
    (run / "metrics.jsonl").unlink()
    with kept_if_begun(run, found):
        pass
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "runs", tmp_path / "runs" / "another"]


def test_the_innermost_folder_that_is_there(tmp_path):
    assert existing(Path("x/y")) == tmp_path
    Path("x").mkdir()
    assert existing(Path("x/y")) == tmp_path / "x"
    with kept_if_begun(Path("x").absolute(), existing(Path("x"))):
        pass
    assert Path("x").exists()


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_no_link_where_something_of_the_users_has_its_name(tmp_path, caplog, make):
    Path("runs/mine").mkdir(parents=True)
    make(Path("runs/latest"))
    mark_latest(tmp_path / "runs" / "mine")
    assert "does not lead to this run" in caplog.text
    assert names_in("runs") == ["latest", "mine"] and not Path("runs/latest").is_symlink()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sparton", "train", *MINIATURE, *words],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip


@pytest.mark.slow
def test_several_processes_that_refuse_leave_nothing(tmp_path):
    done = command("gpus=2", "query_regularizer.flops.weight=-1")
    assert done.returncode == 1
    assert "weight must not be negative" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sweeps_are_refused_before_their_first_cell_and_cells_with_their_reasons(tmp_path):
    assert "batch=lots: must be" in command("-m", "batch=8,lots").stderr
    assert "name=... has several values" in command("-m", "name=a,b").stderr
    assert not list(tmp_path.iterdir())
    assert (
        "weight must not be negative" in command("-m", "query_regularizer.flops.weight=1,-1").stderr
    )
    assert not list(tmp_path.iterdir())
    done = command("-m", "query_length=16,1", "name=lengths", "steps=1")
    assert done.returncode == 1
    lines = Path("runs/quickstart/lengths/sweep.jsonl").read_text().splitlines()
    ends = sorted((line["status"], line["message"]) for line in map(json.loads, lines))
    assert [end[0] for end in ends] == ["failed", "ok"]
    assert "leaves no room" in ends[0][1]
