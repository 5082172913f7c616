"""Queries with different numbers of documents: the step is exact on the global batch as well."""

import math

import pytest
import torch
from torch import Tensor

from sparton.losses.distillation import MarginMSE
from sparton.losses.objective import Objective
from sparton.losses.ranking import Triplet
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep, StepOutput
from sparton.types import TrainBatch
from tests.training.bag_encoder import BagEncoder, gradients, objective, random_batch
from tests.training.batches import uneven_batch
from tests.training.ranks import CPU, on_ranks

COUNTS = [1, 4, 4, 1, 1, 1, 1, 4]  # of the first half of the queries more than of the second
SPARSE, BOTH = ("sparse",), ("sparse", "tokens")


def batch() -> TrainBatch:
    return uneven_batch(COUNTS, seed=1)


def truth(kinds: tuple[str, ...], positives: list[int] | None = None) -> tuple[float, torch.Tensor]:
    """Loss and gradient by plain autograd, the cross entropy written out query by query.

    Args:
        positives: the documents that are taken for those of the queries.
    """
    encoder = BagEncoder(kinds=kinds)
    queries = encoder.encode(batch().queries, "query")
    documents = encoder.encode(batch().documents, "document")
    positives = positives or [sum(COUNTS[:row]) for row in range(len(COUNTS))]
    halves = [queries.sparse @ documents.sparse.T]
    if "tokens" in kinds:
        halves.append(plain_maxsim(queries.tokens, documents.tokens))
    loss = sum(
        (scores[row].logsumexp(0) - scores[row, positive]) / len(COUNTS)
        for scores in halves
        for row, positive in enumerate(positives)
    )
    loss = (
        loss + 0.01 * queries.sparse.sum(1).mean() + 0.1 * documents.sparse.mean(0).square().sum()
    )
    if "tokens" in kinds:
        loss = (
            loss + 0.01 * torch.cat([queries.losses["square"], documents.losses["square"]]).mean()
        )
    loss.backward()
    return loss.item(), gradients(encoder)


def plain_maxsim(queries, documents) -> torch.Tensor:
    rows = []
    for a, b in zip(queries.cu_seqlens[:-1].tolist(), queries.cu_seqlens[1:].tolist()):
        row = []
        for c, d in zip(documents.cu_seqlens[:-1].tolist(), documents.cu_seqlens[1:].tolist()):
            kept = documents.values[c:d][documents.mask[c:d]]
            products = queries.values[a:b] @ kept.T
            row.append(products.amax(1).sum() if kept.numel() else queries.values.new_zeros(()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def stepped(
    world: World, micro_batch: int | None, kinds: tuple[str, ...], given: TrainBatch | None = None
) -> tuple[StepOutput, torch.Tensor]:
    encoder, rows = BagEncoder(kinds=kinds), len(COUNTS) // world.size
    step = ExactStep(encoder, objective(kinds), world, Precision("fp32", CPU), micro_batch)
    own = (given or batch()).select(world.rank * rows, (world.rank + 1) * rows)
    return step(own, step=0), gradients(encoder)


@pytest.mark.parametrize("kinds", [SPARSE, BOTH])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_the_gradient_is_that_of_queries_looked_at_one_by_one(micro_batch, kinds):
    loss, expected = truth(kinds)
    output, found = stepped(World(0, 1, CPU), micro_batch, kinds)
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    assert (found - expected).abs().max() < 5e-6
    assert output.positives.tolist() == [sum(COUNTS[:row]) for row in range(len(COUNTS))]


def test_other_positives_would_have_been_seen():
    """Negative control: those of queries that all have as many documents, and those one further."""
    expected = truth(SPARSE)[1]
    size = sum(COUNTS) // len(COUNTS)
    for wrong in ([size * row for row in range(len(COUNTS))], [1, 2, 6, 10, 11, 12, 13, 14]):
        assert (truth(SPARSE, wrong)[1] - expected).abs().max() > 1e-3


def test_counts_that_are_all_alike_change_no_bit():
    plain = random_batch(8, 2, seed=1)
    counted = uneven_batch([3] * 8, seed=1)
    assert torch.equal(plain.documents.input_ids, counted.documents.input_ids)
    for micro_batch in (None, 3):
        (output, found), (other, same) = (
            stepped(World(0, 1, CPU), micro_batch, BOTH, given) for given in (plain, counted)
        )
        assert torch.equal(found, same) and torch.equal(output.loss, other.loss)
    assert output.sources is None and other.sources is not None


def test_the_losses_of_queries_make_up_the_ranking_loss():
    for kinds in (SPARSE, BOTH):
        output, _ = stepped(World(0, 1, CPU), 3, kinds)
        assert output.by_query.shape == (8,)
        assert output.by_query.mean().item() == pytest.approx(output.parts["ranking"].item())
        assert output.by_query.std() > 0.01 and not output.by_query.requires_grad


@pytest.mark.parametrize("loss", [Triplet(), MarginMSE()])
def test_losses_of_own_negatives_refuse_queries_without(loss):
    step = ExactStep(BagEncoder(), Objective(loss), World(0, 1, CPU), Precision("fp32", CPU))
    with pytest.raises(ValueError, match=f"{type(loss).__name__} compares every query with negati"):
        step(batch(), step=0)


def test_ranks_with_different_numbers_of_documents_decide_alike(monkeypatch):
    """Whether zeros are kept: the rank with more documents must not differ from the other."""
    step = ExactStep(BagEncoder(), objective(SPARSE), World(0, 2, CPU), Precision("fp32", CPU))
    width, most = 40, max(COUNTS)
    for limit, kept in ((2 * 4 * most * width, True), (2 * 4 * most * width - 1, False)):
        monkeypatch.setattr("sparton.training.step.DENSE_ENTRIES", limit)
        for rank in (0, 1):
            own = batch().select(4 * rank, 4 * rank + 4)
            sides = step.encoder.encode_both(own.queries, own.documents, None)
            assert sides[1].num_texts == (10, 7)[rank] and own.most_documents == most
            assert step._keep_zeros(sides, (4, own.most_documents)) == kept


def of_rank(world: World) -> list[tuple[Tensor, ...]]:
    """Of every case the loss, its gradient, and what is said of the queries."""
    results = []
    for one_machine, micro_batch, kinds in CASES:
        own = World(world.rank, world.size, CPU, one_machine)
        output, found = stepped(own, micro_batch, kinds)
        results.append((output.loss, found, output.sources, output.by_query, output.positives))
    return results


CASES = [
    (one_machine, micro_batch, kinds)
    for one_machine, micro_batch in ((True, None), (False, None), (True, 3))
    for kinds in (SPARSE, BOTH)
]


@pytest.mark.slow
def test_the_number_of_processes_does_not_change_the_gradient(tmp_path):
    """Dense, sparse and with micro-batches; ranks have 10 and 7 documents."""
    for results in on_ranks(2, tmp_path, of_rank):
        for (_, micro_batch, kinds), given in zip(CASES, results, strict=True):
            loss, expected = truth(kinds)
            alone, _ = stepped(World(0, 1, CPU), micro_batch, kinds)
            found_loss, found, sources, by_query, positives = given
            assert math.isclose(found_loss.item(), loss, rel_tol=1e-6)
            assert (found - expected).abs().max() < 5e-6
            assert torch.equal(sources, alone.sources) and torch.equal(positives, alone.positives)
            assert torch.allclose(by_query, alone.by_query, atol=1e-6)
