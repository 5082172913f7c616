"""What ``zeros_are_final`` promises: zeros pass no gradient on. Active entries do."""

import pytest
import torch

from sparton.models.asymmetric import static_queries
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.encoder import Encoder
from sparton.models.heads import (
    EagerHead,
    HybridHead,
    SpartonHead,
    SpladeHead,
    TiledHead,
)
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.splade import SpladeEncoder
from sparton.types import TokenBatch

TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt quick hens"]
TOKENS = TokenBatch.from_lists([[2, 5, 6, 7, 3], [2, 3], [2, 8, 9, 3]])
HEADS = [
    EagerHead(),
    EagerHead("sum"),
    TiledHead(8),
    HybridHead(),
    SpartonHead(),
    SpartonHead("max", "log1p_relu"),
    SpartonHead("sum"),
    SpartonHead(fp8=True),
]


def splade(head: SpladeHead) -> SpladeEncoder:
    return SpladeEncoder(tiny(TEXTS, hidden_size=16, layers=1, decoder_bias=-0.5), head)


def autoencoder() -> AutoencoderEncoder:
    head = AutoencoderHead(64, 6, k_aux=8, freeze_backbone=False)
    return AutoencoderEncoder(tiny(TEXTS, hidden_size=32, layers=1), head)


def joint() -> JointEncoder:
    head = JointHead(SpartonHead(), ColbertHead(8))
    return JointEncoder(tiny(TEXTS, hidden_size=16, layers=1, decoder_bias=-0.5), head)


def encoders() -> list[Encoder]:
    torch.manual_seed(0)
    static = static_queries(splade(EagerHead()), frozen=False)
    with torch.no_grad():
        static.query.weights[5::2] *= -1
    return [*map(splade, HEADS), autoencoder(), joint(), static]


@pytest.mark.parametrize("encoder", encoders(), ids=lambda encoder: type(encoder).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_final(encoder, dtype):
    if any(getattr(head, "fp8", False) for head in encoder.modules()) and dtype == torch.float32:
        pytest.skip("fp8 takes 16 bit")
    assert encoder.zeros_are_final
    parameters = [each for each in encoder.parameters() if each.requires_grad]
    moved = []
    for side in ("query", "document"):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            reps = encoder.encode(TOKENS, side).sparse
        zeros = (reps == 0).float()
        assert 0 < zeros.sum() < zeros.numel()
        for places in (zeros, 1 - zeros):
            gradients = torch.autograd.grad(
                reps, parameters, places, retain_graph=True, allow_unused=True
            )
            moved.append(any(each is not None and each.any() for each in gradients))
    assert moved == [False, True] * 2
