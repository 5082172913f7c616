"""``sparton idf``, from the command line to the file."""

import json
from pathlib import Path

import pytest

from sparton.cli.commands.idf import main
from sparton.models.idf import read_idf
from sparton.models.words import word_tokenizer
from sparton.pipelines.idf import compute_idf

TEXTS = ["red fox", "red hen", "green fox"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    word_tokenizer(["red", "green", "fox", "hen"], 16).save_pretrained(tmp_path / "tokenizer")
    for name, texts in (("one", TEXTS[:2]), ("two", TEXTS[2:])):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"_id": str(i), "text": text}) for i, text in enumerate(texts)]
        (tmp_path / name / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(*arguments: object) -> None:
    main([*map(str, arguments)])


def test_several_collections_count_as_one(folder, capsys):
    corpora = (folder / "one", folder / "two" / "corpus.jsonl")
    output = folder / "models" / "idf.json"
    run(*corpora, "--tokenizer", folder / "tokenizer", "--output", output)
    tokenizer = word_tokenizer(["red", "green", "fox", "hen"], 16)
    assert read_idf(output, tokenizer) == compute_idf(TEXTS, tokenizer)
    assert read_idf(output, tokenizer) != compute_idf(TEXTS[:2], tokenizer)
    assert "4 of 9 tokens occur" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("corpus", "tokenizer", "message"),
    [
        ("nowhere", "tokenizer", r"nowhere/corpus\.jsonl\[\.gz\] does not exist"),
        ("one", "one", "no tokenizer in"),
    ],
)
def test_what_is_not_there_is_named(folder, corpus, tokenizer, message):
    output = folder / "idf.json"
    with pytest.raises(FileNotFoundError, match=message):
        run(folder / corpus, "--tokenizer", folder / tokenizer, "--output", output)
    assert not output.exists()


def test_a_file_that_is_there_is_kept(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("precious")
    with pytest.raises(FileExistsError, match="kept exists: remove it, or name another"):
        main([str(tmp_path), "--tokenizer", "none", "--output", str(kept)])
    assert kept.read_text() == "precious"
