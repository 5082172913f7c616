"""Small checkpoints of GTE in the form that the hub has them in, with weights large enough that
attention matters."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

needs_gte = pytest.mark.skipif(
    "gte" not in CONFIG_MAPPING, reason="needs a transformers that has GTE, 5.18 or later"
)
D, INNER, LAYERS, HEADS = 32, 48, 2, 2
CONFIG = {
    "architectures": ["NewForMaskedLM"],
    "auto_map": {"AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig"},
    "model_type": "new",
    "vocab_size": 62,
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 600,
    "type_vocab_size": 0,
    "layer_norm_type": "layer_norm",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "rope",
    "rope_theta": 500000,
    "rope_scaling": None,
    "pack_qkv": True,
    "unpad_inputs": True,
    "logn_attention_scale": False,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, **settings: object) -> dict[str, Tensor]:
    """Weights that were drawn at random, by their names; tokenizer files are the caller's.

    Args:
        settings: of the configuration, in the place of those in :data:`CONFIG`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | settings
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) / D**0.5

    def vector(name: str, size: int, mean: float = 0.0) -> None:
        weights[name] = mean + 0.1 * torch.randn(size, generator=generator)

    def norm(name: str) -> None:
        vector(f"{name}.weight", D, mean=1.0)
        vector(f"{name}.bias", D)

    matrix("new.embeddings.word_embeddings", config["vocab_size"], D)
    if config["type_vocab_size"]:
        matrix("new.embeddings.token_type_embeddings", config["type_vocab_size"], D)
    norm("new.embeddings.LayerNorm")
    for layer in (f"new.encoder.layer.{row}" for row in range(LAYERS)):
        for name, rows, columns in (
            ("attention.qkv_proj", 3 * D, D),
            ("attention.o_proj", D, D),
            ("mlp.up_gate_proj", 2 * INNER, D),
            ("mlp.down_proj", D, INNER),
        ):
            matrix(f"{layer}.{name}", rows, columns)
            if name != "mlp.up_gate_proj":
                vector(f"{layer}.{name}.bias", rows)
        norm(f"{layer}.attn_ln")
        norm(f"{layer}.mlp_ln")
    matrix("lm_head.dense", D, D)
    vector("lm_head.dense.bias", D)
    norm("lm_head.norm")
    vector("lm_head.decoder.bias", config["vocab_size"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights
