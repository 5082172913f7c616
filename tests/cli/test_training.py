"""What a training asks for before it reads its data and builds its model."""

import sys
from pathlib import Path

import pytest
import torch

from sparton.cli.errors import EXPECTED_ERRORS, explain
from sparton.cli.training import run_training
from sparton.training.distributed import World
from tests.composing import composed

ALONE = World(0, 1, torch.device("cpu"))
NO_DATA = ["data=text_files", "data.files={mine: no_such_file.jsonl}", "precision=fp32"]


def refusal(folder: Path, *overrides: str) -> str:
    """Of a training that has no data either."""
    with pytest.raises(EXPECTED_ERRORS) as caught:
        run_training(composed(*NO_DATA, *overrides), ALONE, folder)
    return explain(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["backbone.name=./nowhere"], "backbone.name=./nowhere: no such folder; give"),
        (
            ["backbone=bert_base"],
            "backbone.name=google-bert/bert-base-uncased: no such folder, and",
        ),
        (["init_from=/nowhere"], "init_from=/nowhere: no such folder; give"),
        (["init_from=nobody/none"], "init_from=nobody/none: no such folder, and no such model on"),
        (["backbone=bare", "head=dense"], "backbone.name has no value: set backbone.name=..."),
        (
            ["backbone=tiny", "query_encoder=separate", "query_encoder.backbone.name=../nowhere"],
            "query_encoder.backbone.name=../nowhere: no such folder; give",
        ),
        (["backbone=tiny"], "no_such_file.jsonl"),
    ],
)
def test_models_are_looked_for_before_data_is_read(overrides, message, tmp_path, monkeypatch):
    monkeypatch.setattr("sparton.models.checkpoint.cached_file", lambda *_, **__: None)
    assert message in refusal(tmp_path, *overrides)
    assert not list(tmp_path.iterdir())


def test_loggers_are_asked_before_data_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = ["logger=wandb", f"logger.wandb.directory={tmp_path}"]
    assert "logger=wandb needs the package" in refusal(tmp_path, "backbone=tiny", *settings)
