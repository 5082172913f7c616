"""``sparton embed``: all texts of the folders, once."""

import json
from pathlib import Path

import pytest

from sparton.cli.commands.embed import main
from sparton.embeddings import TextRows
from sparton.models.backbones import tiny
from sparton.models.dense import DenseEncoder
from sparton.models.folders import Lengths
from sparton.models.folders.dense import save_dense
from sparton.models.pooling import Pooling

DOCUMENTS = {"one": ["a fox", "a hen", ""], "two": ["a fox", "a cat"]}
QUERIES = {"one": ["foxes"], "two": ["hens", "foxes"]}


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file, texts in (("corpus", DOCUMENTS[name]), ("queries", QUERIES[name])):
            records = [{"_id": f"{row}", "text": text} for row, text in enumerate(texts)]
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (tmp_path / name / f"{file}.jsonl").write_text(lines)
    (tmp_path / "dense").mkdir()
    body = tiny(["a fox", "a hen", "a cat"], hidden_size=32, layers=1).bare()
    dense = DenseEncoder(body, Pooling("mean", True))
    save_dense(dense, tmp_path / "dense", Lengths(8, 8))
    return [tmp_path / "one", tmp_path / "two"]


def embed(output: Path, folders: list[Path], *more: str) -> None:
    model = ["--model", str(folders[0].parent / "dense"), "--device", "cpu"]
    lengths = ["--query-length", "8", "--document-length", "8"]
    main(["--output", str(output), *model, *lengths, *more, *map(str, folders)])


def test_every_text_of_all_folders_is_there_once(folders, tmp_path, capsys):
    embed(tmp_path / "cache", folders)
    assert "2 queries and 4 documents of width 32" in capsys.readouterr().out
    rows = TextRows(tmp_path / "cache")
    for texts in (*DOCUMENTS.values(), ["a fox", ""]):
        assert rows.documents(texts).num_sequences == len(texts)
    assert rows.queries(["hens", "foxes"]).input_ids.tolist() == [1, 0]


def test_another_cache_is_refused_with_the_flag(folders, tmp_path):
    embed(tmp_path / "cache", folders)
    with pytest.raises(ValueError, match="other settings: choose another --output, or delete it"):
        embed(tmp_path / "cache", folders, "--dtype", "float16")
    with pytest.raises(FileNotFoundError, match=r"queries\.jsonl\[\.gz\] does not exist"):
        embed(tmp_path / "other", [tmp_path])
