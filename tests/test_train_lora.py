"""train.py with adapters: trained, saved, resumed, or refused at once."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparton.cli.checks import check
from sparton.datasets.quickstart import corpus_texts
from sparton.errors import OtherRunError
from sparton.models.backbones import tiny
from tests.composing import composed
from tests.test_train import GENTLE, MINIATURE, run_here

pytestmark = pytest.mark.slow

LORA = "backbone.lora={rank: 4, alpha: 8, dropout: 0.1, targets: all-linear, dtype: fp32}"
LORA_ALONE = LORA.replace("}", ", save: adapter}")
QUICK = ["experiment=quickstart", "debug=tiny", "backbone=bert_base"]


@pytest.fixture
def base(tmp_path) -> Path:
    """A checkpoint of a model with the quickstart's words."""
    backbone = tiny(corpus_texts(), vocabulary_size=300, hidden_size=32, layers=1)
    with backbone.decoder_in_place() as model:
        model.save_pretrained(tmp_path / "base")
    backbone.tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def checkpoint(folder: Path) -> dict:
    return torch.load(max(folder.glob("checkpoints/*.pt")), weights_only=True)


def test_adapters_train_and_are_all_that_checkpoints_have(tmp_path):
    run_here(tmp_path, LORA, "precision=fp32", "evaluation.every=4")
    state = checkpoint(tmp_path)
    assert state["encoder"] and all(".lora_" in name for name in state["encoder"])
    assert len(state["optimizer"]["state"]) == len(state["encoder"])
    assert all(v.any() for name, v in state["encoder"].items() if "lora_B" in name)  # they learned
    assert not any("lora" in name for name in load_file(tmp_path / "model" / "model.safetensors"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert 0 < results["mean"]["ndcg@10"] < 1
    assert "frozen_weights" in state["identity"]


def test_frozen_weights_train_in_bf16(tmp_path):
    small = ["backbone=random", "backbone.hidden_size=32", "backbone.layers=1", "backbone.heads=2"]
    overrides = [LORA.replace("fp32", "bf16"), "precision=bf16", "evaluation=none"]
    overrides += ["backbone.gradient_checkpointing=true"]
    run_here(tmp_path, *overrides, miniature=[*QUICK[:2], *small])
    learned = checkpoint(tmp_path)["encoder"]
    assert {value.dtype for value in learned.values()} == {torch.float32}
    assert all(value.any() for name, value in learned.items() if "lora_B" in name)


def test_adapters_alone_are_saved_tested_and_gone_on_from(base, tmp_path):
    named = [f"backbone.name={base}", LORA_ALONE]
    run_here(tmp_path / "first", *named, "evaluation.every=4", miniature=QUICK)
    model = tmp_path / "first" / "model"
    assert (model / "adapter_model.safetensors").exists()
    assert not list(model.glob("model*.safetensors"))
    assert json.loads((tmp_path / "first" / "results.json").read_text())["mean"]["ndcg@10"] > 0
    records = run_here(
        tmp_path / "second", *GENTLE, LORA, f"init_from={model}", miniature=QUICK[:2]
    )
    assert all(".lora_" in name for name in checkpoint(tmp_path / "second")["encoder"])
    assert len(records) == 4


def test_another_base_is_refused_when_a_run_goes_on(base, tmp_path):
    run = [*GENTLE, f"backbone.name={base}", LORA, "checkpoint_every=2", "log_every=1"]
    folder = tmp_path / "run"
    run_here(folder, *run, miniature=QUICK)
    max(folder.glob("checkpoints/*.pt")).unlink()
    assert len(run_here(folder, *run, miniature=QUICK)) == 4
    max(folder.glob("checkpoints/*.pt")).unlink()
    other = tiny(corpus_texts(), vocabulary_size=300, hidden_size=32, layers=1, seed=1)
    with other.decoder_in_place() as model:
        model.save_pretrained(base)
    with pytest.raises(OtherRunError, match="frozen_weights="):
        run_here(folder, *run, miniature=QUICK)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([LORA, "precision=bf16_pure"], "bf16_pure would keep the adapters of backbone.lora in 16"),
        ([LORA.replace("fp32", "bf16"), "precision=fp32"], "add dtype: fp32 to backbone.lora, or"),
        (["backbone.lora={rank: 4}", "precision=fp32"], "add dtype: fp32 to backbone.lora"),
    ],
)
def test_precisions_that_adapters_do_not_have_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        check(composed(*MINIATURE, *overrides), world_size=1)


def test_precisions_that_adapters_have_are_let_pass():
    check(composed(*MINIATURE, LORA, "precision=fp32"), world_size=1)
    for precision in ("bf16", "fp16"):
        check(composed(*MINIATURE, "backbone.lora={rank: 4}", f"precision={precision}"), 1)
