"""Two hundred steps with every head: the same loss curve as the eager head, within seed noise."""

from functools import partial

import pytest
import torch
from torch import nn

from sparton.datasets import quickstart
from sparton.datasets.loader import BatchStream
from sparton.datasets.mixture import Mixture
from sparton.datasets.tokenization import PackedTokenizer
from sparton.losses.objective import Objective
from sparton.losses.ramps import QuadraticRamp
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops
from sparton.models.backbones import tiny
from sparton.models.heads import CompiledHead, EagerHead, HybridHead, SpartonHead, TiledHead
from sparton.models.splade import SpladeEncoder
from sparton.training.distributed import World
from sparton.training.optimization import build_optimizer, update
from sparton.training.precision import Precision
from sparton.training.step import ExactStep

STEPS = 200
CPU = torch.device("cpu")
HEADS = {
    "compiled": CompiledHead,
    "tiled": partial(TiledHead, tile=300),
    "tiled_compiled": partial(TiledHead, tile=300, compiled=True),
    "sparton": SpartonHead,
    "sparton_hybrid": HybridHead,
}


class MisroutedHead(EagerHead):
    """Negative control: right values, but the gradient goes to a token of another sequence."""

    def forward(self, hidden, weight, bias, tokens, memory=None):
        values = super().forward(hidden, weight, bias, tokens).detach()
        elsewhere = super().forward(hidden.flip(0), weight, bias, tokens)
        return values + elsewhere - elsewhere.detach()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return quickstart.corpus_texts(0)


@pytest.fixture(scope="module")
def data() -> Mixture:
    return Mixture({"quickstart": quickstart.pairs(0)})


def loss_curve(head: nn.Module, seed: int, texts: list[str], data: Mixture) -> torch.Tensor:
    """Ranking loss of every step, in means of ten."""
    encoder = SpladeEncoder(tiny(texts, hidden_size=32, layers=1, max_length=64, seed=seed), head)
    stream = BatchStream(data, PackedTokenizer(encoder.tokenizer, 16, 32), batch=24, seed=seed)
    regularizer = {"flops": Regularizer(flops, 1e-2, QuadraticRamp(100))}
    objective = Objective(InfoNCE(), regularizer, regularizer)
    precision = Precision("fp32", CPU)
    step = ExactStep(encoder, objective, World(0, 1, CPU), precision, seed=seed)
    optimizer = build_optimizer(encoder, partial(torch.optim.AdamW, lr=3e-3), weight_decay=0.0)
    losses = []
    for number in range(STEPS):
        losses.append(step(stream[number], number).parts["ranking"])
        update(optimizer, precision.grad_scaler(), 1.0, clip_norm=1.0)
    return torch.stack(losses).reshape(-1, 10).mean(1)


@pytest.fixture(scope="module")
def eager(texts, data) -> torch.Tensor:
    return loss_curve(EagerHead(), 0, texts, data)


@pytest.fixture(scope="module")
def band(eager, texts, data) -> float:
    """How far apart eager runs of two seeds lie on average."""
    return (loss_curve(EagerHead(), 1, texts, data) - eager).abs().mean().item()


@pytest.mark.slow
def test_the_eager_head_learns(eager):
    assert eager[-3:].mean() < 0.8 * eager[:3].mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_every_head_trains_like_the_eager_one(name, eager, band, texts, data):
    distance = (loss_curve(HEADS[name](), 0, texts, data) - eager).abs().mean().item()
    assert distance < 0.25 * band


@pytest.mark.slow
def test_a_head_with_misrouted_gradients_lies_outside_the_band(eager, band, texts, data):
    distance = (loss_curve(MisroutedHead(), 0, texts, data) - eager).abs().mean().item()
    assert distance > 0.25 * band
