"""Saved models as sentence-transformers runs them: vectors of texts, their largest weights, their
terms in words, searches and metrics are the same in both libraries."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import evaluate_encoder, explain, load_retriever
from sparton.kernels.sparse_vectors import SparseVectors, mean_flops
from sparton.models.asymmetric import static_queries
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.encoder import Encoder
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder
from sparton.representations import Representations
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.indexes.inverted import InvertedIndex
from sparton.types import SIDES, RetrievalTask, Side, TextCollection

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.0")

WORDS = [
    "fox", "hen", "dog", "cat", "lazy", "quick", "red", "green", "blue", "barn", "field", "river",
    "the", "of", "and", ",",
]  # fmt: skip
LENGTH = 12
SPARSE = ("splade", "static queries", "autoencoder")


def make_texts(count: int, seed: int) -> list[str]:
    """Of 1 to 20 words: the longest are cut."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 21))) for _ in range(count)]


TEXTS = {"query": [*make_texts(7, 0), ""], "document": [*make_texts(24, 1), ""]}


def splade() -> SpladeEncoder:
    backbone = tiny(WORDS, hidden_size=32, layers=1)
    with torch.no_grad():
        nn.init.uniform_(backbone.decoder.bias, -1.5, 0.5)
    return SpladeEncoder(backbone, EagerHead())


def with_static_queries() -> Encoder:
    encoder = static_queries(splade(), frozen=False)
    nn.init.uniform_(encoder.query.weights.data[5:], 0.5, 2.0)
    return encoder


def autoencoder() -> AutoencoderEncoder:
    backbone = tiny(WORDS, hidden_size=32, layers=1)
    encoder = AutoencoderEncoder(backbone, AutoencoderHead(hidden_dim=64, k=8, k_aux=8))
    nn.init.normal_(encoder.autoencoder.latent_bias, std=0.1)
    return encoder


def colbert() -> ColbertEncoder:
    return ColbertEncoder(tiny(WORDS, hidden_size=32, layers=1), ColbertHead(8))


BUILDERS = {"static queries": with_static_queries, "splade": splade}
BUILDERS |= {"autoencoder": autoencoder, "colbert": colbert}


class Pair(NamedTuple):
    """One folder in both libraries."""

    encoder: Encoder
    tokenizer: PackedTokenizer
    model: Any

    def rows(self, side: Side, **options: Any) -> SparseVectors:
        rows = encode_texts(self.encoder, self.tokenizer, TEXTS[side], side, **options).sparse
        assert isinstance(rows, SparseVectors)
        return rows

    def elsewhere(self, side: Side, **options: Any) -> torch.Tensor:
        """Dense, or with ``convert_to_sparse_tensor`` as it comes."""
        encode = self.model.encode_query if side == "query" else self.model.encode_document
        return encode(TEXTS[side], **{"convert_to_sparse_tensor": False, **options})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    found = {}
    for name, build in BUILDERS.items():
        path: Path = tmp_path_factory.mktemp("models") / "model"
        torch.manual_seed(3)
        save_encoder(build(), path, query_length=LENGTH, document_length=LENGTH)
        kind = "MultiVectorEncoder" if name == "colbert" else "SparseEncoder"
        model = getattr(sentence_transformers, kind)(str(path), device="cpu")
        found[name] = Pair(*load_retriever(path), model)
    return found


@pytest.mark.parametrize("most", [None, 1, 3, 1000])
@pytest.mark.parametrize("name", SPARSE)
def test_the_largest_weights_of_a_text(pairs, name, most):
    """Their ``max_active_dims``, in batches of one text and of all. An autoencoder gives no more
    than its own 8 latents here; there the number that is asked for stands in their place."""
    bound = min(most, 8) if most and name == "autoencoder" else most
    for side in SIDES:
        expected = pairs[name].elsewhere(side, max_active_dims=bound)
        counts = (expected > 0).sum(1)
        assert counts.max() > 5 if most in (None, 1000) else counts.max() == most
        for batch in (1, 256):
            rows = pairs[name].rows(side, max_terms=most, batch_tokens=batch * LENGTH)
            torch.testing.assert_close(rows.dense(), expected)
            assert rows.lengths.tolist() == counts.tolist()
    assert not torch.allclose(pairs[name].rows("document", max_terms=2).dense(), expected)


@pytest.mark.parametrize("name", SPARSE)
def test_counts_of_active_terms(pairs, name):
    model, counted = pairs[name].model, []
    for side in SIDES:
        rows = pairs[name].rows(side)
        there = model.sparsity(pairs[name].elsewhere(side, convert_to_sparse_tensor=True))
        assert rows.mean_entries == pytest.approx(there["active_dims"])
        counted.append(rows)
    shared = [(pairs[name].elsewhere(side) > 0).float().mean(0) for side in SIDES]
    assert mean_flops(*counted) == pytest.approx(float(shared[0] @ shared[1]), rel=1e-6)


@pytest.mark.parametrize("name", ["splade", "static queries"])
@pytest.mark.parametrize("k", [1, 4, 500])
def test_terms_in_words(pairs, name, k):
    """What is said of a text without a term is nothing; k is a number of terms there and here."""
    encoder, tokenizer, model = pairs[name]
    silent = 0
    for side in SIDES:
        theirs = model.decode(pairs[name].elsewhere(side, convert_to_sparse_tensor=True), top_k=k)
        for text, terms in zip(TEXTS[side], theirs, strict=True):
            found = explain(encoder, tokenizer, text, side=side, k=k)
            assert [term for term, _ in found] == [term for term, _ in terms]
            weights = [weight for _, weight in found]
            assert weights == pytest.approx([weight for _, weight in terms], rel=1e-5)
            assert weights == sorted(weights, reverse=True) and 0.0 not in weights
            silent += not found
    assert silent == (name == "static queries"), "the empty query"
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"k={wrong} must be a whole number of at least 1"):
            explain(encoder, tokenizer, "fox", k=wrong)


def test_vectors_of_tokens(pairs):
    """Queries filled up to their length, documents without the tokens of the skiplist."""
    encoder, tokenizer, model = pairs["colbert"]
    for side in SIDES:
        options = {"vector_dtype": "float32"}
        rows = encode_texts(encoder, tokenizer, TEXTS[side], side, **options).tokens
        encode = model.encode_query if side == "query" else model.encode_document
        theirs = encode(TEXTS[side])
        assert rows.lengths.tolist() == [len(vectors) for vectors in theirs]
        np.testing.assert_allclose(rows.values, np.concatenate(theirs), rtol=0, atol=1e-5)
        lengths = set(rows.lengths.tolist())
        assert lengths == {LENGTH} if side == "query" else len(lengths) > 3


@pytest.mark.parametrize("name", SPARSE)
def test_searches_find_the_same(pairs, name):
    """Their search shows documents of score 0, in no order, where here nothing is found."""
    queries, documents = (pairs[name].rows(side) for side in SIDES)
    scores, rows = InvertedIndex(documents).search(Representations(queries), 5)
    sides = [pairs[name].elsewhere(side) for side in SIDES]
    theirs = sentence_transformers.util.semantic_search(
        *sides, top_k=5, score_function=sentence_transformers.util.dot_score
    )
    assert any(hit["score"] > 0 for hits in theirs for hit in hits)
    for found, number, hits in zip(scores, rows, theirs, strict=True):
        hits = [hit for hit in hits if hit["score"] > 0]
        assert found[: len(hits)] == pytest.approx([hit["score"] for hit in hits], rel=1e-5)
        assert number[: len(hits)].tolist() == [hit["corpus_id"] for hit in hits]
        assert (number[len(hits) :] == -1).all()


def make_task(best: list[int]) -> RetrievalTask:
    """One judgment a query, which is not of its best document."""
    sides = [TextCollection([f"{x[0]}{n}" for n in range(len(TEXTS[x]))], TEXTS[x]) for x in SIDES]
    qrels = {f"q{n}": {f"d{row}": 1} for n, row in enumerate(best)}
    queries = TextCollection(*(x[: len(best)] for x in sides[0]))
    return RetrievalTask("toy", sides[1], queries, qrels)


@pytest.mark.parametrize("name", [*SPARSE, "colbert"])
def test_metrics_and_sizes(pairs, name):
    """Of documents that their ranking has at different places, two of them behind the tenth."""
    encoder, tokenizer, model = pairs[name]
    sides = model.encode_query(TEXTS["query"]), model.encode_document(TEXTS["document"])
    order = torch.as_tensor(model.similarity(*sides)).to_dense().argsort(dim=1, descending=True)
    task = make_task([int(order[query, place]) for query, place in enumerate((0, 1, 2, 6, 11, 15))])
    metrics = ["ndcg@10", "mrr@10", "recall@3", "map@100"]
    result = evaluate_encoder(
        encoder, tokenizer, task, metrics=metrics, k=100, vector_dtype="float32", progress=False
    )
    found = evaluator(name, task)(model)
    prefix = f"toy_{model.similarity_fn_name}_"
    for metric in metrics:
        assert result.metrics[metric] == pytest.approx(found[prefix + metric], abs=1e-9)
        assert 0 < result.metrics[metric] < 1
    if name == "colbert":
        assert (result.query_vectors, result.flops) == (LENGTH, None)
        return
    assert result.query_terms == pytest.approx(found["toy_query_active_dims"])
    assert result.document_terms == pytest.approx(found["toy_corpus_active_dims"])
    assert result.flops == pytest.approx(found["toy_avg_flops"], rel=1e-6)


def evaluator(name: str, task: RetrievalTask) -> Any:
    if name == "colbert":
        from sentence_transformers.multi_vector_encoder.evaluation import (
            MultiVectorInformationRetrievalEvaluator as Evaluator,
        )
    else:
        from sentence_transformers.sparse_encoder.evaluation import (
            SparseInformationRetrievalEvaluator as Evaluator,
        )
    return Evaluator(
        dict(zip(*task.queries, strict=True)),
        dict(zip(*task.documents, strict=True)),
        {query: set(grades) for query, grades in task.qrels.items()},
        precision_recall_at_k=[3],
        name="toy",
        write_csv=False,
    )
