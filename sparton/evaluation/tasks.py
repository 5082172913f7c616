"""One system on one task: encode, index, search, measure.

N documents, Q queries, K results per query.
"""

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from sparton.arguments import refuse_below
from sparton.encoded import EncodedTexts
from sparton.evaluation.documents import check_documents
from sparton.evaluation.exclusion import excluded_rows, own_rows, without
from sparton.evaluation.recall import recall_of_exact
from sparton.evaluation.results import TaskResult
from sparton.evaluation.settings import (
    bm25_finds,
    check_bounds_apply,
    check_index,
    check_pooling,
    check_texts,
    check_vector_dtype,
    compared_kinds,
    plan_search,
)
from sparton.evaluation.speed import WARM_UP_DOCUMENTS, Speed, time_queries
from sparton.representations import Representations
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.crew import ALONE, Crew
from sparton.retrieval.encoding import check_precision, device_of, encode_texts
from sparton.retrieval.indexes.exact import IndexBuilder, exact_index
from sparton.retrieval.indexes.protocols import Found
from sparton.retrieval.metrics import METRICS, evaluate_queries, mean_of_queries
from sparton.retrieval.run import Run
from sparton.retrieval.settings import (
    RERANK_DEPTH,
    Search,
    check_metrics,
    check_search,
    check_term_bounds,
)
from sparton.retrieval.storing import VectorDtype
from sparton.sparse_vectors import SparseVectors, mean_flops
from sparton.types import SIDES, Kind, RetrievalTask, Side, TextForm, Tokenizer

if TYPE_CHECKING:
    from sparton.models.encoder import Encoder

TIMED_QUERIES = 50
log = logging.getLogger(__name__)
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
        search: "sparse" compares sparse vectors by their dot product, "maxsim" token vectors by
            MaxSim. "rerank" orders candidates by MaxSim, which the encoder's sparse vectors find,
            or BM25 for an encoder without them. None is the one that uses all that the encoder
            gives, without BM25.
        rerank_depth: candidates of a query in "rerank". Rankings are no deeper than that.
        max_query_terms, max_document_terms: keep this many of a text's largest weights; None, or
            more than there are, for all.
        k1, b: of BM25, where it finds the candidates.
        index: makes the index that is searched.
        documents: the task's documents as they were encoded before, by this model and with these
            settings.
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
    check_precision(precision)
    refuse_below(0, timed_queries=timed_queries)
    bounds = {"max_query_terms": max_query_terms, "max_document_terms": max_document_terms}
    check_term_bounds(**bounds)
    chosen = plan_search(encoder, metrics=metrics, k=k, search=search, rerank_depth=rerank_depth)
    check_bounds_apply(chosen, encoder, **bounds)
    check_index(index, chosen, encoder)
    check_pooling(pool_factor, chosen, encoder)
    kinds = compared_kinds(chosen, encoder)
    bm25 = BM25(k1, b)

    form = _readable(task, encoder.max_length)
    if documents is not None:
        check_documents(
            documents, encoder, tokenizer, task._replace(form=form), kinds=kinds,
            max_terms=max_document_terms, precision=precision, vector_dtype=vector_dtype,
            pool_factor=pool_factor,
        )  # fmt: skip

    def encode(
        texts: Sequence[str], side: Side, max_terms: int | None, whole: bool
    ) -> Representations:
        bar = progress and whole and not crew.rank
        return encode_texts(
            encoder, tokenizer, texts, side, kinds=kinds, max_terms=max_terms, precision=precision,
            batch_tokens=batch_tokens, vector_dtype=vector_dtype, pool_factor=pool_factor,
            form=form, progress=f"{task.name}: {_PLURAL[side]}" if bar else None,
            crew=crew if whole else ALONE,
        )  # fmt: skip

    by_words = bm25_finds(chosen, encoder)
    system = _System(
        lambda texts, whole: encode(texts, "document", max_document_terms, whole),
        lambda texts, whole: encode(texts, "query", max_query_terms, whole),
        bm25 if by_words else None,
        None if documents is None else partial(_kept, documents, kinds),
    )
    if crew.rank:
        return _help(task, system, crew)
    found = _retrieve(
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
    return crew.share(found)


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
    system = _System(
        lambda texts, _: Representations(bm25.fit(texts)),
        lambda texts, _: Representations(bm25.queries(texts)),
    )
    return _retrieve(
        task, system, metrics, k, search="bm25", timed_queries=timed_queries, device=device
    )


class _System(NamedTuple):
    """What encodes texts: whether they are the whole of a task, which has a bar of progress and in
    which others may have a part, is said with them.

    Attributes:
        documents, queries: to representations, of documents first.
        words: whose sparse vectors find candidates in place of the encoder's.
        stored: gives the documents where they were encoded before.
    """

    documents: Callable[[Sequence[str], bool], Representations]
    queries: Callable[[Sequence[str], bool], Representations]
    words: BM25 | None = None
    stored: Callable[[], Representations] | None = None


def _kept(documents: EncodedTexts, kinds: Collection[Kind]) -> Representations:
    """Documents that were encoded before, with what is compared of them."""
    found = documents.representations()
    return Representations(
        found.sparse if "sparse" in kinds else None, found.tokens if "tokens" in kinds else None
    )


def _retrieve(
    task: RetrievalTask,
    system: _System,
    metrics: Sequence[str],
    k: int,
    *,
    search: str,
    timed_queries: int,
    device: torch.device | str,
    rerank_depth: int = RERANK_DEPTH,
    build: IndexBuilder = exact_index,
    progress: str | None = None,
) -> TaskResult:
    """Encode, index, search, measure."""
    words, texts = system.words, task.queries.texts
    if timed_queries and system.stored is None:
        system.documents(task.documents.texts[:WARM_UP_DOCUMENTS], False)
    clock = _Clock()
    if system.stored is None:
        documents = system.documents(task.documents.texts, True)
    else:
        documents = system.stored()
    stored = documents
    if words is not None:
        stored = documents._replace(sparse=words.fit(task.documents.texts))
    clock.stop("documents")
    queries = system.queries(texts, True)
    asked = _with_words(queries, texts, words)
    clock.stop("queries")
    index = build(stored, device, rerank_depth=rerank_depth)
    clock.stop("index")
    barred = excluded_rows(task)
    own = own_rows(task) if task.exclude_self else None
    found = index.search(asked, k + barred.shape[1], exclude=own, progress=progress)
    run = Run(task.queries.ids, task.documents.ids, *without(found, barred, k))
    clock.stop("search")
    recall = None
    if not index.exact:
        recall = recall_of_exact(
            found, asked, stored, device, rerank_depth=rerank_depth, exclude=own
        )
    seconds, speed = clock.seconds, None
    if timed_queries:

        def answer(text: str) -> Found:
            return index.search(_with_words(system.queries([text], False), [text], words), k)

        speed = Speed(
            None if system.stored else len(task.documents.texts) / seconds["documents"],
            len(texts) / (seconds["queries"] + seconds["search"]),
            time_queries(answer, texts, timed_queries),
            index.nbytes,
        )
    by_query = evaluate_queries(task.qrels, run, metrics)
    return TaskResult(
        name=task.name,
        metrics=mean_of_queries(by_query),
        by_query=by_query,
        search=search,
        seconds=seconds,
        speed=speed,
        exact_recall=recall,
        run=run,
        **_sizes(queries, documents),
    )


def _help(task: RetrievalTask, system: _System, crew: Crew) -> TaskResult:
    """Encode for process 0, which does the rest, and wait for what it finds."""
    if system.stored is None:
        system.documents(task.documents.texts, True)
    system.queries(task.queries.texts, True)
    found: TaskResult | None = None
    found = crew.share(found)
    assert found is not None
    return found


class _Clock:
    """Wall-clock seconds of what is done one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def stop(self, name: str) -> None:
        now = perf_counter()
        self.seconds[name], self._last = now - self._last, now


def _with_words(
    queries: Representations, texts: Sequence[str], words: BM25 | None
) -> Representations:
    return queries if words is None else queries._replace(sparse=words.queries(texts))


def _readable(task: RetrievalTask, longest: int | None) -> TextForm:
    """The form of a task, with no more tokens than an encoder has positions."""
    form = task.form
    longest = longest or sys.maxsize
    for side in SIDES:
        length, _ = form.of(side)
        if length is not None and length > longest:
            said = "%s: the task keeps %d tokens of a %s, the model has %d positions"
            log.warning(said, task.name, length, side, longest)
    return form._replace(
        query_length=form.query_length and min(form.query_length, longest),
        document_length=form.document_length and min(form.document_length, longest),
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
