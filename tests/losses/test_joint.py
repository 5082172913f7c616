"""Two halves trained together: sums, lessons, and what is refused."""

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


def scored(scores: dict[str, Tensor]) -> Scored:
    nothing = Representations()
    return Scored(nothing, nothing, scores, POSITIVES)


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
    temperatures = {"sparse": 2.0, "tokens": 0.5}
    loss = Joint(
        InfoNCE(), InfoNCE(), {"sparse": 0.0, "tokens": 0.0}, {"sparse": 0.7}, temperatures
    )
    terms = loss.terms(scored(scores))
    pupil = (scores["sparse"] / 2.0).softmax(1)
    teacher = (scores["tokens"] / 0.5).softmax(1)
    expected = (teacher * (teacher / pupil).log()).sum(1).mean()
    assert terms["sparse_lesson"].value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert set(terms) == {"sparse", "tokens", "sparse_lesson"}
    assert total(terms).item() == pytest.approx(0.7 * expected.item(), rel=1e-5)
    total(terms).backward()
    assert scores["sparse"].grad.abs().max() > 1e-3
    assert not scores["tokens"].grad.any()


def test_the_weighted_sum_of_both_halves():
    scores = random_scores("sparse", "tokens")
    loss = Joint(InfoNCE(), Triplet(), {"sparse": 0.5, "tokens": 2.0})
    assert (loss.needs_negatives, loss.needs_teacher) == (True, False)
    terms = loss.terms(scored(scores))
    expected = 0.5 * InfoNCE()(scores["sparse"], POSITIVES)
    expected = expected + 2.0 * Triplet()(scores["tokens"], POSITIVES)
    assert total(terms).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {"sparse": 1.0}}, "weights lacks tokens"),
        ({"weights": {"sparse": -1.0, "tokens": 1.0}}, "weights.sparse must be .* not negative"),
        ({"lessons": {"dense": 1.0}}, "lessons.dense: the halves are sparse and tokens"),
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
    with pytest.raises(ValueError, match=r"no tokens: give it head=JointHead\(\.\.\.\)"):
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


def test_a_loss_may_be_one_of_representations():
    queries, documents = half_and_half()
    value = Objective(Centred())(queries, documents, step=0)
    sparse = queries.sparse.mean() + documents.sparse.mean()
    tokens = documents.tokens.values.mean()
    assert value.loss.item() == pytest.approx((2 * sparse + tokens / 2).item(), rel=1e-5)
    assert value.parts["ranking_tokens"].item() == pytest.approx(tokens.item(), rel=1e-5)
    value.loss.backward()
    assert queries.sparse.grad.unique().numel() == 1
