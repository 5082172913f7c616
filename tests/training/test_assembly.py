"""What an objective is told before the training starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from sparton.losses.ramps import LinearRamp
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, l1
from sparton.training.assembly import build_objective

ENCODER: Any = SimpleNamespace(
    kinds=("sparse",),
    regularized=("query", "document"),
    loss_weights={},
    score_weights={},
    narrower_widths=(),
)


@pytest.mark.parametrize(("steps", "said"), [(101, False), (12, True)])
def test_a_ramp_longer_than_the_run_is_said(steps, said, caplog):
    penalty = Regularizer(l1, 1.0, LinearRamp(100))
    build_objective(ENCODER, InfoNCE(), {"query": {"l1": penalty}, "document": {}}, steps)
    assert ("the query regularizer l1 reaches 11 % of its weight" in caplog.text) == said
    assert ("make it fit, with query_regularizer.l1.ramp.steps" in caplog.text) == said
    assert bool(caplog.records) == said
