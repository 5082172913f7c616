"""Late-interaction folders against PyLate, which reads and writes them too. PyLate needs an older
sentence-transformers than the other tests: it has an environment of its own, with a transformers of
this project, newer than PyLate's version 1.6 asks for."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparton.models.assembly import build_encoder
from sparton.models.backbones import bare
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


@pytest.mark.parametrize("saving", ["merged", "adapter"])
def test_adapters_in_the_weights_and_alone(saving, tmp_path):
    pytest.importorskip("peft")
    base = saved(make_encoder(), tmp_path / "base")  # with the markers, which are new tokens
    encoders = [
        build_encoder(bare(str(base), lora=lora), ColbertHead(8))
        for lora in (None, {"rank": 4, "dtype": "fp32", "save": saving})
    ]
    plain, encoder = encoders
    encoder.projection.load_state_dict(plain.projection.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    path, expected = saved(encoder, tmp_path / "model"), scores(encoder)
    assert (path / "config.json").exists() == (saving == "merged")
    torch.testing.assert_close(scores_elsewhere(path), expected, **TOLERANCE)
    assert not torch.allclose(scores(plain), expected, atol=1e-2)
    whole, theirs = tmp_path / "whole", tmp_path / "theirs"
    saved(load_encoder(path), whole)  # makes a complete folder of adapters alone
    assert (whole / "config.json").exists()
    torch.testing.assert_close(scores_elsewhere(whole, theirs), expected, **TOLERANCE)
    torch.testing.assert_close(scores(load_encoder(theirs)), expected, **TOLERANCE)


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
