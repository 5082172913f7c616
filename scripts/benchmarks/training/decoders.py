"""Causal language models of the sizes that people train, with random weights.

A word of the vocabulary is a token, as in the other models of the workload.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from sparton.models.words import SPECIAL_TOKENS, word_tokenizer

SPREAD = 0.02  # of all weights
# Logits of a text begin below zero but for the largest, one or two terms of a hundred.
RARE = 3.7  # standard deviations
LONGEST = 1024


class Decoder(NamedTuple):
    """An architecture of transformers and its sizes, as the model's configuration has them."""

    model_type: str
    sizes: dict[str, Any]

    def config(self, miniature: bool) -> PreTrainedConfig:
        sizes = self.sizes | (_MINIATURE if miniature else {})
        common = {"max_position_embeddings": LONGEST, "initializer_range": SPREAD}
        return AutoConfig.for_model(self.model_type, **sizes, **common)

    def shift(self, miniature: bool) -> float:
        """What is added to all logits, so that few terms of a text are active at the start."""
        width = self.config(miniature).hidden_size
        return -RARE * SPREAD * width**0.5

    def write(self, folder: Path, miniature: bool) -> None:
        """The model in bfloat16, and its tokenizer."""
        config = self.config(miniature)
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        words = [f"w{row}" for row in range(len(SPECIAL_TOKENS), config.vocab_size)]
        word_tokenizer(words, LONGEST).save_pretrained(folder)


_MINIATURE = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
DECODERS = {
    "qwen3-0.6b": Decoder("qwen3", {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    }),
    "llama-3.2-1b": Decoder("llama", {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "tie_word_embeddings": True,
    }),
    "mistral-7b": Decoder("mistral", {
        "vocab_size": 32_768, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False, "sliding_window": None,
    }),
}  # fmt: skip
