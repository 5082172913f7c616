"""``sparton adapt``, from the command line to the model."""

import json

import pytest

from sparton.cli.commands.adapt import main
from sparton.models.backbones import pretrained, tiny
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder

TEXTS = ["red fox", "red hen", "green fox", ""]


def run(*arguments: object) -> None:
    main([*map(str, arguments)])


def test_flags_become_a_plan(tmp_path, capsys):
    (tmp_path / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"_id": f"{row}", "text": text}) + "\n" for row, text in enumerate(TEXTS)
        )
    )
    encoder = SpladeEncoder(tiny(TEXTS, hidden_size=32, layers=1, max_length=32), EagerHead())
    save_encoder(encoder, tmp_path / "start", query_length=32, document_length=32)
    run(
        tmp_path, "--output", tmp_path / "adapted", "--backbone", tmp_path / "start",
        "--steps", 2, "--batch-tokens", 64, "--length", 20, "--active-terms", 3,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "3 texts" in said and "2/2" in said and ": 3 active terms" in said
    assert said.count("held-out loss") == 2
    assert pretrained(str(tmp_path / "adapted")).max_length == 32


def test_a_folder_without_corpus_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl"):
        run(tmp_path, "--output", tmp_path / "adapted", "--steps", 1)


def test_what_cannot_work_is_said_of_flags(tmp_path):
    with pytest.raises(ValueError, match=r"--head-lr 0\.0 must be positive"):
        run(tmp_path, "--output", tmp_path / "adapted", "--head-lr", 0)
    with pytest.raises(ValueError, match=r"--warmup 2\.0 must be a share"):
        run(tmp_path, "--output", tmp_path / "adapted", "--warmup", 2)
