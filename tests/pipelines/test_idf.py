"""The formula of inverse document frequencies, and the file of them."""

import math
from contextlib import nullcontext

import pytest
from transformers import PreTrainedTokenizerFast

from sparton.models.idf import read_idf
from sparton.models.words import word_tokenizer
from sparton.pipelines import idf as idf_module
from sparton.pipelines.idf import compute_idf

TEXTS = ["red fox red", "red hen", "", "unheard of", "red [SEP]", "green " * 100 + "hen"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(["red", "green", "blue", "fox", "hen"], 8)


@pytest.mark.parametrize("at_once", [1, 4, 2048])
def test_the_formula(tokenizer, monkeypatch, at_once):
    """Four texts hold a token that counts: [UNK] and [SEP] do not, and no text is cut."""
    monkeypatch.setattr(idf_module, "_TEXTS_AT_ONCE", at_once)
    counted: list[int] = []
    monkeypatch.setattr(idf_module, "progress_bar", lambda *_: nullcontext(counted.append))
    idf = compute_idf(iter(TEXTS), tokenizer)
    df = {"red": 3, "green": 1, "fox": 1, "hen": 2}
    assert idf == pytest.approx(
        {token: math.log(1 + (4 - n + 0.5) / (n + 0.5)) for token, n in df.items()}
    )
    assert list(idf) == ["red", "green", "fox", "hen"]
    assert idf["fox"] != pytest.approx(math.log(1 + (6 - 1 + 0.5) / (1 + 0.5)), abs=1e-3)
    assert sum(counted) == len(TEXTS)


def test_the_tokenizer_is_left_as_it_was(tokenizer):
    tokenizer(["red " * 20], truncation=True, padding=True)
    before = tokenizer.backend_tokenizer.to_str()
    compute_idf(TEXTS, tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_collection_without_tokens_is_refused(tokenizer):
    with pytest.raises(ValueError, match="none of its texts holds a token"):
        compute_idf(["", "unheard"], tokenizer)


def test_a_file_holds_what_was_written(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    idf = compute_idf(TEXTS, tmp_path / "tokenizer", tmp_path / "new" / "idf.json", progress=False)
    assert read_idf(tmp_path / "new" / "idf.json", tokenizer) == idf


def test_sentence_transformers_reads_the_file(tokenizer, tmp_path):
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    idf = compute_idf(TEXTS, tokenizer, tmp_path / "idf.json")
    module = modules.SparseStaticEmbedding.from_json(str(tmp_path / "idf.json"), tokenizer)
    weights = dict(zip(tokenizer.get_vocab(), [0.0] * 99)) | idf
    for token, row in tokenizer.get_vocab().items():
        assert module.weight[row].item() == pytest.approx(weights[token])
