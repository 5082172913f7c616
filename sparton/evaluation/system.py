"""What encodes, on one task: documents and queries become representations, which are indexed,
searched and measured.

N documents, Q queries, K results per query, M excluded documents of a query.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.evaluation.recall import recall_of_exact
from sparton.evaluation.results import TaskResult
from sparton.evaluation.speed import WARM_UP_DOCUMENTS, WARM_UP_QUERIES, Speed, time_queries
from sparton.kernels.sparse_vectors import SparseVectors, mean_flops
from sparton.representations import Representations
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.crew import Crew
from sparton.retrieval.indexes.documents import Documents
from sparton.retrieval.indexes.exact import IndexBuilder, exact_index
from sparton.retrieval.indexes.protocols import Found
from sparton.retrieval.metrics import evaluate_queries, mean_of_queries
from sparton.retrieval.run import Run
from sparton.retrieval.settings import RERANK_DEPTH
from sparton.types import RetrievalTask

Rows = NDArray[np.int64]


class System(NamedTuple):
    """Encodes the texts of a task. It is told with them whether they are all of their side: these
    have a bar of progress, and other processes may have a part in them.

    Attributes:
        documents, queries: give the representations of texts; documents come first.
        words: whose sparse vectors find candidates in place of the encoder's.
        stored: gives the documents where they were encoded before.
    """

    documents: Callable[[Sequence[str], bool], Representations]
    queries: Callable[[Sequence[str], bool], Representations]
    words: BM25 | None = None
    stored: Callable[[], Documents] | None = None


def retrieve(
    task: RetrievalTask,
    system: System,
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
    """Encode a task, index its documents, search them, and measure what is found.

    Args:
        task: collection, queries, judgments.
        system: encodes them.
        metrics, k, rerank_depth, timed_queries: see
            :func:`~sparton.evaluation.tasks.evaluate_encoder`.
        search: what the result calls the way of searching.
        device: where to search.
        build: makes the index.
        progress: label of a bar of the search; None for no bar.
    """
    words, texts = system.words, task.queries.texts
    if timed_queries:  # what is compiled at its first use is compiled now
        if system.stored is None:
            system.documents(task.documents.texts[:WARM_UP_DOCUMENTS], False)
        system.queries(texts[:WARM_UP_QUERIES], False)
    clock = _Clock()
    if system.stored is None:
        documents = Documents.of(system.documents(task.documents.texts, True))
    else:
        documents = system.stored()
    stored = documents
    if words is not None:
        stored = documents.with_sparse(words.fit(task.documents.texts))
    clock.stop("documents")
    queries = system.queries(texts, True)
    asked = _with_words(queries, texts, words)
    clock.stop("queries")
    index = build(stored, device, rerank_depth=rerank_depth)
    clock.stop("index")
    barred = excluded_rows(task)
    if timed_queries:
        index.search(asked.slice(0, min(WARM_UP_QUERIES, len(texts))), k)
        clock.restart()
    found = index.search(asked, k, exclude=barred, progress=progress)
    run = Run(task.queries.ids, task.documents.ids, found.rows, found.scores)
    clock.stop("search")
    run = run.ties_by_id()
    recall = None
    if not index.exact:
        recall = recall_of_exact(
            found, asked, stored, device, k=k, rerank_depth=rerank_depth, exclude=barred
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


def help_encoding(task: RetrievalTask, system: System, crew: Crew) -> TaskResult:
    """Encode for process 0, which does the rest, and wait for what it finds. It may search on the
    GPU of this process, too, which keeps no memory of it but the encoder's."""
    if system.stored is None:
        system.documents(task.documents.texts, True)
    system.queries(task.queries.texts, True)
    torch.cuda.empty_cache()
    found: TaskResult | None = None
    found = crew.share(found)
    assert found is not None
    return found


def excluded_rows(task: RetrievalTask) -> Rows | None:
    """Rows of the documents that are left out of each query's ranking, int64 ``[Q, M]``, M the most
    of a query; -1 fills up, and stands for documents that the collection lacks. None where the task
    leaves out nothing."""
    if not (task.excluded or task.exclude_self):
        return None
    row_of = {name: row for row, name in enumerate(task.documents.ids)}
    lists = []
    for query in task.queries.ids:
        names = [*task.excluded.get(query, ()), *([query] if task.exclude_self else [])]
        lists.append([row_of.get(name, -1) for name in names])
    rows = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int64)
    for row, own in zip(rows, lists, strict=True):
        row[: len(own)] = own
    return rows


class _Clock:
    """Wall-clock seconds of what is done one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def restart(self) -> None:
        """Leave out what was done since the last stop."""
        self._last = perf_counter()

    def stop(self, name: str) -> None:
        now = perf_counter()
        self.seconds[name], self._last = now - self._last, now


def _with_words(
    queries: Representations, texts: Sequence[str], words: BM25 | None
) -> Representations:
    return queries if words is None else queries._replace(sparse=words.queries(texts))


def _sizes(queries: Representations, documents: Documents) -> dict[str, Any]:
    """The fields of a result that tell how large the representations are."""
    sizes: dict[str, float] = {}
    asked, total = queries.sparse, max(documents.num_texts, 1)
    if isinstance(asked, SparseVectors):
        answers = documents.sparse
        sizes["query_terms"] = asked.mean_entries
        sizes["document_terms"] = sum(part.num_entries for part in answers) / total
        flops = (mean_flops(asked, part) * part.num_vectors for part in answers)
        sizes["flops"] = sum(flops) / total
    if queries.tokens is not None:
        sizes["query_vectors"] = queries.tokens.mean_tokens
        sizes["document_vectors"] = documents.tokens.num_tokens / total
    return sizes
