"""The script that counts inverse document frequencies, from the command line to the file."""

import json
import sys
from pathlib import Path

import pytest

import compute_idf
from sparton.models.backbones import word_tokenizer
from sparton.models.idf import idf_of_collection, read_idf

TEXTS = ["red fox", "red hen", "green fox"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    word_tokenizer(["red", "green", "fox", "hen"], 16).save_pretrained(tmp_path / "tokenizer")
    for name, texts in (("one", TEXTS[:2]), ("two", TEXTS[2:])):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"_id": str(i), "text": text}) for i, text in enumerate(texts)]
        (tmp_path / name / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["compute_idf.py", *map(str, arguments)])
    compute_idf.main()


def test_several_collections_count_as_one(folder, monkeypatch, capsys):
    corpora = (folder / "one", folder / "two" / "corpus.jsonl")
    output = folder / "models" / "idf.json"
    run(monkeypatch, *corpora, "--tokenizer", folder / "tokenizer", "--output", output)
    tokenizer = word_tokenizer(["red", "green", "fox", "hen"], 16)
    assert read_idf(output, tokenizer) == idf_of_collection(TEXTS, tokenizer)
    assert read_idf(output, tokenizer) != idf_of_collection(TEXTS[:2], tokenizer)
    assert "4 of 9 tokens occur" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("corpus", "tokenizer", "message"),
    [
        ("nowhere", "tokenizer", r"nowhere/corpus\.jsonl\[\.gz\] does not exist"),
        ("one", "one", "no tokenizer in"),
    ],
)
def test_what_is_not_there_is_named(folder, monkeypatch, corpus, tokenizer, message):
    with pytest.raises(SystemExit, match=message):
        run(
            monkeypatch, folder / corpus, "--tokenizer", folder / tokenizer,
            "--output", folder / "idf.json",
        )  # fmt: skip
    assert not (folder / "idf.json").exists()
