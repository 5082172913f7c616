"""What a late-interaction folder does not say is what PyLate takes for granted, which wrote it."""

import json
import string

import pytest
import torch

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.folders import load_encoder
from tests.models.late_interaction import LENGTHS, make_encoder, saved, scores

CONFIG = "config_sentence_transformers.json"
DEFAULTS = {
    "query_prefix": ("query_marker", "[Q] "),
    "document_prefix": ("document_marker", "[D] "),
    "do_query_expansion": ("query_expansion", True),
    "attend_to_expansion_tokens": ("attend_to_expansion", False),
    "skiplist_words": ("skiplist", list(string.punctuation)),
}


@pytest.mark.parametrize("silent", [*[[key] for key in DEFAULTS], [*DEFAULTS]], ids=" ".join)
def test_settings_that_are_not_there(silent, tmp_path):
    """sentence-transformers knows other defaults: no markers and no expansion."""
    encoder = make_encoder()
    file = saved(encoder, tmp_path / "model") / CONFIG
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: config[key] for key in config if key not in silent}))
    again = load_encoder(tmp_path / "model")
    for key in silent:
        name, value = DEFAULTS[key]
        assert getattr(again.head, name) == value
    assert torch.equal(scores(again), scores(encoder))


@pytest.mark.parametrize("markers", [("", ""), ("[QUERY] ", "[DOC] ")])
def test_empty_markers_are_none_and_not_the_usual_ones(markers, tmp_path):
    """A marker is the second token and takes the place of one of the text."""
    encoder = make_encoder(query_marker=markers[0], document_marker=markers[1])
    again = load_encoder(saved(encoder, tmp_path / "model"))
    config = json.loads((tmp_path / "model" / CONFIG).read_text())
    assert (config["query_prefix"], config["document_prefix"]) == markers
    assert (again.head.query_marker, again.head.document_marker) == markers
    tokenizer = PackedTokenizer(again.tokenizer, **LENGTHS, markup=again.markup)
    text = "a lazy dog hunts a cat over and over and over and over again"
    sides = tokenizer.queries([text]), tokenizer.documents([text])
    for batch, marker, length in zip(sides, markers, LENGTHS.values(), strict=True):
        words = again.tokenizer.convert_ids_to_tokens(batch.input_ids.tolist())
        opening = ["[CLS]", *([marker] if marker else [])]
        assert words[: len(opening)] == opening
        own = again.tokenizer.tokenize(text)[: length - 1 - len(opening)]
        assert words[len(opening) :] == [*own, "[SEP]"]
        assert len(words) == length
