"""Encode, index, search, measure, write.

N documents, Q queries, V vocabulary, K results per query.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn

from sparton.retrieval.encoding import device_of, encode_texts
from sparton.retrieval.metrics import METRICS, evaluate_run
from sparton.retrieval.output import replacing
from sparton.retrieval.run import Run
from sparton.retrieval.sparse import SparseIndex, SparseRows, mean_flops
from sparton.retrieval.trec import write_run
from sparton.types import RetrievalTask, TokenBatch

if TYPE_CHECKING:
    from sparton.datasets.tokenization import PackedTokenizer
    from sparton.models.encoder import Encoder

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


class TaskResult(NamedTuple):
    """One system on one task.

    Attributes:
        name: the task's.
        metrics: mean over the judged queries, by ranx's names.
        query_terms, document_terms: mean number of active terms.
        flops: mean number of multiplications to score one pair; see :func:`mean_flops`.
        seconds: wall-clock time to ``encode``, ``index`` and ``search``.
        run: the rankings themselves.
    """

    name: str
    metrics: dict[str, float]
    query_terms: float
    document_terms: float
    flops: float
    seconds: dict[str, float]
    run: Run


def choose_device(name: str | None) -> torch.device:
    """The device of that name; for None a GPU if there is one.

    Raises:
        ValueError: no such device, or PyTorch cannot use it.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name} cannot be used ({error}): try device=cpu") from error
    return device


def load_retriever(
    model: Path | str,
    query_length: int | None = None,
    document_length: int | None = None,
    *,
    device: torch.device | str = "cpu",
) -> "tuple[Encoder, PackedTokenizer]":
    """An encoder on its device and its tokenizer, ready for :func:`evaluate_encoder`.

    Args:
        model: a folder of ``train.py``, a sentence-transformers or masked-LM folder, or a name on
            the Hugging Face hub.
        query_length, document_length: tokens at which texts are cut; None takes what the model's
            folder says, or 64 and 256 if it is silent.
        device: where to put the encoder.

    Raises:
        FileNotFoundError: no such folder.
        OSError, ValueError: from :func:`sparton.models.folders.load_encoder`.
    """
    from sparton.datasets.tokenization import PackedTokenizer
    from sparton.models.folders import Lengths, encoder_lengths, load_encoder

    if not Path(model).is_dir() and not _HUB_NAME.fullmatch(str(model)):
        raise FileNotFoundError(
            f"model {model}: no such folder; give a folder of train.py, a sentence-transformers "
            "folder, or a hub name such as naver/splade-v3"
        )
    encoder = load_encoder(model).to(device)
    lengths = encoder_lengths(model) or Lengths(query=64, document=256)
    tokenizer = PackedTokenizer(
        encoder.tokenizer,
        query_length or lengths.query,
        document_length or lengths.document,
        max_length=encoder.max_length,
    )
    return encoder, tokenizer


def evaluate_encoder(
    encoder: nn.Module,
    tokenizer: "PackedTokenizer",
    task: RetrievalTask,
    *,
    metrics: Sequence[str] = METRICS,
    k: int = 1000,
    batch_tokens: int = 16_384,
    batch_sequences: int = 256,
    bf16: bool = False,
    max_query_terms: int | None = None,
    max_document_terms: int | None = None,
    progress: bool = True,
) -> TaskResult:
    """A sparse encoder on a full collection, searched exactly, on the encoder's own device.

    The encoder is in evaluation mode meanwhile; afterwards its mode is what it was.

    Args:
        encoder: packed tokens to non-negative representations fp32 ``[N, V]``.
        tokenizer: its tokenizer, with the lengths at which texts are cut.
        task: collection, queries, judgments.
        metrics: ranx's names.
        k: depth of the rankings.
        max_query_terms, max_document_terms: keep this many of a text's largest weights; None, or
            more than there are, for all.
        batch_tokens, batch_sequences, bf16, progress: see :func:`encode_texts`.

    Raises:
        ValueError: a task without texts, a metric deeper than ``k``, a bound of the terms that is
            none, or representations that are not finite.
    """
    _check(task, metrics, k)
    check_term_bounds(max_query_terms=max_query_terms, max_document_terms=max_document_terms)

    def encode(
        side: str,
        tokenize: Callable[[Sequence[str]], TokenBatch],
        texts: Sequence[str],
        max_terms: int | None,
    ) -> SparseRows:
        return encode_texts(
            encoder,
            tokenize,
            texts,
            batch_tokens=batch_tokens,
            batch_sequences=batch_sequences,
            bf16=bf16,
            max_terms=max_terms,
            progress=f"{task.name}: {side}" if progress else None,
        )

    start = perf_counter()
    documents = encode("documents", tokenizer.documents, task.documents.texts, max_document_terms)
    queries = encode("queries", tokenizer.queries, task.queries.texts, max_query_terms)
    seconds = perf_counter() - start
    return _retrieve(
        task, queries, documents, metrics, k, device=device_of(encoder), encode=seconds
    )


def check_term_bounds(**bounds: object) -> None:
    """Refuse bounds of a text's terms that are neither a positive int nor None.

    Raises:
        ValueError: names the bound and its value.
    """
    for name, value in bounds.items():
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{name}={value}: must be a whole number of terms from 1 on, or null for all"
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
    from sparton.retrieval.bm25 import BM25

    _check(task, metrics, k)
    start = perf_counter()
    bm25 = BM25(k1, b)
    documents = bm25.fit(task.documents.texts)
    queries = bm25.queries(task.queries.texts)
    seconds = perf_counter() - start
    return _retrieve(task, queries, documents, metrics, k, device=device, encode=seconds)


def explain(
    encoder: nn.Module,
    tokenizer: "PackedTokenizer",
    text: str,
    *,
    kind: Literal["query", "document"] = "document",
    k: int = 20,
) -> list[tuple[str, float]]:
    """The ``k`` heaviest terms of a text's representation with their weights, heaviest first."""
    tokenize = tokenizer.queries if kind == "query" else tokenizer.documents
    row = encode_texts(encoder, tokenize, [text])
    heaviest = np.argsort(-row.values, kind="stable")[:k]
    terms = tokenizer.tokenizer.convert_ids_to_tokens(row.indices[heaviest].tolist())
    return list(zip(terms, row.values[heaviest].tolist(), strict=True))


def mean_metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Each metric's mean over tasks, every task weighing the same."""
    return {
        metric: float(np.mean([result.metrics[metric] for result in results]))
        for metric in results[0].metrics
    }


def results_table(results: Sequence[TaskResult], title: str | None = None) -> Table:
    """One row per task, and below them the mean row; "terms q/d" are the mean active terms."""
    metrics = list(results[0].metrics)
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("task", no_wrap=True)
    for label in (*(_label(metric) for metric in metrics), "terms q/d", "FLOPS", "seconds"):
        table.add_column(label, justify="right", no_wrap=True)
    figures = [
        [
            *(result.metrics[metric] for metric in metrics),
            result.query_terms,
            result.document_terms,
            result.flops,
            sum(result.seconds.values()),
        ]
        for result in results
    ]
    rows = [*zip((result.name for result in results), figures), ("mean", np.mean(figures, axis=0))]
    for name, (*values, query_terms, document_terms, flops, seconds) in rows:
        if name == "mean":
            table.add_section()
        table.add_row(
            name,
            *(f"{value:.4f}" for value in values),
            f"{query_terms:.1f}/{document_terms:.1f}",
            f"{flops:.2f}",
            f"{seconds:.1f}",
        )
    return table


def write_results(
    results: Sequence[TaskResult], folder: Path | str, description: Mapping[str, Any]
) -> None:
    """``results.json``: the description, the tasks' figures, and the means; replaced as a whole.

    Raises:
        OSError: the disk is full or not writable; names the file and the room left.
    """
    tasks = [
        result._asdict() | {"run": _run_file(result), "queries": len(result.run.query_ids)}
        for result in results
    ]
    content = dict(description) | {"tasks": tasks, "mean": mean_metrics(results)}
    with replacing(Path(folder) / "results.json") as fresh:
        fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_task_run(result: TaskResult, folder: Path | str) -> None:
    """The rankings as ``runs/<task>.trec``, where ``results.json`` says they are.

    Raises:
        OSError: as for :func:`write_results`.
    """
    with replacing(Path(folder) / _run_file(result)) as fresh:
        write_run(result.run, fresh)


def _check(task: RetrievalTask, metrics: Sequence[str], k: int) -> None:
    for side, texts in (("documents", task.documents.texts), ("queries", task.queries.texts)):
        if not texts:
            raise ValueError(f"task {task.name} has no {side}: check its files and the split")
    for metric in metrics:
        cutoff = metric.partition("@")[2]
        if cutoff.isdigit() and int(cutoff) > k:
            raise ValueError(f"{metric} looks deeper than the k={k} documents that are retrieved")


def _retrieve(
    task: RetrievalTask,
    queries: SparseRows,
    documents: SparseRows,
    metrics: Sequence[str],
    k: int,
    *,
    device: torch.device | str,
    encode: float,
) -> TaskResult:
    start = perf_counter()
    index = SparseIndex(documents, device)
    indexed = perf_counter()
    scores, rows = index.search(queries, k, exclude=_own_rows(task) if task.exclude_self else None)
    seconds = {"encode": encode, "index": indexed - start, "search": perf_counter() - indexed}
    run = Run(task.queries.ids, task.documents.ids, rows, scores)
    return TaskResult(
        task.name,
        evaluate_run(task.qrels, run, metrics),
        queries.mean_active_terms,
        documents.mean_active_terms,
        mean_flops(queries, documents),
        seconds,
        run,
    )


def _own_rows(task: RetrievalTask) -> NDArray[np.int64]:
    """Row of the document that has a query's id, or -1; int64 ``[Q]``."""
    row_of = {name: row for row, name in enumerate(task.documents.ids)}
    return np.array([row_of.get(name, -1) for name in task.queries.ids], np.int64)


def _label(metric: str) -> str:
    return metric.upper().replace("RECALL", "R")


def _run_file(result: TaskResult) -> str:
    return f"runs/{re.sub('[^a-zA-Z0-9_.-]+', '-', result.name)}.trec"
