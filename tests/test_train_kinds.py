"""train.py with every kind of encoder: trained, saved and evaluated, or refused at once."""

import json
from pathlib import Path

import pytest
import torch
from hydra.errors import InstantiationException
from safetensors.torch import load_file

from sparton.cli.assembly import build_model
from sparton.cli.errors import explain
from sparton.cli.schema import without_replaced
from sparton.datasets import quickstart
from sparton.evaluation import evaluate_encoder, load_retriever
from sparton.models.backbones import bare, tiny
from sparton.models.dense import DenseEncoder
from sparton.models.folders import Lengths, load_encoder, save_encoder
from sparton.models.folders.dense import save_dense
from sparton.models.pooling import Pooling
from sparton.pipelines import cache_embeddings
from sparton.retrieval.indexes.divided import DividedIndex
from sparton.types import BodyOptions
from tests.composing import composed
from tests.test_train import MINIATURE, run_here

pytestmark = pytest.mark.slow

JOINT = ["head=sparton_colbert", "head.tokens.width=16"]
THREE = ["head=sparton_colbert_dense", "head.tokens.width=16"]
SHORT = ["rerank_depth=20", "metrics=[ndcg@10,recall@20]"]
ONCE = ["evaluation.every=4", "query_length=12"]
CSR = ["head=csr", "head.hidden_dim=64", "head.k=8"]


@pytest.mark.parametrize(
    ("overrides", "search"),
    [
        (["head=colbert", "head.width=16"], "maxsim"),
        (["head=colbert", "head.width=16", "search=rerank"], "bm25 + maxsim"),
        (["head=dense", "loss.temperature=0.05"], "maxsim"),
        ([*JOINT, "loss=joint", "loss.lessons.sparse=0.5"], "sparse + maxsim"),
        ([*JOINT, "search=sparse"], "sparse"),
        ([*THREE, *SHORT, "loss=joint_dense", "micro_batch=3"], "sum"),
        ([*CSR, "head.freeze_backbone=false", "precision=bf16", "micro_batch=3"], "sparse"),
    ],
)
def test_every_kind_trains_is_saved_and_evaluated(overrides, search, tmp_path):
    records = run_here(tmp_path, *overrides, *ONCE)
    assert "dev_ndcg@10" in records[-1]
    [task] = json.loads((tmp_path / "results.json").read_text())["tasks"]
    assert task["search"] == search and 0 < task["metrics"]["ndcg@10"] < 1
    assert type(load_encoder(tmp_path / "model")).__name__.endswith("Encoder")


def test_the_last_evaluation_searches_on_the_gpus_of_all_ranks(tmp_path, monkeypatch):
    """Those in between leave the GPUs of the others to their training."""
    made = []

    class Watched(DividedIndex):
        def __init__(self, documents, devices, *rest):
            made.append(len(devices))
            super().__init__(documents, devices, *rest)

    monkeypatch.setattr("sparton.retrieval.indexes.exact.DividedIndex", Watched)
    monkeypatch.setattr("sparton.cli.devices.neighbours", lambda world: [world.device] * 2)
    run_here(tmp_path, "head=colbert", "head.width=16", *ONCE)
    assert made == [3]


def test_a_short_list_of_candidates_with_metrics_that_fit(tmp_path):
    overrides = [*JOINT, "search=rerank", *SHORT]
    run_here(tmp_path, *overrides, *ONCE)
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["mean"]) == {"ndcg@10", "recall@20"}


@pytest.mark.parametrize(
    "kind",
    [
        [],
        ["head=colbert", "head.width=16"],
        ["head=dense"],
        JOINT,
        [*CSR, "head.freeze_backbone=false"],
        ["query_encoder=static", "query_encoder.frozen=false"],
    ],
)
def test_init_from_is_all_of_a_trained_model(kind, tmp_path):
    trained = build_model(composed(*MINIATURE, *kind))
    save_encoder(trained, tmp_path / "model", query_length=12, document_length=32)
    head = [each for each in kind if not each.startswith("query_encoder")]
    cfg = composed(*MINIATURE, *head, f"init_from={tmp_path / 'model'}", "seed=1")
    found = build_model(without_replaced(cfg))
    assert type(found) is type(trained)
    learns = [
        {name for name, each in encoder.named_parameters() if each.requires_grad}
        for encoder in (trained, found)
    ]
    assert learns[0] == learns[1]
    expected = trained.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.state_dict().items())


def test_a_run_from_a_trained_model_begins_where_that_ended(tmp_path):
    colbert = ["head=colbert", "head.width=16", "head.bias=true", "evaluation=none"]
    colbert += ["log_every=1", "steps=3"]
    still = ["optimizer.lr=0", "weight_decay=0"]
    first = run_here(tmp_path / "first", *colbert)
    second = run_here(
        tmp_path / "second", *colbert, *still, f"init_from={tmp_path / 'first' / 'model'}"
    )
    assert second[0]["loss"] < first[0]["loss"]
    for file in ("model.safetensors", "1_Dense/model.safetensors"):
        before, after = (load_file(tmp_path / run / "model" / file) for run in ("first", "second"))
        assert all(torch.equal(after[key], before[key]) for key in before)
    assert before["linear.bias"].any(), "of the last file"
    manifest = json.loads((tmp_path / "second" / "manifest.json").read_text())
    assert set(manifest["config"]["backbone"]) == set(BodyOptions.__annotations__)


def test_a_bare_backbone_says_what_it_leaves_out(tmp_path, caplog):
    trained = build_model(composed(*MINIATURE, "head=colbert", "head.width=16"))
    save_encoder(trained, tmp_path / "model", query_length=12, document_length=32)
    bare(str(tmp_path / "model"))
    assert "leaves out; load_encoder reads all of it" in caplog.text


def run_cached(folder: Path, *overrides: str) -> list[dict]:
    """Without the size that the miniature has for its own backbone."""
    return run_here(folder, *overrides, miniature=MINIATURE[:2])


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """The embeddings of all that the quickstart reads, and their model."""
    folder = tmp_path_factory.mktemp("cached")
    tasks = [quickstart.task("dev"), quickstart.task("test")]
    pairs = quickstart.pairs()
    examples = [pairs.example(row, 0, 0) for row in range(len(pairs))]
    queries = [each.query for each in examples]
    queries += [text for task in tasks for text in task.queries.texts]
    documents = [each.positive for each in examples]
    documents += [text for task in tasks for text in task.documents.texts]
    body = tiny(documents, hidden_size=32, layers=1).bare()
    (folder / "dense").mkdir()
    save_dense(DenseEncoder(body, Pooling("mean", True)), folder / "dense", Lengths(16, 32))
    cache_embeddings(
        queries, documents, folder / "cache",
        model=folder / "dense", query_length=16, document_length=32, device="cpu",
    )  # fmt: skip
    return folder / "cache"


def test_a_training_on_cached_embeddings_saves_the_model_that_it_evaluated(cache, tmp_path):
    settings = [*CSR, "query_length=16", "document_length=32", "evaluation.every=4"]
    records = run_cached(tmp_path, "backbone=cached", f"backbone.path={cache}", *settings)
    retriever = load_retriever(tmp_path / "model")
    task = quickstart.task("dev")
    found = evaluate_encoder(*retriever, task, progress=False).metrics["ndcg@10"]
    assert records[-1]["dev_ndcg@10"] == pytest.approx(found, rel=0.02) and found > 0
    other = run_cached(
        tmp_path / "other", "backbone=cached", f"backbone.path={cache}", *settings, "seed=1"
    )
    assert other[-1]["dev_ndcg@10"] != pytest.approx(found, rel=0.02)


def test_a_cache_without_the_texts_or_lengths_of_a_run_is_refused(cache, tmp_path):
    looked_up = ["backbone=cached", f"backbone.path={cache}", *CSR]
    with pytest.raises(ValueError, match="set these to 16 and 32"):
        run_cached(tmp_path / "lengths", *looked_up)
    other = ["query_length=16", "document_length=32", "+data.sources.quickstart.seed=1"]
    with pytest.raises(ValueError, match="has no embedding of the"):
        run_cached(tmp_path / "texts", *looked_up, *other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["search=maxsim"], "search=maxsim compares token vectors, which SpladeEncoder does not"),
        (["head=colbert", "search=sparse"], "set search=maxsim or rerank, or leave"),
        (["search=bm25"], "search=bm25: must be sparse, maxsim, dense, rerank, sum, or left"),
        ([*JOINT, "search=sum"], "set search=sparse or maxsim or rerank, or leave it out"),
        ([*JOINT, "rerank_depth=100"], "recall@1000 looks deeper than the rerank_depth=100"),
        (["rerank_depth=0"], "rerank_depth=0: must be a whole number from 1 on"),
        (["metrics=[ndcg@10,mrr@1O]"], "metrics=['ndcg@10', 'mrr@1O']: mrr@1O is no metric"),
        (["metrics=[mrr@10]"], "lack ndcg@10, by which the best model is chosen"),
        ([*JOINT, "head.sparse.fp8=true"], "head.sparse.fp8=True needs products in 16 bit"),
        (["head=colbert", "query_length=3"], "query_length=3 leaves no room for text beside 3"),
        (["init_from=runs/nowhere/model"], "runs/nowhere/model: no such folder"),
        (["init_from=x", "query_encoder=static"], "leave query_encoder=shared"),
        (["init_from="], "init_from= is empty"),
        (["loss=joint"], "give it head=sparton_colbert with such a half, or take another loss"),
        ([*JOINT, "loss=joint_dense"], "Joint compares dense and sparse and tokens, but this enc"),
        ([*THREE, "loss=joint"], "Joint has no loss for the half dense, which this encoder gives"),
        ([*THREE, "query_encoder=static"], "choose a SPLADE head"),
        (["head=colbert", "query_encoder=static"], "choose a SPLADE head"),
        ([*JOINT, "query_encoder=static"], "choose a SPLADE head"),
        ([*CSR, "query_encoder=static"], "choose a SPLADE head"),
        ([*JOINT, "loss=joint", "loss@loss.tokens=triplet"], "num_negatives=0, but the loss Joint"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_training(overrides, message, tmp_path):
    with pytest.raises((ValueError, OSError, InstantiationException)) as caught:
        run_here(tmp_path, *overrides)
    assert message in explain(caught.value)
    assert not (tmp_path / "metrics.jsonl").exists()
