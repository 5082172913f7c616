"""A fused MultiVectorEncoder and the fused MaxSim of its losses, against sentence-transformers."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

peer = pytest.importorskip("sentence_transformers", minversion="6.0")

from sentence_transformers.multi_vector_encoder import losses, scoring  # noqa: E402
from sentence_transformers.multi_vector_encoder.evaluation import (  # noqa: E402
    MultiVectorInformationRetrievalEvaluator,
)

from sparton.integrations import sentence_transformers as ours  # noqa: E402
from sparton.integrations.sentence_transformers import fuse, fuse_scores  # noqa: E402
from tests.integrations.theirs import (  # noqa: E402
    TEXTS,
    TOKENS,
    colbert,
    examples,
    files,
    gradients,
    train,
)

TIGHT = {"rtol": 1e-5, "atol": 1e-5}
Q, K, LQ, LD, E = 3, 2, 4, 6, 8
EXPANSIONS: dict[str, Any] = {
    "none": {},
    "attended": {"query_expansion": {"strategy": "fixed", "attend": True, "length": 12}},
    "not attended": {"query_expansion": {"strategy": "fixed", "attend": False, "length": 12}},
    "at least": {"query_expansion": {"strategy": "min", "attend": False, "length": 5}},
}


def vectors(model: Any, side: str) -> list[Tensor]:
    encode = getattr(model, f"encode_{side}")
    return [torch.as_tensor(x) for x in encode(TEXTS, batch_size=4)]


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_token_vectors_and_gradients_are_the_same(checkpoint, expansion):
    model = colbert(checkpoint(), **EXPANSIONS[expansion])
    sides = ("query", "document")
    expected = [vectors(model, side) for side in sides]
    stock = [model.preprocess(TEXTS, task=side) | {"task": side} for side in sides]
    wanted = gradients(model, stock, TOKENS)
    fuse(model)
    found = [vectors(model, side) for side in sides]
    for side in range(2):
        assert [len(x) for x in found[side]] == [len(x) for x in expected[side]]
        torch.testing.assert_close(torch.cat(found[side]), torch.cat(expected[side]), **TIGHT)
    fused = [model.preprocess(TEXTS, task=side) | {"task": side} for side in sides]
    assert ("cu_seq_lens_q" in fused[0]) == (expansion == "none")
    assert "cu_seq_lens_q" in fused[1]
    actual = gradients(model, fused, TOKENS)
    for name, gradient in wanted.items():
        scale = max(float(gradient.abs().max()), 1)
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-5 * scale)
    other = gradients(model, fused[:1], TOKENS)
    assert not all(torch.allclose(other[n], wanted[n], atol=1e-3) for n in other)


def contrastive(model: Any, cached: bool = False, **options: Any) -> torch.nn.Module:
    if cached:
        kind = losses.CachedMultiVectorMultipleNegativesRankingLoss
        return kind(model, mini_batch_size=4, score_mini_batch_size=3, **options)
    return losses.MultiVectorMultipleNegativesRankingLoss(model, **options)


# Columns, scores of a teacher, and the loss.
LOSSES = {
    "in-batch negatives": (2, 0, contrastive),
    "hard negatives": (4, 0, contrastive),
    "in parts": (3, 0, functools.partial(contrastive, mini_batch_size=5, score_mini_batch_size=4)),
    "cached": (3, 0, functools.partial(contrastive, cached=True)),
    "mean": (2, 0, functools.partial(contrastive, similarity_fct=scoring.mean_colbert_scores)),
    "partial": (
        2,
        0,
        lambda m: contrastive(
            m, similarity_fct=functools.partial(scoring.colbert_scores, length_normalize=True)
        ),
    ),
    "margins": (3, 2, losses.MultiVectorMarginMSELoss),
    "teacher": (4, 3, losses.MultiVectorDistillKLDivLoss),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "expansion", ["not attended", pytest.param("none", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", LOSSES)
def test_their_trainer_gives_the_same_losses(checkpoint, tmp_path, name, expansion):
    columns, labels, build = LOSSES[name]
    data, folder = examples(columns, labels), checkpoint()
    stock, fused = (colbert(folder, **EXPANSIONS[expansion]) for _ in range(2))
    expected = train(stock, build(stock), data, tmp_path / "stock")
    loss = fuse_scores(build(fuse(fused)))
    inner = getattr(loss.similarity_fct, "func", loss.similarity_fct)
    assert inner.__module__ == "sparton.integrations.sentence_transformers.scores"
    found = train(fused, loss, data, tmp_path / "fused")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    changed = colbert(folder, **EXPANSIONS[expansion])
    other = train(changed, build(changed), examples(columns, labels, seed=1), tmp_path / "other")
    assert not torch.allclose(other, expected, rtol=1e-2)


def test_saved_folders_are_the_same_bytes(checkpoint, tmp_path):
    folder = checkpoint()
    for name, change in (("stock", lambda x: x), ("fused", fuse)):
        model = change(colbert(folder, **EXPANSIONS["not attended"]))
        vectors(model, "query"), vectors(model, "document")
        model.save_pretrained(str(tmp_path / name))
    assert files(tmp_path / "fused") == files(tmp_path / "stock")


def test_the_card_names_the_same_scores(checkpoint):
    model = colbert(checkpoint())
    for build in (contrastive, losses.MultiVectorMarginMSELoss):
        expected = build(model).get_config_dict()
        assert fuse_scores(build(model)).get_config_dict() == expected


def test_evaluators_give_the_same_numbers(checkpoint):
    queries = {f"q{i}": text for i, text in enumerate(TEXTS)}
    corpus = {f"d{i}": f"{text} w7 w{20 + i}" for i, text in enumerate(TEXTS)}
    relevant = {f"q{i}": {f"d{i}"} for i in range(len(TEXTS))}
    evaluator = MultiVectorInformationRetrievalEvaluator(queries, corpus, relevant, batch_size=2)
    model = colbert(checkpoint())
    expected = evaluator(model)
    assert evaluator(fuse(model)) == pytest.approx(expected, rel=1e-6)


SHAPES = {
    "colbert_scores": ((Q, LQ, E), (Q + 1, K, LD, E)),
    "colbert_kd_scores": ((Q, LQ, E), (Q, K, LD, E)),
    "colbert_scores_pairwise": ((Q, LQ, E), (Q, LD, E)),
}
NAMES = [f"{prefix}{name}" for name in SHAPES for prefix in ("", "mean_")]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def problem(name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Token vectors of both sides, and masks with holes; one query has no tokens."""
    shapes = SHAPES[name.removeprefix("mean_")]
    sides = [torch.randn(shape, requires_grad=True) for shape in shapes]
    masks = [torch.rand(shape[:-1]) < 0.7 for shape in shapes]
    masks[0][1] = False
    masks[1][..., 0] = True
    return sides, dict(zip(("queries_mask", "documents_mask"), masks, strict=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_scores_and_gradients_are_theirs(name, dtype):
    sides, masks = problem(name)
    masks = {key: mask.to(dtype) for key, mask in masks.items()}
    theirs, mine = (getattr(module, name)(*sides, **masks) for module in (scoring, ours))
    torch.testing.assert_close(mine, theirs, **TIGHT)
    assert mine.dtype == theirs.dtype == torch.float32
    cotangent = torch.randn_like(mine)
    expected, found = (
        torch.autograd.grad((scores * cotangent).sum(), sides) for scores in (theirs, mine)
    )
    torch.testing.assert_close(found, expected, **TIGHT)
    unmasked = getattr(ours, name)(*sides)
    assert not torch.allclose(unmasked, theirs, atol=1e-3)


def test_a_document_without_tokens_scores_as_theirs(name):
    sides, masks = problem(name)
    masks["documents_mask"][1] = False
    theirs, mine = (getattr(module, name)(*sides, **masks) for module in (scoring, ours))
    torch.testing.assert_close(mine, theirs, **TIGHT)
    assert theirs.min() < -1e6


def test_without_masks_rows_of_zeros_are_padding(name):
    sides, _ = problem(name)
    queries, documents = (side.detach().clone() for side in sides)
    queries[0, -1], documents[0, ..., -2:, :] = 0, 0
    documents -= 10 * (documents != 0)  # every similarity is far from zero, and most below
    theirs, mine = (getattr(module, name)(queries, documents) for module in (scoring, ours))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(3, 3, 3), (3, 1, 4)])
def test_lists_of_texts_score_as_theirs(lengths):
    queries, documents = (
        [torch.randn(length + more, E, requires_grad=True) for length in lengths] for more in (0, 2)
    )
    sides = [*queries, *documents]
    theirs, mine = (
        module.colbert_scores_pairwise(queries, documents) for module in (scoring, ours)
    )
    torch.testing.assert_close(mine, theirs, **TIGHT)
    expected, found = (torch.autograd.grad(each.square().sum(), sides) for each in (theirs, mine))
    torch.testing.assert_close(found, expected, **TIGHT)
    arrays = [[each.detach().numpy() for each in side] for side in (queries, documents)]
    torch.testing.assert_close(ours.colbert_scores_pairwise(*arrays), theirs.detach(), **TIGHT)


def test_products_in_another_dtype(checkpoint, name):
    sides, masks = problem(name)
    expected = getattr(scoring, name)(*sides, **masks)
    found = getattr(ours, name)(*sides, **masks, dtype=torch.bfloat16)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    loss = fuse_scores(contrastive(colbert(checkpoint())), dtype=torch.bfloat16)
    assert loss.similarity_fct.keywords == {"dtype": torch.bfloat16}


def test_other_scores_are_refused_by_name(checkpoint):
    model = colbert(checkpoint())
    loss = contrastive(model, similarity_fct=scoring.xtr_scores)
    with pytest.raises(ValueError, match="scores with xtr_scores: of similarity functions the Col"):
        fuse_scores(loss)
    with pytest.raises(ValueError, match="scores with XTRScores"):
        fuse_scores(contrastive(model, similarity_fct=scoring.XTRScores(4)))
    with pytest.raises(ValueError, match="Linear has no similarity_fct"):
        fuse_scores(torch.nn.Linear(1, 1))
    assert fuse_scores(fuse_scores(contrastive(model))).similarity_fct is ours.colbert_scores
