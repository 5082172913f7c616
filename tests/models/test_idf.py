"""Files of token weights: what is refused."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from sparton.models.idf import read_idf
from sparton.models.words import word_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(["red", "green", "blue", "fox", "hen"], 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1.0]", "must hold a JSON object"),
        ("{}", "must hold a JSON object"),
        ('{"red": 1, "fox": "2", "hen": null}', r"2 of 3 values .* of 'fox': '2'"),
        ('{"red": -0.5}', r"1 of 1 values .* of 'red': -0.5"),
        ('{"red": NaN}', "is not valid JSON .NaN is no finite number"),
        ('{"red": 1e999}', "1e999 is no finite number"),
        ('{"red": 1, "fox": 1e39}', "of 'fox': 1e.39"),  # which is infinite in fp32
        (f'{{"red": 1{"0" * 400}}}', "of 'red': 1000000"),
        (f'{{"red": 1{"0" * 5000}}}', "is not valid JSON .*4300 digits"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"red": 1, "red": 2}', "'red' occurs twice in one object"),
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
    with pytest.raises(
        FileNotFoundError, match=r"nowhere\.json: no such file; `sparton idf` writes"
    ):
        read_idf(tmp_path / "nowhere.json", tokenizer)
