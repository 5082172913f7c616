"""What a training asks for before it reads its data and builds its model."""

import json
import sys

import pytest
from omegaconf import OmegaConf

from sparton.cli import entry
from sparton.cli.command_line import read_request
from sparton.cli.errors import EXPECTED_ERRORS, explain
from tests.composing import composed

pytestmark = pytest.mark.usefixtures("here")

NO_DATA = ["data=text_files", "data.files={mine: no_such_file.jsonl}", "precision=fp32"]


def refusal(*overrides: str) -> str:
    """Of a training that has no data either."""
    with pytest.raises(EXPECTED_ERRORS) as caught:
        entry.train(read_request([*NO_DATA, *overrides], "train"), ["no", "program"])
    return explain(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["backbone.name=./nowhere"], "backbone.name=./nowhere: no such folder; give"),
        (
            ["backbone=bert_base"],
            "backbone.name=google-bert/bert-base-uncased: no such folder, no such model in",
        ),
        (["init_from=/nowhere"], "init_from=/nowhere: no such folder; give"),
        (["init_from=nobody/none"], "init_from=nobody/none: no such folder, no such model in the"),
        (["backbone=bare", "head=dense"], "backbone.name has no value: set backbone.name=..."),
        (
            ["backbone=tiny", "query_encoder=separate", "query_encoder.backbone.name=../nowhere"],
            "query_encoder.backbone.name=../nowhere: no such folder; give",
        ),
    ],
)
def test_models_are_looked_for_before_a_folder_is_made(overrides, message, tmp_path, monkeypatch):
    monkeypatch.setattr("sparton.models.repository.cached_file", lambda *_, **__: None)
    assert message in refusal(*overrides)
    assert not list(tmp_path.iterdir())


def test_lengths_of_all_cells_are_compared_with_positions_before_the_first(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text('{"max_position_embeddings": 512}')
    begin = ["backbone=bare", "backbone.name=mine", "document_length=512"]
    said = "query_length=513 is more than the 512 positions of backbone.name=mine: set query_length"
    assert said in refusal(*begin, "query_length=513")
    assert said in refusal(*begin, "-m", "query_length=32,513")
    assert "no_such_file.jsonl" in refusal(*begin, "query_length=512")
    told = "document_length=600 is more than the 512 positions of init_from=mine"
    assert told in refusal("init_from=mine", "document_length=600")
    more = "backbone.config_args={max_position_embeddings: 1024}"
    assert "no_such_file.jsonl" in refusal(*begin, "query_length=513", more)


def test_loggers_are_asked_before_data_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "Weights & Biases needs the package wandb" in refusal("backbone=tiny", "logger=wandb")
    assert "no_such_file.jsonl" in refusal("backbone=tiny")


def test_other_settings_of_a_folder_are_refused_before_data_is_read(tmp_path):
    """The manifest tells them; where it cannot, data that is missing is told first."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    overrides = [*NO_DATA, "backbone=tiny", "steps=8"]
    config = OmegaConf.to_container(composed(*overrides, "batch=64"), resolve=True)
    (run / "manifest.json").write_text(json.dumps({"config": config}))
    asked = ["backbone=tiny", "steps=8", f"hydra.run.dir={run}"]
    missing = "no_such_file.jsonl"
    assert missing in refusal(*asked, "batch=32")
    (run / "checkpoints/step-00000004.pt").touch()
    told = refusal(*asked, "batch=32")
    assert "holds the checkpoints of a run with other settings or data: batch=32 (was 64)" in told
    told = refusal(*asked, "batch=64", "averaging=ema")
    assert "averaging.decay=0.999 (was absent). Give" in told and "averaging=" not in told
    assert missing in refusal(*asked, "batch=64", "log_every=3")
    (run / "manifest.json").write_text("{")
    assert missing in refusal(*asked, "batch=32")
