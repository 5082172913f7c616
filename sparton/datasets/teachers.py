"""The scores of teachers for the documents of a record: those of several made one, and what they
say of negatives.

D documents of a record, T teachers.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sparton.arguments import ArgumentError, refuse_other
from sparton.datasets.files import RecordError

Scaling = Literal["min_max", "z_score"]
Scale = Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True)
class Teachers:
    """How scores of several teachers are brought to one scale and combined, and which negatives
    they leave. The scores of a lone teacher stay as they are.

    Attributes:
        weights: of the teachers, in the order of their scores, whose mean is taken; 0 leaves a
            teacher out. None for equal ones.
        scaling: what is done to each teacher's scores for the documents of a record. "min_max"
            brings them to [0, 1], as for SPLADE-v3 (arXiv 2403.06789). "z_score" gives them the
            mean 0 and the standard deviation 1 (Montague and Aslam, CIKM 2001).
        share: a negative scores less than this share of the positive that scores least, for example
            0.95 (NV-Retriever, arXiv 2407.15831), or it is left out; None for any. Of several
            teachers, what they are combined to counts.

    Raises:
        ArgumentError: weights that are negative or all 0, another scaling, or a share that is not
            above 0 and at most 1.
    """

    weights: Sequence[float] | None = None
    scaling: Scaling = "min_max"
    share: float | None = None

    def __post_init__(self) -> None:
        check_share(teacher_share=self.share)
        refuse_other(get_args(Scaling), scaling=self.scaling)
        if self.weights is not None and not _are_weights(self.weights):
            raise ArgumentError(
                "{teacher_weights} must be finite numbers, none negative, and one above 0",
                teacher_weights=self.weights,
            )

    @classmethod
    def of(cls, settings: "Teachers | Mapping[str, Any]") -> "Teachers":
        """Teachers as they are, or made of their fields."""
        return settings if isinstance(settings, Teachers) else cls(**settings)

    def combine(self, scores: Sequence[Sequence[float]]) -> tuple[list[float], int]:
        """One score for each document, and T.

        A teacher of several that finds all documents equal adds 0 to each of them, so that the
        others' differences shrink by its share of the weights; where all do, all scores are 0.

        Args:
            scores: ``[D, T]``.

        Raises:
            RecordError: documents have scores of different numbers of teachers.
            ArgumentError: another number of weights than of teachers.
        """
        if not scores:
            return [], 1
        count = len(scores[0])
        if any(len(each) != count for each in scores):
            raise RecordError(f"some documents have {count} teacher scores and others have not")
        if count == 1:
            return [score for (score,) in scores], 1
        weights = self.weights or [1.0] * count
        if len(weights) != count:
            raise ArgumentError(
                "{teacher_weights} for the scores of {} teachers: give each one weight",
                count,
                teacher_weights=[*weights],
            )
        scale: Scale = _min_max if self.scaling == "min_max" else _z_scores
        combined = [0.0] * len(scores)
        for weight, teacher in zip(weights, zip(*scores)):
            if max(teacher) > min(teacher):
                for place, score in enumerate(scale(teacher)):
                    combined[place] += weight / sum(weights) * score
        return combined, count


def _are_weights(values: object) -> bool:
    return (
        isinstance(values, Sequence)
        and all(isinstance(each, int | float) and each >= 0 for each in values)
        and 0 < sum(values) < 1e30
    )


def check_share(**shares: float | None) -> None:
    """Refuse shares of a score that are not above 0 and at most 1; None is none.

    Raises:
        ArgumentError: names it.
    """
    for name, share in shares.items():
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            raise ArgumentError(f"{{{name}}} must lie above 0 and not above 1", **{name: share})


def share_of(score: float, share: float) -> float:
    """What every negative must stay below where a positive has this score. Of a score below 0, as
    a cross-encoder's logits can be, the share is taken off its size, so that the limit lies below
    the positive there too."""
    return score - (1 - share) * abs(score)


EQUAL_TEACHERS = Teachers()


def _min_max(scores: Sequence[float]) -> list[float]:
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) for score in scores]


def _z_scores(scores: Sequence[float]) -> list[float]:
    mean = statistics.fmean(scores)
    deviation = statistics.pstdev(scores, mean)
    return [(score - mean) / deviation for score in scores]
