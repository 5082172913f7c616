"""Does a run learn anything? Its first log lines tell; nothing is computed between them.

S queries of a sample, N of their documents, K negatives of each.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparton.losses.combination import WeightedSum
from sparton.losses.contract import Loss, Scored
from sparton.losses.distillation import MarginMSE
from sparton.losses.joint import SUM, Joint
from sparton.losses.objective import all_scores
from sparton.losses.ranking import InfoNCE, RankingLoss, Triplet, own_scores
from sparton.representations import Representations

_SAMPLE = 64  # queries
_NOTHING = 1e-3  # of a ranking loss
_NO_GRADIENT = 1e-7
# By how many temperatures a positive lies above all other documents: where a softmax has nothing
# left to tell them apart by, and where models begin that learn well.
_SATURATED, _SOUND = 30.0, 5.0
_FAR = 10.0  # times that a model's margins and its teacher's may differ


class LearningWatch:
    """Looks for losses that have nothing to teach from the start, and for a teacher whose scores
    are of another size than the model's: what the first line shows and the second still does.

    Args:
        ranking: the loss of the run; of losses that are no functions of scores nothing is known.
        score_weights: of the halves in the sum of their scores, for losses that look at it.
    """

    def __init__(self, ranking: Loss, score_weights: Mapping[str, float] | None = None) -> None:
        self._ranking, self._score_weights = ranking, score_weights or {}
        self._first: frozenset[str] | None = None  # what was wrong at the first line
        self._over = False

    @torch.no_grad()
    def look(
        self,
        step: int,
        record: Mapping[str, Any],
        queries: Representations,
        documents: Representations,
        positives: Tensor,
        teacher_scores: Tensor | None = None,
    ) -> str | None:
        """A sentence for the user, or None; call it at every logging step.

        Args:
            step: how many are completed. A run that is first seen later than at its first step, as
                one that was resumed, is not judged.
            record: with the ``gradient_norm``.
            queries, documents: representations of the global batch, without a graph.
            positives: int64, the number of each query's positive among the documents.
            teacher_scores: of the global batch, where the loss follows a teacher.
        """
        if self._over or (self._first is None and step > 1):
            self._over = True
            return None
        faults = {"gradient": _no_gradient(record["gradient_norm"])}
        for place, loss, scores in self._scored(queries, documents, positives):
            own = positives[: len(scores)]
            if isinstance(loss, MarginMSE) and teacher_scores is not None:
                faults[place] = _far_from_teacher(loss, scores, own, teacher_scores[: len(scores)])
            elif isinstance(loss, InfoNCE | Triplet):
                faults[place] = _nothing_to_teach(loss, scores, own)
        found = {place: fault for place, fault in faults.items() if fault}
        if self._first is None:
            self._first = frozenset(found)
            self._over = not found
            return None
        self._over = True
        return next((fault for place, fault in found.items() if place in self._first), None)

    def _scored(
        self, queries: Representations, documents: Representations, positives: Tensor
    ) -> Iterator[tuple[str, RankingLoss, Tensor]]:
        """Every loss that is no sum of losses, with a name and the scores ``[S, N]`` that it is a
        function of."""
        count, last = min(_SAMPLE, queries.num_texts), documents.num_texts
        if count < queries.num_texts:
            last = int(positives[count])
        sample = _first(queries, count), _first(documents, last)
        scores = all_scores(*sample)
        if isinstance(self._ranking, Joint) and self._ranking.sum is not None:
            batch = Scored(*sample, scores, positives[:count], None, self._score_weights)
            scores[SUM] = batch.total_scores
        for kind, each in scores.items():
            for name, leaf in _leaves(kind, self._ranking):
                yield name, leaf, each


def _leaves(name: str, loss: Loss) -> Iterator[tuple[str, RankingLoss]]:
    if isinstance(loss, Joint):
        if loss.weights.get(name, 1.0):
            yield from _leaves(name, getattr(loss, name))
    elif isinstance(loss, WeightedSum):
        for part, own in loss.losses.items():
            if loss.weights[part]:
                yield from _leaves(f"{name}.{part}", own)
    elif isinstance(loss, RankingLoss):
        yield name, loss


def _first(reps: Representations, count: int) -> Representations:
    """The first texts."""
    tokens, dense = (half and half.slice(0, count) for half in (reps.tokens, reps.dense))
    if isinstance(reps.sparse, Tensor):
        return Representations(reps.sparse[:count].float(), tokens, dense)
    return Representations(reps.sparse and reps.sparse.slice(0, count), tokens, dense)


def _no_gradient(norm: float) -> str | None:
    if not norm <= _NO_GRADIENT:  # nor NaN, of an overflow that a loss scale expects
        return None
    return (
        f"the gradient is {norm:.1e}, so that nothing is learned: are all parameters frozen, or "
        "all representations empty?"
    )


def _far_from_teacher(
    loss: MarginMSE, scores: Tensor, positives: Tensor, teacher_scores: Tensor
) -> str | None:
    own = own_scores(scores, positives)
    ours = own[:, :1] - own[:, 1:]
    theirs = (teacher_scores[:, :1] - teacher_scores[:, 1:]).to(ours.dtype) * loss.scale
    size, wanted = (margins.square().mean().sqrt().item() for margins in (ours, theirs))
    if min(size, wanted) <= 0 or wanted / _FAR <= size <= wanted * _FAR:
        return None
    return (
        f"the margins between the model's scores are about {_round(size)} and those between its "
        f"teacher's {_round(wanted)}, so that MarginMSE is {(ours - theirs).square().mean():,.0f}: "
        f"give it scale={_round(loss.scale * size / wanted)}, by which the teacher's are multiplied"
    )


def _nothing_to_teach(loss: InfoNCE | Triplet, scores: Tensor, positives: Tensor) -> str | None:
    if scores.shape[1] == 1:
        return (
            "a query is compared with its positive alone, so that nothing is learned: give it "
            "negatives, or a batch of more queries"
        )
    value = loss(scores, positives, None).item()
    if isinstance(loss, Triplet):
        if value > _NOTHING:
            return None
        return (
            f"Triplet is {value:.1e}: all negatives are more than its margin, {loss.margin:g}, "
            "below their positives. Raise margin, or give harder negatives"
        )
    right = scores.gather(1, positives[:, None])
    others = scores.scatter(1, positives[:, None], float("-inf")).amax(1, keepdim=True)
    lead = (right - others).median().item()
    if value > _NOTHING and lead < _SATURATED * loss.temperature:
        return None
    return (
        f"half of the positives score {lead:.3g} or more above all other documents, which leaves "
        f"InfoNCE with temperature={loss.temperature:g} nothing to teach: give it temperature="
        f"{_round(max(lead / _SOUND, loss.temperature))}, or harder negatives"
    )


def _round(number: float) -> str:
    return f"{float(f'{number:.2g}'):g}"
