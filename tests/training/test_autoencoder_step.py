"""A sparse autoencoder in the exact step: what it learns, counts and keeps, however it is cut."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.embedding_files import CacheFacts, seal_cache
from sparton.embeddings import text_keys
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.models.backbones import tiny
from sparton.models.cached import CachedBackbone
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.folders import Lengths
from sparton.models.folders.dense import save_dense
from sparton.models.pooling import Pooling
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import TokenBatch, TrainBatch

CPU = torch.device("cpu")
TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat sleeps", "foxes hunt hens"]


def make_step(encoder: AutoencoderEncoder, micro_batch: int | None = None) -> ExactStep:
    objective = Objective(InfoNCE(), own_losses=encoder.loss_weights)
    return ExactStep(encoder, objective, World(0, 1, CPU), Precision("fp32", CPU), micro_batch)


def text_encoder(**settings: object) -> AutoencoderEncoder:
    torch.manual_seed(0)
    head = AutoencoderHead(hidden_dim=128, k=2, k_aux=8, dead_threshold=6, **settings)
    return AutoencoderEncoder(tiny(TEXTS, hidden_size=32, layers=1), head).train()


def random_batch(encoder: AutoencoderEncoder, seed: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)

    def sequences(count: int) -> TokenBatch:
        lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
        words = len(encoder.tokenizer)
        return TokenBatch.from_lists(
            [torch.randint(words, (length,), generator=generator).tolist() for length in lengths]
        )

    return TrainBatch(sequences(6), sequences(12))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_and_counters_do_not_depend_on_the_micro_batch(frozen):
    results = []
    for micro_batch in (None, 1, 4):
        encoder = text_encoder(freeze_backbone=frozen)
        encoder.autoencoder.passes_since_active[::3] = 9
        step = make_step(encoder, micro_batch)
        values = [step(random_batch(encoder, seed), seed) for seed in range(3)]
        gradients = {n: p.grad for n, p in encoder.named_parameters() if p.grad is not None}
        results.append((values[-1].parts, gradients, encoder.autoencoder.passes_since_active))
    parts, gradients, counters = results[0]
    assert set(parts) == {"ranking", "reconstruction_k", "reconstruction_4k", "auxiliary"}
    assert {1, 12, 21} < set(counters.tolist()) <= {1, 3, 5, 7, 9, 11, 12, 21}
    assert all(name.startswith("autoencoder.") for name in gradients) == frozen
    for other_parts, other_gradients, other_counters in results[1:]:
        assert torch.equal(other_counters, counters)
        torch.testing.assert_close(other_parts, parts)
        torch.testing.assert_close(other_gradients, gradients, rtol=1e-4, atol=1e-6)
    matrix = gradients["autoencoder.encoder.weight"]
    assert not torch.allclose(matrix, 1.01 * matrix, rtol=1e-4, atol=1e-6)


PAIRS, HELD_OUT, WIDTH = 2048, 200, 24


def pairs(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Queries and their documents: unit vectors that agree in a subspace alone."""
    generator = torch.Generator().manual_seed(seed)
    common, *own = (torch.randn(rows, WIDTH // 2, generator=generator) for _ in range(3))
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator.manual_seed(0))).Q
    queries, documents = (
        F.normalize(torch.cat([common, 0.7 * other], 1) @ basis, dim=1) for other in own
    )
    return queries, documents


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Embeddings of the texts "0", "1", ... of either side; the last ones are held out."""
    folder = tmp_path_factory.mktemp("cache")
    body = tiny(TEXTS, hidden_size=WIDTH, layers=1).bare()
    (folder / "model").mkdir()
    save_dense(DenseEncoder(body, Pooling()), folder / "model", Lengths(8, 8))
    sides = zip(pairs(PAIRS, 1), pairs(HELD_OUT, 2), strict=True)
    np.save(folder / "embeddings.npy", torch.cat([torch.cat(side) for side in sides]).numpy())
    total = PAIRS + HELD_OUT
    np.save(folder / "keys.npy", text_keys([f"{row}" for row in range(total)] * 2))
    facts = CacheFacts(total, 8, 8, "mean", False, "", "", "digest")
    (folder / "cache.json").write_text(json.dumps(facts._asdict()))
    (folder / "progress.json").write_text(json.dumps({"rows": 2 * total}))
    seal_cache(folder)
    return folder


class Fate(NamedTuple):
    """On held-out texts, before and after a training: the share of queries whose own document
    comes first, the mean squared error of the reconstruction; and the share of dead latents."""

    recall: tuple[float, float]
    error: tuple[float, float]
    dead: list[float]


@torch.no_grad()
def measure(encoder: AutoencoderEncoder) -> tuple[float, float]:
    texts = [f"{row}" for row in range(PAIRS, PAIRS + HELD_OUT)]
    rows = encoder.text_rows
    queries = encoder.encode(rows.queries(texts), "query")
    documents = encoder.encode(rows.documents(texts), "document")
    found = (queries.sparse @ documents.sparse.T).argmax(1) == torch.arange(HELD_OUT)
    return found.float().mean().item(), documents.losses["reconstruction_k"].mean().item()


def train(cache: Path, steps: int = 120, **settings: object) -> Fate:
    torch.manual_seed(0)
    head = AutoencoderHead(
        hidden_dim=96, k=4, k_aux=16, normalize=True, dead_threshold=20, **settings
    )
    encoder = AutoencoderEncoder(CachedBackbone(cache), head).train()
    with torch.no_grad():  # a quarter of the latents is never among the largest at first
        encoder.autoencoder.latent_bias[:24] = -3.0
    step = make_step(encoder)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(3)
    before, dead = measure(encoder), []
    for number in range(steps):
        texts = [f"{row}" for row in torch.randint(PAIRS, (128,), generator=generator).tolist()]
        rows = encoder.text_rows
        step(TrainBatch(rows.queries(texts), rows.documents(texts)), number)
        optimizer.step()
        optimizer.zero_grad()
        dead.append(encoder.figures()["dead_latents"].item())
    return Fate(*zip(before, measure(encoder), strict=True), dead)


@pytest.mark.slow
def test_a_short_training_on_cached_embeddings_learns(cache):
    """Negative controls: without the auxiliary loss dead latents stay dead, and without that of
    reconstructions their error stays."""
    fate, control = train(cache), train(cache, auxiliary_weight=0.0)
    unheeded = train(cache, reconstruction_weight=0.0)
    assert fate.recall[1] > 2 * fate.recall[0] > 0.3
    assert fate.error[1] < 0.95 * fate.error[0]
    assert unheeded.error[1] > 0.98 * fate.error[0]
    assert max(fate.dead) > 0.2 and fate.dead[-1] < 0.15
    assert control.dead[-1] > 0.2
