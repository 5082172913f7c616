"""Recipes of published encoders: 20 steps of each on data of its own format."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from sparton.models.assembly import build_encoder
from sparton.models.backbones import bare
from sparton.models.colbert import ColbertHead
from sparton.models.encoder import Encoder
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.words import word_tokenizer
from tests.composing import composed
from tests.models.gte import needs_gte, write_checkpoint
from tests.test_recipes import texts
from tests.test_train import run_here

WORDS = [*(f"w{row}" for row in range(5, 60)), "W7", "W8"]
PROMPTS = {"query_prompt": "search_query: ", "document_prompt": "search_document: "}
SMALL = [
    "steps=20", "batch=4", "log_every=1", "num_workers=0", "evaluation=none",
    "checkpoint_every=null", "precision=fp32", "optimizer.lr=3e-3",
]  # fmt: skip


def language_model(folder: Path, seed: int) -> Path:
    """A masked-language model of random weights, small, of ModernBERT's architecture."""
    config = ModernBertConfig(
        vocab_size=len(WORDS) + 5, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=600, pad_token_id=0, cls_token_id=2,
        sep_token_id=3, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ModernBertForMaskedLM(config).save_pretrained(folder)
    word_tokenizer(WORDS, 600).save_pretrained(folder)
    return folder


def late_interaction(folder: Path, **prompts: str) -> Path:
    """Such a model with a projection, as PyLate's folders have it."""
    body = bare(str(language_model(folder / "body", 0)))
    encoder = build_encoder(body, ColbertHead(**prompts))
    save_encoder(encoder, folder / "colbert", query_length=32, document_length=300)
    return folder / "colbert"


def columns_of_negatives(folder: Path) -> list[str]:
    """Two sources of queries, positives, and a column for each of 50 negatives."""
    for source in ("msmarco", "nq"):
        rows = [texts(row, 52) for row in range(12)]
        names = ["query", "positive", *(f"negative_{number}" for number in range(50))]
        table = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        pq.write_table(pa.table(table), folder / f"{source}.parquet")
    files = ", ".join(f"{name}: {folder / name}.parquet" for name in ("msmarco", "nq"))
    return [f"data.files={{{files}}}"]


def lists_of_negatives(folder: Path) -> list[str]:
    """Two sources of queries and documents, one of which has no negatives."""
    for source, number in (("nq", 7), ("reddit", 0)):
        lines = []
        for row in range(12):
            query, document, *negatives = texts(row, number + 2)
            record = {"query": query, "document": document, "negative": negatives}
            lines.append(json.dumps(record | {"dataset": source}) + "\n")
        with gzip.open(folder / f"{source}.jsonl.gz", "wt") as file:
            file.writelines(lines)
    files = ", ".join(f"{name}: {folder / name}.jsonl.gz" for name in ("nq", "reddit"))
    return [f"data.files={{{files}}}"]


def scored_documents(folder: Path, name: str, count: int, teachers: int) -> Path:
    """Ids with scores, and the texts beside them; several teachers have a list for each score."""
    documents = [texts(row, 1)[0] for row in range(40)]
    scores = [[float(count - k) + t for t in range(teachers)] for k in range(count)]
    one = scores if teachers > 1 else [score for (score,) in scores]
    tables = {
        "train": {
            "query_id": list(range(12)),
            "document_ids": [[(row + k) % 40 for k in range(count)] for row in range(12)],
            "scores": [one] * 12,
        },
        "queries": {"query_id": list(range(12)), "text": documents[:12]},
        "documents": {"document_id": list(range(40)), "text": documents},
    }
    for part, columns in tables.items():
        (folder / name / part).mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / name / part / "0000.parquet")
    return folder / name


def sparseup(folder: Path) -> list[str]:
    body, head = (language_model(folder / name, row) for row, name in enumerate(("body", "head")))
    start = [f"backbone.name={body}", f"backbone.mlm_head_from={head}", "backbone.logit_shift=0"]
    return [*start, *columns_of_negatives(folder)]


def lateon(folder: Path) -> list[str]:
    return [f"init_from={late_interaction(folder)}", *columns_of_negatives(folder)]


def colbert_zero(folder: Path) -> list[str]:
    return [f"backbone.name={language_model(folder / 'dense', 0)}", *lists_of_negatives(folder)]


def colbert_zero_distillation(folder: Path) -> list[str]:
    scored_documents(folder, "ms-marco-en-bge-gemma", 32, teachers=1)
    return [f"init_from={late_interaction(folder, **PROMPTS)}", f"data_dir={folder}"]


def splade_v3(folder: Path) -> list[str]:
    root = scored_documents(folder, "scored", 9, teachers=5)
    start = language_model(folder / "start", 0)
    return [f"backbone.name={start}", f"data.sources.scored.root={root}"]


def gte(folder: Path) -> Path:
    """A masked-language model as the hub has GTE's."""
    write_checkpoint(folder, vocab_size=len(WORDS) + 5)
    word_tokenizer(WORDS, 600).save_pretrained(folder)
    return folder


def opensearch_doc_v3(folder: Path, start: Path | None = None) -> list[str]:
    root = scored_documents(folder, "scored", 9, teachers=2)
    start, idf = start or language_model(folder / "start", 0), folder / "idf.json"
    idf.write_text(json.dumps({word: 1 + row / 20 for row, word in enumerate(WORDS)}))
    return [
        f"backbone.name={start}", f"data.sources.scored.root={root}",
        f"query_encoder.weights={idf}",
    ]  # fmt: skip


RECIPES: dict[Callable[[Path], list[str]], tuple] = {
    sparseup: (128, 7, 32, 300, 2e-5),
    lateon: (128, 7, 32, 300, 3e-6),
    colbert_zero: (64, 7, 39, 519, 8e-6),
    colbert_zero_distillation: (128, 31, 39, 519, 4e-6),
    splade_v3: (128, 8, 256, 256, 2e-5),
    opensearch_doc_v3: (160, 1, 256, 256, 2e-5),
}


def trained(recipe: Callable, overrides: list[str], folder: Path) -> Encoder:
    start = [f"experiment={recipe.__name__}", *overrides]
    records = run_here(folder / "run", *SMALL, miniature=start)
    assert len(records) == 20
    losses = [record["loss_ranking"] for record in records]
    assert sum(losses[-5:]) < sum(losses[:5])
    return load_encoder(folder / "run/model")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_a_recipe_trains(recipe, tmp_path):
    encoder = trained(recipe, recipe(tmp_path), tmp_path)
    if recipe is sparseup:
        head = encoder.head
        assert (head.token_topk, head.fold is not None) == (12, True)
        assert not encoder.markup.include_prompt and encoder.markup.query_prompt == "[Q] "
    if "colbert" in recipe.__name__:
        assert encoder.markup.query_prompt == "search_query: "
    if recipe is opensearch_doc_v3:
        assert encoder.document.head.activation == "log1p_relu"


@needs_gte
@pytest.mark.slow
def test_the_start_of_doc_v3_gte(tmp_path):
    overrides = opensearch_doc_v3(tmp_path, gte(tmp_path / "start"))
    encoder = trained(opensearch_doc_v3, overrides, tmp_path)
    body = encoder.document.backbone
    assert (body.model.config.model_type, body.layout.name) == ("gte", "packed")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_the_settings_that_are_written_down(recipe):
    cfg = composed(f"experiment={recipe.__name__}")
    lengths = cfg.query_length, cfg.document_length
    assert (cfg.batch, cfg.num_negatives, *lengths, cfg.optimizer.lr) == RECIPES[recipe]


def test_the_settings_that_make_them_what_they_are():
    cfg = {recipe.__name__: composed(f"experiment={recipe.__name__}") for recipe in RECIPES}
    assert cfg["sparseup"].backbone.logit_shift == -15
    assert (cfg["sparseup"].head.token_topk, cfg["sparseup"].head.folding) == (12, "case")
    assert (cfg["lateon"].loss.temperature, cfg["colbert_zero"].loss.temperature) == (0.02, 0.2)
    assert all(cfg[name].data.homogeneous for name in ("sparseup", "lateon", "colbert_zero"))
    weights = cfg["splade_v3"].loss.weights
    assert (weights.kl_divergence, weights.margin_mse) == (1.0, 0.05)
    flops = cfg["opensearch_doc_v3"].document_regularizer.l0_flops
    assert (flops.penalty.threshold, flops.weight, flops.ramp.steps) == (150, 0.08, 40000)
    assert cfg["opensearch_doc_v3"].head.activation == "log1p_relu"
