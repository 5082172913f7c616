"""Adaptation by adapters: what learns, how it goes on when stopped, the folders, what is refused.

The other side of the comparisons is the base in transformers, or peft on it.
"""

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparton.errors import OtherRunError
from sparton.models.backbones import pretrained, tiny
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder
from sparton.pipelines import adapt_lm
from sparton.pipelines.masked_language import Plan
from sparton.types import TokenBatch
from tests.models.alone import alone, batch, close
from tests.pipelines.test_adaptation import TEXTS as PAIRED
from tests.pipelines.test_adaptation import stopping_at, weights
from tests.pipelines.test_causal_adaptation import PLAN, TEXTS, start

__all__ = ["start"]  # a fixture

LORA = {"rank": 3, "alpha": 12, "dropout": 0.1}
ALONE = LORA | {"save": "adapter"}
MASKED = Plan(steps=6, batch_tokens=256, length=20, lr=1e-2, active_terms=9)
QUIET = {"plan": PLAN, "progress": False}


@pytest.fixture
def masked(tmp_path) -> Path:
    encoder = SpladeEncoder(tiny(PAIRED, hidden_size=64, layers=1, max_length=32), EagerHead())
    save_encoder(encoder, tmp_path / "masked", query_length=32, document_length=32)
    return tmp_path / "masked"


def moved(base: Path, adapted: Path) -> dict[str, int]:
    """The rank of what every weight of a folder differs by from that of its base, if it does."""
    before, after = weights(base), weights(adapted)
    changes = {name: after[name] - value for name, value in before.items() if name in after}
    return {
        name: int(torch.linalg.matrix_rank(change, atol=1e-4)) if change.ndim == 2 else 1
        for name, change in changes.items()
        if change.any()
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize("objective", ["mntp", "clm"])
def test_adapters_of_a_causal_model_learn_alone(objective, start, tmp_path):
    plan = replace(PLAN, objective=objective, steps=60, lr=1e-2)
    output = tmp_path / "adapted"
    adapted = adapt_lm(TEXTS, output, backbone=start, plan=plan, lora=LORA, progress=False)
    assert adapted.after.loss < 0.9 * adapted.before.loss
    found = moved(start, output)
    assert found == {name: 3 for name in weights(start) if name.endswith("proj.weight")}
    assert len(found) == 14
    # The decoder is that of the base, which shares its embeddings, but for the mean row.
    table = weights(start)["model.embed_tokens.weight"]
    assert close(weights(output)["lm_head.weight"], table - table.mean(0))
    texts = TokenBatch.from_lists(load_encoder(output).tokenizer(TEXTS)["input_ids"])
    assert 6 < (load_encoder(output).eval()(texts) > 0).sum(1).float().mean() < 13


def test_adapters_of_a_masked_model_learn_alone(masked, tmp_path):
    plan, output = replace(MASKED, steps=40), tmp_path / "adapted"
    adapted = adapt_lm(PAIRED, output, backbone=masked, plan=plan, lora=LORA, progress=False)
    assert adapted.after.loss < 0.9 * adapted.before.loss
    found, shift = moved(masked, output), weights(output)["cls.predictions.bias"]
    assert close(shift - weights(masked)["cls.predictions.bias"], torch.tensor(adapted.shift))
    del found["cls.predictions.bias"]
    linears = [name for name, value in weights(masked).items() if value.ndim == 2]
    linears = [name for name in linears if "embeddings" not in name]
    assert found == dict.fromkeys(linears, 3) and "cls.predictions.transform.dense.weight" in found


@pytest.mark.quick(1)
@pytest.mark.parametrize("lora", [LORA, ALONE])
def test_a_stopped_adaptation_goes_on_to_the_same_adapters(lora, start, tmp_path, monkeypatch):
    settings = {"backbone": start, "checkpoint_every": 2, "lora": lora, **QUIET}
    whole = adapt_lm(TEXTS, tmp_path / "whole", **settings)
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        stopping_at(5, patched)
        with pytest.raises(KeyboardInterrupt):
            adapt_lm(TEXTS, stopped, **settings)
    state = torch.load(max((tmp_path / "stopped.run/checkpoints").glob("*.pt")))
    assert len(state["encoder"]) == 28 and all(".lora_" in name for name in state["encoder"])
    assert len(state["optimizer"]["state"]) == 28
    with pytest.raises(OtherRunError, match=r"lora=Lora\(rank=3.*alpha=6.*was .*alpha=12"):
        adapt_lm(TEXTS, stopped, **settings | {"lora": lora | {"alpha": 6}})
    with monkeypatch.context() as patched:
        begun = stopping_at(-1, patched)
        assert adapt_lm(TEXTS, stopped, **settings) == whole
    assert begun == [4, 5]
    name = "adapter_model.safetensors" if "save" in lora else "model.safetensors"
    expected, found = (load_file(tmp_path / each / name) for each in ("whole", "stopped"))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    other = adapt_lm(TEXTS, tmp_path / "other", **settings | {"lora": lora | {"dropout": 0.2}})
    assert other.after != whole.after


def in_peft(base: Path, folder: Path, tokens: TokenBatch) -> Tensor:
    """The logits of the base with the adapters of a folder, by peft alone."""
    stock = AutoModelForCausalLM.from_pretrained(base)
    stock.config.is_causal = False
    return alone(peft.PeftModel.from_pretrained(stock, str(folder)).eval(), tokens)


@torch.no_grad()
def logits_of(folder: Path, tokens: TokenBatch) -> Tensor:
    backbone = pretrained(str(folder)).eval()
    assert not backbone.is_causal
    return backbone.decoder(backbone(tokens))


def test_both_folders_are_the_base_with_its_adapters(start, tmp_path):
    settings = {"backbone": start, **QUIET}
    whole = adapt_lm(TEXTS, tmp_path / "whole", lora=LORA, **settings)
    apart = adapt_lm(TEXTS, tmp_path / "apart", lora=ALONE, **settings)
    assert close(torch.tensor(apart.after), torch.tensor(whole.after))
    assert not list((tmp_path / "apart").glob("model*.safetensors"))
    tokens = batch((9, 4, 1))
    expected = in_peft(start, tmp_path / "apart", tokens)
    base = AutoModelForCausalLM.from_pretrained(start)
    base.config.is_causal = False
    assert not close(alone(base.eval(), tokens), expected)
    # Merged, the decoder is centred: what all logits of a token share is their mean.
    centred = expected - expected.mean(1, keepdim=True)
    assert close(logits_of(tmp_path / "whole", tokens), centred + whole.shift)
    assert close(logits_of(tmp_path / "apart", tokens), expected + apart.shift)
    assert not close(logits_of(tmp_path / "apart", tokens), centred + apart.shift)
    for folder in ("whole", "apart"):
        encoder = load_encoder(tmp_path / folder).eval()
        texts = TokenBatch.from_lists(encoder.tokenizer(TEXTS)["input_ids"])
        assert 6 < (encoder(texts) > 0).sum(1).float().mean() < 13


def test_frozen_weights_in_bf16(start, tmp_path):
    """On a CPU, too, where that is asked for; what is saved is fp32."""
    settings = {"backbone": start, **QUIET}
    adapted = adapt_lm(TEXTS, tmp_path / "x", lora=LORA | {"dtype": "bf16"}, **settings)
    assert adapted.after.loss < adapted.before.loss
    assert {value.dtype for value in weights(tmp_path / "x").values()} == {torch.float32}
    name = "model.embed_tokens.weight"
    before, after = weights(start)[name], weights(tmp_path / "x")[name]
    assert torch.equal(after, before.bfloat16().float()) and not torch.equal(after, before)
    adapt_lm(TEXTS, tmp_path / "y", lora=ALONE | {"dtype": "bf16"}, **settings)
    (bias,) = load_file(tmp_path / "y/1_LogitBias/model.safetensors").values()
    assert not torch.equal(bias, bias.bfloat16().float())


def test_what_adapters_cannot_do_is_refused(start, masked, tmp_path):
    frozen = {"lora": LORA | {"dtype": "bf16"}}
    fitting = {"backbone": start, "plan": PLAN}
    for settings, message in (
        ({"lora": LORA}, "MiniLM comes without a head.* or give backbone a language model"),
        (
            {"backbone": masked, "lora": LORA, "plan": replace(MASKED, frozen=True)},
            "frozen=True leaves the body as it is, and lora=.* are what learns in it",
        ),
        ({"backbone": masked, "lora": ALONE}, "one of the frozen weights of BertForMaskedLM: save"),
        (fitting | {"lora": {"rank": 0}}, "rank=0, which must be a whole number from 1 on"),
        (fitting | {"lora": "rank"}, "lora is 'rank', and must be settings by their names"),
        (fitting | frozen | {"precision": "fp32"}, "precision='fp32' has no products with the fro"),
        (fitting | {"lora": LORA, "precision": "bf16_pure"}, "would keep the adapters .* 16 bits"),
        ({"backbone": tiny(PAIRED), "lora": LORA}, "a loaded backbone ignores lora"),
        ({"backbone": tiny(PAIRED, lora=ALONE)}, "the weights that they belong to are in no folde"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt_lm(PAIRED, tmp_path / "x", **{"plan": MASKED, **settings})
    assert not (tmp_path / "x.run").exists()


def test_a_loaded_backbone_brings_its_adapters(masked, tmp_path):
    loaded = pretrained(str(masked), lora=LORA | {"dtype": "fp32"})
    settings = {"plan": MASKED, "progress": False}
    adapt_lm(PAIRED, tmp_path / "by-object", backbone=loaded, **settings)
    found = moved(masked, tmp_path / "by-object")
    assert found.pop("cls.predictions.bias") and set(found.values()) == {3}
    assert loaded.lora is not None, "what was given keeps its adapters"
