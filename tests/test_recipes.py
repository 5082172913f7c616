"""Recipes of papers for causal language models: 20 steps of each on data of its own format."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from sparton.models.folders import load_encoder
from sparton.models.words import word_tokenizer
from tests.composing import composed
from tests.models.causal_lms import WORDS, build
from tests.test_train import run_here

SMALL = ["steps=20", "batch=4", "log_every=1", "num_workers=0", "evaluation=none"]
SMALL += ["checkpoint_every=null", "precision=fp32", "+backbone.lora.dtype=fp32"]


def texts(row: int, number: int) -> list[str]:
    return [" ".join(WORDS[(row * 3 + k + n) % 50] for k in range(6)) for n in range(number)]


def triples(folder: Path) -> list[str]:
    lines = []
    for row in range(12):
        query, positive, *negatives = texts(row, 17)
        lines.append({"query": query, "positive": positive, "negatives": negatives})
    (folder / "triples").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "triples/own.jsonl").write_text(text)
    return ["data.files.triples=own.jsonl"]


def pairs(folder: Path) -> list[str]:
    columns = zip(*(texts(row, 2) for row in range(12)), strict=True)
    table = dict(zip(("query", "document"), map(list, columns), strict=True))
    pq.write_table(pa.table(table), folder / "pairs.parquet")
    return [f"data.files={{own: {folder / 'pairs.parquet'}}}"]


def scored_ids(folder: Path) -> list[str]:
    documents = [texts(row, 1)[0] for row in range(40)]
    scored = [[(row + k) % 40 for k in range(17)] for row in range(12)]
    scores = [[float(17 - k) for k in range(17)] for _ in range(12)]
    tables = {
        "train": {"query_id": list(range(12)), "document_ids": scored, "scores": scores},
        "queries": {"query_id": list(range(12)), "text": documents[:12]},
        "documents": {"document_id": list(range(40)), "text": documents},
    }
    for name, columns in tables.items():
        place = folder / "ms-marco-en-bge" / name
        place.mkdir(parents=True)
        pq.write_table(pa.table(columns), place / "0000.parquet")
    return []


RECIPES: dict[str, Callable[[Path], list[str]]] = {
    "laconic": triples,
    "laconic_pretraining": pairs,
    "lion": scored_ids,
    "csplade": triples,
}
ECHO = ["backbone.attention=causal", "head.echo=' '"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"), [*((recipe, []) for recipe in RECIPES), ("csplade", ECHO)]
)
def test_a_recipe_trains(recipe, more, tmp_path):
    build("llama", None, tie_word_embeddings=True, max_position_embeddings=192).save_pretrained(
        tmp_path / "llama"
    )
    word_tokenizer(WORDS, 192).save_pretrained(tmp_path / "llama")
    data = RECIPES[recipe](tmp_path)
    start = [f"experiment={recipe}", f"backbone.name={tmp_path / 'llama'}", f"data_dir={tmp_path}"]
    overrides = [*SMALL, "optimizer.lr=1e-2", *data, *more]
    records = run_here(tmp_path / "run", *overrides, miniature=start)
    assert len(records) == 20
    losses = [record["loss"] for record in records]
    assert sum(losses[-5:]) < sum(losses[:5])
    encoder = load_encoder(tmp_path / "run/model")
    assert encoder.backbone.is_causal == bool(more)
    assert encoder.markup.echo == (" " if more else None)
    tied = encoder.backbone.decoder.weight is encoder.backbone.model.get_input_embeddings().weight
    assert not tied  # centred or, in lion's, scaled


@pytest.mark.parametrize(
    ("recipe", "published"),
    [
        ("laconic", (128, 15, 192, 192, 5e-5, 1e-3, 1e-3)),
        ("laconic_pretraining", (2048, 0, 64, 192, 1e-4, 5e-4, 5e-4)),
        ("lion", (112, 16, 64, 128, 1e-4, 5e-2, 4e-2)),
        ("csplade", (32, 15, 64, 192, 5e-5, 3e-3, 3e-3)),
    ],
)
def test_the_published_settings(recipe, published):
    cfg = composed(f"experiment={recipe}", "data.files={own: x}" if "pre" in recipe else "seed=0")
    weights = [getattr(cfg, f"{side}_regularizer").flops.weight for side in ("query", "document")]
    found = (
        cfg.batch, cfg.num_negatives, cfg.query_length, cfg.document_length, cfg.optimizer.lr,
        *weights,
    )  # fmt: skip
    assert found == published
    assert cfg.backbone.attention == "bidirectional"


def test_a_small_real_model_has_the_data_and_tests_of_the_encoders():
    small, usual = (
        OmegaConf.to_container(composed(f"experiment={name}"))
        for name in ("smollm2_in_domain", "in_domain")
    )
    differing = {key for key in usual if small[key] != usual[key]} - {"run_name"}
    assert differing == {"backbone", "optimizer", "study"}
    assert (small["backbone"]["attention"], small["backbone"]["center"]) == ("bidirectional", True)
