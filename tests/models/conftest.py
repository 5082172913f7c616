"""Tiny random members of every backbone family, with weights large enough that attention matters.

The families differ where packing could go wrong: BERT has absolute positions and token types,
DistilBERT another head, XLM-R an offset of the positions, ModernBERT rotary positions and local
attention (here 4 tokens to each side).
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from sparton.models import bert_ends, bert_parts, decoder_layers, modernbert, residuals
from sparton.models.body import without_attention_dropout
from sparton.models.words import word_tokenizer
from tests.models.gte import needs_gte

VOCABULARY_SIZE = 60
MAX_LENGTH = 96
FAMILIES = (
    "bert", "distilbert", "xlm_roberta", "modernbert", pytest.param("gte", marks=needs_gte),
)  # fmt: skip
SIZES = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": MAX_LENGTH,
}  # fmt: skip
CONFIGS: dict[str, dict[str, object]] = {
    "bert": SIZES,
    "distilbert": {
        "vocab_size": VOCABULARY_SIZE, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48,
        "max_position_embeddings": MAX_LENGTH,
    },
    "xlm_roberta": SIZES
    | {
        "max_position_embeddings": MAX_LENGTH + 2,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    },
    "modernbert": SIZES
    | {
        "num_hidden_layers": 4, "local_attention": 8, "global_attn_every_n_layers": 3,
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2,
        "sep_token_id": 3,
    },
    "gte": SIZES | {"pad_token_id": 0},
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def build_mlm() -> Callable[[str], PreTrainedModel]:
    """Family name to a fresh model; equal names give equal weights."""

    def build(name: str) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            config = AutoConfig.for_model(name.replace("_", "-"), **CONFIGS[name])
            mlm = AutoModelForMaskedLM.from_config(without_attention_dropout(config))
            for parameter in mlm.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(5)
        return mlm.eval()

    return build


def _take(monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    for module in (bert_ends, bert_parts, decoder_layers, modernbert, residuals):
        monkeypatch.setattr(module, "has_kernels", lambda x: kernels)


@pytest.fixture
def kernels(monkeypatch) -> None:
    """On a CPU fused layers take it for a GPU."""
    if not torch.cuda.is_available():
        _take(monkeypatch, True)


@pytest.fixture(params=["kernels", "PyTorch"])
def arithmetic(request, monkeypatch) -> None:
    """Fused layers run kernels, or what stands in for them."""
    _take(monkeypatch, request.param == "kernels")


@pytest.fixture
def graphs(monkeypatch) -> CompileCounter:
    """Counts what modules compile; a break would be an error, by fullgraph=True."""
    counter, compile = CompileCounter(), nn.Module.compile

    def counted(module: nn.Module, *, dynamic: bool, options: dict[str, bool]) -> None:
        assert options  # of a compiler that is not here
        compile(module, backend=counter, fullgraph=True, dynamic=dynamic)

    monkeypatch.setattr(nn.Module, "compile", counted)
    torch._dynamo.reset()
    return counter


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer([f"w{row}" for row in range(5, VOCABULARY_SIZE)], MAX_LENGTH)
