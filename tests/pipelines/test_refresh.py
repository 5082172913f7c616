"""Negatives mined by the model in training: by which weights, from when on, after a kill."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, open_dict

from sparton.arguments import ArgumentError
from sparton.cli.assembly import build_model
from sparton.cli.errors import explain
from sparton.cli.training import run_training
from sparton.datasets.quickstart import pairs
from sparton.datasets.sources import text_records
from sparton.errors import CheckpointError
from sparton.pipelines.mining import Rule, TrainedModel, mine_hard_negatives
from sparton.pipelines.mining.refresh import Refresh
from sparton.training.distributed import World
from tests.composing import composed
from tests.forking import environment

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = {"query_length": 24, "document_length": 64}


@pytest.fixture
def examples(tmp_path) -> Path:
    """80 pairs, each with a negative that belongs to another query."""
    path, source = tmp_path / "data/examples.jsonl", pairs()
    path.parent.mkdir()
    with path.open("w") as file:
        for number in range(80):
            query, positive, *_ = source.example(number, 0, 0)
            negative = source.example((number + 7) % 80, 0, 0).positive
            file.write(json.dumps([query, positive, negative]) + "\n")
    return path


def words(examples: Path, *overrides: str) -> list[str]:
    """A training at a rate at which the ranking changes in two steps."""
    return [
        *("experiment=quickstart", "debug=tiny", "backbone.hidden_size=32", "evaluation=none"),
        *("data=text_files", f"data.files={examples}", "num_negatives=2", "loss=triplet"),
        *("refresh=negatives", "refresh.every=2", "refresh.rule.share=null", "optimizer.lr=0.1"),
        *("steps=6", "scheduler=constant", *overrides),
    ]


def config(examples: Path, *overrides: str) -> DictConfig:
    return composed(*words(examples, *overrides))


def run(folder: Path, cfg: DictConfig) -> list[float]:
    folder.mkdir(exist_ok=True)
    run_training(cfg, World(0, 1, torch.device("cpu")), folder)
    return losses(folder)


def losses(folder: Path) -> list[float]:
    """Those of all steps of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def mined(folder: Path) -> dict[str, str]:
    """What each mining has found, by its name, in order."""
    files = sorted(folder.glob("negatives/step-*/*.jsonl"))
    return {file.parent.name: file.read_text() for file in files}


@pytest.mark.slow
def test_the_weights_of_a_step_mine_for_the_steps_after_it(examples, tmp_path):
    cfg = config(examples)
    own = run(tmp_path / "run", cfg)
    with open_dict(cfg):
        cfg.refresh = {}
    without = run(tmp_path / "without", cfg)
    assert own[:2] == without[:2] and own[2] != without[2]
    found = mined(tmp_path / "run")
    assert [name[:13] for name in found] == ["step-00000002", "step-00000004"]
    first, second = found.values()
    assert first != second
    # The last checkpoints are those of steps 4 and 6.
    state = torch.load(tmp_path / "run/checkpoints/step-00000004.pt", weights_only=True)
    encoder = build_model(cfg)
    encoder.load_state_dict(state["encoder"])
    output = tmp_path / "expected.jsonl"
    rule = Rule(7, depth=100, sample=True, seed=0)
    miner = TrainedModel(encoder, **LENGTHS)
    source = text_records(str(examples))
    mine_hard_negatives(source, output, miners=[miner], rule=rule, progress=False)
    assert output.read_text() == second
    assert state["mined"] == next(iter(found)), "that of the steps before it"


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["averaging=ema"], ["refresh.at_start=true"]])
def test_a_run_goes_on_with_the_negatives_that_its_checkpoint_names(
    examples, tmp_path, overrides, monkeypatch
):
    cfg = config(examples, "refresh.every=3", "checkpoint_every=1", *overrides)
    whole = run(tmp_path / "whole", cfg)
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    (killed / "checkpoints/step-00000006.pt").unlink()
    shutil.rmtree(killed / "model")
    again = run(killed, cfg)  # from step 5 on, in the middle
    assert again == whole and mined(killed) == mined(tmp_path / "whole")
    states = [
        torch.load(folder / "checkpoints/step-00000006.pt", weights_only=True)["encoder"]
        for folder in (tmp_path / "whole", killed)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    (killed / "checkpoints/step-00000006.pt").unlink()
    monkeypatch.setattr("sparton.datasets.lookup.Records.example", _first_negatives)
    assert run(killed, cfg) != whole, "other negatives show"


@pytest.mark.slow
def test_minings_that_no_checkpoint_goes_on_with_are_removed(examples, tmp_path):
    cfg = config(examples, "refresh.every=1", "checkpoint_every=2", "steps=8")
    folder = tmp_path / "run"
    run(folder, cfg)
    # At step 7, the last mining, the last two checkpoints were those of steps 4 and 6.
    left = sorted(each.name[:13] for each in (folder / "negatives").iterdir())
    assert left == [f"step-0000000{step}" for step in (3, 4, 5, 6, 7)]
    whole = losses(folder)
    (folder / "checkpoints/step-00000008.pt").unlink()
    shutil.rmtree(folder / "model")
    assert run(folder, cfg) == whole, "from step 6 on, with what step 5 mined and then anew"


def _first_negatives(self, index, draw, num_negatives):
    from sparton.types import Example

    query, positive = self.judged(index)
    return Example(query, positive[0], (query,) * num_negatives)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs mine with other last bits")
def test_two_processes_train_on_what_one_mines(examples, tmp_path):
    settings = words(examples, "optimizer.lr=1e-3", "refresh.every=3")
    for folder, gpus in (("one", 1), ("two", 2)):
        command = [sys.executable, "-m", "sparton", "train", *settings, f"gpus={gpus}"]
        command.append(f"hydra.run.dir={tmp_path / folder}")
        subprocess.run(command, check=True, env=environment(), capture_output=True)
    alone, together = (losses(tmp_path / folder) for folder in ("one", "two"))
    assert together == pytest.approx(alone, rel=1e-4)
    assert len(mined(tmp_path / "two")) == 1
    assert len({*alone}) == 6, "a run that does not change says nothing"


@pytest.mark.slow
def test_lost_negatives_are_named(examples, tmp_path):
    cfg = config(examples, "refresh.every=3", "checkpoint_every=1")
    folder = tmp_path / "run"
    run(folder, cfg)
    (folder / "checkpoints/step-00000006.pt").unlink()
    for file in folder.glob("negatives/step-*/*.jsonl"):
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"examples\.jsonl is missing.*put it back, or delete"
    ):
        run(folder, cfg)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss=kl_divergence"], "the loss follows a teacher, who has not scored"),
        ([], "source quickstart is a QuickstartPairs, and negatives are mined"),
        (["refresh.every=0"], "every=0 must be at least 1"),
    ],
)
def test_what_cannot_be_mined_is_refused_before_the_run(examples, tmp_path, overrides, message):
    quickstart = ["experiment=quickstart", "debug=tiny", "evaluation=none", "refresh=negatives"]
    cfg = config(examples, *overrides) if overrides else composed(*quickstart)
    with pytest.raises(Exception, match=message):
        run(tmp_path / "run", cfg)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_rule_that_leaves_no_negative_is_named(examples, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    records = map(json.loads, examples.read_text().splitlines())
    pairs.write_text("".join(json.dumps(record[:2]) + "\n" for record in records))
    rule = ("refresh.at_start=true", "refresh.rule.share=1e-6", "refresh.rule.depth=20")
    with pytest.raises(ArgumentError) as error:
        run(tmp_path / "run", config(pairs, "loss=infonce", *rule))
    settings = "refresh.rule.share=1e-06, refresh.rule.depth=20"
    said = f"before step 1 mining left no negative to any example, under {settings}: let them"
    assert explain(error.value).startswith(said)


def test_steps_at_which_negatives_are_mined():
    assert [step for step in range(10) if Refresh(3).due(step)] == [3, 6, 9]
    assert [step for step in range(5) if Refresh(4, at_start=True).due(step)] == [0, 4]
