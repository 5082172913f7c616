"""``sparton export``: flags to arguments, and what is said of flags that cannot be."""

from pathlib import Path

import pytest
import torch

from sparton.cli.commands.export import main
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from tests.pipelines.conftest import own_cache
from tests.pipelines.mining_problems import generate, read_records, write

__all__ = ["own_cache"]  # a fixture

DOCUMENTS = [each["positive"] for each in generate(9)]


@pytest.fixture
def beir(tmp_path) -> Path:
    for name in ("corpus", "queries"):
        records = [{"_id": f"{name}-{row}", "text": text} for row, text in enumerate(DOCUMENTS)]
        write(tmp_path / "beir" / f"{name}.jsonl", records)
    return tmp_path / "beir"


@pytest.fixture
def models(tmp_path) -> dict[str, Path]:
    for kind, head in (("splade", EagerHead()), ("colbert", ColbertHead(16))):
        torch.manual_seed(0)
        encoder = build_encoder(tiny(DOCUMENTS, hidden_size=32, layers=1), head)
        save_encoder(encoder, tmp_path / kind, query_length=16, document_length=32)
    return {kind: tmp_path / kind for kind in ("splade", "colbert")}


def export(*arguments: object) -> None:
    main([*map(str, arguments)])


def test_flags_become_arguments(models, beir, tmp_path, capsys):
    output = tmp_path / "vectors.jsonl.gz"
    flags = ["--max-terms", 3, "--quantize", 50, "--contents", "--length", 16, "--device", "cpu"]
    export(models["splade"], "--beir", beir, "--side", "query", "--output", output, *flags)
    records = read_records(output)
    assert [record["contents"] for record in records] == DOCUMENTS
    assert [record["id"] for record in records] == [f"queries-{row}" for row in range(9)]
    assert all(len(record["vector"]) <= 3 for record in records)
    assert all(type(weight) is int for each in records for weight in each["vector"].values())
    assert f"9 queries of 3.0 weights, written to {output}" in capsys.readouterr().out

    tokens, corpus = tmp_path / "vectors.safetensors", beir / "corpus.jsonl"
    arguments = ["--files", corpus, "--side", "document", "--output", tokens]
    export(models["colbert"], *arguments, "--dtype", "float32")
    assert tokens.with_suffix(".ids").read_text().splitlines()[3] == "corpus-3"
    written = tokens.read_bytes()
    with pytest.raises(ValueError, match="exists: name another --output, or replace it by --over"):
        export(models["colbert"], *arguments)
    export(models["colbert"], *arguments, "--overwrite")
    assert len(tokens.read_bytes()) < len(written), "half precision unless it is said"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--output", "x.json"],
            r"x\.json must end in \.jsonl or \.jsonl\.gz for sparse vectors, ",
        ),
        (
            ["--output", "x.jsonl", "--kind", "tokens"],
            r"--kind tokens it must end in \.safetensors",
        ),
        (["--output", "x.jsonl", "--dtype", "float32"], "sparse vectors ignores --dtype: leave"),
        (
            ["--output", "x.safetensors", "--max-terms", 3, "--quantize", 9, "--contents"],
            "token vectors ignores --max-terms, --quantize, --contents: leave",
        ),
        (["--output", "x.jsonl", "--max-terms", 0], "--max-terms 0 must be at least 1"),
        (["--output", "x.jsonl", "--quantize", -1], "--quantize -1 must be at least 1"),
        (["--output", "x.jsonl", "--length", 0], "--length 0 must be at least 1"),
        (["--output", "there.jsonl"], r"there\.jsonl exists: name another --output, or .*--overwr"),
        (["--output", "there.safetensors"], r"there\.ids exists: name another"),
        (["--output", "folder.jsonl", "--overwrite"], r"folder\.jsonl is a folder: name another"),
        (["--output", "x.jsonl", "--device", "tpu9"], "device=tpu9 cannot be used"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(more, message, tmp_path, monkeypatch, beir):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparton.pipelines.export.load_retriever", lambda *_, **__: 1 / 0)
    for name in ("there.jsonl", "there.ids"):
        Path(name).touch()
    Path("folder.jsonl").mkdir()
    Path("model").mkdir()
    with pytest.raises(ValueError, match=message):
        export("model", "--beir", beir, "--side", "document", *more)


def test_models_texts_and_sides_that_are_not_there_are_refused(models, beir, tmp_path, capsys):
    arguments = ["--side", "document", "--output", tmp_path / "x.jsonl"]
    with pytest.raises(ValueError, match="bm25 has no vectors to export: name a trained model"):
        export("bm25", "--beir", beir, *arguments)
    with pytest.raises(FileNotFoundError, match="no such folder; give a folder of"):
        export(tmp_path / "none", "--beir", beir, *arguments)
    folder = models["splade"]
    with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl.* does not exist"):
        export(folder, "--beir", tmp_path, *arguments)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file"):
        export(folder, "--files", tmp_path / "none.jsonl", *arguments)
    with pytest.raises(SystemExit):
        export(folder, "--beir", beir, "--side", "both", "--output", tmp_path / "x.jsonl")
    assert "invalid choice: 'both' (choose from" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"no token vectors: name an --output that ends in \.json"):
        export(folder, "--beir", beir, *arguments[:3], tmp_path / "x.safetensors")
    assert not (tmp_path / "cache").exists(), "nothing is converted"


def test_malformed_records_stop_or_are_skipped(models, tmp_path):
    file = write(tmp_path / "texts.jsonl", [{"id": "a", "text": "dodak"}, {"id": "b"}])
    output = tmp_path / "x.jsonl"
    arguments = [models["splade"], "--files", file, "--side", "document", "--output", output]
    with pytest.raises(ValueError, match=r"texts\.jsonl, line 2: .* set --on-error skip"):
        export(*arguments)
    export(*arguments, "--on-error", "skip")
    assert [record["id"] for record in read_records(output)] == ["a"]


def test_the_choices_are_those_of_the_library():
    """Written out in the commands, which import little."""
    from sparton.cli.commands import export
    from sparton.pipelines.vector_files import DTYPES
    from sparton.retrieval.encoding import AUTOCAST

    def choices(parser, name: str) -> tuple:
        (action,) = (each for each in parser._actions if each.dest == name)
        return tuple(action.choices)

    assert choices(export._parser(), "precision") == tuple(AUTOCAST)
    assert choices(export._parser(), "dtype") == tuple(DTYPES)
