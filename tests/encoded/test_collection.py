"""Encoded collections are what encoding in memory gives, are read in place, and are refused where
they are damaged or of something else."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sparton.datasets.files import DataFile
from sparton.datasets.preparation import Reading
from sparton.datasets.texts import TextList, text_table
from sparton.encoded import (
    EncodedTexts,
    encode_collection,
    encoding,
    open_encoded,
    plan_encoding,
)
from sparton.encoded.identity import encoder_digest
from sparton.evaluation import load_retriever
from sparton.representations import Representations
from sparton.retrieval.encoding import encode_texts
from sparton.types import SIDES
from tests.encoded.problems import KINDS, files, make_texts, save_model

TEXTS = make_texts(50)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_model(folder / kind, kind) for kind in KINDS}


def encoded(model: Path, output: Path, **settings: object) -> EncodedTexts:
    texts = settings.pop("texts", TEXTS)
    settings = {"rows_per_shard": 16, "progress": False, "name": str(model)} | settings
    return encode_collection(*load_retriever(model), texts, output, **settings)


def assert_same(left: Representations, right: Representations, tolerance: float = 0) -> None:
    assert left.kinds == right.kinds
    for half in left.kinds:
        ours, theirs = getattr(left, half), getattr(right, half)
        torch.testing.assert_close(ours.cu_seqlens.long(), theirs.cu_seqlens.long(), rtol=0, atol=0)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=tolerance)
        if half == "sparse":
            assert torch.equal(ours.terms, theirs.terms)


@pytest.mark.parametrize(
    ("kind", "tokens", "expected"),
    [
        ("splade", 24 * 2**14, 2**14),
        ("splade", 24, 2**14),
        ("colbert", 24 * 2**14, 2**14),
        ("colbert", 24 * 1000, 1000),
    ],
)
def test_shards_are_small_and_with_vectors_of_tokens_smaller(
    kind, tokens, expected, models, monkeypatch
):
    monkeypatch.setattr(encoding, "_TOKENS", tokens)
    retriever = load_retriever(models[kind], document_length=24)
    assert plan_encoding(*retriever).rows_per_shard == expected


def test_transformers_is_imported_when_a_model_is_read():
    """Which takes a process that only starts others as long as the others."""
    code = "import sys, sparton.cli.encoding, sparton.cli.evaluation; print(*sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    modules = done.stdout.split()
    assert "sparton.encoded.identity" in modules and "transformers" not in modules


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_what_is_read_is_what_encoding_in_memory_gives(kind, side, models, tmp_path):
    found = encoded(models[kind], tmp_path / "docs", side=side)
    texts = TEXTS.take(range(50))
    whole = encode_texts(*load_retriever(models[kind]), texts.texts, side)
    read = found.representations()
    # Batches have other texts in them, which moves the last bits.
    assert_same(read, whole, 2e-3 if read.tokens is not None else 1e-5)
    parts = [
        encode_texts(*load_retriever(models[kind]), texts.texts[start : start + 16], side)
        for start in range(0, 50, 16)
    ]
    assert_same(read, Representations.concatenate(parts))
    assert [part.num_texts for part in found.shards()] == [16, 16, 16, 2]
    assert list(found.ids) == list(texts.ids) and len(found) == 50
    assert [found.ids[0], found.ids[49], found.ids[-1]] == ["0-0", "0-49", "0-49"]
    assert found.ids[3:5] == ["0-3", "0-4"]
    with pytest.raises(IndexError):
        found.ids[50]
    shifted = read.take(torch.arange(50).roll(1))
    with pytest.raises(AssertionError):
        assert_same(shifted, whole, 2e-3)


def test_one_kind_of_a_model_that_gives_both_bounded_and_in_full_precision(models, tmp_path):
    both = encoded(models["joint"], tmp_path / "both", max_terms=3, vector_dtype="float32")
    assert both.facts.settings.kinds == ("sparse", "tokens")
    read = both.representations()
    assert int(read.sparse.lengths.max()) == 3 and read.tokens.values.dtype == torch.float32
    for kind in ("sparse", "tokens"):
        one = encoded(models["joint"], tmp_path / kind, kinds=[kind])
        assert one.representations().kinds == {kind}
    assert both.entries == read.sparse.num_entries and both.tokens == len(read.tokens.values)


def test_pooled_vectors_are_another_collection(models, tmp_path):
    whole = encoded(models["colbert"], tmp_path / "whole")
    pooled = encoded(models["colbert"], tmp_path / "pooled", pool_factor=2)
    assert (whole.facts.settings.pool_factor, pooled.facts.settings.pool_factor) == (1.0, 2.0)
    assert pooled.tokens < 0.7 * whole.tokens
    assert open_encoded(tmp_path / "pooled").facts == pooled.facts
    with pytest.raises(ValueError, match=r"with pool_factor=2\.0 and not 1\.0"):
        encoded(models["colbert"], tmp_path / "pooled")


def test_parts_lie_in_their_files(models, tmp_path):
    found = encoded(models["colbert"], tmp_path / "docs")
    first = next(found.shards())
    with Path("/proc/self/maps").open() as maps:
        spans = [
            [int(end, 16) for end in line.split()[0].split("-")]
            for line in maps
            if "00000.safetensors" in line
        ]
    address = first.tokens.values.data_ptr()
    assert any(start <= address < stop for start, stop in spans)
    copied = first.tokens.values.clone().data_ptr()
    assert not any(start <= copied < stop for start, stop in spans)


def test_a_prepared_table_and_a_list_of_the_same_texts_are_the_same(models, tmp_path):
    texts = TEXTS.take(range(50))
    lines = [json.dumps({"_id": i, "text": t}) for i, t in zip(*texts, strict=True)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    file = DataFile("corpus.jsonl", tmp_path / "corpus.jsonl")
    table = text_table("corpus", [file], Reading(), str(tmp_path / "cache"))
    assert table.digest == TEXTS.digest != make_texts(50, seed=1).digest
    encoded(models["splade"], tmp_path / "list")
    encoded(models["splade"], tmp_path / "table", texts=table)
    assert files(tmp_path / "list") == files(tmp_path / "table")


def test_a_folder_of_something_else_is_not_touched(models, tmp_path):
    output = tmp_path / "docs"
    encoded(models["splade"], output)
    before = files(output)
    other = save_model(tmp_path / "other", "splade", seed=1)
    for model, settings, message in (
        (models["splade"], {"precision": "bf16"},
         "docs was encoded with precision='fp32' and not bf16: set precision='fp32' to go on"),
        (models["splade"], {"max_terms": 4, "rows_per_shard": 8},
         "max_terms=None and not 4, rows_per_shard=16 and not 8: set max_terms=None and rows_per_"),
        (models["splade"], {"side": "query"}, "side='document' and not query: set side='document'"),
        (models["colbert"], {}, r"docs was encoded by another model, \S*/splade as it was"),
        (other, {}, r"by another model, \S*/splade as it was then: choose another output$"),
        (models["splade"], {"texts": make_texts(50, seed=1)}, "docs holds 50 other texts: choose"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            encoded(model, output, **settings)
    assert files(output) == before

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"full is there and holds no encoded texts: choose"):
        encoded(models["splade"], tmp_path / "full")
    with pytest.raises(ValueError, match=r"notes.txt is there and holds no encoded texts"):
        encoded(models["splade"], tmp_path / "full" / "notes.txt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"texts": TextList([])}, "there are no texts to encode"),
        ({"texts": TextList(["a", "b"], ["x", "x"])}, "the id 'x' stands for several texts"),
        ({"rows_per_shard": 0}, "rows_per_shard=0 must be at least 1"),
        ({"precision": "fp4"}, "precision='fp4' must be fp32"),
        ({"precision": "fp8"}, "precision=fp8 needs a CUDA GPU of compute capability 8.9"),
        ({"kinds": ["tokens"]}, "SpladeEncoder gives no token vectors"),
        ({"max_terms": 0}, "max_terms=0 must be a whole number of at least 1"),
        ({"side": "documents"}, "side='documents' must be query or document"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(settings, message, models, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        encoded(models["splade"], tmp_path / "docs", **settings)
    assert not (tmp_path / "docs").exists()


def test_truncated_foreign_missing_and_changed_shards_are_named(models, tmp_path):
    output = tmp_path / "docs"
    found = encoded(models["joint"], output)
    first, second = (output / "shards" / f"0000{number}.safetensors" for number in range(2))
    content = first.read_bytes()

    def refused(message: str) -> None:
        for attempt in (
            lambda: open_encoded(output).representations(),
            lambda: encoded(models["joint"], output).representations(),
        ):
            with pytest.raises(ValueError, match=message):
                attempt()

    first.write_bytes(content[:-1])
    refused(r"00000.safetensors is damaged \(.*\): delete it and encode again, which writes it")
    first.write_bytes(content[:6])
    refused(r"00000.safetensors is damaged")
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(r"00000.safetensors is damaged \(it has another content than was written\)")
    first.write_bytes(second.read_bytes())
    refused("00000.safetensors holds other texts, or by another model or settings, than rows 0 to ")
    save_file(load_file(second), first)
    refused("00000.safetensors must hold a JSON object, not None")
    other = encoded(save_model(tmp_path / "other", "joint", 1), tmp_path / "elsewhere")
    first.write_bytes((other.folder / "shards" / first.name).read_bytes())
    refused("00000.safetensors holds other texts, or by another model or settings, than rows 0 to ")

    first.unlink()
    with pytest.raises(FileNotFoundError, match="is not complete: 1 of 4 shards are missing; the"):
        open_encoded(output)
    again = encoded(models["joint"], output)
    assert first.read_bytes() == content
    assert_same(again.representations(), found.representations())


def test_damaged_facts_and_ids_are_named(models, tmp_path):
    output = tmp_path / "docs"
    encoded(models["splade"], output)
    facts, ids = output / "encoding.json", output / "ids.arrow"
    content, names = json.loads(facts.read_text()), ids.read_bytes()
    for change, message in (
        ({"side": "both"}, "encoding.json: side is 'both', and must be query or document"),
        ({"kinds": ["tokens"]}, "kinds is .'tokens'., and must be a list of those of sparse"),
        ({"rows": 49}, "rows is 49, and must be the sum of the rows of the parts"),
        ({"rows_per_shard": 0}, "rows_per_shard is 0, and must be a whole number from 1"),
        ({"model": None}, "model is None, and must be a string"),
        ({"parts": [{"source": "x", "rows": 50, "ids": [1]}]}, "ids is .1., and must be the size"),
        ({"precision": "fp4"}, "precision is 'fp4', and must be fp32 or bf16 or fp16"),
    ):
        facts.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=message):
            open_encoded(output)
    facts.write_text(json.dumps(content))
    ids.write_bytes(names[:-8])
    with pytest.raises(ValueError, match=r"ids.arrow has .* bytes in the place of .*: delete it"):
        open_encoded(output)
    ids.write_bytes(names)
    assert len(open_encoded(output)) == 50
    with pytest.raises(FileNotFoundError, match=r"holds no encoded texts .encoding.json is mis"):
        open_encoded(tmp_path)


def test_a_model_is_known_wherever_it_lies_and_whichever_head_computes(models, tmp_path):
    found = encoded(models["splade"], tmp_path / "docs")
    copy, _ = load_retriever(save_model(tmp_path / "copy", "splade"), 5, 6)
    found.check_model(copy)
    for kind in KINDS:
        digests = [encoder_digest(load_retriever(models[kind])[0]) for _ in range(2)]
        assert digests[0] == digests[1]
    copy.head.activation = "log1p_relu"
    with pytest.raises(ValueError, match=r"was encoded by another model, .*splade as it was t"):
        found.check_model(copy)
    copy, _ = load_retriever(models["splade"])
    with torch.no_grad():
        copy.backbone.decoder.bias[3] += 1e-6
    with pytest.raises(ValueError, match="another model"):
        found.check_model(copy)


def test_the_digest_of_a_folder_is_that_of_its_texts(models, tmp_path):
    digests = [
        encoded(models["splade"], tmp_path / str(number), texts=make_texts(9, seed=number)).digest
        for number in (1, 2)
    ]
    again = encoded(models["splade"], tmp_path / "again", texts=make_texts(9, seed=1)).digest
    assert again == digests[0] != digests[1]
    assert np.unique(digests).size == 2
