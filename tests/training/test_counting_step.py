"""Encoders that count what a batch used: losses that depend on it, however the batch is cut."""

from itertools import chain

import pytest
import torch
from torch import Tensor

from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.representations import Representations
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import Side, TokenBatch, TrainBatch
from tests.training.bag_encoder import VOCABULARY, WIDTH, BagEncoder, random_batch
from tests.training.ranks import CPU, on_ranks

QUERIES, NEGATIVES = 6, 1


class CountingBag(BagEncoder):
    """Minimises products with the tokens that the batch has not used so far, queries first."""

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        used = torch.zeros(VOCABULARY, dtype=torch.bool)
        used[tokens.input_ids] = True
        reps = super().encode(tokens, side)
        return reps._replace(losses={"terms": reps.sparse[:, :WIDTH]}, used=used)

    def observe(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        self.observed = queries, documents
        return ~queries, ~(queries | documents)

    def finish(self, representations: Representations, seen: Tensor) -> Representations:
        products = representations.losses["terms"] @ self.embedding.weight.T
        losses = {"unused": (products * seen).square().mean(1)}
        return representations._replace(losses=losses, used=None)


def global_batch() -> TrainBatch:
    return random_batch(QUERIES, NEGATIVES, seed=4)


def objective() -> Objective:
    return Objective(InfoNCE(), own_losses={"unused": 0.3})


def stepped(world: World, micro_batch: int | None) -> tuple[float, list[Tensor], list[Tensor]]:
    """The loss, the gradients and what was observed on this rank."""
    encoder, batch = CountingBag(), global_batch()
    own = QUERIES // world.size
    part = batch.select(world.rank * own, (world.rank + 1) * own)
    step = ExactStep(encoder, objective(), world, Precision("fp32", CPU), micro_batch)
    loss = step(part, 0).loss.item()
    return loss, [p.grad for p in encoder.parameters()], list(encoder.observed)


def truth(parts: int = 1) -> tuple[float, list[Tensor], list[Tensor]]:
    """Plain autograd through everything; in several parts each sees what it used by itself."""
    encoder, batch = CountingBag(), global_batch()
    sides: list[list[Representations]] = [[], []]
    for start in range(0, QUERIES, QUERIES // parts):
        part = batch.select(start, start + QUERIES // parts)
        queries = encoder.encode(part.queries, "query")
        documents = encoder.encode(part.documents, "document")
        seen = encoder.observe(queries.used, documents.used)
        sides[0].append(encoder.finish(queries, seen[0]))
        sides[1].append(encoder.finish(documents, seen[1]))
    loss = objective()(*map(Representations.concatenate, sides), 0).loss
    loss.backward()
    return loss.item(), [p.grad for p in encoder.parameters()], list(encoder.observed)


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def check(given: tuple[float, list[Tensor], list[Tensor]]) -> None:
    loss, gradients, observed = given
    expected = truth()
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert distance(gradients, expected[1]) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(observed, expected[2], strict=True))
    assert 0 < observed[0].sum() < VOCABULARY


@pytest.mark.parametrize("micro_batch", [None, 1, 4, 6])
def test_what_the_whole_batch_used_reaches_every_micro_batch(micro_batch):
    check(stepped(World(0, 1, CPU), micro_batch))


def test_what_each_part_used_by_itself_would_have_been_seen():
    """The negative control."""
    loss, gradients, _ = truth(parts=3)
    assert loss > truth()[0] + 1e-3
    assert distance(gradients, truth()[1]) > 1e-4


def of_rank(world: World) -> list[tuple[float, list[Tensor], list[Tensor]]]:
    return [stepped(world, micro_batch) for micro_batch in (2, None)]


@pytest.mark.slow
def test_and_every_rank(tmp_path):
    for found in chain(*on_ranks(2, tmp_path, of_rank)):
        check(found)


def test_an_encoder_that_counts_nothing_is_not_asked():
    encoder = BagEncoder()
    step = ExactStep(encoder, Objective(InfoNCE()), World(0, 1, CPU), Precision("fp32", CPU), 2)
    step(global_batch(), 0)
    with pytest.raises(NotImplementedError):
        encoder.observe(torch.zeros(1), torch.zeros(1))
