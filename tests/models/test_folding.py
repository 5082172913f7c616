"""Which terms count as one, the largest of their weights, and where gradients go."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparton.models.folding import Folding, fold_case, read_folding, same_folding, write_folding
from sparton.models.words import word_tokenizer

WORDS = [
    "Paris",
    "paris",
    "PARIS",
    "Rome",
    "ROME",
    "##Ing",
    "##ing",
    "\u00c9t\u00e9",
    "\u00e9t\u00e9",
]
COLUMNS = torch.tensor([0, 0, 2, 2, 2, -1, 6])


def reference(reps, columns):
    """Term by term."""
    folded = torch.zeros_like(reps)
    for target in range(len(columns)):
        own = (columns == target).nonzero().flatten()
        if len(own):
            folded[:, target] = reps[:, own].max(1).values
    return folded


def test_weights_by_hand():
    reps = torch.tensor([[1.0, 3, 5, 2, 4, 9, 7], [2, 0, 0, 0, 0, 1, 0]], requires_grad=True)
    folded = Folding(COLUMNS)(reps)
    assert folded.tolist() == [[3, 0, 5, 0, 0, 0, 7], [2, 0, 0, 0, 0, 0, 0]]
    (gradient,) = torch.autograd.grad(folded, reps, torch.arange(1.0, 15).view(2, 7))
    # Those that won, and of the zeros that are equal the first.
    assert gradient.tolist() == [[0, 1, 3, 0, 0, 0, 7], [8, 0, 10, 0, 0, 0, 14]]


def test_gradients_are_finite_differences():
    generator = torch.Generator().manual_seed(0)
    reps = torch.rand(4, 40, generator=generator, dtype=torch.float64, requires_grad=True)
    columns = torch.arange(40) // 5 * 5
    columns[35:] = torch.arange(35, 40)
    columns[7] = -1
    folding = Folding(columns)
    assert torch.equal(folding(reps), reference(reps, columns))
    assert not torch.equal(folding(reps), reference(reps, columns.roll(1)))
    assert torch.autograd.gradcheck(folding, reps)


def test_nan_is_not_lost():
    reps = torch.tensor([[1.0, float("nan"), 0, 0, 0, 0, 0]])
    assert Folding(COLUMNS)(reps)[0, 0].isnan()


@pytest.mark.parametrize("columns", [[1, 2, 2], [1, -1, 2]])
def test_chains_are_refused(columns):
    with pytest.raises(ValueError, match="folded into term 1, which is folded or left out itself"):
        Folding(torch.tensor(columns))


@pytest.mark.parametrize("end", ["Rome", None])
def test_chains_in_a_file_are_refused_by_their_terms(end, tmp_path):
    tokenizer = word_tokenizer(WORDS, 20)
    file = tmp_path / "fold.json"
    file.write_text(json.dumps({"Paris": "paris", "paris": end}))
    with pytest.raises(ValueError, match="'Paris' is folded into 'paris', which is folded or left"):
        read_folding(file, tokenizer, len(tokenizer))
    file.write_text(json.dumps({"Paris": "Rome", "paris": "Rome", "Rome": "Rome"}))
    vocabulary = tokenizer.get_vocab()
    columns = read_folding(file, tokenizer, len(tokenizer)).columns
    assert columns[vocabulary["Paris"]] == columns[vocabulary["paris"]] == vocabulary["Rome"]


def test_terms_that_do_not_exist_are_refused():
    for columns in ([0, 3, 2], [0, -2, 2]):
        with pytest.raises(ValueError, match="others than the 3 of the vocabulary"):
            Folding(torch.tensor(columns))


def names(tokenizer, columns):
    rows = range(len(tokenizer))
    return {
        tokenizer.convert_ids_to_tokens(row): tokenizer.convert_ids_to_tokens(int(columns[row]))
        for row in rows
        if columns[row] != row
    }


def test_case_of_words():
    tokenizer = word_tokenizer(WORDS, 20)
    columns = fold_case(tokenizer, len(tokenizer) + 3)
    assert names(tokenizer, columns) == {
        "Paris": "paris",
        "PARIS": "paris",
        "ROME": "Rome",  # there is none in lower case
        "##Ing": "##ing",
        "\u00c9t\u00e9": "\u00e9t\u00e9",
    }
    assert columns[-3:].tolist() == [14, 15, 16]  # rows without a token


def test_case_of_bytes():
    """In this alphabet the letters of a byte-level vocabulary stand for bytes: lower-casing them
    would fold one letter into another, and parts of letters."""
    terms = [
        "\u0120Paris",
        "\u0120paris",
        "paris",
        "Paris",
        "\u00c3\u012b",
        "\u00c3\u00a9",
        "\u00c3",
        "\u00e3",
    ]
    assert terms[4].encode() != terms[5].encode() and "\u00c3".lower() == "\u00e3"
    backend = Tokenizer(models.BPE({term: row for row, term in enumerate(terms)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert backend.decode([4]) == "\u00c9" and backend.decode([5]) == "\u00e9"
    assert names(tokenizer, fold_case(tokenizer, len(terms))) == {
        "\u0120Paris": "\u0120paris",
        "Paris": "paris",
        "\u00c3\u012b": "\u00c3\u00a9",
    }


def test_files_of_terms(tmp_path):
    tokenizer = word_tokenizer(WORDS, 20)
    path = tmp_path / "terms.json"
    path.write_text(json.dumps({"PARIS": "paris", "[SEP]": None}))
    folding = read_folding(path, tokenizer, 20)
    assert names(tokenizer, folding.columns.clamp_min(0)) == {"PARIS": "paris", "[SEP]": "[PAD]"}
    assert folding.columns[tokenizer.sep_token_id] == -1
    write_folding(folding, tmp_path)
    again = read_folding(tmp_path / "folding.safetensors", tokenizer, 20)
    assert same_folding(again, folding)
    assert not same_folding(again, read_folding("case", tokenizer, 20))
    assert not same_folding(again, None) and same_folding(None, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"London": "paris"}', "'London' is no term"),
        ('{"paris": 3}', "3 is no term"),
        ('{"paris": []}', r"\[\] is no term"),
        ('["paris"]', "JSON object"),
        ("{", "not valid JSON"),
        ('{"Paris": "PARIS", "PARIS": "paris"}', "folded or left out itself"),
    ],
)
def test_files_that_cannot_be(content, message, tmp_path):
    path = tmp_path / "terms.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"folding='{path}': .*{message}"):
        read_folding(path, word_tokenizer(WORDS, 20), 20)


def test_other_files_are_refused(tmp_path):
    tokenizer = word_tokenizer(WORDS, 20)
    with pytest.raises(FileNotFoundError, match=r"folding='lower': no such file; it is 'case'"):
        read_folding("lower", tokenizer, 20)
    write_folding(Folding(COLUMNS), tmp_path)
    path = tmp_path / "folding.safetensors"
    with pytest.raises(ValueError, match="it folds 7 terms, and the model has 20"):
        read_folding(path, tokenizer, 20)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is damaged"):
        read_folding(path, tokenizer, 20)
