"""What the log says of representations, and when it warns."""

import pytest
import torch

from sparton.representations import Representations, TokenVectors
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
    with pytest.raises(AssertionError, match=message):
        assert warning("query", Representations(reps)) is None


def warning(side: str, reps: Representations) -> str | None:
    """At a logging step after one with the same figures."""
    figures = describe_representations(reps)
    return collapse_warning(side, reps, figures, figures)


def test_the_remedy_is_one_that_the_model_has():
    alike, dead = torch.eye(1, 10).expand(4, 10), torch.zeros(4, 10)
    losses = {"reconstruction_k": torch.ones(4)}
    splade = [warning("document", Representations(reps)) for reps in (alike, dead)]
    csr = [warning("document", Representations(reps, losses=losses)) for reps in (alike, dead)]
    assert "MLM head" in splade[0] and "regularizer" in splade[1]
    assert "or raise head.reconstruction_weight" in csr[0]
    assert csr[1].endswith("are empty: lower the learning rate")
    assert not any(word in said for said in csr for word in ("MLM", "logit_scale", "regularizer"))
    half = Representations(torch.rand(4, 10) + 0.1 + 9 * torch.eye(4, 10), losses=losses)
    assert warning("document", half) is None, "so many latents were asked for"


def test_vectors_of_texts_are_not_called_vectors_of_tokens():
    values = torch.ones(4, 8)
    pooled, tokens = (
        warning("query", Representations(tokens=TokenVectors(values, torch.tensor(bounds))))
        for bounds in ([0, 1, 2, 3, 4], [0, 3, 4])
    )
    assert pooled.startswith("the query vectors are nearly the same")
    assert tokens.startswith("the vectors of all query tokens are nearly the same")


def test_healthy_and_improving_representations_give_no_warning():
    reps = Representations(torch.eye(8, 100))
    assert collapse_warning("query", reps, describe_representations(reps), None) is None
    reps = Representations(torch.rand(4, 10) + 0.1 + 9 * torch.eye(4, 10))
    dense = describe_representations(reps)
    denser_before = dense | {"active_terms": dense["active_terms"] * 1.1}
    assert collapse_warning("query", reps, dense, denser_before) is None
    assert collapse_warning("query", reps, dense, None) is None
    assert "do not get fewer" in collapse_warning("query", reps, dense, dense)
    assert collapse_warning("query", reps, dense, dense, rising=True) is None


def test_dense_vectors_beside_others_that_are_all_alike_are_named():
    apart = torch.eye(4, 8)
    alike = apart / 10 + 1
    for values, cosine in ((apart, 0.0), (alike, None)):
        reps = Representations(torch.eye(4, 100), dense=TokenVectors.of_texts(values))
        figures = describe_representations(reps)
        if cosine is None:
            unit = alike.double() / alike.double().norm(dim=1, keepdim=True)
            cosine = ((unit @ unit.T).sum().item() - 4) / 12
        assert figures["dense_cosine"] == pytest.approx(cosine, abs=1e-6)
        said = collapse_warning("query", reps, figures, None)
        assert (said is not None) == (values is alike)
    assert "the dense query vectors are nearly the same" in said
