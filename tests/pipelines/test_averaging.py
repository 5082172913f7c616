"""Means of saved models against float64, and what has no mean."""

from pathlib import Path

import pytest
import torch

from sparton.arguments import ArgumentError
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.encoder import Encoder
from sparton.models.folders import encoder_lengths, load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.origin import Origin
from sparton.models.splade import SpladeEncoder
from sparton.pipelines import average_models

TEXTS = ["red fox", "green hen"]


def splade(seed: int, hidden: int = 32, head: EagerHead | None = None) -> SpladeEncoder:
    backbone = tiny(TEXTS, hidden_size=hidden, layers=1, max_length=32)
    return moved(SpladeEncoder(backbone, head or EagerHead()), seed)


def moved(encoder: Encoder, seed: int) -> Encoder:
    generator = torch.Generator().manual_seed(seed)
    for parameter in encoder.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator)
    return encoder


def saved(folder: Path, encoder: Encoder, document_length: int = 16) -> Path:
    save_encoder(encoder, folder, query_length=8, document_length=document_length)
    return folder


def test_every_weight_is_the_mean(tmp_path):
    models = [splade(seed) for seed in range(3)]
    models[0].origin = Origin("base", "mit", ("squad",))
    models[1].origin = models[2].origin = Origin("base", "cc-by-nc-4.0", ("acl",))
    folders = [saved(tmp_path / f"{row}", model) for row, model in enumerate(models)]
    average_models(folders, tmp_path / "mean")
    found = load_encoder(tmp_path / "mean")
    weights = [dict(model.named_parameters()) for model in models]
    for name, weight in found.named_parameters():
        parts = torch.stack([each[name].detach().double() for each in weights])
        torch.testing.assert_close(weight.double(), parts.mean(0), rtol=1e-6, atol=1e-6)
        assert not torch.allclose(weight.double(), parts[:2].mean(0), atol=1e-3), name
    assert encoder_lengths(tmp_path / "mean") == (8, 16)
    assert found.origin == Origin("base", None, ("squad", "acl"))


def test_token_vectors_have_a_mean_too(tmp_path):
    backbone = tiny(TEXTS, hidden_size=32, layers=1, max_length=32)
    models = [moved(ColbertEncoder(backbone, ColbertHead(8)), seed) for seed in range(2)]
    weights = []
    for row, model in enumerate(models):
        moved(model, 5 + row)
        weights.append(model.projection.weight.detach().clone())
        saved(tmp_path / f"{row}", model)
    average_models([tmp_path / "0", tmp_path / "1"], tmp_path / "mean")
    mean = load_encoder(tmp_path / "mean").projection.weight
    torch.testing.assert_close(mean, (weights[0] + weights[1]) / 2)


def test_nothing_that_exists_is_replaced(tmp_path):
    with pytest.raises(ArgumentError, match=r"output=.*there exists: remove it"):
        there = tmp_path / "there"
        there.mkdir()
        average_models([tmp_path / "a", tmp_path / "b"], there)
    assert not list(there.iterdir())


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: splade(1, hidden=64), r"hidden_size 64, and .*one has 32"),
        (lambda: splade(1, head=EagerHead("sum")), r"head\.pooling sum, and .*one has max"),
        (
            lambda: splade(1, head=EagerHead(token_topk=3)),
            r"head\.token_topk 3, and .*has None",
        ),
        (lambda: ColbertEncoder(splade(1).backbone, ColbertHead(8)), "kind ColbertEncoder"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path, other, why):
    folders = saved(tmp_path / "one", splade(0)), saved(tmp_path / "other", other())
    with pytest.raises(ValueError, match=rf"other has .*{why}"):
        average_models(folders, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_halves_that_count_for_more_are_refused(tmp_path):
    backbone = tiny(TEXTS, hidden_size=32, layers=1, max_length=32)
    folders = [
        saved(tmp_path / str(weight), JointEncoder(backbone, joint_head(weight)))
        for weight in (1.0, 0.5)
    ]
    with pytest.raises(ValueError, match=r"score_weights\.sparse"):
        average_models(folders, tmp_path / "mean")


def joint_head(weight: float) -> JointHead:
    return JointHead(
        sparse=EagerHead(), tokens=ColbertHead(8), score_weights={"sparse": weight, "tokens": 1.0}
    )


def test_other_lengths_words_and_prompts_are_refused(tmp_path):
    first = saved(tmp_path / "one", splade(0))
    longer = saved(tmp_path / "longer", splade(1), document_length=20)
    with pytest.raises(ValueError, match=r"longer has lengths\.document 20, and .* has 16"):
        average_models([first, longer], tmp_path / "mean")
    words = tiny(["red fox", "green cow"], hidden_size=32, layers=1, max_length=32)
    words = saved(tmp_path / "words", SpladeEncoder(words, EagerHead()))
    with pytest.raises(ValueError, match="words has document tokenizer"):
        average_models([first, words], tmp_path / "mean")
    prompted = splade(0)
    prompted.markup = replace_prompt(prompted)
    prompted = saved(tmp_path / "prompted", prompted)
    with pytest.raises(ValueError, match=r"prompted has markup\.query_prompt red "):
        average_models([first, prompted], tmp_path / "mean")
    with pytest.raises(ValueError, match=r"has fewer than two models"):
        average_models([first], tmp_path / "mean")


def test_other_foldings_are_refused(tmp_path):
    folders = []
    for name in ("red", "hen"):
        (tmp_path / f"{name}.json").write_text(f'{{"fox": "{name}"}}')
        head = EagerHead(folding=tmp_path / f"{name}.json")
        folders.append(saved(tmp_path / name, splade(len(folders), head=head)))
    average_models([folders[0], folders[0]], tmp_path / "mean")
    with pytest.raises(ValueError, match=r"hen has head\.fold\.columns"):
        average_models(folders, tmp_path / "other")


def replace_prompt(encoder: Encoder):
    return encoder.markup._replace(query_prompt="red ")
