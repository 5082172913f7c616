"""The wheel: what it holds, and that its command trains in a folder outside of the clone."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
    subprocess.run(command, check=True)
    [path] = folder.glob("sparton-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Where the wheel is installed, without what it depends on: the tests' own is taken."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*command, wheel], check=True)
    return folder


def sparton(installed: Path, folder: Path, *words: str) -> str:
    """What the installed command prints in a folder."""
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [installed / "bin" / "sparton", *words],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_configurations_and_nothing_of_a_clone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        described = archive.read(metadata).decode()
    own = [name for name in names if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in own} == {"sparton"}
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert f"sparton/configs/{path.relative_to(ROOT / 'configs')}" in own
    assert {"sparton/py.typed", "sparton/results/paper.json", "sparton/__main__.py"} <= set(own)
    for field in ("Project-URL", "Keywords", "Classifier: Typing :: Typed", "Author"):
        assert field in described
    status = ["git", "-C", ROOT, "status", "--porcelain", "--ignored=no", "build", "dist"]
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == ""


def test_the_installed_command_trains_and_evaluates(installed, tmp_path):
    words = ["experiment=quickstart", "debug=tiny", "backbone.hidden_size=32", "study=here"]
    sparton(installed, tmp_path, "train", *words, "hydra.run.dir=run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["steps"] == 4
    printed = sparton(installed, tmp_path, "evaluate", "model=run/model", "evaluation=quickstart")
    trained = json.loads((tmp_path / "run" / "results.json").read_text())["mean"]["ndcg@10"]
    assert f"{trained:.4f}" in printed


def test_it_trains_on_files_and_configurations_of_its_own(installed, tmp_path):
    pairs = [{"query": f"a question {n}", "positive": f"an answer {n}"} for n in range(32)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /data: text_files, override /evaluation: none]\n"
        "data: {root: ., files: {mine: pairs.jsonl}}\nprecision: fp32\nsteps: 2\nbatch: 8\n"
    )
    small = ["backbone=tiny", "backbone.hidden_size=32", "query_length=16", "document_length=16"]
    sparton(installed, tmp_path, "train", "experiment=mine", *small, "hydra.run.dir=run")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "ok"


def test_it_starts_its_other_processes_by_itself(installed, tmp_path):
    words = ["experiment=quickstart", "debug=tiny", "backbone.hidden_size=32", "steps=2"]
    sweep = ["-m", "gpus=1,2", "evaluation=none", "hydra.sweep.dir=sweep"]
    sparton(installed, tmp_path, "train", *words, *sweep)
    lines = (tmp_path / "sweep" / "sweep.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["ok", "ok"]
