"""Which causal language models go with which heads, and how the others are refused."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from sparton.models.backbone import Backbone
from sparton.models.colbert import ColbertHead
from sparton.models.folders import load_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.joint import JointHead
from sparton.models.pooling import Pooling
from sparton.representations import Representations
from tests.models.alone import alone, assert_same_logits_and_gradients, batch, close
from tests.models.causal_lms import ARCHITECTURES, TEXTS, build, encode, random_model, saved

LENGTHS = (3, 1, 9, 2)
TOKENS = ColbertHead(16, query_marker="", document_marker="", query_expansion=False)
HEADS: dict[str, nn.Module | Pooling] = {
    "sparton": SpartonHead(),
    "eager": EagerHead(),
    "colbert": TOKENS,
    "sparton_colbert": JointHead(SpartonHead(), TOKENS),
    "dense": Pooling("mean"),
}
CLASSES = {
    "eager": "SparseEncoder",
    "colbert": "MultiVectorEncoder",
    "dense": "SentenceTransformer",
}


def small(architecture: str, attention: str, **options: Any) -> PreTrainedModel:
    sizes = {"vocab_size": 60, "hidden_size": 32, "pad_token_id": 0, "eos_token_id": 3}
    return random_model(architecture, attention, **sizes, **options)


def values(representations: Representations) -> torch.Tensor:
    sparse, tokens = representations.sparse, representations.tokens
    parts = [each for each in (sparse, tokens and tokens.values) if each is not None]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_goes_with_every_head(architecture, head, tmp_path):
    _, given = saved(build(architecture, "bidirectional"), HEADS[head], tmp_path)
    expected = values(given)
    again = load_encoder(tmp_path)
    assert close(values(encode(again)), expected)
    with torch.no_grad():
        next(again.parameters()).mul_(2)
    assert not close(values(encode(again)), expected)
    if head in CLASSES:
        sentence_transformers = pytest.importorskip("sentence_transformers", "6.2")
        stock = getattr(sentence_transformers, CLASSES[head])(str(tmp_path), device="cpu")
        options = {"convert_to_sparse_tensor": False} if head == "eager" else {}
        found = stock.encode_document(TEXTS, **options)
        found = torch.cat([torch.as_tensor(each).flatten() for each in found])
        if head == "dense":  # which compares by cosine, and normalises there
            expected, found = (
                nn.functional.normalize(each.view(3, -1), dim=1) for each in (expected, found)
            )
        assert close(found, expected)


PADDED = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_oss": {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1,
        "max_position_embeddings": 96, "sliding_window": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("architecture", PADDED)
def test_those_that_cannot_be_packed_are_padded(architecture, attention, tokenizer):
    stock = small(architecture, attention, **PADDED[architecture])
    backbone = Backbone(small(architecture, attention, **PADDED[architecture]), tokenizer).eval()
    assert backbone.layout.name == "padded"
    assert_same_logits_and_gradients(backbone, stock, batch(LENGTHS))


DEAF = {
    "stablelm": {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 96,
    },
    "mamba": {"num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("architecture", DEAF)
def test_those_that_stay_causal_are_refused_as_bidirectional(architecture, tokenizer):
    with pytest.raises(ValueError, match=r"is to be bidirectional, but .* attention='causal'"):
        Backbone(small(architecture, "bidirectional", **DEAF[architecture]), tokenizer)
    if architecture == "stablelm":
        model = small(architecture, "causal", **DEAF[architecture])
        backbone = Backbone(small(architecture, "causal", **DEAF[architecture]), tokenizer).eval()
        assert close(backbone.decoder(backbone(batch(LENGTHS))), alone(model, batch(LENGTHS)))


def test_one_that_stays_bidirectional_is_refused_as_causal(tokenizer):
    """As EmbeddingGemma, whose configuration has a word of its own for it."""
    model = build("gemma3_text", "causal", use_bidirectional_attention=True)
    with pytest.raises(ValueError, match=r"is to be causal, but .* attention='bidirectional'"):
        Backbone(model, tokenizer)
    assert Backbone(build("gemma3_text", None, use_bidirectional_attention=True), tokenizer)
