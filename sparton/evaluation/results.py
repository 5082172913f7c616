"""What an evaluation found: figures, tables, files."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from sparton.evaluation.recall import ExactRecall
from sparton.evaluation.speed import Speed
from sparton.reading import Fields, read_json
from sparton.retrieval.run import Run
from sparton.retrieval.trec import write_run
from sparton.types import Side
from sparton.writing import replacing

Figures = tuple[float | None, ...]
Columns = dict[str, tuple[str, list[Figures]]]
_SPEEDS = ("queries_per_second", "index_bytes")
# With which a model finds other documents than by itself: null where they are its own.
_CHANGING = (
    "query_length",
    "document_length",
    "width",
    "search",
    "pool_factor",
    "max_query_terms",
    "max_document_terms",
)


class TaskResult(NamedTuple):
    """One system on one task.

    What a system does not have is None: terms and FLOPS without sparse vectors, vectors without
    token vectors.

    Attributes:
        name: the task's.
        metrics: mean over the judged queries, by ranx's names.
        search: how documents were ranked: "sparse", "maxsim" or "bm25"; of two stages both, the
            one that finds candidates first, as "sparse + maxsim".
        seconds: wall-clock time to encode the ``documents`` and the ``queries``, to ``index`` and
            to ``search``.
        run: the rankings themselves.
        by_query: metric to query id to value, of which ``metrics`` are the means.
        query_terms, document_terms: mean number of active terms.
        flops: mean number of multiplications to score one pair of sparse vectors; see
            :func:`~sparton.kernels.sparse_vectors.mean_flops`.
        query_vectors, document_vectors: mean number of token vectors.
        lengths: by side, how many tokens of a text were read.
        cut: by side, the share of texts of which not all is read; see
            :func:`~sparton.datasets.lengths.shares_cut`.
        speed: what it costs to encode and to ask; None where that was not measured.
        exact_recall: what an approximate index finds of what exact search does; None where search
            was exact.
    """

    name: str
    metrics: dict[str, float]
    search: str
    seconds: dict[str, float]
    run: Run
    by_query: Mapping[str, Mapping[str, float]]
    query_terms: float | None = None
    document_terms: float | None = None
    flops: float | None = None
    query_vectors: float | None = None
    document_vectors: float | None = None
    lengths: Mapping[Side, int] | None = None
    cut: Mapping[Side, float] | None = None
    speed: Speed | None = None
    exact_recall: ExactRecall | None = None


def mean_metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Each metric's mean over tasks, every task weighing the same."""
    return {
        metric: float(np.mean([result.metrics[metric] for result in results]))
        for metric in results[0].metrics
    }


def flat_metrics(results: Sequence[TaskResult], prefix: str) -> dict[str, float]:
    """``prefix_metric``, the mean over tasks, and ``prefix_task_metric`` of each."""
    flat = {f"{prefix}_{metric}": value for metric, value in mean_metrics(results).items()}
    return flat | {
        f"{prefix}_{result.name}_{metric}": value
        for result in results
        for metric, value in result.metrics.items()
    }


def results_table(results: Sequence[TaskResult], title: str | None = None) -> Group:
    """What was found and what it costs, each with a row per task, and below them the mean row.

    "terms q/d" are the mean active terms, "vectors q/d" the mean token vectors of queries and
    documents, and "cut q/d" the shares of them of which not all is read; "of exact@10" is the
    :class:`~sparton.evaluation.recall.ExactRecall` of an index that is not exact; "docs/s",
    "queries/s", "ms/query p50/p95/p99" and "index MB" are the
    :class:`~sparton.evaluation.speed.Speed`. A column that no result fills is left out.
    """
    found = _table(results, quality_columns(results), title)
    return Group(found, _table(results, cost_columns(results), None))


def _table(results: Sequence[TaskResult], columns: Columns, title: str | None) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("task", no_wrap=True)
    for label in columns:
        table.add_column(label, justify="right", no_wrap=True)
    for place, result in enumerate(results):
        table.add_row(result.name, *(_cell(form, rows[place]) for form, rows in columns.values()))
    table.add_section()
    table.add_row("mean", *(_cell(form, _mean(rows)) for form, rows in columns.values()))
    return table


def quality_columns(results: Sequence[TaskResult]) -> Columns:
    """By heading, the format of a figure and each result's figures: metrics and sizes."""
    columns: Columns = {
        _label(metric): (".4f", [(each.metrics[metric],) for each in results])
        for metric in results[0].metrics
    }
    columns |= {
        "terms q/d": (".1f", [(each.query_terms, each.document_terms) for each in results]),
        "FLOPS": (".2f", [(each.flops,) for each in results]),
        "vectors q/d": (".1f", [(each.query_vectors, each.document_vectors) for each in results]),
        "cut q/d": (".0%", [tuple(each.cut.values()) if each.cut else (None,) for each in results]),
    }
    return _filled(columns)


def cost_columns(results: Sequence[TaskResult]) -> Columns:
    """As :func:`quality_columns`: what search loses by being approximate, speed and time."""
    speeds = [each.speed for each in results]
    recalls = [each.exact_recall for each in results]
    columns: Columns = {
        "of exact@10": (".4f", [(each and each.at_10,) for each in recalls]),
        "of exact@100": (".4f", [(each and each.at_100,) for each in recalls]),
        "docs/s": (",.0f", [(each and each.documents_per_second,) for each in speeds]),
        "queries/s": (",.0f", [(each and each.queries_per_second,) for each in speeds]),
        "ms/query p50/p95/p99": (
            ",.1f",
            [each.latency[:3] if each else (None,) for each in speeds],
        ),
        "index MB": (",.1f", [(each and each.index_bytes / 1e6,) for each in speeds]),
        "seconds": (".1f", [(sum(each.seconds.values()),) for each in results]),
    }
    return _filled(columns)


def _filled(columns: Columns) -> Columns:
    """Those in which any result has a figure."""
    return {
        label: (form, rows)
        for label, (form, rows) in columns.items()
        if any(figure is not None for row in rows for figure in row)
    }


def _mean(rows: Sequence[Figures]) -> Figures:
    """Over the results that have the figures."""
    return tuple(
        float(np.mean([figure for figure in column if figure is not None])) for column in zip(*rows)
    )


def _cell(form: str, figures: Figures) -> str:
    return "/".join("-" if figure is None else format(figure, form) for figure in figures)


def write_results(
    results: Sequence[TaskResult], folder: Path | str, description: Mapping[str, Any]
) -> None:
    """``results.json``: the description, the tasks' figures, and the means; replaced as a whole.

    Raises:
        OSError: the disk is full or not writable; names the file and the room left.
    """
    tasks = [task_figures(result) for result in results]
    content = dict(description) | {"tasks": tasks, "mean": mean_metrics(results)}
    with replacing(Path(folder) / "results.json") as fresh:
        fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def task_figures(result: TaskResult) -> dict[str, Any]:
    """What ``results.json`` says of a task; what a system does not have is left out."""
    figures = {name: figure for name, figure in result._asdict().items() if figure is not None}
    if speed := result.speed:
        figures["speed"] = speed._asdict() | {"latency": speed.latency._asdict()}
    if recall := result.exact_recall:
        figures["exact_recall"] = recall._asdict()
    return figures | {
        "run": _file(result.name, "trec"),
        "by_query": _file(result.name, "metrics.json"),
        "queries": len(result.run.query_ids),
    }


def check_task_names(tasks: Iterable[str]) -> None:
    """Refuse names of tasks that :func:`write_task_run` has one file for. Some file systems do not
    tell large letters from small ones.

    Raises:
        ValueError: names two of them and the file.
    """
    owners: dict[str, str] = {}
    for task in tasks:
        file = _file(task, "trec")
        if file.lower() in owners:
            raise ValueError(
                f"the tasks {owners[file.lower()]} and {task} would both be written to {file}: "
                "give one of them another name"
            )
        owners[file.lower()] = task


def write_task_run(result: TaskResult, folder: Path | str) -> None:
    """The rankings as ``runs/<task>.trec``, and what every query came to as
    ``runs/<task>.metrics.json``, where ``results.json`` says they are; :func:`read_queries` reads
    the latter.

    Raises:
        OSError: as for :func:`write_results`.
    """
    with replacing(Path(folder) / _file(result.name, "trec")) as fresh:
        write_run(result.run, fresh)
    values = {metric: list(each.values()) for metric, each in result.by_query.items()}
    queries = list(next(iter(result.by_query.values())))
    with replacing(Path(folder) / _file(result.name, "metrics.json")) as fresh:
        fresh.write_text(json.dumps({"queries": queries, "metrics": values}), encoding="utf-8")


def read_queries(folder: Path | str) -> dict[str, dict[str, dict[str, float]]]:
    """Task to metric to query id to value, of what :func:`write_results` and
    :func:`write_task_run` left in a folder.

    Raises:
        FileNotFoundError: there are no results, or they lack what every query came to.
        ValueError: a file is damaged.
    """
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; trainings and evaluations that measured something leave one"
        )
    return {
        task["name"]: _read_task_queries(Path(folder), task) for task in read_results(path).tasks
    }


class Measured(NamedTuple):
    """What a ``results.json`` holds.

    Attributes:
        model: the folder or the name of what was measured; empty where it does not say, as that of
            a training does not.
        settings: with which settings of its own an evaluation has measured it, as ``width=32``.
        tasks: what it says of each, which has its ``name``, its ``metrics``, and perhaps its
            ``speed`` and ``exact_recall``; see :func:`task_figures`.
    """

    model: str
    settings: list[str]
    tasks: list[dict[str, Any]]


def read_results(path: Path) -> Measured:
    """What a ``results.json`` holds.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged.
    """
    content = Fields.of(read_json(path), str(path))
    tasks = content.need("tasks", list)
    for row, each in enumerate(tasks):
        _check_task(Fields.of(each, f"{path}: task {row}"))
    model = content.get("model", str) or ""
    return Measured(model, _settings(content) if model else [], tasks)


def _settings(content: Fields) -> list[str]:
    config = content.object("config")
    if config is None:
        return []
    encoder = config.object("encoder")
    given = config.as_dict() | ({} if encoder is None else encoder.as_dict())
    return [f"{name}={given[name]}" for name in _CHANGING if given.get(name) is not None]


def _check_task(task: Fields) -> None:
    task.need("name", str)
    task.get("by_query", str)
    metrics, speed = task.need_object("metrics"), task.object("speed")
    for metric in metrics:
        metrics.need(metric, float)
    if recall := task.object("exact_recall"):
        recall.get("at_10", float)
    if speed is not None:
        latency = speed.need_object("latency")
        for fields, keys in ((speed, _SPEEDS), (latency, ("p50", "p95", "p99"))):
            for key in keys:
                fields.need(key, float)
        speed.get("documents_per_second", float)


def _read_task_queries(folder: Path, task: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Metric to query id to value."""
    path = folder / (task.get("by_query") or "nothing")
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no figures of the queries of {task['name']}: evaluate the model "
            "again, which writes them"
        )
    held = Fields.of(read_json(path), str(path))
    metrics, queries = held.need_object("metrics"), held.strings("queries") or []
    values = {metric: metrics.numbers(metric) for metric in metrics}
    for metric, each in values.items():
        if len(each) != len(queries):
            metrics.refuse(metric, f"a list of {len(queries)} numbers, one for each query")
    return {metric: dict(zip(queries, each, strict=True)) for metric, each in values.items()}


def _label(metric: str) -> str:
    return metric.upper().replace("RECALL", "R")


def _file(task: str, ending: str) -> str:
    name = re.sub(r"[^\w.-]+", "-", task)
    return f"runs/{name}.{ending}"
