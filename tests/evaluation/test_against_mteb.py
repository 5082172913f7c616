"""Saved folders under mteb 2: its wrappers, its search and its metrics find what ours do."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from sparton.evaluation import evaluate_encoder, load_retriever
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.types import RetrievalTask, TextCollection

mteb = pytest.importorskip("mteb")
WORDS = ["red", "green", "blue", "crimson", "cat", "dog", "bird", "fish", "stone", "river"]
METRICS = {"ndcg@10": "ndcg_at_10", "mrr@10": "mrr_at_10", "recall@10": "recall_at_10"}


@pytest.fixture(scope="module")
def task() -> RetrievalTask:
    """30 documents of three words, none like another and one empty, six queries of two, and graded
    judgments by words in common."""
    texts = [" ".join(words) for words in list(permutations(WORDS, 3))[::25]][:29]
    asked = [f"{WORDS[n]} {WORDS[n + 3]}" for n in range(6)]
    documents = {f"d{row}": text for row, text in enumerate([*texts, ""])}
    queries = {f"q{row}": text for row, text in enumerate(asked)}
    qrels = {
        query: {
            name: len({*text.split()} & {*body.split()})
            for name, body in documents.items()
            if int(name[1:]) % 3
        }
        for query, text in queries.items()
    }
    sides = (TextCollection(list(x), list(x.values())) for x in (documents, queries))
    return RetrievalTask("local", *sides, qrels)


@pytest.fixture(params=["splade", "colbert"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    head = EagerHead() if request.param == "splade" else ColbertHead(16)
    encoder = build_encoder(tiny(WORDS, hidden_size=32, layers=1, max_length=32), head)
    save_encoder(encoder, tmp_path / request.param, query_length=8, document_length=8)
    return tmp_path / request.param


def local(task: RetrievalTask) -> Any:
    """The task as one of mteb's, which downloads nothing."""
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    class Local(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="Local",
            description="A task of this test.",
            dataset={"path": "local/local", "revision": "1"},
            type="Retrieval",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, **_: Any) -> None:
            corpus, queries = (
                Dataset.from_list([{"id": key, "text": text} for key, text in zip(*side)])
                for side in (task.documents, task.queries)
            )
            self.dataset = {
                "default": {
                    "test": {
                        "corpus": corpus,
                        "queries": queries,
                        "relevant_docs": task.qrels,
                        "top_ranked": None,
                    }
                }
            }
            self.data_loaded = True

    return Local()


def test_scores_of_mteb_are_ours(model: Path, task: RetrievalTask) -> None:
    from mteb.models.sentence_transformer_wrapper import MultiVectorWrapper, SparseEncoderWrapper

    wrap = SparseEncoderWrapper if model.name == "splade" else MultiVectorWrapper
    wrapped = wrap(str(model), device="cpu")
    found = mteb.evaluate(wrapped, local(task), cache=None, show_progress_bar=False)
    (theirs,) = found.task_results[0].scores["test"]
    options = {"metrics": list(METRICS), "vector_dtype": "float32", "progress": False}
    ours = evaluate_encoder(*load_retriever(model), task, **options).metrics
    for metric, name in METRICS.items():
        assert ours[metric] == pytest.approx(theirs[name], abs=1e-5), metric  # theirs have 5 digits
    cut = evaluate_encoder(*load_retriever(model, document_length=4), task, **options).metrics
    assert abs(cut["ndcg@10"] - ours["ndcg@10"]) > 1e-2, "a task that tells encoders apart"
