"""A run that learns nothing is told why, and a sound one nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparton.losses.combination import WeightedSum
from sparton.losses.distillation import KLDivergence, MarginMSE
from sparton.losses.joint import Joint
from sparton.losses.ranking import InfoNCE, Triplet
from sparton.representations import Representations, TokenVectors
from sparton.training.learning import LearningWatch
from tests.test_train import run_here

QUERIES = 80  # more than are looked at
RECORD = {"gradient_norm": 1.0}


def sides(lead: float, negatives: int = 0, spread: float = 1.0, tokens: bool = False):
    """Representations whose positives score ``lead`` above other documents, which differ by about
    ``spread``: one dimension for each query, and one in which all are alike."""
    generator = torch.Generator().manual_seed(1)
    queries = torch.cat([torch.eye(QUERIES), torch.ones(QUERIES, 1)], dim=1)
    own = torch.cat([lead * torch.eye(QUERIES), torch.zeros(QUERIES, 1)], dim=1)
    documents = torch.zeros(QUERIES, 1 + negatives, QUERIES + 1)
    documents[:, 0] = own
    documents[:, :, -1] = spread * torch.rand(QUERIES, 1 + negatives, generator=generator)
    documents = documents.flatten(0, 1)
    if not tokens:
        return Representations(queries), Representations(documents)
    return tuple(
        Representations(tokens=TokenVectors(side, torch.arange(len(side) + 1, dtype=torch.int32)))
        for side in (queries, documents)
    )


def said(loss, *lines, record=RECORD, first_step: int = 1) -> list[str | None]:
    watch = LearningWatch(loss)
    return [
        watch.look(
            *(first_step if number == 0 else 50 * number, record, queries, documents),
            torch.arange(queries.num_texts) * (documents.num_texts // queries.num_texts),
            *teacher,
        )
        for number, (queries, documents, *teacher) in enumerate(lines)
    ]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("negatives", [0, 2])
def test_a_softmax_with_nothing_left_to_tell_apart(tokens, negatives):
    saturated = sides(lead=55.0, negatives=negatives, tokens=tokens)
    first, second, third = said(InfoNCE(), saturated, saturated, saturated)
    assert first is None and third is None, "told once, when the second line has it as well"
    assert "half of the positives score 5" in second and "InfoNCE with temperature=1 no" in second
    assert "give it temperature=11, or harder negatives" in second
    sound = sides(lead=3.0, negatives=negatives, tokens=tokens)
    for loss, lines in (
        (InfoNCE(), [sound, sound]),
        (InfoNCE(temperature=11.0), [saturated, saturated]),
        (InfoNCE(), [saturated, sound, saturated]),
        (InfoNCE(), [sound, saturated, saturated]),  # by then, it has been learned
    ):
        assert set(said(loss, *lines)) == {None}


def test_sparse_vectors_without_their_zeros_are_judged_alike():
    saturated = tuple(side.compact() for side in sides(lead=55.0))
    assert "nothing to teach" in said(InfoNCE(), saturated, saturated)[1]
    sound = tuple(side.compact() for side in sides(lead=3.0))
    assert set(said(InfoNCE(), sound, sound)) == {None}


def test_wrong_answers_of_the_same_size_teach_and_are_not_told_of():
    queries, documents = sides(lead=55.0)
    turned = Representations(documents.sparse.roll(1, dims=0))
    assert set(said(InfoNCE(), (queries, turned), (queries, turned))) == {None}


def test_a_run_that_is_resumed_is_not_judged():
    saturated = sides(lead=55.0)
    assert set(said(InfoNCE(), saturated, saturated, first_step=51)) == {None}


def test_a_gradient_of_nothing():
    sound = sides(lead=3.0)
    warning = said(InfoNCE(), sound, sound, record={"gradient_norm": 0.0})[1]
    assert "the gradient is 0.0e+00, so that nothing is learned: are all parameters f" in warning


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_gradient_that_overflows_under_a_loss_scale_is_none_of_nothing(norm):
    sound = sides(lead=3.0)
    assert set(said(InfoNCE(), sound, sound, record={"gradient_norm": norm})) == {None}


def test_a_positive_alone():
    alone = tuple(side._replace(sparse=side.sparse[:1]) for side in sides(lead=1.0))
    assert "compared with its positive alone" in said(InfoNCE(), alone, alone)[1]


def test_a_margin_that_all_negatives_keep():
    kept = sides(lead=9.0, negatives=1)
    assert "more than its margin, 5, below their positives" in said(Triplet(), kept, kept)[1]
    assert set(said(Triplet(margin=20.0), kept, kept)) == {None}


def taught(lead: float, size: float):
    """A model with such margins, and a teacher whose margins are about ``size``."""
    generator = torch.Generator().manual_seed(2)
    scores = size * torch.rand(QUERIES, 3, generator=generator) + torch.tensor([size, 0, 0])
    return *sides(lead, negatives=2, spread=0.1), scores


@pytest.mark.parametrize(("lead", "size", "scale"), [(130.0, 5.0, "24"), (0.2, 8.0, "0.023")])
def test_a_teacher_of_another_size(lead, size, scale):
    far = taught(lead, size)
    first, second, third = said(MarginMSE(), far, far, far)
    assert first is None and third is None
    assert f"give it scale={scale}, by which the teacher's are multiplied" in second
    assert ("MarginMSE is 15," in second) == (lead > 100)
    for loss in (MarginMSE(scale=float(scale)), KLDivergence()):
        assert set(said(loss, far, far)) == {None}
    near = taught(lead, lead)
    assert set(said(MarginMSE(), far, near, near)) == {None}


def test_a_model_that_tells_nothing_apart_is_not_told_to_scale_its_teacher_by_0():
    alike = *sides(0.0, negatives=2, spread=0.0), taught(1.0, 5.0)[2]
    assert set(said(MarginMSE(), alike, alike)) == {None}


def test_losses_of_sums_and_of_halves_are_judged_each():
    far = taught(55.0, 1.0)
    both = {"a": InfoNCE(temperature=20.0), "b": MarginMSE()}
    told = said(WeightedSum(both, {"a": 1.0, "b": 0.1}), far, far)[1]
    assert "MarginMSE" in told and "InfoNCE" not in told
    sparse, tokens = sides(lead=3.0), sides(lead=55.0, tokens=True)
    halves = tuple(
        Representations(one.sparse, other.tokens) for one, other in zip(sparse, tokens, strict=True)
    )
    joint = Joint(InfoNCE(), InfoNCE())
    assert "nothing to teach" in said(joint, halves, halves)[1]
    for joint in (
        Joint(InfoNCE(), InfoNCE(temperature=20.0)),
        Joint(InfoNCE(), InfoNCE(), weights={"tokens": 0.0}),
    ):
        assert set(said(joint, halves, halves)) == {None}


def test_the_loss_of_the_sum_of_all_halves_is_judged_by_their_weighted_sum():
    sparse, tokens = sides(lead=3.0), sides(lead=6.0, tokens=True)
    halves = tuple(
        Representations(one.sparse, other.tokens) for one, other in zip(sparse, tokens, strict=True)
    )

    def told(joint: Joint, **score_weights: float) -> str | None:
        watch = LearningWatch(joint, score_weights)
        positives = torch.arange(QUERIES)
        return [watch.look(step, RECORD, *halves, positives) for step in (1, 50)][1]

    joint = Joint(InfoNCE(), InfoNCE(), sum=InfoNCE())
    assert "nothing to teach" in (told(joint, tokens=8.0) or "")
    assert told(joint) is None
    assert told(replace(joint, weights={"sum": 0.0}), tokens=8.0) is None
    assert told(Joint(InfoNCE(), InfoNCE()), tokens=8.0) is None


@pytest.mark.slow
def test_a_training_warns_once_in_its_log(tmp_path: Path, caplog):
    """The quickstart's loss begins near the logarithm of its batch; a tiny temperature leaves
    nothing but right and wrong answers, of which half must be right for the warning."""
    run_here(tmp_path / "sound", "evaluation=none", "steps=3")
    assert "nothing" not in caplog.text
    caplog.clear()
    run_here(tmp_path / "stuck", "evaluation=none", "steps=3", "loss.temperature=1e-6", "batch=2")
    assert caplog.text.count("InfoNCE with temperature=1e-06 nothing to teach") == 1


def test_queries_with_different_numbers_of_documents_are_judged_by_their_positives():
    queries, documents = sides(lead=55.0, negatives=2)
    kept = torch.arange(3 * QUERIES).view(QUERIES, 3)
    kept = torch.cat([row if number % 2 else row[:1] for number, row in enumerate(kept)])
    fewer = documents._replace(sparse=documents.sparse[kept])
    counts = 1 + 2 * (torch.arange(QUERIES) % 2)

    def told(positives: torch.Tensor) -> str | None:
        watch = LearningWatch(InfoNCE())
        return [watch.look(step, RECORD, queries, fewer, positives) for step in (1, 50)][1]

    positives = counts.cumsum(0) - counts
    assert "half of the positives score 5" in told(positives)
    assert told((positives + 1).clamp(max=len(kept) - 1)) is None, "other documents teach"
