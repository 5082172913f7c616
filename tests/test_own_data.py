"""A training on a user's own file, from the file to the end of the run."""

import csv
import json
from pathlib import Path

import pytest
from hydra.utils import instantiate

from sparton.cli.tasks import hold_out_dev
from sparton.datasets.quickstart import pairs
from sparton.training.state import CheckpointError
from tests.composing import composed
from tests.test_train import run_here

TINY = [
    "backbone=tiny", "backbone.hidden_size=32", "query_length=24", "document_length=64",
    "precision=fp32", "batch=8", "steps=4", "num_workers=0", "data=text_files",
]  # fmt: skip


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """300 pairs under names of their own."""
    path = tmp_path_factory.mktemp("own") / "mine.csv"
    source = pairs()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "frage", "antwort"])
        for number in range(300):
            writer.writerow([number, *source.example(number, 0, 0)[:2]])
    return path


def own(mine: Path, *overrides: str) -> list[str]:
    return [*TINY, f"data.files={mine}", *overrides]


def test_own_files_choose_a_dev_set_of_their_own_and_leave_experiments_theirs(mine):
    def evaluation(*overrides: str) -> str:
        cfg = composed(*overrides, "data.files=x.csv", with_hydra=True)
        return cfg.hydra.runtime.choices["evaluation"]

    assert evaluation("data=text_files") == "holdout"
    assert evaluation("data=text_files", "evaluation=none") == "none"
    assert evaluation("experiment=quickstart", "data=text_files") == "quickstart"
    assert composed(with_hydra=True).hydra.runtime.choices["evaluation"] == "small_beir"


def test_a_share_is_held_out_and_the_same_in_every_cell_of_a_sweep(mine, caplog):
    caplog.set_level("INFO")
    found = []
    for overrides in (["seed=0"], ["seed=1", "batch=4"]):
        cfg = composed(*own(mine, *overrides, "evaluation.holdout.share=0.1"))
        rest, dev = hold_out_dev(cfg, instantiate(cfg.data))
        assert len(rest) == 270
        found.append(dev["holdout"]().queries.texts)
    assert found[0] == found[1] and len(found[0]) == 30
    assert "holdout: 30 of 300 examples are the dev set and are not trained on" in caplog.text
    other = composed(*own(mine, "evaluation=quickstart"))
    rest, dev = hold_out_dev(other, instantiate(other.data))
    assert len(rest) == 300 and list(dev) == ["quickstart"]


@pytest.mark.slow
def test_a_training_on_own_files_chooses_its_model_by_the_share(mine, tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    overrides = own(mine, "checkpoint_every=2", "evaluation.every=2", "log_every=1")
    records = run_here(tmp_path, *overrides, miniature=())
    assert [record["step"] for record in records if "dev_ndcg@10" in record] == [2, 4]
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["split"], [task["name"] for task in results["tasks"]]) == ("dev", ["holdout"])
    best = max(record.get("dev_ndcg@10", 0) for record in records)
    assert results["mean"]["ndcg@10"] == pytest.approx(best)
    said = capsys.readouterr().out
    assert "dev tasks, by which this model was chosen" in said
    assert said.index("dev tasks") < said.index(f"{tmp_path}/run.png") < said.index("What to do")
    assert "evaluation=beir_folder evaluation.path=FOLDER" in said and "small_beir" not in said
    assert "frage as query, antwort as positive; not used: 'id'" in caplog.text
    assert "4 steps of 8 see each of 294 examples 0.109 times" in caplog.text
    with pytest.raises(CheckpointError, match=r"evaluation\.holdout\.share=0\.2 \(was 0\.02\)"):
        run_here(tmp_path, *overrides, "evaluation.holdout.share=0.2", miniature=())


@pytest.mark.slow
def test_a_training_that_sees_its_examples_too_often_is_asked_about(mine, tmp_path, caplog):
    run_here(tmp_path, *own(mine, "evaluation=none", "log_every=2"), "data.limit=8", miniature=())
    assert "seen" not in caplog.text
    run_here(
        tmp_path / "b", *own(mine, "evaluation=none"), "data.limit=8", "steps=60", miniature=()
    )
    assert "each example is seen 60 times: steps=3 sees each three times" in caplog.text
    assert json.loads((tmp_path / "b" / "manifest.json").read_text())
