"""An objective that fits its encoder."""

import logging
from collections.abc import Mapping

from sparton.arguments import ArgumentError, Instance
from sparton.losses.contract import Loss
from sparton.losses.objective import Objective
from sparton.losses.regularizers import Regularizer
from sparton.models.encoder import Encoder

log = logging.getLogger(__name__)


def build_objective(
    encoder: Encoder,
    loss: Loss,
    regularizers: Mapping[str, Mapping[str, Regularizer]],
    steps: int,
) -> Objective:
    """The loss, and the regularizers of the sides, ``query`` and ``document``, that have something
    to regularize. Warns of those whose weight ``steps`` steps do not complete.

    Raises:
        ValueError: a loss of several halves, and an encoder without one of them, or with another.
    """
    if missing := loss.halves - set(encoder.kinds):
        raise ArgumentError(
            "{} compares {}, but this encoder has no {}: give it {head} with such a half, or take "
            "another loss",
            type(loss).__name__,
            " and ".join(sorted(loss.halves)),
            " and ".join(sorted(missing)),
            head=Instance("JointHead"),
        )
    if loss.halves and (untrained := set(encoder.kinds) - loss.halves):
        raise ArgumentError(
            "{} has no loss for the half {}, which this encoder gives: give it one of that name, "
            "or take a head without that half",
            type(loss).__name__,
            " and ".join(sorted(untrained)),
        )
    kept = dict(regularizers)
    for side in kept:
        if kept[side] and side not in encoder.regularized:
            if "sparse" in encoder.kinds:
                log.info(
                    "no %s regularizer: training cannot make this encoder's %s representations "
                    "sparser",
                    side,
                    side,
                )
            kept[side] = {}
        for name, regularizer in kept[side].items():
            share = regularizer.ramp(steps - 1)
            if share < 0.9:
                log.warning(
                    "the %s regularizer %s reaches %.0f %% of its weight: its ramp is longer than "
                    "this run of %d steps; make it fit, with %s_regularizer.%s.ramp.steps",
                    *(side, name, 100 * share, steps, side, name),
                )
    penalties = kept["query"], kept["document"]
    return Objective(
        loss, *penalties, encoder.loss_weights, encoder.narrower_widths, encoder.score_weights
    )
