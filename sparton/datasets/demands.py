"""What a training asks of its data: negatives of each query's own, and a teacher's scores."""

import logging
from collections.abc import Iterable

from sparton.arguments import ArgumentError, Instance
from sparton.datasets.lookup import Records, Source, whole_of
from sparton.datasets.mixture import Mixture

logger = logging.getLogger(__name__)


def without_negatives(data: Mixture, num_negatives: int) -> dict[str, int]:
    """By source, how many examples have no negatives of their own where some are asked for.

    Sources whose examples all have some are left out. Of sources other than
    :class:`~sparton.datasets.lookup.Records` the first example speaks for all; of those of which
    a share is held out, the whole is counted.

    Raises:
        ValueError: a source gives some negatives, but not ``num_negatives``.
    """
    lacking: dict[str, int] = {}
    for name, source in data.sources.items() if num_negatives else ():
        whole = whole_of(source)
        if isinstance(whole, Records):
            lacking[name] = whole.without_negatives
            continue
        given = len(whole.example(0, 0, num_negatives).negatives)
        if given not in (0, num_negatives):
            raise ValueError(
                f"source {name!r} does not give num_negatives={num_negatives}, but {given}"
            )
        lacking[name] = 0 if given else len(whole)
    return {name: count for name, count in lacking.items() if count}


def without_scores(data: Mixture) -> list[str]:
    """The sources that have no teacher scores."""
    return [
        name for name, source in data.sources.items() if not source.example(0, 0, 0).teacher_scores
    ]


def check(
    data: Mixture,
    num_negatives: int,
    *,
    needs_negatives: bool = False,
    needs_teacher: bool = False,
) -> None:
    """Refuse what would fail in the middle of training, and say which queries have no negatives of
    their own.

    Args:
        data: the sources.
        num_negatives: asked for.
        needs_negatives, needs_teacher: of the loss: every query has ``num_negatives`` of its own,
            and a teacher has scored all of its documents.

    Raises:
        ValueError: no source has negatives, or some example has none though the loss compares with
            them; or a source has no teacher scores though they are needed, or another scale of them
            than another source.
    """
    lacking = without_negatives(data, num_negatives)
    wholes = {name: whole_of(source) for name, source in data.sources.items()}
    shares = _shares(wholes[name] for name in lacking)
    if lacking and (needs_negatives or needs_teacher):
        _refuse(next(iter(lacking)), wholes)
    if lacking == {name: len(whole) for name, whole in wholes.items()}:
        raise ArgumentError(
            "{num_negatives}, but no source has negatives of its own: set {num_negatives:name} to "
            "0, or mine some; a training that mines does so before its first step with {at_start}"
            f"{_left_out(shares)}",
            num_negatives=num_negatives,
            at_start=True,
            **shares,
        )
    if lacking:
        logger.info(
            "queries without negatives of their own, compared with the other documents of their "
            "batch alone: %s",
            ", ".join(
                f"{count} of {len(wholes[name])} of {name}" for name, count in lacking.items()
            ),
        )
    if needs_teacher and (bare := without_scores(data)):
        raise ArgumentError(
            "the loss follows a teacher, but {} gives no teacher scores: use data that has some, "
            "as for distillation, or {loss}",
            ", ".join(bare),
            loss=Instance("InfoNCE"),
        )
    if needs_teacher:
        _refuse_two_scales(wholes)
        return
    for name, source in wholes.items():
        if isinstance(source, Records) and source.scores_pairs:
            logger.warning(
                "source %s has a score beside every pair, and the loss reads none: all pairs are "
                "taken to belong together, whatever they score",
                name,
            )


def _refuse_two_scales(sources: dict[str, Source]) -> None:
    """Scores of one teacher stay as they are, and those of several are brought to one scale."""
    teachers = {
        name: source.table.facts["teachers"]
        for name, source in sources.items()
        if isinstance(source, Records)
    }
    raw = [name for name, number in teachers.items() if number == 1]
    scaled = [name for name, number in teachers.items() if number > 1]
    if raw and scaled:
        raise ValueError(
            f"the loss follows teachers, and source {raw[0]} has raw scores of one where source "
            f"{scaled[0]} has means of {teachers[scaled[0]]}, brought to one scale: let the same "
            "teachers score both, or leave one out"
        )


def _shares(sources: Iterable[Source]) -> dict[str, float]:
    """The share of a teacher's score that has left out negatives of sources, as an argument."""
    found = [each.share for each in sources if isinstance(each, Records) and each.share is not None]
    return {"teacher_share": found[0]} if found else {}


def _left_out(shares: dict[str, float]) -> str:
    return "; {teacher_share} may have left them out, and a larger one leaves more" * bool(shares)


def _refuse(name: str, sources: dict[str, Source]) -> None:
    """Say which examples of a source have no negatives, and what can be done."""
    source = sources[name]
    shares = _shares([source])
    why = f"none of the {len(source)} examples of source {name} has any"
    if isinstance(source, Records) and source.without_negatives < len(source):
        raise ArgumentError(
            "the loss compares every query with negatives of its own, but {} of the {} records of "
            "source {} have none, the first of them {}: leave them out with {negatives} of the "
            "source and {on_error}, or take a loss that ranks the documents of the batch, {loss}"
            f"{_left_out(shares)}",
            source.without_negatives,
            len(source),
            name,
            source.table.facts["first_without_negatives"],
            negatives="required",
            on_error="skip",
            loss=Instance("InfoNCE"),
            **shares,
        )
    if isinstance(source, Records) and source.negatives == "none":
        why = f"source {name} leaves its own unused (negatives='none')"
    raise ArgumentError(
        "the loss compares every query with negatives of its own, but {}: leave this source out, "
        "mine some, or take a loss that ranks the documents of the batch, {loss}"
        f"{_left_out(shares)}",
        why,
        loss=Instance("InfoNCE"),
        **shares,
    )
