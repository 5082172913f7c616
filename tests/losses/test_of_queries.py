"""What each query adds to a loss: the mean is the loss, and a query's own rows decide it."""

import pytest
import torch
from torch import Tensor

from sparton.losses import ranking
from sparton.losses.combination import WeightedSum
from sparton.losses.contract import Scored, total
from sparton.losses.distillation import KLDivergence, MarginMSE
from sparton.losses.joint import Joint
from sparton.losses.ranking import InfoNCE, RankingLoss, Triplet
from sparton.representations import Representations

Q, K = 6, 2
LOSSES = {
    "infonce": InfoNCE(0.7),
    "symmetric": InfoNCE(0.7, symmetric=True),
    "triplet": Triplet(1.0),
    "margin": MarginMSE(0.3),
    "kl": KLDivergence(2.0, 3.0),
}
LOSSES["sum"] = WeightedSum({"a": LOSSES["infonce"], "b": LOSSES["margin"]}, {"a": 1.0, "b": 0.25})
JOINT = Joint(
    LOSSES["infonce"],
    LOSSES["kl"],
    sum=LOSSES["margin"],
    weights={"sparse": 0.5, "tokens": 2.0, "sum": 0.7},
    lessons={"sparse": 0.3, "tokens": 0.7},
    temperatures={"sparse": 2.0, "tokens": 0.5, "sum": 1.5},
)


class Unknown(RankingLoss):
    """Of a user, that does not tell queries apart."""

    def __call__(self, scores: Tensor, positives: Tensor, teacher_scores: Tensor | None) -> Tensor:
        return scores.mean()


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scored(*halves: str) -> Scored:
    scores = {half: random(Q, Q * (1 + K), seed=row) for row, half in enumerate(halves)}
    nothing = Representations()
    positives = torch.arange(Q) * (1 + K)
    return Scored(nothing, nothing, scores, positives, random(Q, 1 + K, seed=9))


@pytest.mark.parametrize("entries", [1, 2**24])
@pytest.mark.parametrize("name", [*LOSSES, "joint"])
def test_the_mean_over_queries_is_the_loss(name, entries, monkeypatch):
    monkeypatch.setattr(ranking, "_ENTRIES", entries)  # rows of scores one at a time, or all
    loss = JOINT if name == "joint" else LOSSES[name]
    for halves in [("sparse", "tokens")] if name == "joint" else [("a",), ("a", "b")]:
        batch = scored(*halves)
        each = loss.by_query(batch)
        assert each.shape == (Q,)
        assert each.mean().item() == pytest.approx(total(loss.terms(batch)).item(), rel=1e-12)
        assert each.std() > 1e-3


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "symmetric"])
def test_a_query_depends_on_its_own_scores_alone(name):
    batch = scored("a")
    before = LOSSES[name].by_query(batch)
    batch.scores["a"][2] += random(Q * (1 + K), seed=5)
    changed = LOSSES[name].by_query(batch) != before
    assert changed.tolist() == [row == 2 for row in range(Q)]


def test_a_loss_that_cannot_tell_queries_apart_says_so():
    assert Unknown().by_query(scored("a")) is None
    both = WeightedSum({"a": InfoNCE(), "b": Unknown()}, {"a": 1.0, "b": 1.0})
    assert both.by_query(scored("a")) is None
    assert Joint(InfoNCE(), Unknown()).by_query(scored("sparse", "tokens")) is None


class Own(RankingLoss):
    """Of a user, whose numbers are what ``reduce`` makes of the scores."""

    def __init__(self, reduce):
        self.reduce = reduce

    def __call__(self, scores, positives, teacher_scores):
        return scores.mean()

    def of_queries(self, scores, positives, teacher_scores):
        return self.reduce(scores)


@pytest.mark.parametrize(
    "make",
    [
        lambda loss: loss,
        lambda loss: WeightedSum({"a": LOSSES["infonce"], "b": loss}, {"a": 1.0, "b": 1.0}),
        lambda loss: Joint(LOSSES["infonce"], loss),
    ],
)
def test_what_is_not_one_number_for_each_query_is_refused(make):
    batch = scored("sparse", "tokens")
    assert make(Own(lambda scores: scores.mean(1))).by_query(batch).shape == (Q,)
    for reduce, found in (
        (lambda scores: scores, rf"a tensor of shape \({Q}, {Q * (1 + K)}\)"),
        (lambda scores: scores.mean(), r"a tensor of shape \(\)"),
        (lambda scores: scores.mean().item(), r"-?0\.\d+"),
    ):
        with pytest.raises(ValueError, match=rf"Own must give one number for each of .* {found}"):
            make(Own(reduce)).by_query(batch)
