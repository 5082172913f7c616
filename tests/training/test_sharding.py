"""Sharded weights: gradients, updates, averages and models are those of one process.

The other side of each comparison is plain autograd through one graph, or a training in one process
whose weights are whole.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops
from sparton.models.assembly import build_encoder
from sparton.models.backbone import Backbone
from sparton.models.backbones import random_bert, word_tokenizer
from sparton.models.body import layers_of
from sparton.models.colbert import ColbertHead
from sparton.models.csr import AutoencoderHead
from sparton.models.encoder import Encoder
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.layouts import UniformLayout
from sparton.training.averaging import AveragedWeights, ExponentialAverage
from sparton.training.distributed import World, is_sharded, whole
from sparton.training.loop import LoopSettings, Trainer
from sparton.training.optimization import build_optimizer
from sparton.training.precision import Precision
from sparton.training.schedules import LinearSchedule
from sparton.training.sharding import ShardedWeights, place_weights
from sparton.training.step import ExactStep
from sparton.training.throughput import ThroughputMeter
from sparton.types import TokenBatch, TrainBatch
from tests.models.causal_lms import WORDS, build
from tests.models.test_lora import FP32, learn
from tests.training.ranks import CPU, on_ranks

ALONE = World(0, 1, CPU)
QUERIES, STEPS = 8, 4
LENGTHS = {"query_length": 12, "document_length": 12}


class Case(NamedTuple):
    """An encoder to train."""

    architecture: str = "llama"
    head: Any = SpartonHead()
    tied: bool = False
    logit_bias: bool = False
    options: dict[str, Any] = {}

    def build(self) -> Encoder:
        torch.manual_seed(0)
        tokenizer = word_tokenizer(WORDS, 96)
        if self.architecture == "bert":
            sizes = {"hidden_size": 32, "layers": 2, "heads": 4}
            backbone = random_bert(tokenizer, **sizes, **self.options)
        else:
            model = build(
                self.architecture, "bidirectional", tie_word_embeddings=self.tied
            )
            backbone = Backbone(model, tokenizer, **self.options)
        if self.logit_bias:
            backbone.need_bias()
        return learn(build_encoder(backbone, copy.deepcopy(self.head))).train()


CASES = {
    "llama": Case(),
    "tied": Case(tied=True),
    "tied with a bias of its own": Case(tied=True, logit_bias=True),
    "gemma": Case("gemma2"),
    "checkpointed": Case(options={"gradient_checkpointing": True}),
    "compiled": Case(options={"compile": True}),
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
    world: World, names: list[str], micro_batches: list[int | None], precision: str = "fp32"
) -> dict[tuple[str, int | None], dict[str, Tensor]]:
    found = {}
    for name in names:
        for micro_batch in micro_batches:
            encoder = CASES[name].build()
            place_weights(encoder, world, Precision(precision, CPU), sharded=True)
            assert all(map(is_sharded, encoder.parameters()))
            exact_step(encoder, world, micro_batch, precision)(share(global_batch(), world), 0)
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
    return max(
        float((each.float() - expected.get(name, torch.zeros_like(each))).abs().max())
        for name, each in found.items()
    ) / largest


def assert_gradients_of_one_graph(found: list[dict[tuple[str, int | None], dict]]) -> None:
    for each in found:  # of each rank
        for (name, micro_batch), own in each.items():
            expected = truth(CASES[name])
            assert distance(own, expected) < 1e-5, (name, micro_batch)
            off = {key: 1.01 * value for key, value in own.items()}
            assert distance(off, expected) > 1e-3


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


def in_16_bits(world: World) -> tuple[dict, set[torch.dtype], set[torch.dtype]]:
    """Gradients, and the dtypes that a layer and the whole have meanwhile."""
    encoder = CASES["llama"].build()
    place_weights(encoder, world, Precision("bf16", CPU), sharded=True)
    layer, seen = layers_of(encoder)[0], []
    layer.register_forward_pre_hook(
        lambda *_: seen.extend([layer.mlp.up_proj.weight, encoder.backbone.decoder.weight])
    )
    exact_step(encoder, world, None, "bf16")(share(global_batch(), world), 0)
    return gradients(encoder), *({each.dtype for each in seen[n::2]} for n in (0, 1))


@pytest.mark.slow
def test_layers_are_gathered_in_16_bits_and_learn_in_fp32(tmp_path):
    """As far from fp32 as autocast over whole weights is."""
    encoder, expected = CASES["llama"].build(), truth(CASES["llama"])
    exact_step(encoder, ALONE, None, "bf16")(global_batch(), 0)
    allowed = 1.5 * distance(gradients(encoder), expected)
    for found, of_layers, of_rest in on_ranks(2, tmp_path, in_16_bits):
        assert (of_layers, of_rest) == ({torch.bfloat16}, {torch.float32})
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


# --- trainings ---


def make_trainer(folder: Path, world: World, case: Case = CASES["tied"]) -> Trainer:
    encoder, precision = case.build(), Precision("fp32", CPU)
    weights = place_weights(encoder, world, precision, sharded=not folder.name == "whole")
    step = ExactStep(encoder, objective(encoder), world, precision, 2, seed=5)
    adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True)
    return Trainer(
        step=step,
        optimizer=build_optimizer(encoder, adamw, 0.01, {"backbone.model": 5e-4}),
        schedule=LinearSchedule(0.1),
        settings=LoopSettings(
            STEPS, log_every=1, evaluate_every=2, checkpoint_every=2, clip_norm=0.5
        ),
        folder=folder,
        meter=ThroughputMeter(CPU, encoder.flops_per_token),
        # Each rank by itself, and one more often than the others.
        evaluate=lambda model: {"ndcg@10": evaluated(model, 1 + world.rank)},
        save_model=partial(save_encoder, **LENGTHS),
        averages=AveragedWeights(encoder, ExponentialAverage(0.5), STEPS),
        weights=weights,
    )


@torch.no_grad()
def evaluated(encoder: Encoder, times: int) -> float:
    for _ in range(times):
        sparse = encoder.encode(global_batch(99).documents, "document").sparse
    return float(sparse.sum())


class Log:
    """Keeps the records of a run."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log(self, record: Any, step: int) -> None:
        self.records.append(dict(record))


class Left(NamedTuple):
    """What a training ends with: all weights, their averages, and what it has logged."""

    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    records: list[dict[str, Any]]
    start: int


def train(world: World, folder: Path, until: int = STEPS, name: str = "tied") -> Left:
    trainer, log = make_trainer(folder, world, CASES[name]), Log()
    start = trainer.resume()
    batches = (share(global_batch(step), world) for step in range(start, until))
    trainer.run(batches, [log])
    named = {name: whole(p.detach()).clone() for name, p in trainer.encoder.named_parameters()}
    averages = {name: whole(p).clone() for name, p in trainer.averages.state_dict().items()}
    return Left(named, averages, log.records, start)


def assert_same(found: Left, expected: Left, tolerance: float = 1e-5) -> None:
    for kind in ("weights", "averages"):
        for name, value in getattr(expected, kind).items():
            difference = (getattr(found, kind)[name] - value).abs().max()
            assert difference <= tolerance, (kind, name)
    for record, wanted in zip(found.records, expected.records[-len(found.records) :], strict=True):
        for name in ("loss", "gradient_norm", "learning_rate", "dev_ndcg@10"):
            if name in wanted:
                assert record[name] == pytest.approx(wanted[name], rel=10 * tolerance), name


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[Left, Path]:
    """A training in one process, whose weights are whole."""
    folder = tmp_path_factory.mktemp("reference") / "whole"
    return train(ALONE, folder), folder


def model_weights(folder: Path) -> dict[str, Tensor]:
    encoder = load_encoder(folder / "model")
    return dict(encoder.named_parameters())


@pytest.mark.slow
def test_a_training_is_that_of_one_process_and_goes_on_with_any_number(tmp_path, reference):
    expected, folder = reference
    start = make_trainer(folder, ALONE).encoder.state_dict()
    moved = max((expected.weights[n] - start[n]).abs().max() for n in expected.weights)
    assert moved > 1e-3  # what the tolerance is to be compared with
    killed = tmp_path / "killed"
    uninterrupted = on_ranks(2, tmp_path / "a", train, tmp_path / "two")
    for found in uninterrupted:
        assert_same(found, expected)
    on_ranks(2, tmp_path / "b", train, killed, 3)
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["step-00000002"]
    copies = {size: tmp_path / f"on {size}" for size in (1, 2, 4)}
    for size, copied in copies.items():
        copied.mkdir()
        import shutil

        shutil.copytree(killed / "checkpoints", copied / "checkpoints")
        resumed = (
            [train(ALONE, copied)]
            if size == 1
            else on_ranks(size, tmp_path / f"c{size}", train, copied)
        )
        for found in resumed:
            assert found.start == 2
            assert_same(found, uninterrupted[0], 0.0 if size == 2 else 1e-5)
        models = model_weights(copied), model_weights(folder)
        assert models[0].keys() == models[1].keys()
        for name, value in models[1].items():
            torch.testing.assert_close(models[0][name], value, atol=1e-5, rtol=0)
