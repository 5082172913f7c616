"""One system on one task: encode, index, search, measure.

N documents, Q queries, K results per query.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.evaluation.results import TaskResult
from sparton.evaluation.settings import (
    bm25_finds,
    check_bounds_apply,
    check_texts,
    check_vector_dtype,
    compared_kinds,
    plan_search,
)
from sparton.representations import Representations
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.encoding import VectorDtype, autocast_dtype, device_of, encode_texts
from sparton.retrieval.index import IndexBuilder, exact_index
from sparton.retrieval.metrics import METRICS, evaluate_queries, mean_of_queries
from sparton.retrieval.run import Run
from sparton.retrieval.settings import (
    RERANK_DEPTH,
    Search,
    check_metrics,
    check_search,
    check_term_bounds,
)
from sparton.retrieval.sparse import mean_flops
from sparton.sparse_vectors import SparseVectors
from sparton.types import RetrievalTask, Side, Tokenizer

if TYPE_CHECKING:
    from sparton.models.encoder import Encoder

_PLURAL: dict[Side, str] = {"query": "queries", "document": "documents"}


def evaluate_encoder(
    encoder: "Encoder",
    tokenizer: Tokenizer,
    task: RetrievalTask,
    *,
    metrics: Sequence[str] = METRICS,
    k: int = 1000,
    search: Search | None = None,
    rerank_depth: int = RERANK_DEPTH,
    batch_tokens: int = 16_384,
    batch_sequences: int = 256,
    precision: str = "fp32",
    max_query_terms: int | None = None,
    max_document_terms: int | None = None,
    vector_dtype: VectorDtype = "float16",
    k1: float = 0.9,
    b: float = 0.4,
    index: IndexBuilder = exact_index,
    progress: bool = True,
) -> TaskResult:
    """Search a full collection with an encoder, on the encoder's own device, and measure what it
    finds.

    The encoder is in evaluation mode meanwhile; afterwards its mode is what it was.

    Args:
        encoder: an :class:`~sparton.models.encoder.Encoder`.
        tokenizer: its tokenizer, with the lengths at which texts are cut.
        task: collection, queries, judgments.
        metrics: ranx's names.
        k: depth of the rankings.
        search: "sparse" compares sparse vectors by their dot product, "maxsim" token vectors by
            MaxSim. "rerank" orders candidates by MaxSim, which the encoder's sparse vectors find,
            or BM25 for an encoder without them. None is the one that uses all that the encoder
            gives, without BM25.
        rerank_depth: candidates of a query in "rerank". Rankings are no deeper than that.
        max_query_terms, max_document_terms: keep this many of a text's largest weights; None, or
            more than there are, for all.
        k1, b: of BM25, where it finds the candidates.
        index: makes the index that is searched.
        batch_tokens, batch_sequences, precision, vector_dtype, progress: see
            :func:`~sparton.retrieval.encoding.encode_texts`.

    Raises:
        ValueError: a task without texts, a metric that does not exist or is deeper than the
            rankings, a ``search`` or a bound of terms that the encoder cannot serve, ``k1`` or
            ``b`` out of range (all before anything is encoded), or representations that are not
            finite.
    """
    check_texts(task)
    check_search(search, rerank_depth)
    check_vector_dtype(vector_dtype)
    autocast_dtype(precision)
    bounds = {"max_query_terms": max_query_terms, "max_document_terms": max_document_terms}
    check_term_bounds(**bounds)
    chosen = plan_search(encoder, metrics=metrics, k=k, search=search, rerank_depth=rerank_depth)
    check_bounds_apply(chosen, encoder, **bounds)
    kinds = compared_kinds(chosen, encoder)
    bm25 = BM25(k1, b)

    def encode(texts: Sequence[str], side: Side, max_terms: int | None) -> Representations:
        return encode_texts(
            encoder, tokenizer, texts, side, kinds=kinds, max_terms=max_terms, precision=precision,
            batch_tokens=batch_tokens, batch_sequences=batch_sequences, vector_dtype=vector_dtype,
            progress=f"{task.name}: {_PLURAL[side]}" if progress else None,
        )  # fmt: skip

    start = perf_counter()
    documents = encode(task.documents.texts, "document", max_document_terms)
    queries = encode(task.queries.texts, "query", max_query_terms)
    by_words = bm25_finds(chosen, encoder)
    return _retrieve(
        task,
        _Sides(queries, documents),
        metrics,
        k,
        search=f"{'bm25' if by_words else 'sparse'} + maxsim" if chosen == "rerank" else chosen,
        first_stage=_encode_words(task, bm25) if by_words else None,
        rerank_depth=rerank_depth,
        build=index,
        device=device_of(encoder),
        start=start,
        progress=f"{task.name}: search" if progress else None,
    )


def evaluate_bm25(
    task: RetrievalTask,
    *,
    k1: float = 0.9,
    b: float = 0.4,
    metrics: Sequence[str] = METRICS,
    k: int = 1000,
    device: torch.device | str = "cpu",
) -> TaskResult:
    """BM25 on the same task, through the same index and metrics."""
    check_texts(task)
    check_metrics(metrics, k)
    bm25 = BM25(k1, b)
    start = perf_counter()
    sides = _encode_words(task, bm25)
    return _retrieve(task, sides, metrics, k, search="bm25", device=device, start=start)


class _Sides(NamedTuple):
    queries: Representations
    documents: Representations


def _encode_words(task: RetrievalTask, bm25: BM25) -> _Sides:
    documents = Representations(bm25.fit(task.documents.texts))
    return _Sides(Representations(bm25.queries(task.queries.texts)), documents)


def _retrieve(
    task: RetrievalTask,
    sides: _Sides,
    metrics: Sequence[str],
    k: int,
    *,
    search: str,
    device: torch.device | str,
    start: float,
    first_stage: _Sides | None = None,
    rerank_depth: int = RERANK_DEPTH,
    build: IndexBuilder = exact_index,
    progress: str | None = None,
) -> TaskResult:
    """Index and search what was encoded since ``start``; the first stage's sparse vectors take the
    place of the encoder's."""
    queries, documents = sides
    if first_stage is not None:
        queries, documents = (
            own._replace(sparse=words.sparse) for own, words in zip(sides, first_stage, strict=True)
        )
    encoded = perf_counter()
    index = build(documents, device, rerank_depth=rerank_depth)
    indexed = perf_counter()
    scores, rows = index.search(
        queries,
        k,
        exclude=_own_rows(task) if task.exclude_self else None,
        progress=progress,
    )
    run = Run(task.queries.ids, task.documents.ids, rows, scores)
    seconds = {
        "encode": encoded - start,
        "index": indexed - encoded,
        "search": perf_counter() - indexed,
    }
    by_query = evaluate_queries(task.qrels, run, metrics)
    return TaskResult(
        name=task.name,
        metrics=mean_of_queries(by_query),
        by_query=by_query,
        search=search,
        seconds=seconds,
        run=run,
        **_sizes(*sides),
    )


def _sizes(queries: Representations, documents: Representations) -> dict[str, float]:
    """The fields of a result that tell how large the representations are."""
    sizes: dict[str, float] = {}
    asked, answers = queries.sparse, documents.sparse
    if isinstance(asked, SparseVectors) and isinstance(answers, SparseVectors):
        sizes["query_terms"], sizes["document_terms"] = asked.mean_entries, answers.mean_entries
        sizes["flops"] = mean_flops(asked, answers)
    if queries.tokens is not None and documents.tokens is not None:
        sizes["query_vectors"] = queries.tokens.mean_tokens
        sizes["document_vectors"] = documents.tokens.mean_tokens
    return sizes


def _own_rows(task: RetrievalTask) -> NDArray[np.int64]:
    """Row of the document that has a query's id, or -1; int64 ``[Q]``."""
    row_of = {name: row for row, name in enumerate(task.documents.ids)}
    return np.array([row_of.get(name, -1) for name in task.queries.ids], np.int64)
