"""A short training of documents for inference-free queries: who learns, and how far."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from sparton.datasets import quickstart
from sparton.datasets.loader import BatchStream
from sparton.datasets.mixture import Mixture
from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.asymmetric import AsymmetricEncoder, static_queries
from sparton.models.backbones import tiny
from sparton.models.heads import SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.training.optimization import build_optimizer, update

STEPS, BATCH = 60, 24
NO_SCALER = torch.amp.GradScaler(enabled=False)


@pytest.fixture(scope="module")
def stream() -> tuple[list[str], Mixture]:
    return quickstart.corpus_texts(0), Mixture({"quickstart": quickstart.pairs(0)})


def build(texts: list[str], *, frozen: bool) -> AsymmetricEncoder:
    backbone = tiny(texts, hidden_size=32, layers=1, max_length=64, word_std=0.02, decoder_bias=0.0)
    return static_queries(SpladeEncoder(backbone, SpartonHead()), frozen=frozen, lr=3e-2)


def train(encoder: AsymmetricEncoder, data: Mixture, steps: int = STEPS) -> torch.Tensor:
    """The ranking loss of every step, documents penalised for their terms."""
    batches = BatchStream(data, PackedTokenizer(encoder.tokenizer, 16, 32), batch=BATCH, seed=0)
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    optimizer = build_optimizer(encoder, adamw, 0.0, encoder.learning_rates())
    losses = []
    for number in range(steps):
        batch = batches[number]
        queries = encoder.encode(batch.queries, "query").sparse
        documents = encoder.encode(batch.documents, "document").sparse
        loss = F.cross_entropy(queries @ documents.T, torch.arange(BATCH))
        (loss + 1e-3 * documents.mean(0).square().sum()).backward()
        update(optimizer, NO_SCALER, 1.0, clip_norm=1.0)
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.quick(1)
@pytest.mark.parametrize("frozen", [True, False])
def test_documents_learn_to_hold_the_words_of_queries(stream, frozen):
    texts, data = stream
    encoder = build(texts, frozen=frozen)
    before = encoder.query.weights.detach().clone()
    losses = train(encoder, data)
    assert losses[-10:].mean() < 0.6 * losses[:10].mean()
    after = encoder.query.weights.detach()
    assert torch.equal(before, after) == frozen
    assert not after[encoder.tokenizer.all_special_ids].any()


def test_documents_that_do_not_learn_stay_where_they_are(stream):
    """Negative control: learned weights alone, at the same rate, do not reach that loss."""
    texts, data = stream
    encoder = build(texts, frozen=False)
    encoder.document.requires_grad_(False)
    losses = train(encoder, data)
    assert losses[-10:].mean() > 0.6 * losses[:10].mean()
