"""The fused MaxSim under PyLate's names, by its definition and, where it is installed, by PyLate.

PyLate needs an older sentence-transformers than the other tests: it has an environment of its own.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparton.integrations import pylate as ours
from tests.models.late_interaction import make_encoder, saved

OTHERS = ["foxes over hens", "the dog and a quick cat"]
Q, K, LQ, LD, E = 3, 2, 4, 6, 8
SHAPES = {
    "contrastive_scores": ((Q, LQ, E), (Q + 1, K, LD, E)),
    "colbert_scores": ((Q, LQ, E), (Q + 2, LD, E)),
    "colbert_kd_scores": ((Q, LQ, E), (Q, K, LD, E)),
}


@pytest.fixture(params=SHAPES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def problem(name: str, sign: float = 1) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Token vectors of which all similarities have one sign, and masks with holes."""
    sides = [torch.rand(shape) for shape in SHAPES[name]]
    sides[1] *= sign
    masks = [(torch.rand(shape[:-1]) < 0.7).long() for shape in SHAPES[name]]
    return [side.requires_grad_() for side in sides], dict(
        zip(("queries_mask", "documents_mask"), masks, strict=True)
    )


def definition(name: str, sides: list[Tensor], masks: dict[str, Tensor]) -> Tensor:
    """Of documents ``[Q, C, Ld, E]``, those of each query."""
    (queries, documents), (query_mask, document_mask) = sides, masks.values()
    if name == "contrastive_scores":
        documents, document_mask = documents.flatten(0, 1), document_mask.flatten(0, 1)
    if name != "colbert_kd_scores":
        documents, document_mask = (x.expand(Q, *x.shape) for x in (documents, document_mask))
    similarities = torch.einsum("qse,qcte->qcst", queries, documents)
    best = similarities.masked_fill(document_mask[:, :, None] == 0, -torch.inf).amax(-1)
    return (best.masked_fill(best.isinf(), 0) * query_mask[:, None]).sum(-1)


def test_masks_may_be_of_numpy(name):
    sides, masks = problem(name)
    arrays = {key: mask.numpy() for key, mask in masks.items()}
    assert torch.equal(getattr(ours, name)(*sides, **arrays), getattr(ours, name)(*sides, **masks))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_are_those_of_the_definition(name, sign, dtype):
    sides, masks = problem(name, sign)
    expected = definition(name, sides, masks)
    scores = getattr(ours, name)(*sides, **{key: mask.to(dtype) for key, mask in masks.items()})
    torch.testing.assert_close(scores, expected)
    assert not torch.allclose(getattr(ours, name)(*sides), expected, atol=1e-2)
    wanted, found = (torch.autograd.grad(x.square().sum(), sides) for x in (expected, scores))
    torch.testing.assert_close(found, wanted)


def test_reranking_orders_documents_of_unequal_lengths():
    chance = np.random.default_rng(0)
    queries = [chance.standard_normal((length, E)).astype(np.float32) for length in (3, 5)]
    documents = [
        [chance.standard_normal((length, E)).astype(np.float32) for length in lengths]
        for lengths in ((2, 7, 4), (1, 6))
    ]
    ids = [["a", "b", "c"], [7, 9]]
    for convert in (lambda x: x, torch.from_numpy, np.ndarray.tolist):
        ranked = ours.rerank(
            ids, [convert(q) for q in queries], [[convert(d) for d in each] for each in documents]
        )
        for query, own, named, result in zip(queries, documents, ids, ranked, strict=True):
            scores = {name: (query @ d.T).max(1).sum() for name, d in zip(named, own, strict=True)}
            best = sorted(named, key=lambda name: -scores[name])
            assert [each["id"] for each in result] == best
            assert [each["score"] for each in result] == pytest.approx(
                [scores[name] for name in best], rel=1e-5
            )
    assert ours.rerank([[]], queries[:1], [[]]) == [[]]


def test_numbers_that_differ_are_refused():
    query, document = torch.ones(2, E), torch.ones(3, E)
    with pytest.raises(ValueError, match=r"2 queries need as many lists .* got 1 and 2"):
        ours.rerank([["a"], ["b"]], [query, query], [[document]])
    with pytest.raises(ValueError, match="a query has 1 documents and 2 ids"):
        ours.rerank([["a", "b"]], [query], [[document]])


@pytest.fixture
def peer() -> Any:
    names = ("scores", "rank", "losses", "models")
    return SimpleNamespace(**{name: pytest.importorskip(f"pylate.{name}") for name in names})


def theirs(peer: Any, name: str) -> Any:
    scores = peer.scores
    return scores.ColBERTScores() if name == "contrastive_scores" else getattr(scores, name)


def test_scores_are_pylates(peer, name):
    sides, masks = problem(name)
    expected = theirs(peer, name)(*sides, **masks)
    scores = getattr(ours, name)(*sides, **masks)
    torch.testing.assert_close(scores, expected)
    wanted, found = (torch.autograd.grad(x.square().sum(), sides) for x in (expected, scores))
    torch.testing.assert_close(found, wanted)
    sides, masks = problem(name, -1)  # where masked tokens of PyLate win with zero
    differ = theirs(peer, name)(*sides, **masks), getattr(ours, name)(*sides, **masks)
    assert not torch.allclose(*differ, atol=1e-2)


def test_pairs_are_pylates(peer):
    sides = torch.randn(Q, LQ, E), torch.randn(Q, LD, E)
    expected = peer.scores.colbert_scores_pairwise(*sides)
    torch.testing.assert_close(ours.colbert_scores_pairwise(*sides), expected)


def test_reranking_is_pylates(peer):
    queries = [torch.rand(3, E), torch.rand(5, E)]
    documents = [[torch.rand(n, E) for n in (2, 7, 4)], [torch.rand(n, E) for n in (1, 6)]]
    ids = [["a", "b", "c"], [7, 9]]
    expected = peer.rank.rerank(ids, queries, documents)
    found = ours.rerank(ids, queries, documents)
    for left, right in zip(found, expected, strict=True):
        assert [each["id"] for each in left] == [each["id"] for each in right]
        scores = [[each["score"] for each in side] for side in (left, right)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_their_losses_and_gradients_are_the_same(peer, tmp_path):
    folder = saved(make_encoder(), tmp_path / "model")
    model = peer.models.ColBERT(str(folder), device="cpu")
    texts = ["the quick brown fox", "a lazy cat hunts"]
    queries = model.tokenize(texts, is_query=True)
    documents = [model.tokenize(t, is_query=False, pad=True) for t in (texts, OTHERS)]
    teacher = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    both = {key: torch.cat([x[key] for x in documents]) for key in documents[0]}
    single = {key: value[:1] for key, value in queries.items()}
    cases = [
        ("Contrastive", {}, ours.contrastive_scores, ([queries, *documents],)),
        (
            "CachedContrastive",
            {"mini_batch_size": 1},
            ours.contrastive_scores,
            ([queries, *documents],),
        ),
        ("Distillation", {}, ours.colbert_kd_scores, ([single, both], teacher)),
    ]
    for name, settings, scores, inputs in cases:
        results = []
        for chosen in ({}, {"score_metric": scores}):
            model.zero_grad()
            loss = getattr(peer.losses, name)(model, **settings, **chosen)
            columns = [dict(features) for features in inputs[0]]
            value = loss(columns, *(inputs[1:] or (None,)))
            value.backward()
            gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
            results.append((value.detach(), gradients))
        (expected, wanted), (found, actual) = results
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
        assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3, name


def test_lists_of_tensors_are_stacked_as_pylate_stacks_them():
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        torch.rand(2, 3, 8, generator=generator),
        torch.rand(2, 4, 5, 8, generator=generator),
    )
    masks = torch.ones(2, 3), torch.ones(2, 4, 5)
    expected = ours.contrastive_scores(queries, documents, *masks)
    nested = [list(each) for each in documents]
    assert torch.equal(ours.contrastive_scores(list(queries), nested, *masks), expected)
    arrays = [each.numpy() for each in queries]
    assert torch.equal(ours.contrastive_scores(arrays, documents, *map(list, masks)), expected)
    assert torch.equal(ours.contrastive_scores(queries.tolist(), documents, *masks), expected)


def test_pairs_may_be_lists_of_unequal_lengths():
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        [torch.randn(length, 8, generator=generator, requires_grad=True) for length in lengths]
        for lengths in ((3, 1, 4), (2, 5, 3))
    )
    pairs = list(zip(queries, documents, strict=True))
    expected = torch.stack([(q @ d.T).amax(1).sum() for q, d in pairs])
    found = ours.colbert_scores_pairwise(queries, documents)
    torch.testing.assert_close(found, expected)
    sides = [*queries, *documents]
    wanted, learned = (torch.autograd.grad(x.square().sum(), sides) for x in (expected, found))
    torch.testing.assert_close(learned, wanted)
    of_equal = [torch.stack([side[0], side[0]]) for side in (queries, documents)]
    torch.testing.assert_close(ours.colbert_scores_pairwise(*of_equal), expected[[0, 0]])
