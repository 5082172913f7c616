"""``sparton adapt``, from the command line to the model."""

import json

import pytest
from safetensors.torch import load_file

from sparton.cli.commands.adapt import main
from sparton.models.backbones import pretrained, tiny
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder

TEXTS = ["red fox", "red hen", "green fox", ""]


def run(*arguments: object) -> None:
    main([*map(str, arguments)])


@pytest.fixture
def small(tmp_path) -> list[object]:
    """Arguments of an adaptation of a small model to a small collection."""
    (tmp_path / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"_id": f"{row}", "text": text}) + "\n" for row, text in enumerate(TEXTS)
        )
    )
    encoder = SpladeEncoder(tiny(TEXTS, hidden_size=32, layers=1, max_length=32), EagerHead())
    save_encoder(encoder, tmp_path / "start", query_length=32, document_length=32)
    return [
        tmp_path, "--output", tmp_path / "adapted", "--backbone", tmp_path / "start",
        "--steps", 2, "--batch-tokens", 64, "--length", 20, "--active-terms", 3,
    ]  # fmt: skip


def test_flags_become_a_plan(small, tmp_path, capsys):
    run(*small)
    said = capsys.readouterr().out
    assert "3 texts" in said and "2/2" in said and ": 3 active terms" in said
    assert said.count("held-out loss") == 2
    assert pretrained(str(tmp_path / "adapted")).max_length == 32


def test_a_folder_without_corpus_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl"):
        run(tmp_path, "--output", tmp_path / "adapted", "--steps", 1)


def test_what_cannot_work_is_said_of_flags(tmp_path):
    with pytest.raises(ValueError, match="--frozen ignores --lr, --gradient-checkpointing: leave"):
        flags = ("--frozen", "--lr", 1e-4, "--gradient-checkpointing")
        run(tmp_path, "--output", tmp_path / "adapted", *flags)
    with pytest.raises(ValueError, match=r"--head-lr 0\.0 must be positive"):
        run(tmp_path, "--output", tmp_path / "adapted", "--head-lr", 0)
    with pytest.raises(ValueError, match=r"--warmup 2\.0 must be a share"):
        run(tmp_path, "--output", tmp_path / "adapted", "--warmup", 2)


def test_adapters_are_set_as_those_of_trainings_are(small, tmp_path, capsys):
    run(*small, "--lora", "{rank: 4, targets: [query, value]}", "--gradient-checkpointing")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("start", "adapted")
    )
    changed = {name for name, value in before.items() if not value.equal(after[name])}
    ends = ("query.weight", "value.weight", "predictions.bias")
    assert len(changed) == 3 and all(name.endswith(ends) for name in changed)
    for lora, message in (
        ("{rank: 0}", r"--lora \{'rank': 0\} has rank=0, which must be"),
        ("{ranks: 4}", r"--lora \{'ranks': 4\} has ranks, and adapters have only rank"),
        ("16", r"--lora is 16, and must be settings by their names, such as --lora \{'rank'"),
        ("{rank: 4, save: adapter}", r"--lora .* saves adapters alone, but the number of"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*small, "--output", tmp_path / "x", "--lora", lora)
    with pytest.raises(ValueError, match=r"--lora .* or give --backbone a language model"):
        run(tmp_path, "--output", tmp_path / "x", "--lora", "{rank: 4}")
    with pytest.raises(SystemExit):
        run(*small, "--lora", "{rank: 4")
    assert "--lora: '{rank: 4' is not written like" in capsys.readouterr().err
