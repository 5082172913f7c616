"""The exact step with adapters: micro-batches, checkpointing, dropout and ranks change nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops
from sparton.models.assembly import build_encoder
from sparton.models.backbone import Backbone
from sparton.models.encoder import Encoder
from sparton.models.heads import SpartonHead
from sparton.models.words import word_tokenizer
from sparton.training import gradient_sum
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import TokenBatch, TrainBatch
from tests.models.test_causal_lm import WORDS, build
from tests.models.test_lora import FP32, distance, learn
from tests.training.ranks import CPU, on_ranks

ALONE = World(0, 1, CPU)
QUERIES = 8


def encoder_with(checkpointing: bool = False, **lora: Any) -> Encoder:
    backbone = Backbone(
        build("llama", "bidirectional"),
        word_tokenizer(WORDS, 96),
        lora=FP32 | lora,
        gradient_checkpointing=checkpointing,
    )
    encoder = build_encoder(backbone, SpartonHead())
    return learn(encoder).train()


def global_batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(1)

    def texts(number: int) -> TokenBatch:
        lengths = torch.randint(1, 9, (number,), generator=generator).tolist()
        draw = [torch.randint(5, 60, (each,), generator=generator).tolist() for each in lengths]
        return TokenBatch.from_lists(draw)

    return TrainBatch(texts(QUERIES), texts(2 * QUERIES))


def objective() -> Objective:
    return Objective(InfoNCE(), {}, {"flops": Regularizer(flops, 0.1)})


def gradients(encoder: Encoder) -> dict[str, Tensor]:
    return {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def step_gradients(
    encoder: Encoder, micro_batch: int | None, world: World = ALONE
) -> dict[str, Tensor]:
    step = ExactStep(encoder, objective(), world, Precision("fp32", CPU), micro_batch)
    rows = QUERIES // world.size
    step(global_batch().select(world.rank * rows, (world.rank + 1) * rows), step=0)
    return gradients(encoder)


def truth() -> dict[str, Tensor]:
    """One graph of everything, by plain autograd."""
    encoder, batch = encoder_with(), global_batch()
    sides = encoder.encode(batch.queries, "query"), encoder.encode(batch.documents, "document")
    objective()(*sides, 0).loss.backward()
    return gradients(encoder)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_micro_batches_and_checkpointing_change_no_gradient(micro_batch, checkpointing):
    found, expected = step_gradients(encoder_with(checkpointing), micro_batch), truth()
    assert expected and all(".lora_" in name for name in expected)
    assert distance(found, expected) < 1e-5
    assert distance({name: 1.01 * each for name, each in found.items()}, expected) > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_of_adapters_is_the_same_in_both_encodings(checkpointing, monkeypatch):
    """A gradient of the step is that of the loss of the very representations that it has seen."""
    for forgets in (False, True):
        encoder = encoder_with(checkpointing, dropout=0.5)
        seen: list[Tensor] = []
        encode_both = encoder.encode_both

        def spy(*sides: TokenBatch, encode_both=encode_both, seen=seen) -> Any:
            representations = encode_both(*sides[:2])
            seen.extend(side.sparse.detach() for side in representations)
            return representations

        encoder.encode_both = spy
        if forgets:
            monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
        step_gradients(encoder, 4)
        monkeypatch.undo()
        first, second = seen[:2], seen[4:]  # of two micro-batches, of which the last has one
        assert len(seen) == 6
        assert all(map(torch.equal, first, second)) != forgets


def of_rank(world: World, micro_batches: list[int | None]) -> list[tuple[dict[str, Tensor], int]]:
    """The gradients, and how many numbers were sent for them."""
    results: list[tuple[dict[str, Tensor], int]] = []
    summed, add = [], gradient_sum._summed

    def spy(gradient: Tensor) -> Any:
        summed.append(gradient.numel())
        return add(gradient)

    gradient_sum._summed = spy
    for micro_batch in micro_batches:
        summed.clear()
        encoder = encoder_with()
        world.broadcast(encoder)
        results.append((step_gradients(encoder, micro_batch, world), sum(summed)))
    return results


@pytest.mark.slow
def test_ranks_change_no_gradient_and_send_those_of_adapters_alone(tmp_path):
    size, micro_batches = 2, [None, 1, 3]
    expected = truth()
    for results in on_ranks(size, tmp_path, of_rank, micro_batches):
        assert len(results) == len(micro_batches)
        for found, summed in results:
            assert distance(found, expected) < 1e-5
            assert summed == sum(each.numel() for each in expected.values())
    encoder, rows = encoder_with(), QUERIES // size
    step = ExactStep(encoder, objective(), ALONE, Precision("fp32", CPU))
    step(global_batch().select(0, rows), step=0)
    assert distance(gradients(encoder), expected) > 1e-2  # a share is not the whole
