"""Objectives of late interaction: the numbers of sentence-transformers' losses of token vectors.

Q queries, K negatives of a query, L tokens, E width of a token's vector.
"""

import pytest
import torch
from torch import Tensor

from sparton.losses.distillation import KLDivergence, MarginMSE
from sparton.losses.objective import Objective, all_scores
from sparton.losses.ranking import InfoNCE
from sparton.representations import Representations, TokenVectors

pytest.importorskip("sentence_transformers", minversion="6.0")
peer = pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")

Q, K, LQ, E = 4, 2, 5, 8
LENGTHS = (9, 6, 11)  # tokens of the longest positive and of the longest negatives of each column
POSITIVES = (1 + K) * torch.arange(Q)


class Passing(torch.nn.Module):
    """A model of which the features are the vectors and the mask of those that take part."""

    def forward(self, features: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        return features


@pytest.fixture
def columns() -> list[dict[str, Tensor]]:
    """Queries, positives and negatives as they come there, padded column by column. Masks have
    holes; what they leave out would win, and no text is without tokens."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in (LQ, *LENGTHS):
        mask = torch.rand(Q, length, generator=generator) > 0.3
        mask[:, 0] = True
        vectors = torch.nn.functional.normalize(
            torch.randn(Q, length, E, generator=generator), dim=2
        )
        vectors = torch.where(mask[..., None], vectors, 100.0).requires_grad_()
        found.append({"token_embeddings": vectors, "attention_mask": mask})
    return found


def representations(columns: list[dict[str, Tensor]], *, packed: bool) -> list[Representations]:
    """The same as this project holds them, texts end to end and documents grouped by query: without
    the tokens that take no part, or with them and a mask."""
    sides = []
    for side in (columns[:1], columns[1:]):
        values, masks = [], []
        for query in range(Q):
            for column in side:
                mask = column["attention_mask"][query]
                kept = mask if packed else torch.ones_like(mask)
                values.append(column["token_embeddings"][query][kept])
                masks.append(mask[kept])
        lengths = torch.tensor([0, *map(len, values)])
        mask = None if packed else torch.cat(masks)
        vectors = TokenVectors(torch.cat(values), lengths.cumsum(0).int(), mask)
        sides.append(Representations(tokens=vectors))
    return sides


TEACHER = torch.tensor([[5.0, 1.0, 0.0], [4.0, 4.5, -1.0], [0.0, -2.0, 3.0], [1.0, 1.0, 1.0]])
LOSSES = {
    "infonce": (InfoNCE(), peer.MultiVectorMultipleNegativesRankingLoss, {}),
    "colder": (InfoNCE(0.25), peer.MultiVectorMultipleNegativesRankingLoss, {"scale": 4.0}),
    "margin": (MarginMSE(), peer.MultiVectorMarginMSELoss, {}),
    "kl": (KLDivergence(), peer.MultiVectorDistillKLDivLoss, {}),
    "two temperatures": (
        KLDivergence(1.0, 4.0),
        peer.MultiVectorDistillKLDivLoss,
        {"student_temperature": 1.0, "teacher_temperature": 4.0},
    ),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(columns, name, packed):
    ranking, theirs, options = LOSSES[name]
    leaves = [column["token_embeddings"] for column in columns]
    expected = theirs(Passing(), **options)(columns, TEACHER)
    value = Objective(ranking)(*representations(columns, packed=packed), 0, TEACHER).loss
    torch.testing.assert_close(value, expected)
    assert value > 0.1
    gradients = zip(torch.autograd.grad(value, leaves), torch.autograd.grad(expected, leaves))
    for (actual, right), column in zip(gradients, columns):
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(1.01 * actual, right, rtol=1e-5, atol=1e-6)
        assert not actual[~column["attention_mask"]].any()
    others = [Objective(loss)(*representations(columns, packed=packed), 0, TEACHER).loss
              for loss, *_ in LOSSES.values() if loss is not ranking]  # fmt: skip
    assert not any(torch.allclose(other, value, rtol=1e-3) for other in others)


def test_the_positive_of_a_query_is_the_first_of_its_documents():
    """Worked out by hand: one token a text, a positive that is the query and a negative that is
    half of the other one."""
    axes = torch.eye(2)
    documents = torch.stack((axes[0], axes[1] / 2, axes[1], axes[0] / 2))
    queries, documents = (
        Representations(tokens=TokenVectors(x, torch.arange(len(x) + 1).int()))
        for x in (axes, documents)
    )
    scores = all_scores(queries, documents)["tokens"]
    assert scores.tolist() == [[1.0, 0.0, 0.0, 0.5], [0.0, 0.5, 1.0, 0.0]]
    value = Objective(InfoNCE())(queries, documents, 0).loss
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(value, ((e + 2 + e.sqrt()) / e).log())


@pytest.mark.parametrize("ranking", [InfoNCE(), MarginMSE(), KLDivergence()], ids=repr)
@pytest.mark.parametrize("emptied", [0, 1])
def test_losses_survive_documents_without_tokens(columns, ranking, emptied):
    """A positive or a negative of which the skiplist leaves nothing scores 0, where the other
    library takes minus 10^9: the loss is of the size of the others, and no gradient is lost."""
    columns[1 + emptied]["attention_mask"][2] = False
    leaves = [column["token_embeddings"] for column in columns]
    for packed in (True, False):
        sides = representations(columns, packed=packed)
        scores = all_scores(*sides)["tokens"]
        empty = torch.zeros_like(scores, dtype=torch.bool)
        empty[:, POSITIVES[2] + emptied] = True
        assert torch.equal(scores == 0, empty)
        value = Objective(ranking)(*sides, 0, TEACHER).loss
        assert 0.1 < value < 100
        gradients = torch.autograd.grad(value, leaves)
        assert all(x.isfinite().all() and x.any() for x in gradients)
        assert not gradients[1 + emptied][2].any()
