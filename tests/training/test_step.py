"""The gradient of a step does not depend on the number of processes or on micro_batch."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sparton import products
from sparton.datasets.tokenization import PackedTokenizer
from sparton.losses.distillation import MarginMSE
from sparton.losses.objective import Objective
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.heads import EagerHead
from sparton.representations import Extent, Representations, TokenVectors
from sparton.training.distributed import World, join_world
from sparton.training.precision import Precision
from sparton.training.step import DENSE_ENTRIES, ExactStep
from sparton.types import TrainBatch
from tests.training.bag_encoder import BagEncoder, objective, random_batch
from tests.training.ranks import CPU, on_ranks

BATCH = 8
SPARSE, TOKENS, DENSE = ("sparse",), ("tokens",), ("dense",)


def global_batch(negatives: int) -> TrainBatch:
    return random_batch(BATCH, negatives, seed=1)


def share(batch: TrainBatch, rank: int, size: int) -> TrainBatch:
    rows = BATCH // size
    return batch.select(rank * rows, (rank + 1) * rows)


def encode(encoder: BagEncoder, batch: TrainBatch) -> tuple[Representations, Representations]:
    return encoder.encode(batch.queries, "query"), encoder.encode(batch.documents, "document")


def gradients(
    world: World, negatives: int, micro_batch: int | None, kinds: tuple[str, ...] = SPARSE
) -> list[torch.Tensor]:
    encoder = BagEncoder(kinds=kinds)
    step = ExactStep(encoder, objective(kinds), world, Precision("fp32", CPU), micro_batch)
    step(share(global_batch(negatives), world.rank, world.size), step=0)
    return [parameter.grad for parameter in encoder.parameters()]


def truth(negatives: int, kinds: tuple[str, ...] = SPARSE) -> list[torch.Tensor]:
    """One process, one graph, plain autograd through everything."""
    encoder, batch = BagEncoder(kinds=kinds), global_batch(negatives)
    objective(kinds)(*encode(encoder, batch), 0).loss.backward()
    return [parameter.grad for parameter in encoder.parameters()]


def distance(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right))


@pytest.fixture(params=[DENSE_ENTRIES, 0], ids=["zeros kept", "compact"])
def _as_held(request, monkeypatch):
    """Micro-batches are held in either way."""
    monkeypatch.setattr("sparton.training.step.DENSE_ENTRIES", request.param)


@pytest.mark.usefixtures("_as_held")
@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("micro_batch", [None, 1, 3, 8, 100])
def test_micro_batch_does_not_change_the_gradient(negatives, micro_batch):
    alone = World(0, 1, CPU)
    assert distance(gradients(alone, negatives, micro_batch), truth(negatives)) < 1e-6


@pytest.mark.usefixtures("_as_held")
@pytest.mark.parametrize("kinds", [TOKENS, SPARSE + TOKENS, SPARSE + TOKENS + DENSE])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_nor_does_it_for_vectors_of_tokens(kinds, micro_batch):
    alone = World(0, 1, CPU)
    given, expected = gradients(alone, 1, micro_batch, kinds), truth(1, kinds)
    pairs = [(a, b) for a, b in zip(given, expected) if b is not None]
    assert len(pairs) == (1 if kinds == TOKENS else 3)
    assert all(a is None for a, b in zip(given, expected) if b is None)
    assert distance(*zip(*pairs)) < 1e-6


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_teacher_scores_reach_the_loss(micro_batch):
    batch = random_batch(BATCH, 1, seed=1)
    teacher = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(2))
    objective = Objective(MarginMSE())
    expected = BagEncoder()
    loss = objective(*encode(expected, batch), 0, teacher).loss
    loss.backward()
    encoder = BagEncoder()
    step = ExactStep(encoder, objective, World(0, 1, CPU), Precision("fp32", CPU), micro_batch)
    step(batch._replace(teacher_scores=teacher), step=0)
    pairs = ([p.grad for p in model.parameters()] for model in (encoder, expected))
    assert distance(*pairs) < 1e-6


def test_averaging_over_chunks_would_have_been_seen():
    """Negative control: what built-in gradient accumulation computes is far outside the bound."""
    encoder, batch = BagEncoder(), global_batch(0)
    for start in (0, 4):
        chunk = TrainBatch(*(side.select(start, start + 4) for side in batch[:2]))
        (objective()(*encode(encoder, chunk), 0).loss / 2).backward()
    averaged = [parameter.grad for parameter in encoder.parameters()]
    assert distance(averaged, truth(0)) > 1e-3


class Case(NamedTuple):
    one_machine: bool
    micro_batch: int | None
    kinds: tuple[str, ...]


def of_rank(world: World, cases: list[Case]) -> list[tuple[list[Tensor], int]]:
    """The gradients of every case, and how often it left out zeros."""
    results, compacted = [], []
    compact = Representations.compact
    Representations.compact = lambda reps: compacted.append(1) or compact(reps)
    for case in cases:
        compacted.clear()
        world = World(world.rank, world.size, CPU, case.one_machine)
        given = gradients(world, 1, case.micro_batch, case.kinds)
        results.append((given, len(compacted)))
    return results


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (
            2,
            [
                Case(True, None, SPARSE),
                Case(False, None, SPARSE),
                Case(True, 3, SPARSE),
                Case(True, None, SPARSE + TOKENS),
                Case(False, None, SPARSE + TOKENS),
                Case(False, 3, SPARSE + TOKENS + DENSE),
            ],
        ),
        pytest.param(
            4, [Case(False, 1, SPARSE), Case(True, 1, SPARSE + TOKENS)], marks=pytest.mark.slow
        ),
    ],
)
def test_number_of_processes_does_not_change_the_gradient(size, cases, tmp_path):
    """On one machine the zeros of small batches are kept."""
    for results in on_ranks(size, tmp_path, of_rank, cases):
        for case, (given, compacted) in zip(cases, results, strict=True):
            assert distance(given, truth(1, case.kinds)) < 1e-6, case
            assert (compacted == 0) == case.one_machine, case


def test_the_longest_text_of_all_ranks_is_known_if_every_ranks_is():
    tokens = TokenVectors(torch.zeros(3, 2), torch.tensor([0, 1, 3], dtype=torch.int32))
    for longest, of_all in (((4, 9), 9), ((9, 4), 9), ((4, 0), None)):
        extents = [Extent(2, 0, 3, most) for most in longest]
        assert World(0, 1, CPU)._gather_tokens(tokens, extents).max_seqlen == of_all


def test_zeros_are_kept_of_batches_that_are_small_beside_memory(monkeypatch):
    ranks = World(0, 2, CPU)
    step = ExactStep(BagEncoder(), objective(), ranks, Precision("fp32", CPU))
    sides = encode(step.encoder, share(global_batch(1), 0, 2))
    entries = 2 * sides[1].sparse.numel()
    for most, kept in ((entries, True), (entries - 1, False)):
        monkeypatch.setattr("sparton.training.step.DENSE_ENTRIES", most)
        assert step._keep_zeros(sides, (sides[0].num_texts, 2)) == kept


@pytest.mark.parametrize(("local_size", "one_machine"), [("2", True), ("1", False), (None, False)])
def test_ranks_know_whether_they_share_a_machine(local_size, one_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local_size:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
    assert join_world() == World(0, 2, CPU, one_machine)


def test_dropout_repeats_in_the_second_encoding():
    """With dropout, replaying must see the very masks of the first encoding."""

    def first_gradient(micro_batch: int, forget_seed: bool) -> tuple[float, torch.Tensor]:
        encoder = BagEncoder(dropout=0.5)
        step = ExactStep(
            encoder, objective(), World(0, 1, CPU), Precision("fp32", CPU), micro_batch
        )
        encoded = []
        encoder.register_forward_hook(lambda *call: encoded.append(call[2].detach()))
        if forget_seed:
            step._encode = lambda part, memory=None: encode(encoder, part)
        step(global_batch(0), step=0)
        others = len(encoded) // 3  # of two micro-batches, of which the last is encoded once
        first, second = encoded[:others], encoded[-others:]
        return max((a - b).abs().max().item() for a, b in zip(first, second)), encoded[0]

    assert first_gradient(4, forget_seed=False)[0] == 0.0
    assert first_gradient(4, forget_seed=True)[0] > 0.0


def test_steps_draw_different_dropout_and_repeat_themselves():
    encoder = BagEncoder(dropout=0.5)
    step = ExactStep(encoder, objective(), World(0, 1, CPU), Precision("fp32", CPU))
    losses = [step(global_batch(0), step=number).loss.item() for number in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


def exchanged(world: World) -> tuple[Tensor, list[int] | None, str]:
    """Weights, sizes of what rank 0 collects, and a word."""
    layer = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(layer.weight, world.rank + 1.0)
    world.broadcast(layer)
    own = Representations(torch.full((world.rank + 1, 2), float(world.rank)))
    gathered = world.collect(own)
    sizes = None if gathered is None else [part.num_texts for part in gathered]
    return layer.weight.detach(), sizes, world.share(f"of {world.rank}")


@pytest.mark.slow
def test_ranks_get_what_rank_0_has_and_rank_0_what_they_have(tmp_path):
    weights, gathered, shared = zip(*on_ranks(2, tmp_path, exchanged), strict=True)
    assert all((weight == 1.0).all() for weight in weights)
    assert gathered == ([1, 2], None)
    assert shared == ("of 0", "of 0")


def test_ranks_draw_different_dropout():
    losses = []
    for rank in (0, 1):
        step = ExactStep(
            BagEncoder(dropout=0.5), objective(), World(rank, 1, CPU), Precision("fp32", CPU)
        )
        micro_batch = next(step._split(global_batch(0), step=0))
        losses.append(step._encode(micro_batch)[0].sparse.sum().item())
    assert losses[0] != losses[1]


def test_micro_batches_share_what_products_read_of_the_weights(monkeypatch):
    words = [f"w{number}" for number in range(40)]
    encoder = build_encoder(tiny(words, hidden_size=16, layers=2), EagerHead())
    stacked: list[int] = []
    original = products._stacked
    monkeypatch.setattr(products, "_stacked", lambda x: stacked.append(len(x)) or original(x))
    for micro_batch in (None, 2):
        stacked.clear()
        step = ExactStep(
            encoder, objective(), World(0, 1, CPU), Precision("bf16", CPU), micro_batch
        )
        for number in range(2):
            step(batch_of_words(encoder.tokenizer), step=number)
        # Queries, keys and values: weights and biases of either layer, in each step.
        assert stacked == 2 * 2 * [3, 3]


def batch_of_words(tokenizer: PreTrainedTokenizerFast) -> TrainBatch:
    packed = PackedTokenizer(tokenizer, 8, 12)
    texts = [f"w{number} w{number + 1}" for number in range(8)]
    return TrainBatch(packed.queries(texts), packed.documents(texts), None)
