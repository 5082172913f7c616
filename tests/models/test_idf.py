"""The formula of inverse document frequencies, and the files that hold them."""

import json
import math

import pytest
from transformers import PreTrainedTokenizerFast

from sparton.models import idf as idf_module
from sparton.models.backbones import word_tokenizer
from sparton.models.idf import idf_of_collection, read_idf, write_idf

TEXTS = ["red fox red", "red hen", "", "unheard of", "red [SEP]", "green " * 100 + "hen"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(["red", "green", "blue", "fox", "hen"], 8)


@pytest.mark.parametrize("at_once", [1, 4, 2048])
def test_the_formula(tokenizer, monkeypatch, at_once):
    """Four texts hold a token that counts: [UNK] and [SEP] do not, and no text is cut."""
    monkeypatch.setattr(idf_module, "_TEXTS_AT_ONCE", at_once)
    counted: list[int] = []
    idf = idf_of_collection(iter(TEXTS), tokenizer, advance=counted.append)
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
    idf_of_collection(TEXTS, tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_collection_without_tokens_is_refused(tokenizer):
    with pytest.raises(ValueError, match="none of its texts holds a token"):
        idf_of_collection(["", "unheard"], tokenizer)


def test_a_file_holds_what_was_written(tokenizer, tmp_path):
    idf = idf_of_collection(TEXTS, tokenizer)
    write_idf(idf, tmp_path / "new" / "idf.json")
    assert read_idf(tmp_path / "new" / "idf.json", tokenizer) == idf


def test_sentence_transformers_reads_the_file(tokenizer, tmp_path):
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    idf = idf_of_collection(TEXTS, tokenizer)
    write_idf(idf, tmp_path / "idf.json")
    module = modules.SparseStaticEmbedding.from_json(str(tmp_path / "idf.json"), tokenizer)
    weights = dict(zip(tokenizer.get_vocab(), [0.0] * 99)) | idf
    for token, row in tokenizer.get_vocab().items():
        assert module.weight[row].item() == pytest.approx(weights[token])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1.0]", "must hold a JSON object"),
        ("{}", "must hold a JSON object"),
        ('{"red": 1, "fox": "2", "hen": null}', r"2 of 3 values .* of 'fox': '2'"),
        ('{"red": -0.5}', r"1 of 1 values .* of 'red': -0.5"),
        ('{"red": NaN}', "of 'red': nan"),
        ('{"red": true}', "of 'red': True"),
        (
            json.dumps({"red": 1.0, "##ox": 2.0, "cow": 3.0}),
            r"2 of 3 tokens are not in the vocabulary of 10 tokens, the first is '##ox'",
        ),
    ],
)
def test_files_that_are_wrong_say_where(tokenizer, tmp_path, content, message):
    (tmp_path / "idf.json").write_text(content)
    with pytest.raises(ValueError, match=r"idf\.json.*" + message):
        read_idf(tmp_path / "idf.json", tokenizer)


def test_a_file_that_is_not_there(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json: no such file; scripts/compute_"):
        read_idf(tmp_path / "nowhere.json", tokenizer)
