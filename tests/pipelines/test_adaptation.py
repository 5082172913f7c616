"""Adaptation in miniature: what it learns, how it goes on when stopped, what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sparton.models.backbones import pretrained, tiny
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder
from sparton.pipelines import adapt_lm
from sparton.pipelines.adaptation import split
from sparton.pipelines.masked_language import (
    BLANK,
    MaskedLanguageStep,
    Masking,
    Plan,
    masked_batches,
    shuffled_batches,
)
from sparton.training.state import CheckpointError
from sparton.types import TokenBatch

# Words come in fixed pairs, so a hidden word can be told from its neighbour.
PAIRS = [(f"left{row}", f"right{row}") for row in range(12)]
SHORT = Plan(steps=8, batch_tokens=256, length=20, lr=1e-2, head_lr=1e-2, active_terms=9)


def sentence(row: int) -> str:
    chosen = [PAIRS[(row * 7 + step * (1 + row % 5)) % len(PAIRS)] for step in range(6)]
    return " ".join(f"{left} {right}" for left, right in chosen)


TEXTS = [*(sentence(row) for row in range(400)), "", " "]


@pytest.fixture
def start(tmp_path) -> Path:
    """A small masked-language model that knows the words."""
    encoder = SpladeEncoder(tiny(TEXTS, hidden_size=64, layers=1, max_length=32), EagerHead())
    save_encoder(encoder, tmp_path / "start", query_length=32, document_length=32)
    return tmp_path / "start"


@pytest.mark.slow
def test_some_steps_teach_the_pairs_and_the_result_loads(start, tmp_path):
    plan = replace(SHORT, steps=150, batch_tokens=1024)
    output = tmp_path / "adapted"
    adapted = adapt_lm(TEXTS, output, backbone=start, plan=plan, progress=False)
    assert adapted.texts == 400
    assert adapted.after.loss < 0.25 * adapted.before.loss

    backbone = pretrained(str(output)).eval()
    ids = backbone.tokenizer("left3 [MASK] left5 right5")["input_ids"]
    with torch.no_grad():
        logits = backbone.decoder(backbone(TokenBatch.from_lists([ids])))
    assert backbone.tokenizer.convert_ids_to_tokens(int(logits[2].argmax())) == "right3"

    encoder = load_encoder(output, EagerHead()).eval()
    texts = encoder.tokenizer([sentence(row)[:60] for row in range(100)])["input_ids"]
    active = (encoder(TokenBatch.from_lists(texts)) > 0).sum(1).float().mean()
    assert 5 < active < 15


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def records(output: Path) -> list[dict]:
    lines = (output.with_name(f"{output.name}.run") / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def stopping_at(step: int, monkeypatch) -> list[int]:
    """Ctrl-C before that step; gives the steps that were begun."""
    begun: list[int] = []
    real = MaskedLanguageStep.__call__

    def call(self, batch, number, *scale):
        if number == step:
            raise KeyboardInterrupt
        begun.append(number)
        return real(self, batch, number, *scale)

    monkeypatch.setattr(MaskedLanguageStep, "__call__", call)
    return begun


def test_a_stopped_adaptation_goes_on_to_the_same_weights(start, tmp_path, monkeypatch, capsys):
    settings = {"backbone": start, "plan": SHORT, "checkpoint_every": 2, "progress": False}
    adapt_lm(TEXTS, tmp_path / "whole", **settings)
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        assert stopping_at(5, patched) == []
        with pytest.raises(KeyboardInterrupt):
            adapt_lm(TEXTS, stopped, **settings)
    assert not stopped.exists()
    with pytest.raises(CheckpointError, match=r"seed=1 \(was 0\)"):
        adapt_lm(TEXTS, stopped, **settings | {"plan": replace(SHORT, seed=1)})
    with pytest.raises(CheckpointError, match="texts="):
        adapt_lm(TEXTS[1:], stopped, **settings)
    with pytest.raises(CheckpointError, match=r"precision=bf16 \(was fp32\)"):
        adapt_lm(TEXTS, stopped, **settings | {"precision": "bf16"})
    with monkeypatch.context() as patched:
        begun = stopping_at(-1, patched)
        adapted = adapt_lm(TEXTS, stopped, **settings)
    assert begun == [4, 5, 6, 7]
    assert capsys.readouterr().out == ""
    assert adapted.before.loss != adapted.after.loss
    expected, found = weights(tmp_path / "whole"), weights(stopped)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    losses = [[line["loss"] for line in records(tmp_path / name)] for name in ("whole", "stopped")]
    assert losses[0] == losses[1] and len(losses[0]) == SHORT.steps
    assert not list((tmp_path / "stopped.run").glob("checkpoints"))
    other = adapt_lm(TEXTS, tmp_path / "other", **settings | {"plan": replace(SHORT, seed=1)})
    assert other.after != adapted.after, "chance has a say"


def test_what_is_in_a_folder_stays(start, tmp_path, monkeypatch):
    """Unless the adaptation that it is of was stopped while it wrote."""
    settings = {"backbone": start, "plan": SHORT, "checkpoint_every": 2, "progress": False}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    (whole / "notes.txt").touch()
    with pytest.raises(
        ValueError, match=r"something in it, notes\.txt .*: name another folder, or"
    ):
        adapt_lm(TEXTS, whole, **settings)
    (whole / "notes.txt").unlink()
    adapted = adapt_lm(TEXTS, whole, **settings)
    with pytest.raises(ValueError, match=r"whole' holds a model, .*, or delete this one"):
        adapt_lm(TEXTS, whole, **settings)
    with monkeypatch.context() as patched:
        stopping_at(5, patched)
        with pytest.raises(KeyboardInterrupt):
            adapt_lm(TEXTS, stopped, **settings)
    stopped.mkdir()
    (stopped / "config.json").write_text("{")
    assert adapt_lm(TEXTS, stopped, **settings).after == adapted.after
    assert weights(stopped)


def test_a_loaded_backbone_is_adapted_too(start, tmp_path):
    backbone = pretrained(str(start))
    adapted = adapt_lm(TEXTS, tmp_path / "by-object", backbone=backbone, plan=SHORT)
    again = adapt_lm(TEXTS, tmp_path / "by-name", backbone=start, plan=SHORT)
    assert adapted == again
    expected, found = weights(tmp_path / "by-name"), weights(tmp_path / "by-object")
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    with pytest.raises(ValueError, match="a loaded backbone ignores compile"):
        adapt_lm(TEXTS, tmp_path / "x", backbone=backbone, compile=True)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_body_stays_as_it_is(start, tmp_path, frozen):
    plan = replace(SHORT, frozen=frozen)
    adapted = adapt_lm(TEXTS, tmp_path / "adapted", backbone=start, plan=plan, progress=False)
    assert adapted.after.loss < adapted.before.loss
    before, after = weights(start), weights(tmp_path / "adapted")
    kept = {name for name, value in before.items() if torch.equal(value, after[name])}
    body = {name for name in before if name.startswith("bert.")}
    assert 0 < len(body) < len(before)
    assert kept == (body if frozen else set())


def test_the_log_has_what_trainings_log(start, tmp_path, capsys):
    adapt_lm(TEXTS, tmp_path / "adapted", backbone=start, plan=SHORT)
    first, *_, last = records(tmp_path / "adapted")
    assert {"loss", "gradient_norm", "tokens_per_second", "step_ms"} <= set(first)
    assert first["learning_rate"] == first["learning_rate_backbone.model.bert"] == 0.01
    assert last["learning_rate"] < first["learning_rate"]
    assert last["step"] == SHORT.steps
    manifest = json.loads((tmp_path / "adapted.run/manifest.json").read_text())
    assert manifest["config"]["steps"] == "8" and "hardware" in manifest
    assert "8/8" in capsys.readouterr().out


def test_batches_are_shuffled_bounded_and_complete():
    lengths = np.random.default_rng(0).integers(1, 9, 50)
    lengths[7] = 40
    batches = shuffled_batches(lengths, 30, seed=3)
    rows: list[int] = []
    while len(rows) < 150:
        batch = next(batches)
        assert len(batch) == 1 or lengths[batch].sum() <= 30
        rows += batch.tolist()
    epochs = [rows[start : start + 50] for start in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != list(range(50))
    few = shuffled_batches(np.array([3, 4]), 30, seed=0)
    assert sorted(next(few).tolist()) == [0] * 4 + [1] * 4, "a batch of more than one epoch"


@pytest.mark.parametrize(("steps", "held"), [(1, 32), (10, 100), (300, 256)])
def test_short_plans_hold_fewer_texts_out(steps, held):
    tokens = TokenBatch.from_lists([[row] * 10 for row in range(4000)])
    training, held_out = split(tokens, Plan(steps=steps, batch_tokens=100))
    assert held_out.num_sequences == held
    rows = torch.cat([training.input_ids[::10], held_out.input_ids[::10]])
    assert rows.sort().values.tolist() == list(range(4000))
    few = tokens.select(0, 30)
    assert [each.num_sequences for each in split(few, SHORT)] == [30, 30]


@pytest.mark.parametrize("size", [31, 255, 256, 257, 319, 320, 600, 2559, 2600])
def test_nine_tenths_of_the_texts_are_learned_from(size):
    tokens = TokenBatch.from_lists([[row] * 10 for row in range(size)])
    learned, judged = split(tokens, Plan(steps=300, batch_tokens=1000))
    assert learned.num_sequences >= 0.9 * size
    assert judged.num_sequences == (min(size // 10, 256) if size >= 320 else min(size, 256))


def test_the_vocabulary_is_listed_once_for_all_batches(monkeypatch):
    tokenizer = tiny(TEXTS, hidden_size=16, layers=1).tokenizer
    tokenizer.mask_token = None
    listed: list[int] = []
    monkeypatch.setattr(
        type(tokenizer), "get_vocab", lambda self: listed.append(0) or {BLANK: 7}, raising=True
    )
    tokens = TokenBatch.from_lists([[8] * 10] * 40)
    plan = replace(SHORT, objective="mntp", steps=5, batch_tokens=100)
    batches = list(masked_batches(tokens, Masking("mntp", tokenizer), plan, 0))
    assert len(batches) == 5 and listed == [0]
    assert all((batch.tokens.input_ids == 7).any() for batch in batches)
    later = list(masked_batches(tokens, Masking("mntp", tokenizer), plan, 3))
    for one, other in zip(batches[3:], later, strict=True):
        assert torch.equal(one.tokens.input_ids, other.tokens.input_ids)
        assert torch.equal(one.places, other.places)
    assert not torch.equal(batches[3].places, batches[4].places)


def test_what_is_hidden():
    tokenizer = tiny(TEXTS, hidden_size=16, layers=1).tokenizer
    ids = tokenizer([sentence(row) for row in range(400)])["input_ids"]
    tokens = TokenBatch.from_lists(ids)
    masked = Masking("mlm", tokenizer)(tokens, torch.Generator().manual_seed(0))
    assert torch.equal(tokens.input_ids[masked.places], masked.targets)
    regular = ~torch.isin(tokens.input_ids, torch.tensor(tokenizer.all_special_ids))
    assert regular[masked.places].all()
    assert len(masked.places) / regular.sum() == pytest.approx(0.15, abs=0.02)
    shown = masked.tokens.input_ids[masked.places]
    assert (shown == tokenizer.mask_token_id).float().mean() == pytest.approx(0.8, abs=0.04)
    assert (shown == masked.targets).float().mean() == pytest.approx(0.1, abs=0.04)
    others = torch.ones_like(regular)
    others[masked.places] = False
    assert torch.equal(masked.tokens.input_ids[others], tokens.input_ids[others])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"active_terms": 0}, "active_terms=0 must be at least 1"),
        ({"lr": 0.0}, "lr=0.0 must be positive"),
        ({"relu_weight": -1.0}, "relu_weight=-1.0 must be at least 0"),
        ({"objective": "nsp"}, "objective='nsp' must be mlm, mntp or clm"),
        ({"objective": "mntp", "frozen": True}, "frozen=True lets a masked .* objective='mntp'"),
        ({"warmup": 1.0}, r"warmup=1.0 must be a share of the steps in \[0, 1\)"),
    ],
)
def test_plans_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Plan(**settings)


def test_collections_and_models_without_what_is_needed_are_refused(start, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there are no texts to learn from"):
        adapt_lm(["", " "], tmp_path / "x", backbone=start)
    backbone = pretrained(str(start))
    backbone.decoder.bias = None
    with pytest.raises(ValueError, match="has no bias, by which the number of active terms"):
        adapt_lm(TEXTS, tmp_path / "x", backbone=backbone)
    assert not (tmp_path / "x.run").exists()
