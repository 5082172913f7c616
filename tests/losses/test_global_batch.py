"""Sums of losses, triplets and thresholds are exact on the global batch, however it is cut."""

from itertools import chain

import pytest
import torch

from sparton.losses.combination import WeightedSum
from sparton.losses.distillation import KLDivergence, MarginMSE
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE, Triplet
from sparton.losses.regularizers import DFFlops, L0Flops, Regularizer, flops_of_sums
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import TrainBatch
from tests.training.bag_encoder import BagEncoder, gradients, random_batch
from tests.training.ranks import CPU, on_ranks

BATCH, DOCUMENTS, THRESHOLD = 8, 3, 20


def objective() -> Objective:
    losses = {"infonce": InfoNCE(), "margin": MarginMSE(), "kl": KLDivergence(2.0, 2.0)}
    losses["triplet"] = Triplet(0.1)
    weights = {"infonce": 1.0, "margin": 0.1, "kl": 0.5, "triplet": 0.3}
    l0, df = Regularizer(L0Flops(THRESHOLD), 0.5), Regularizer(DFFlops(0.4, 3.0), 0.5)
    sums = Regularizer(flops_of_sums, 0.5)
    return Objective(WeightedSum(losses, weights), {"l0": l0, "sums": sums}, {"l0": l0, "df": df})


def part(start: int, stop: int) -> TrainBatch:
    batch = random_batch(BATCH, DOCUMENTS - 1, seed=1)
    teacher = torch.randn(BATCH, DOCUMENTS, generator=torch.Generator().manual_seed(2))
    return batch._replace(teacher_scores=teacher).select(start, stop)


def plain_loss(encoder: BagEncoder, batch: TrainBatch) -> torch.Tensor:
    sides = encoder.encode(batch.queries, "query"), encoder.encode(batch.documents, "document")
    return objective()(*sides, 0, batch.teacher_scores).loss


def truth() -> torch.Tensor:
    encoder = BagEncoder()
    plain_loss(encoder, part(0, BATCH)).backward()
    return gradients(encoder)


def stepped(world: World, micro_batch: int | None) -> torch.Tensor:
    encoder, rows = BagEncoder(), BATCH // world.size
    step = ExactStep(encoder, objective(), world, Precision("fp32", CPU), micro_batch)
    step(part(world.rank * rows, (world.rank + 1) * rows), step=0)
    return gradients(encoder)


def test_the_threshold_lies_among_the_rows():
    """Otherwise the other tests would say nothing about it."""
    encoder = BagEncoder()
    for side in part(0, BATCH)[:2]:
        active = (encoder(side) > 0).sum(1)
        assert active.min() <= THRESHOLD < active.max()


@pytest.mark.parametrize("micro_batch", [None, 1, 3, 8])
def test_micro_batches_do_not_change_the_gradient(micro_batch):
    assert (stepped(World(0, 1, CPU), micro_batch) - truth()).abs().max() < 1e-6


def test_averaging_over_chunks_would_have_been_seen():
    encoder = BagEncoder()
    for start in (0, 4):
        (plain_loss(encoder, part(start, start + 4)) / 2).backward()
    assert (gradients(encoder) - truth()).abs().max() > 1e-3


def of_rank(world: World, micro_batches: list[int | None]) -> list[torch.Tensor]:
    return [stepped(world, micro_batch) for micro_batch in micro_batches]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "micro_batches"), [(2, [None, 3]), (4, [None, 1])])
def test_processes_do_not_change_the_gradient(size, micro_batches, tmp_path):
    for given in chain(*on_ranks(size, tmp_path, of_rank, micro_batches)):
        assert (given - truth()).abs().max() < 1e-6
