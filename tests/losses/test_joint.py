"""Halves trained together: sums, lessons, and what is refused."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sparton.kernels.maxsim import maxsim_reference
from sparton.losses.contract import Scored, Term, total
from sparton.losses.joint import Joint
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE, Triplet
from sparton.representations import Representations, TokenVectors

POSITIVES = torch.tensor([0, 2, 4])


def random_scores(*names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: (4 * torch.rand(3, 6, generator=generator)).requires_grad_() for n in names}


def scored(scores: dict[str, Tensor], **weights: float) -> Scored:
    nothing = Representations()
    return Scored(nothing, nothing, scores, POSITIVES, score_weights=weights)


def half_and_half() -> tuple[Representations, Representations]:
    generator = torch.Generator().manual_seed(1)

    def side(lengths: list[int], mask: bool) -> Representations:
        bounds = F.pad(torch.tensor(lengths).cumsum(0, dtype=torch.int32), (1, 0))
        values = torch.randn(sum(lengths), 8, generator=generator).requires_grad_()
        kept = torch.rand(sum(lengths), generator=generator) > 0.3 if mask else None
        sparse = torch.rand(len(lengths), 11, generator=generator).requires_grad_()
        return Representations(sparse, TokenVectors(values, bounds, kept))

    return side([3, 1, 4], False), side([2, 5, 1, 3, 4, 2], True)


def maxsim(queries: TokenVectors, documents: TokenVectors, mask: Tensor | None) -> Tensor:
    sides = queries.values, documents.values, queries.cu_seqlens, documents.cu_seqlens
    return maxsim_reference(*sides, queries.mask, mask)


def test_objective_scores_both_halves_and_adds_one_loss_of_each():
    queries, documents = half_and_half()
    value = Objective(InfoNCE())(queries, documents, step=0)
    sparse = queries.sparse @ documents.sparse.T
    tokens = maxsim(queries.tokens, documents.tokens, documents.tokens.mask)
    expected = [InfoNCE()(each, POSITIVES).item() for each in (sparse, tokens)]
    assert value.parts["ranking_sparse"].item() == pytest.approx(expected[0], rel=1e-5)
    assert value.parts["ranking_tokens"].item() == pytest.approx(expected[1], rel=1e-5)
    assert value.loss.item() == pytest.approx(sum(expected), rel=1e-5)
    everything = maxsim(queries.tokens, documents.tokens, None)
    assert InfoNCE()(everything, POSITIVES).item() != pytest.approx(expected[1], rel=1e-3)


def test_a_lesson_is_a_divergence_and_moves_only_the_pupil():
    scores = random_scores("sparse", "tokens")
    loss = Joint(
        InfoNCE(),
        InfoNCE(),
        weights={"sparse": 0.0, "tokens": 0.0},
        lessons={"sparse": 0.7, "tokens": 0.0},
        temperatures={"sparse": 2.0, "sum": 0.5},
    )
    terms = loss.terms(scored(scores, sparse=0.0, tokens=1.0))
    pupil = (scores["sparse"] / 2.0).softmax(1)
    teacher = (scores["tokens"] / 0.5).softmax(1)
    expected = (teacher * (teacher / pupil).log()).sum(1).mean()
    assert terms["sparse_lesson"].value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert set(terms) == {"sparse", "tokens", "sparse_lesson"}
    assert total(terms).item() == pytest.approx(0.7 * expected.item(), rel=1e-5)
    total(terms).backward()
    assert scores["sparse"].grad.abs().max() > 1e-3
    assert not scores["tokens"].grad.any()


def bge_m3(scores: dict[str, Tensor]) -> Tensor:
    """Equations 3 to 7 of arXiv 2402.03216, with other weights, and a divergence in place of the
    cross entropy: they differ by the entropy of the teacher, which has no gradient."""

    def nce(each: Tensor) -> Tensor:
        return -(each / 0.5).log_softmax(1)[range(3), POSITIVES].mean()

    inter = scores["dense"] + 0.3 * scores["sparse"] + 0.7 * scores["tokens"]
    taught = (inter / 0.5).softmax(1).detach()
    loss = nce(inter) / 8
    for half, weight in (("sparse", 0.1), ("tokens", 1.0), ("dense", 1.0)):
        learned = (scores[half] / 0.5).log_softmax(1)
        loss = loss + weight * nce(scores[half]) / 8
        loss = loss + weight * (taught * (taught.log() - learned)).sum(1).mean() / 6
    return loss


@pytest.mark.parametrize("wrong", [False, True])
def test_the_loss_of_bge_m3_and_its_gradients(wrong):
    scores = random_scores("sparse", "tokens", "dense")
    nce, share = InfoNCE(temperature=0.5), {"sparse": 0.1, "tokens": 1.0, "dense": 1.0}
    loss = Joint(
        *(nce, nce, nce, nce),
        weights={half: weight / 8 for half, weight in share.items()} | {"sum": 1 / 8},
        lessons={half: weight / 6 for half, weight in share.items()},
        temperatures=dict.fromkeys((*share, "sum"), 0.5),
    )
    assert loss.halves == {"sparse", "tokens", "dense"}
    batch = scored(scores, sparse=0.3, tokens=0.7, dense=0.9 if wrong else 1.0)
    actual = total(loss.terms(batch))
    exact = {name: each.detach().double().requires_grad_() for name, each in scores.items()}
    expected = bge_m3(exact)
    assert (actual.item() == pytest.approx(expected.item(), rel=1e-5)) != wrong
    for name, each in exact.items():
        ours, theirs = (
            torch.autograd.grad(value, leaf, retain_graph=True)[0].double()
            for value, leaf in ((actual, scores[name]), (expected, each))
        )
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-7) != wrong
    by_query = loss.by_query(batch)
    assert by_query.mean().item() == pytest.approx(actual.item(), rel=1e-5)


def test_a_dense_half_is_scored_by_dot_product():
    queries, documents = half_and_half()
    generator = torch.Generator().manual_seed(5)
    sides = [
        side._replace(
            dense=TokenVectors.of_texts(torch.randn(side.num_texts, 4, generator=generator))
        )
        for side in (queries, documents)
    ]
    for side in sides:
        side.dense.values.requires_grad_()
    loss = Joint(InfoNCE(), InfoNCE(), InfoNCE(), InfoNCE())
    weights = {"sparse": 0.5, "tokens": 0.25, "dense": 3.0}
    value = Objective(loss, score_weights=weights)(*sides, step=0)
    dense = sides[0].dense.values @ sides[1].dense.values.T
    assert value.parts["ranking_dense"].item() == pytest.approx(
        InfoNCE()(dense, POSITIVES).item(), rel=1e-5
    )
    summed = 3 * dense + 0.5 * queries.sparse @ documents.sparse.T
    summed = summed + maxsim(queries.tokens, documents.tokens, documents.tokens.mask) / 4
    expected = InfoNCE()(summed, POSITIVES)
    assert value.parts["ranking_sum"].item() == pytest.approx(expected.item(), rel=1e-5)
    value.loss.backward()
    (both,) = torch.autograd.grad(
        InfoNCE()(dense, POSITIVES) + expected, sides[1].dense.values, retain_graph=True
    )
    torch.testing.assert_close(sides[1].dense.values.grad, both, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(both, torch.autograd.grad(expected, sides[1].dense.values)[0])


def test_the_weighted_sum_of_both_halves():
    scores = random_scores("sparse", "tokens")
    loss = Joint(InfoNCE(), Triplet(), weights={"sparse": 0.5, "tokens": 2.0})
    assert (loss.needs_negatives, loss.needs_teacher) == (True, False)
    terms = loss.terms(scored(scores))
    expected = 0.5 * InfoNCE()(scores["sparse"], POSITIVES)
    expected = expected + 2.0 * Triplet()(scores["tokens"], POSITIVES)
    assert total(terms).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {"sum": 1.0}}, "weights.sum: this loss has sparse, tokens alone"),
        (
            {"weights": {"sparse": 0.0, "tokens": 0.0}, "lessons": {"sparse": 0.0}},
            "all weights of sparse, tokens are 0, and nothing would be learned",
        ),
        ({"weights": {"sparse": -1.0, "tokens": 1.0}}, "weights.sparse must be .* not negative"),
        (
            {"temperatures": 3},
            "temperatures=3: must be a mapping from some of sparse, sum",
        ),
        ({"lessons": {"dense": 1.0}}, "lessons.dense: this loss has sparse, tokens alone"),
        (
            {"temperatures": {"sparse": 1.0, "tokens": 0.0}},
            "temperatures.tokens must be .* positive",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Joint(InfoNCE(), InfoNCE(), **settings)


def test_a_missing_half_is_named():
    with pytest.raises(ValueError, match=r"no tokens: give it head=JointHead\(\.\.\.\) with"):
        Joint(InfoNCE(), InfoNCE()).terms(scored(random_scores("sparse")))


class Centred:
    """A loss of representations, which no score shows: the mean of all vectors."""

    needs_negatives = needs_teacher = False
    halves = frozenset({"sparse", "tokens"})

    def terms(self, batch: Scored) -> dict[str, Term]:
        sparse = batch.queries.sparse.mean() + batch.documents.sparse.mean()
        return {
            "sparse": Term(sparse, 2.0),
            "tokens": Term(batch.documents.tokens.values.mean(), 0.5),
        }

    def by_query(self, batch: Scored) -> None:
        return None


def test_a_loss_may_be_one_of_representations():
    queries, documents = half_and_half()
    value = Objective(Centred())(queries, documents, step=0)
    sparse = queries.sparse.mean() + documents.sparse.mean()
    tokens = documents.tokens.values.mean()
    assert value.loss.item() == pytest.approx((2 * sparse + tokens / 2).item(), rel=1e-5)
    assert value.parts["ranking_tokens"].item() == pytest.approx(tokens.item(), rel=1e-5)
    value.loss.backward()
    assert queries.sparse.grad.unique().numel() == 1
