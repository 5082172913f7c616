"""Tiny random causal language models of twelve families, with weights large enough that attention
matters, and encoders of them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.assembly import build_encoder
from sparton.models.backbone import Backbone
from sparton.models.body import without_attention_dropout
from sparton.models.causal_lm import set_attention
from sparton.models.encoder import Encoder
from sparton.models.folders import save_encoder
from sparton.models.words import word_tokenizer
from sparton.representations import Representations

WINDOW = {"sliding_window": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {**WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    "gemma3_text": WINDOW,
    "gpt_neox": {},
    "granite": {"logits_scaling": 2.0},
    "llama": {},
    "mistral": WINDOW,
    "olmo2": {},
    "phi3": WINDOW,
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "smollm3": {},
}
ATTENTIONS = ("bidirectional", "causal")
TEXTS = ["w7 w9 w30", "w12", "w44 w45 w8 w9 w10 w11 w12"]
WORDS = [f"w{row}" for row in range(5, 60)]


def build(architecture: str, attention: str | None, **others: Any) -> PreTrainedModel:
    options = {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 96,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        **ARCHITECTURES[architecture],
        **others,
    }
    return random_model(architecture, attention, **options)


def random_model(architecture: str, attention: str | None, **options: Any) -> PreTrainedModel:
    """A model of a configuration, with matrices large enough to matter."""
    config = without_attention_dropout(AutoConfig.for_model(architecture, **options))
    set_attention(config, attention, architecture)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return model.eval()


def tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerFast:
    """Of words; of Qwen 2, whose folders are read with a class that knows pairs of bytes alone, of
    letters."""
    if model.config.model_type != "qwen2":
        return word_tokenizer(WORDS, 96)
    letters = ["<pad>", "<unk>", "<s>", "<|endoftext|>", "\u0120", "w", *"0123456789"]
    vocabulary = {letter: row for row, letter in enumerate(letters)}
    return Qwen2Tokenizer(vocabulary, [], model_max_length=96)


@torch.no_grad()
def saved(model: PreTrainedModel, head: nn.Module, path: Path) -> tuple[Encoder, Representations]:
    """An encoder that was saved there, and what it makes of :data:`TEXTS`."""
    encoder = build_encoder(Backbone(model, tokenizer_of(model)), head).eval()
    save_encoder(encoder, path, query_length=16, document_length=32)
    return encoder, encode(encoder)


@torch.no_grad()
def encode(encoder: Encoder) -> Representations:
    tokenizer = PackedTokenizer(encoder.tokenizer, 16, 32, markup=encoder.markup)
    return encoder.eval().encode(tokenizer.documents(TEXTS), "document")
