"""One system on one task: encode, index, search, measure.

N documents, Q queries, K results per query.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sparton.arguments import refuse_below
from sparton.datasets.lengths import CutCounter, lengths_read
from sparton.encoded import EncodedTexts
from sparton.evaluation.documents import check_documents
from sparton.evaluation.results import TaskResult
from sparton.evaluation.settings import (
    bm25_finds,
    check_bounds_apply,
    check_index,
    check_pooling,
    check_texts,
    compared_kinds,
    plan_search,
)
from sparton.evaluation.system import System, help_encoding, retrieve
from sparton.representations import Representations
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.crew import ALONE, Crew
from sparton.retrieval.encoding import check_precision, device_of, encode_texts
from sparton.retrieval.indexes.exact import IndexBuilder, exact_index
from sparton.retrieval.metrics import METRICS
from sparton.retrieval.settings import (
    RERANK_DEPTH,
    Search,
    check_metrics,
    check_search,
    check_term_bounds,
)
from sparton.retrieval.storing import VectorDtype, check_vector_dtype, query_dtype
from sparton.types import PLURAL, SIDES, RetrievalTask, Side, Tokenizer

if TYPE_CHECKING:
    from sparton.models.encoder import Encoder

TIMED_QUERIES = 50


def evaluate_encoder(
    encoder: "Encoder",
    tokenizer: Tokenizer,
    task: RetrievalTask,
    *,
    metrics: Sequence[str] = METRICS,
    k: int = 1000,
    search: Search | None = None,
    rerank_depth: int = RERANK_DEPTH,
    batch_tokens: int | None = None,
    precision: str | None = None,
    max_query_terms: int | None = None,
    max_document_terms: int | None = None,
    vector_dtype: VectorDtype = "float16",
    pool_factor: float | None = None,
    k1: float = 0.9,
    b: float = 0.4,
    index: IndexBuilder = exact_index,
    documents: EncodedTexts | None = None,
    counter: CutCounter | None = None,
    timed_queries: int = TIMED_QUERIES,
    progress: bool = True,
    crew: Crew = ALONE,
) -> TaskResult:
    """Search a full collection with an encoder, on the encoder's own device, and measure what it
    finds.

    The encoder is in evaluation mode meanwhile; afterwards its mode is what it was.

    Args:
        encoder: an :class:`~sparton.models.encoder.Encoder`.
        tokenizer: its tokenizer, with the lengths at which texts are cut where the task's form does
            not say.
        task: collection, queries, judgments.
        metrics: ranx's names.
        k: depth of the rankings.
        search: "sparse" and "dense" compare such vectors by their dot product, "maxsim" token
            vectors by MaxSim. "rerank" orders candidates by MaxSim, which the encoder's sparse
            vectors find, or BM25 for an encoder without them. "sum" orders what the sparse and the
            dense vectors find by the weighted sum of all scores, with the encoder's
            ``score_weights``. None is the one that uses all that the encoder gives, without BM25.
        rerank_depth: candidates of a query in "rerank", and of each half that finds some in "sum".
            Metrics look no deeper.
        max_query_terms, max_document_terms: keep this many of a text's largest weights; None, or
            more than there are, for all.
        k1, b: of BM25, where it finds the candidates.
        index: makes the index that is searched.
        documents: the task's documents as they were encoded before, by this model and with these
            settings.
        counter: counts and tells what is cut of the task's texts, once for many evaluations of one
            model in training; None for a fresh one.
        timed_queries: how many queries are timed one at a time, see
            :func:`~sparton.evaluation.speed.time_queries`; 0 measures no speed.
        batch_tokens, precision, vector_dtype, pool_factor, progress: see
            :func:`~sparton.retrieval.encoding.encode_texts`.
        crew: processes with the same encoder that encode together. The first searches, and all get
            its result.

    Raises:
        ValueError: a task without texts, a metric that does not exist or is deeper than the
            rankings, a ``search``, an ``index`` or a bound of terms that the encoder cannot serve,
            ``k1`` or ``b`` out of range, ``documents`` that are others or were encoded otherwise
            (all before anything is encoded), or representations that are not finite.
    """
    check_texts(task)
    check_search(search, rerank_depth)
    check_vector_dtype(vector_dtype)
    check_precision(precision, encoder)
    refuse_below(0, timed_queries=timed_queries)
    bounds = {"max_query_terms": max_query_terms, "max_document_terms": max_document_terms}
    check_term_bounds(**bounds)
    chosen = plan_search(encoder, metrics=metrics, k=k, search=search, rerank_depth=rerank_depth)
    check_bounds_apply(chosen, encoder, **bounds)
    check_index(index, chosen, encoder)
    check_pooling(pool_factor, chosen, encoder)
    kinds = compared_kinds(chosen, encoder)
    bm25 = BM25(k1, b)

    counter = counter or CutCounter()
    task = _readable(task, encoder.max_length, counter)
    if documents is not None:
        check_documents(
            documents, encoder, tokenizer, task, kinds=kinds, max_terms=max_document_terms,
            precision=precision, vector_dtype=vector_dtype, pool_factor=pool_factor,
        )  # fmt: skip

    def encode(
        texts: Sequence[str], side: Side, max_terms: int | None, whole: bool
    ) -> Representations:
        bar = progress and whole and not crew.rank
        return encode_texts(
            encoder, tokenizer, texts, side, kinds=kinds, max_terms=max_terms, precision=precision,
            batch_tokens=batch_tokens, pool_factor=pool_factor,
            vector_dtype=vector_dtype if side == "document" else query_dtype(vector_dtype),
            form=task.form, progress=f"{task.name}: {PLURAL[side]}" if bar else None,
            crew=crew if whole else ALONE,
        )  # fmt: skip

    by_words = bm25_finds(chosen, encoder)
    system = System(
        lambda texts, whole: encode(texts, "document", max_document_terms, whole),
        lambda texts, whole: encode(texts, "query", max_query_terms, whole),
        bm25 if by_words else None,
        None if documents is None else lambda: documents.documents().only(frozenset(kinds)),
    )
    if crew.rank:
        return help_encoding(task, system, crew)
    found = retrieve(
        task,
        system,
        metrics,
        k,
        search=f"{'bm25' if by_words else 'sparse'} + maxsim" if chosen == "rerank" else chosen,
        rerank_depth=rerank_depth,
        timed_queries=timed_queries,
        build=index,
        device=device_of(encoder),
        progress=f"{task.name}: search" if progress else None,
    )
    cut = counter(tokenizer, task)
    return crew.share(found._replace(lengths=lengths_read(tokenizer, task.form), cut=cut))


def evaluate_bm25(
    task: RetrievalTask,
    *,
    k1: float = 0.9,
    b: float = 0.4,
    metrics: Sequence[str] = METRICS,
    k: int = 1000,
    timed_queries: int = TIMED_QUERIES,
    device: torch.device | str = "cpu",
) -> TaskResult:
    """BM25 on the same task, through the same index and metrics."""
    check_texts(task)
    check_metrics(metrics, k)
    refuse_below(0, timed_queries=timed_queries)
    bm25 = BM25(k1, b)
    system = System(
        lambda texts, _: Representations(bm25.fit(texts)),
        lambda texts, _: Representations(bm25.queries(texts)),
    )
    return retrieve(
        task, system, metrics, k, search="bm25", timed_queries=timed_queries, device=device
    )


def _readable(task: RetrievalTask, longest: int | None, counter: CutCounter) -> RetrievalTask:
    """A task of whose texts no more tokens are read than an encoder has positions."""
    form = task.form
    longest = longest or sys.maxsize
    for side in SIDES:
        length, _ = form.of(side)
        if length is not None and length > longest:
            said = "%s: the task keeps %d tokens of a %s, the model has %d positions"
            counter.warn_once(said, task.name, length, side, longest)
    form = form._replace(
        query_length=form.query_length and min(form.query_length, longest),
        document_length=form.document_length and min(form.document_length, longest),
    )
    return task._replace(form=form)
