"""Sharded weights: gradients, updates, averages and models are those of one process.

The other side of each comparison is plain autograd through one graph, or a training in one process
whose weights are whole.
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops
from sparton.models.assembly import build_encoder
from sparton.models.backbone import Backbone
from sparton.models.colbert import ColbertHead
from sparton.models.csr import AutoencoderHead
from sparton.models.encoder import Encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.layouts import layers_of
from sparton.models.words import word_tokenizer
from sparton.sharded import is_sharded, whole
from sparton.training.distributed import World
from sparton.training.micro_batch import MicroBatchSearch
from sparton.training.precision import Precision
from sparton.training.sharding import ShardedWeights, place_weights
from sparton.training.step import ExactStep
from sparton.types import TokenBatch, TrainBatch
from tests.models.causal_lms import WORDS, build
from tests.models.test_layouts import ARCHITECTURES as MASKED
from tests.models.test_layouts import build as build_masked
from tests.models.test_lora import FP32, learn
from tests.training.ranks import CPU, on_ranks

ALONE = World(0, 1, CPU)
QUERIES, STEPS = 8, 4
TIED = {"tie_word_embeddings": True}
LENGTHS = {"query_length": 12, "document_length": 12}


class Case(NamedTuple):
    """An encoder to train."""

    architecture: str = "llama"
    head: Any = SpartonHead()
    logit_bias: bool = False
    config: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}

    def build(self) -> Encoder:
        torch.manual_seed(0)
        tokenizer = word_tokenizer(WORDS, 96)
        if self.architecture in MASKED:
            model = build_masked(self.architecture, **self.config)
        else:
            model = build(self.architecture, "bidirectional", **self.config)
        backbone = Backbone(model, tokenizer, **self.options)
        if self.logit_bias:
            backbone.need_bias()
        encoder = learn(build_encoder(backbone, copy.deepcopy(self.head))).train()
        for part in encoder.modules():  # whose masks depend on the number of ranks
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return encoder


CASES = {
    "llama": Case(),
    "tied": Case(config=TIED),
    "tied with a bias of its own": Case(config=TIED, logit_bias=True),
    "gemma": Case("gemma2"),
    "bert": Case("bert"),
    "one layer many times": Case("albert"),
    "padded, decoder read from the embeddings": Case("deberta-v2", config={"legacy": False}),
    "padded, decoder in two parts": Case("mobilebert"),
    "checkpointed": Case(options={"gradient_checkpointing": True}),
    "lora": Case(options={"lora": FP32}),
    "eager head": Case(head=EagerHead()),
    "colbert": Case(head=ColbertHead(8)),
    "csr": Case(head=AutoencoderHead(hidden_dim=64, k=4, k_aux=8, freeze_backbone=False)),
    "frozen body": Case(head=AutoencoderHead(hidden_dim=64, k=4, k_aux=8, freeze_backbone=True)),
}


def texts(number: int, generator: torch.Generator, shortest: int = 1) -> TokenBatch:
    lengths = torch.randint(shortest, 9, (number,), generator=generator).tolist()
    draw = [torch.randint(5, 60, (each,), generator=generator).tolist() for each in lengths]
    return TokenBatch.from_lists(draw)


def global_batch(seed: int = 1) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    return TrainBatch(texts(QUERIES, generator), texts(2 * QUERIES, generator))


def share(batch: TrainBatch, world: World) -> TrainBatch:
    rows = QUERIES // world.size
    return batch.select(world.rank * rows, (world.rank + 1) * rows)


def objective(encoder: Encoder) -> Objective:
    penalty = {"flops": Regularizer(flops, 0.1)} if encoder.regularized else {}
    penalty = penalty if "sparse" in encoder.kinds else {}
    return Objective(InfoNCE(), {}, penalty, encoder.loss_weights)


def exact_step(
    encoder: Encoder, world: World, micro_batch: int | None = None, precision: str = "fp32"
) -> ExactStep:
    return ExactStep(encoder, objective(encoder), world, Precision(precision, CPU), micro_batch)


def gradients(encoder: Encoder) -> dict[str, Tensor]:
    named = encoder.named_parameters()
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


def sharded_gradients(
    world: World, names: list[str], micro_batches: list[int | None]
) -> dict[tuple[str, int | None], dict[str, Tensor]]:
    found = {}
    for name in names:
        for micro_batch in micro_batches:
            encoder = CASES[name].build()
            place_weights(encoder, world, Precision("fp32", CPU), sharded=True)
            assert all(map(is_sharded, encoder.parameters()))
            step = exact_step(encoder, world, micro_batch)
            with pytest.raises(ValueError, match="give a step with sharded weights one"):
                MicroBatchSearch(step, None, 8, 8)
            step(share(global_batch(), world), 0)
            found[name, micro_batch] = gradients(encoder)
    return found


def truth(case: Case) -> dict[str, Tensor]:
    """One graph of everything, by plain autograd."""
    encoder, batch = case.build(), global_batch()
    if isinstance(case.head, AutoencoderHead):  # whose losses need what the step tells it
        exact_step(encoder, ALONE)(batch, 0)
        return gradients(encoder)
    sides = encoder.encode(batch.queries, "query"), encoder.encode(batch.documents, "document")
    objective(encoder)(*sides, 0).loss.backward()
    return gradients(encoder)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest entry. What nobody used counts as zero."""
    assert expected.keys() <= found.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    return (
        max(
            float((each.float() - expected.get(name, torch.zeros_like(each))).abs().max())
            for name, each in found.items()
        )
        / largest
    )


def assert_gradients_of_one_graph(found: list[dict[tuple[str, int | None], dict]]) -> None:
    for each in found:  # of each rank
        for (name, micro_batch), own in each.items():
            expected = truth(CASES[name])
            assert distance(own, expected) < 1e-5, (name, micro_batch)
            off = {key: 1.01 * value for key, value in own.items()}
            assert distance(off, expected) > 1e-3


@pytest.mark.slow
def test_gradients_of_two_ranks_are_those_of_one_graph(tmp_path):
    found = on_ranks(2, tmp_path, sharded_gradients, ["llama"], [None, 3])
    assert_gradients_of_one_graph(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "names"), [(2, sorted(CASES)), (4, ["llama", "lora", "tied", "checkpointed"])]
)
def test_gradients_of_every_kind_are_those_of_one_graph(size, names, tmp_path):
    found = on_ranks(size, tmp_path, sharded_gradients, names, [None, 1])
    assert_gradients_of_one_graph(found)


def test_one_rank_has_all_of_each_weight():
    encoder = CASES["llama"].build()
    place_weights(encoder, ALONE, Precision("fp32", CPU), sharded=True)
    assert not any(map(is_sharded, encoder.parameters()))
    exact_step(encoder, ALONE)(global_batch(), 0)
    assert distance(gradients(encoder), truth(CASES["llama"])) < 1e-5


def in_16_bits(world: World, name: str) -> tuple[dict, set[torch.dtype], set[torch.dtype]]:
    """Gradients, and the dtypes that a layer and the rest have while the layer runs."""
    encoder = CASES[name].build()
    place_weights(encoder, world, Precision("bf16", CPU), sharded=True)
    layer, inside, outside = layers_of(encoder)[0], set(), set()

    def look(*_: object) -> None:
        inside.update(each.dtype for each in layer.parameters())
        outside.add(encoder.backbone.decoder.weight.dtype)

    layer.mlp.register_forward_pre_hook(look)
    exact_step(encoder, world, None, "bf16")(share(global_batch(), world), 0)
    return gradients(encoder), inside, outside


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "lora"])
def test_layers_are_gathered_in_16_bits_and_learn_in_fp32(name, tmp_path):
    """As far from fp32 as autocast over whole weights is."""
    encoder, expected = CASES[name].build(), truth(CASES[name])
    exact_step(encoder, ALONE, None, "bf16")(global_batch(), 0)
    allowed = 1.5 * distance(gradients(encoder), expected)
    for found, inside, outside in on_ranks(2, tmp_path, in_16_bits, name):
        assert (inside, outside) == ({torch.bfloat16}, {torch.float32})
        assert {each.dtype for each in found.values()} == {torch.float32}
        assert 1e-5 < distance(found, expected) < allowed


def lone_texts(world: World) -> dict[str, Tensor]:
    encoder, batch = CASES["llama"].build(), share(global_batch(), world)
    place_weights(encoder, world, Precision("fp32", CPU), sharded=True)
    if world.rank == 1:
        batch = batch._replace(queries=TokenBatch.from_lists([[]] * (QUERIES // 2)))
    exact_step(encoder, world)(batch, 0)
    return gradients(encoder)


@pytest.mark.slow
def test_a_rank_whose_queries_are_all_empty_does_not_keep_the_others_waiting(tmp_path):
    encoder, batch = CASES["llama"].build(), global_batch()
    half = batch.queries.select(0, QUERIES // 2)
    ids = half.input_ids.split(half.cu_seqlens.diff().tolist())
    queries = TokenBatch.from_lists([each.tolist() for each in ids] + [[]] * (QUERIES // 2))
    exact_step(encoder, ALONE)(batch._replace(queries=queries), 0)
    for found in on_ranks(2, tmp_path, lone_texts):
        assert distance(found, gradients(encoder)) < 1e-5


@pytest.mark.parametrize(
    ("world", "precision", "message"),
    [
        (World(0, 2, CPU, one_machine=False), "bf16", "these ranks are on several"),
        (World(0, 2, torch.device("cuda")), "fp16", "precision=fp16 scales gradients"),
    ],
)
def test_what_cannot_be_sharded_is_refused(world, precision, message):
    with pytest.raises(ValueError, match=message):
        ShardedWeights(CASES["llama"].build(), world, Precision(precision, world.device))


def test_bodies_that_run_length_by_length_and_compiled_ones_are_refused():
    with pytest.raises(ValueError, match="ConvBertForMaskedLM runs one length at a time"):
        ShardedWeights(Case("convbert").build(), World(0, 2, CPU), Precision("fp32", CPU))
    compiled = Case(options={"compile": True}).build()
    with pytest.raises(ValueError, match="build the backbone with compile=False"):
        ShardedWeights(compiled, World(0, 2, CPU), Precision("fp32", CPU))
