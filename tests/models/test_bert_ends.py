"""What comes before the layers of BERT's kind and behind them, on the GPU, or on a CPU that the
modules take for one."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from sparton.models import bert_ends
from sparton.models.backbone import Backbone
from sparton.models.bert_ends import FusedEmbeddings, FusedTransform
from sparton.models.body import EncoderBody
from sparton.models.layers import fuse_layers
from sparton.products import keeping_weights
from sparton.types import TokenBatch
from tests.models.fused_layers import DEVICE, adapt, packed_states, sequences
from tests.models.test_layers import FAMILIES, SMALL, build

HALF = torch.float16  # what a GPU encodes in


@pytest.fixture
def fused(kernels, monkeypatch) -> list[str]:
    """Which of the two did something in one pass."""
    calls: list[str] = []

    def noted(name: str) -> None:
        function = getattr(bert_ends, name)

        def call(*given: object, **options: object) -> Tensor:
            calls.append(name)
            return function(*given, **options)

        monkeypatch.setattr(bert_ends, name, call)

    noted("embedding_norm")
    noted("linear_gelu_norm")
    return calls


def backbone(tokenizer, **settings) -> Backbone:
    torch.manual_seed(0)
    mlm = BertForMaskedLM(BertConfig(**SMALL | settings)).to(DEVICE)
    with torch.no_grad():  # of other values than those that a normalisation starts with
        for parameter in mlm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return Backbone(mlm, tokenizer).eval()


def transformed(model: Backbone) -> Tensor:
    tokens = TokenBatch.from_lists([ids.tolist() for ids in sequences()]).to(DEVICE)
    return model(tokens)


def furthest(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max())


def test_both_encode_as_their_parts_do(tokenizer, fused):
    model = backbone(tokenizer)
    with torch.no_grad():
        truth = transformed(model)
        with torch.autocast(DEVICE, HALF):
            parts, calls = transformed(model), list(fused)
            with keeping_weights(model):
                found = transformed(model)
    assert (calls, fused) == ([], ["embedding_norm", "linear_gelu_norm"])
    assert found.dtype == HALF
    assert furthest(found, truth) < max(2 * furthest(parts, truth), 0.02)
    assert furthest(found, truth.roll(1, 0)) > 1


@pytest.mark.parametrize(("kind", "config"), FAMILIES)
def test_every_family_begins_in_one_pass(kind, config, tokenizer, fused):
    body = EncoderBody(build(kind, config), tokenizer).eval()
    with torch.no_grad(), keeping_weights(body):
        truth = packed_states(body)
        with torch.autocast(DEVICE, HALF):
            assert furthest(packed_states(body), truth) < 0.02
    assert fused == ["embedding_norm"]


@pytest.mark.parametrize("reason", ["training", "gradients", "weights", "fp32"])
def test_what_learns_or_keeps_no_weights_runs_part_by_part(reason, tokenizer, fused):
    model = backbone(tokenizer).train(reason == "training")
    weights = nullcontext() if reason == "weights" else keeping_weights(model)
    cast = torch.autocast(DEVICE, HALF, enabled=reason != "fp32")
    with torch.set_grad_enabled(reason == "gradients"), cast, weights:
        transformed(model)
    assert fused == []


@pytest.mark.parametrize("other", ["activation", "adapter"])
def test_another_transform_runs_part_by_part(other, tokenizer, fused):
    model = backbone(tokenizer, hidden_act="relu" if other == "activation" else "gelu")
    if other == "adapter":
        adapt(model.model.cls)
    with torch.no_grad(), torch.autocast(DEVICE, HALF), keeping_weights(model):
        transformed(model)
    assert fused == ["embedding_norm"]


def test_a_model_of_other_parts_keeps_its_own():
    class Other(nn.Embedding):
        pass

    mlm = BertForMaskedLM(BertConfig(**SMALL))
    mlm.bert.embeddings.position_embeddings = Other(32, 32)
    fuse_layers(mlm)
    kinds = {type(part) for part in mlm.modules()}
    assert FusedTransform in kinds and FusedEmbeddings not in kinds
