"""Token vectors whose first components work alone. E width of a vector."""

import pytest
import torch
import torch.nn.functional as F

from sparton.kernels.maxsim import maxsim_reference
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import TrainBatch
from tests.training.bag_encoder import WIDTH, BagEncoder, random_batch
from tests.training.ranks import CPU, on_ranks

BATCH, WIDTHS = 8, (6, 3)


def part(start: int = 0, stop: int = BATCH) -> TrainBatch:
    return random_batch(BATCH, 1, seed=1).select(start, stop)


def sides(encoder: BagEncoder) -> list:
    batch = part()
    return [encoder.encode(batch.queries, "query"), encoder.encode(batch.documents, "document")]


def by_hand(encoder: BagEncoder, width: int) -> torch.Tensor:
    """Cross entropy of MaxSim in float64; only narrow vectors are given the length 1."""
    cut = []
    for side in sides(encoder):
        values = side.tokens.values.double()[:, :width]
        cut.append(values if width == WIDTH else F.normalize(values, dim=1))
    queries, documents = (side.tokens for side in sides(encoder))
    scores = maxsim_reference(
        *cut, queries.cu_seqlens, documents.cu_seqlens, queries.mask, documents.mask
    )
    return F.cross_entropy(scores, torch.arange(BATCH) * 2)


def gradient(encoder: BagEncoder) -> torch.Tensor:
    return encoder.embedding.weight.grad.flatten().clone()


def truth(widths: tuple[int, ...] = (WIDTH, *WIDTHS)) -> torch.Tensor:
    encoder = BagEncoder(kinds=("tokens",))
    sum(by_hand(encoder, width) for width in widths).backward()
    return gradient(encoder)


def stepped(world: World, micro_batch: int | None, widths: tuple[int, ...] = WIDTHS):
    encoder, rows = BagEncoder(kinds=("tokens",)), BATCH // world.size
    objective = Objective(InfoNCE(), widths=widths)
    step = ExactStep(encoder, objective, world, Precision("fp32", CPU), micro_batch)
    step(part(world.rank * rows, (world.rank + 1) * rows), step=0)
    return gradient(encoder)


def test_the_loss_is_the_sum_over_renormalised_prefixes():
    encoder = BagEncoder(kinds=("tokens",))
    value = Objective(InfoNCE(), widths=WIDTHS)(*sides(encoder), 0)
    expected = [by_hand(encoder, width) for width in (WIDTH, *WIDTHS)]
    found = [value.parts[name] for name in ("ranking", "ranking_width_6", "ranking_width_3")]
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(expected).detach())
    torch.testing.assert_close(value.loss.double(), sum(expected))
    assert len({round(each.item(), 4) for each in expected}) == 3
    plain = Objective(InfoNCE())(*sides(encoder), 0)
    assert torch.equal(plain.loss, value.parts["ranking"]) and list(plain.parts) == ["ranking"]


@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_micro_batches_do_not_change_the_gradient(micro_batch):
    given = stepped(World(0, 1, CPU), micro_batch)
    torch.testing.assert_close(given, truth(), rtol=0, atol=1e-6)
    assert (given - truth((WIDTH, 6))).abs().max() > 1e-3, "negative control"
    assert (stepped(World(0, 1, CPU), micro_batch, ()) - truth((WIDTH,))).abs().max() < 1e-6


@pytest.mark.slow
def test_nor_does_the_number_of_processes(tmp_path):
    for found in on_ranks(2, tmp_path, stepped, 3):
        torch.testing.assert_close(found, truth(), rtol=0, atol=1e-6)
