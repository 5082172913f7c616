"""Late-interaction folders against PyLate, which reads and writes them too. PyLate needs an older
sentence-transformers than the other tests: it has an environment of its own."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparton.models.colbert import ColbertHead
from sparton.models.folders import encoder_lengths, load_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointEncoder, JointHead
from tests.models.late_interaction import TEXTS, TOLERANCE, make_encoder, saved, scores

pylate_models = pytest.importorskip("pylate.models")

VARIANTS = {
    "default": {},
    "biased": {"bias": True},
    "attended": {"attend_to_expansion": True},
    "not expanded": {"query_expansion": False},
    "not marked": {"query_marker": "", "document_marker": ""},
    "a word as marker": {"query_marker": "fox"},
    "other words skipped": {"skiplist": ["the", "elephant"]},
    "nothing skipped": {"skiplist": ""},
}


def scores_elsewhere(path: Path, save_to: Path | None = None, **settings: object) -> Tensor:
    model = pylate_models.ColBERT(str(path), device="cpu", **settings)
    if save_to is not None:
        model.save(str(save_to))
    queries, documents = (
        model.encode(TEXTS, is_query=is_query, convert_to_tensor=True, show_progress_bar=False)
        for is_query in (True, False)
    )
    return torch.stack([torch.stack([(q @ d.T).amax(1).sum() for d in documents]) for q in queries])


@pytest.mark.parametrize("variant", VARIANTS)
def test_pylate_gives_the_same_scores_both_ways(variant, tmp_path):
    encoder = make_encoder(**VARIANTS[variant])
    expected = scores(encoder)
    path, theirs = saved(encoder, tmp_path / "model"), tmp_path / "theirs"
    torch.testing.assert_close(scores_elsewhere(path, theirs), expected, **TOLERANCE)
    torch.testing.assert_close(scores(load_encoder(theirs)), expected, **TOLERANCE)
    assert encoder_lengths(theirs) == (9, 14)
    if variant != "default":
        assert not torch.allclose(scores(make_encoder()), expected, atol=1e-3)


def test_a_model_that_pylate_began(tmp_path):
    """From a bare encoder without markers, whose vocabulary lacks most punctuation."""
    start = saved(make_encoder(query_marker="", document_marker=""), tmp_path / "start")
    for file in ("modules.json", "config_sentence_transformers.json"):
        (start / file).unlink()
    torch.manual_seed(0)
    words = ["cat", "elephant", "!"]
    settings = {"query_length": 9, "document_length": 14, "skiplist_words": words}
    expected = scores_elsewhere(start, tmp_path / "theirs", **settings)
    encoder = load_encoder(tmp_path / "theirs")
    assert encoder.head.width == 128 and encoder.head.query_marker == "[Q] "
    torch.testing.assert_close(scores(encoder), expected, **TOLERANCE)
    again = saved(encoder, tmp_path / "again")
    torch.testing.assert_close(scores_elsewhere(again), expected, **TOLERANCE)


def test_the_half_of_a_joint_folder(tmp_path):
    from sparton.models.backbones import tiny

    torch.manual_seed(0)
    backbone = tiny(TEXTS, hidden_size=32, layers=1, max_length=20)
    encoder = JointEncoder(backbone, JointHead(EagerHead(), ColbertHead(8)))
    path = saved(encoder, tmp_path / "model")
    actual = scores_elsewhere(path / "colbert")
    torch.testing.assert_close(actual, scores(encoder), **TOLERANCE)
