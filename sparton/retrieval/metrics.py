"""Ranking metrics, computed by ranx. Q judged queries, K results, J judgments of a query."""

import re
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sparton.retrieval.run import Run

Qrels = Mapping[str, Mapping[str, int]]

METRICS = ("ndcg@10", "mrr@10", "recall@100", "recall@1000")
# Those of ranx but bpref, which would take what fills the arrays for judgments, and rbp, which
# weighs by raw grades where its definition has probabilities. "@" and a number of results may
# follow, and must where ranx divides by it.
NAMES = (
    "hits", "hit_rate", "precision", "recall", "f1", "r-precision", "mrr", "map", "dcg",
    "dcg_burges", "ndcg", "ndcg_burges",
)  # fmt: skip
CUT = ("precision", "f1")
_FORM = re.compile(rf"(?:{'|'.join(NAMES)})(?:@(?P<depth>[1-9]\d*))?(?:-l[1-9]\d*)?")
# What fills the arrays: documents that do not exist, different ones on the two sides, since ranx
# looks judged documents up in the judgments themselves; and a grade that is never relevant.
_NO_JUDGMENT = (-2.0, -1.0)
_NO_RESULT = (-1.0, -1.0)


def metric_depth(metric: str) -> int | None:
    """How many results of a query a metric looks at; None for all of them.

    Args:
        metric: ranx's name, such as ``ndcg@10``, ``map`` or, with the grade from which on a
            document is relevant, ``recall@100-l2``.

    Raises:
        ValueError: ranx has no such metric.
    """
    form = _FORM.fullmatch(metric)
    if form is None:
        raise ValueError(
            f"{metric} is no metric: choose from {', '.join(NAMES)}, each with or without a number "
            "of results as in ndcg@10"
        )
    depth, name = form["depth"], metric.partition("-l")[0]
    if depth is None and name in CUT:
        raise ValueError(f"{metric} needs a number of results, as in {name}@10")
    return int(depth) if depth else None


def evaluate_queries(
    qrels: Qrels, run: Run, metrics: Sequence[str] = METRICS
) -> dict[str, dict[str, float]]:
    """Metric to query id to value, over exactly the queries in ``qrels``.

    NDCG's gain is the grade itself, as in trec_eval; MRR and recall take a grade of 1 or more as
    relevant. A judged query that the run lacks, or without results, or without a relevant
    document, has the value 0. The order of the run is taken as it is, equal scores included.

    Args:
        qrels: query id to document id to grade; documents outside the collection count as missed.
        run: rankings at least as deep as the metrics look.
        metrics: ranx's names, such as ``ndcg@10``.

    Raises:
        ValueError: no judged query, a metric that ranx does not know, or a document that the run
            ranks twice for a query.
    """
    if not qrels:
        raise ValueError("no query has a judgment: check the qrels file and the split's name")
    for metric in metrics:
        metric_depth(metric)
    _refuse_repeated(run)
    judgments, rankings = _as_arrays(qrels, run)
    from ranx import evaluate

    with warnings.catch_warnings():
        # Numba compiles ranx's metrics at the first use on a machine and is verbose about it.
        warnings.simplefilter("ignore")
        # Asked for one metric without its mean, ranx 0.3.21 looks up a wrong key; so never for one.
        values = evaluate(judgments, rankings, [*metrics, metrics[0]], return_mean=False)
    return {
        metric: dict(zip(qrels, scores.tolist(), strict=True)) for metric, scores in values.items()
    }


def evaluate_run(qrels: Qrels, run: Run, metrics: Sequence[str] = METRICS) -> dict[str, float]:
    """Metric to its mean over the queries in ``qrels``; see :func:`evaluate_queries`."""
    return mean_of_queries(evaluate_queries(qrels, run, metrics))


def mean_of_queries(by_query: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metric to the mean of its values."""
    return {metric: float(np.mean(list(values.values()))) for metric, values in by_query.items()}


def _refuse_repeated(run: Run) -> None:
    rows = np.sort(run.rows, axis=1)
    queries, places = ((rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)).nonzero()
    if len(queries):
        raise ValueError(
            f"the run ranks document {run.document_ids[rows[queries[0], places[0]]]!r} twice for "
            f"query {run.query_ids[queries[0]]!r}: every result would count twice"
        )


def _as_arrays(qrels: Qrels, run: Run) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Judgments ``[Q, J, 2]`` and rankings ``[Q, K, 2]`` of (document, grade or score).

    ranx takes such arrays as they are. Its own containers of strings would be compiled for half
    a minute, and sorted without a rule for equal scores. Documents are numbers: their row in the
    run, or numbers behind the last row if the run's collection lacks them.
    """
    judged = {name for grades in qrels.values() for name in grades}
    row_of = {name: row for row, name in enumerate(run.document_ids) if name in judged}
    for name in judged - row_of.keys():
        row_of[name] = len(run.document_ids) + len(row_of)
    most = max(1, *(len(grades) for grades in qrels.values()))
    judgments = np.tile(_NO_JUDGMENT, (len(qrels), most, 1))
    rankings = np.tile(_NO_RESULT, (len(qrels), max(run.rows.shape[1], 1), 1))
    place_of = {name: place for place, name in enumerate(run.query_ids)}
    for query, (name, grades) in enumerate(qrels.items()):
        ordered = sorted(grades.items(), key=lambda item: -item[1])
        judgments[query, : len(ordered), 0] = [row_of[document] for document, _ in ordered]
        judgments[query, : len(ordered), 1] = [grade for _, grade in ordered]
        if name in place_of:
            rankings[query, : run.rows.shape[1], 0] = run.rows[place_of[name]]
            rankings[query, : run.rows.shape[1], 1] = run.scores[place_of[name]]
    return judgments, rankings
