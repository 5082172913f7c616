"""Heads pool logits as sentence-transformers' SpladePooling does.

N texts, T packed tokens, V vocabulary. The weight is the identity: hidden states are logits.
"""

import pytest
import torch
from torch import Tensor

from sparton.models.heads import HybridHead
from sparton.types import TokenBatch
from tests.models.test_heads import BUILDERS, DEVICE

modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")

V = 23
LENGTHS = (5, 1, 12, 0, 3)
TOKENS = TokenBatch.from_lists([[7] * length for length in LENGTHS]).to(DEVICE)
VARIANTS = pytest.mark.parametrize(
    ("pooling", "activation"),
    [("max", "relu"), ("max", "log1p_relu"), ("sum", "relu"), ("sum", "log1p_relu")],
)


def logits() -> Tensor:
    """Of all sizes; a third of the terms is positive nowhere."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(TOKENS.num_tokens, V, generator=generator)
    values[:, ::3] = -values[:, ::3].abs()
    return (values * torch.logspace(-3, 2, V)).to(DEVICE)


def upstream() -> Tensor:
    return torch.randn(len(LENGTHS), V, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def elsewhere(pooling: str, activation: str, chunk_size: int | None) -> list[Tensor]:
    """Their representations, and their gradients of the logits; padding holds what would win."""
    module = modules.SpladePooling(pooling, activation, chunk_size=chunk_size).train()
    leaf = logits().requires_grad_()
    mask = TOKENS.padding_mask()
    padded = torch.where(mask[..., None], TOKENS.pad(leaf), 1e4)
    features = {"token_embeddings": padded, "attention_mask": mask.long()}
    reps = module(features)["sentence_embedding"]
    return [reps.detach(), *torch.autograd.grad(reps, leaf, upstream())]


@VARIANTS
@pytest.mark.parametrize("name", ["eager", "tiled", "sparton"])
def test_values_and_gradients(name, pooling, activation):
    leaf = logits().requires_grad_()
    head = BUILDERS[name](pooling=pooling, activation=activation)
    reps = head(leaf, torch.eye(V, device=DEVICE), None, TOKENS)
    results = [reps.detach(), *torch.autograd.grad(reps, leaf, upstream())]
    for chunk_size in (None, 5):
        for actual, expected in zip(results, elsewhere(pooling, activation, chunk_size)):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
            assert not torch.allclose(actual * 1.001, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(reps == 0, elsewhere(pooling, activation, None)[0] == 0)


def test_the_papers_head():
    reps = HybridHead()(logits(), torch.eye(V, device=DEVICE), None, TOKENS)
    torch.testing.assert_close(reps, elsewhere("max", "relu", None)[0], rtol=1e-6, atol=1e-6)


@VARIANTS
def test_texts_end_to_end(pooling, activation):
    """Their pooling of unpadded batches, which knows no empty text."""
    head = BUILDERS["sparton"](pooling=pooling, activation=activation)
    reps = head(logits(), torch.eye(V, device=DEVICE), None, TOKENS)
    module = modules.SpladePooling(pooling, activation).eval()
    bounds = TOKENS.cu_seqlens.unique()
    features = {"token_embeddings": logits()[None], "cu_seq_lens_q": bounds}
    theirs = module(features)["sentence_embedding"]
    torch.testing.assert_close(reps[[0, 1, 2, 4]], theirs, rtol=1e-6, atol=1e-6)
    assert not reps[3].any()
