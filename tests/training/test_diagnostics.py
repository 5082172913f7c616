"""What the log says of representations, and when it warns."""

import pytest
import torch

from sparton.representations import Representations
from sparton.training.diagnostics import collapse_warning, describe_representations


def test_figures_are_counts_and_shares_of_the_batch():
    reps = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    figures = describe_representations(Representations(reps))
    assert figures["active_terms"] == pytest.approx(1.0)
    assert figures["dead_rows"] == pytest.approx(1 / 3)
    assert figures["used_terms"] == pytest.approx(0.5)
    assert figures["max_weight"] == 2.0
    assert figures["cosine"] == pytest.approx(2 * 2 / 5**0.5 / 6)


def test_one_row_has_no_pairs_to_compare():
    assert describe_representations(Representations(torch.ones(1, 3)))["cosine"] == 0.0


@pytest.mark.parametrize(
    ("reps", "message"),
    [
        (torch.zeros(4, 10), "100% of the query representations are empty"),
        (torch.eye(1, 10).expand(4, 10), r"nearly the same \(mean cosine 1.000\)"),
        (torch.rand(4, 10) + 0.1 + 9 * torch.eye(4, 10), "10 active terms of 10"),
    ],
)
def test_a_collapsed_side_is_named_with_a_remedy(reps, message):
    figures = describe_representations(Representations(reps))
    with pytest.raises(AssertionError, match=message):
        assert collapse_warning("query", figures, figures, reps.shape[1]) is None


def test_healthy_and_improving_representations_give_no_warning():
    healthy = describe_representations(Representations(torch.eye(8, 100)))
    assert collapse_warning("query", healthy, None, 100) is None
    dense = describe_representations(
        Representations(torch.rand(4, 10) + 0.1 + 9 * torch.eye(4, 10))
    )
    denser_before = dense | {"active_terms": dense["active_terms"] * 1.1}
    assert collapse_warning("query", dense, denser_before, 10) is None
    assert collapse_warning("query", dense, None, 10) is None
