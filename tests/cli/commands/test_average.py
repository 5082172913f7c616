"""``sparton average``, from the command line to the model."""

import pytest
import torch

from sparton.cli.commands.average import main
from sparton.models.backbones import tiny
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder


def test_two_models_become_one(tmp_path, capsys):
    folders = [tmp_path / "zero", tmp_path / "two"]
    for folder, value in zip(folders, (0.0, 2.0)):
        encoder = SpladeEncoder(tiny(["red fox"], hidden_size=32, layers=1), EagerHead())
        for parameter in encoder.parameters():
            parameter.data.fill_(value)
        save_encoder(encoder, folder, query_length=8, document_length=8)
    main([*map(str, folders), "--output", str(tmp_path / "one")])
    assert "one: the mean of 2 models" in capsys.readouterr().out
    for parameter in load_encoder(tmp_path / "one").parameters():
        assert torch.equal(parameter, torch.ones_like(parameter))


def test_what_cannot_work_is_said_of_what_was_typed(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        main([str(tmp_path / "missing"), "--output", str(tmp_path / "one")])
    (tmp_path / "zero").mkdir()
    with pytest.raises(ValueError, match=r"MODEL .* has fewer than two models"):
        main([str(tmp_path / "zero"), "--output", str(tmp_path / "one")])
