"""What can be asked of an evaluation, and of which encoder."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sparton.representations import KINDS
from sparton.retrieval.encoding import VECTOR_DTYPES
from sparton.retrieval.index import RERANK_DEPTH, SEARCHES, Search
from sparton.retrieval.metrics import metric_depth
from sparton.types import Kind, RetrievalTask

if TYPE_CHECKING:
    from sparton.models.encoder import Encoder

_COMPARED: dict[str, Kind] = {"sparse": "sparse", "maxsim": "tokens"}


def check_term_bounds(**bounds: object) -> None:
    """Refuse bounds of a text's terms that are neither a positive int nor None.

    Raises:
        ValueError: names the bound and its value.
    """
    for name, value in bounds.items():
        if value is not None and not _is_count(value):
            raise ValueError(
                f"{name}={value}: must be a whole number of terms from 1 on, or null for all"
            )


def check_search(search: object, rerank_depth: object, vector_dtype: object = "float16") -> None:
    """Refuse a way to search, or to store what is searched, that does not exist.

    Raises:
        ValueError: names the setting and its value.
    """
    if search is not None and search not in SEARCHES:
        raise ValueError(
            f"search={search}: must be {', '.join(SEARCHES)}, or null for what the encoder gives"
        )
    if not _is_count(rerank_depth):
        raise ValueError(f"rerank_depth={rerank_depth}: must be a whole number from 1 on")
    if vector_dtype not in VECTOR_DTYPES:
        raise ValueError(f"vector_dtype={vector_dtype}: must be {' or '.join(VECTOR_DTYPES)}")


def check_texts(task: RetrievalTask) -> None:
    """Refuse a task without texts.

    Raises:
        ValueError: names the side.
    """
    for side, texts in (("documents", task.documents.texts), ("queries", task.queries.texts)):
        if not texts:
            raise ValueError(f"task {task.name} has no {side}: check its files and the split")


def check_metrics(
    metrics: Sequence[str], k: int | None = None, bound: str = "k", setting: str = "metrics"
) -> None:
    """Refuse metrics that do not exist, or that look deeper than the ``k`` best documents.

    Args:
        k: from 1 on; None where it is not known yet how many documents are retrieved.
        bound: name of ``k``.
        setting: where the metrics were given.

    Raises:
        ValueError: names the ``setting`` and the metric, or the ``bound``.
    """
    if k is not None and not _is_count(k):
        raise ValueError(f"{bound}={k}: must be a whole number from 1 on")
    if isinstance(metrics, str) or not metrics:
        raise ValueError(f"{setting}={metrics}: must be a list of metrics, such as [ndcg@10]")
    for metric in metrics:
        try:
            depth = metric_depth(str(metric))
        except ValueError as error:
            raise ValueError(f"{setting}={list(metrics)}: {error}") from None
        if k is not None and depth is not None and depth > k:
            raise ValueError(
                f"{metric} looks deeper than the {bound}={k} documents that are retrieved: "
                f"raise {bound}, or leave {metric} out of the metrics"
            )


def plan_search(
    encoder: "Encoder",
    *,
    metrics: Sequence[str],
    k: int = 1000,
    search: Search | None = None,
    rerank_depth: int = RERANK_DEPTH,
) -> Search:
    """How :func:`evaluate_encoder` will search with what the encoder gives; nothing is encoded.

    Raises:
        ValueError: the encoder does not give what ``search`` compares, or a metric does not exist
            or looks deeper than the rankings.
    """
    check_search(search, rerank_depth)
    check_metrics(metrics, k)
    chosen = _choose_search(search, encoder)
    if chosen == "rerank":
        check_metrics(metrics, rerank_depth, "rerank_depth")
    return chosen


def bm25_finds(search: Search, encoder: "Encoder") -> bool:
    """Whether the candidates of ``search``, as :func:`plan_search` gives it, come from BM25."""
    return search == "rerank" and "sparse" not in encoder.kinds


def _choose_search(search: Search | None, encoder: "Encoder") -> Search:
    if search is None:
        if "tokens" not in encoder.kinds:
            return "sparse"
        return "rerank" if "sparse" in encoder.kinds else "maxsim"
    needed: Kind = "sparse" if search == "sparse" else "tokens"
    if needed not in encoder.kinds:
        offered = ("sparse",) if needed == "tokens" else ("maxsim", "rerank")
        raise ValueError(
            f"search={search} compares {KINDS[needed]}, which {type(encoder).__name__} does not "
            f"give: set search={' or '.join(offered)}, or null"
        )
    return search


def compared_kinds(search: Search, encoder: "Encoder") -> Collection[Kind]:
    """What ``search``, as :func:`plan_search` gives it, takes of the encoder."""
    return encoder.kinds if search == "rerank" else (_COMPARED[search],)


def check_bounds_apply(search: Search, encoder: "Encoder", **bounds: int | None) -> None:
    """Refuse bounds of terms where no sparse vectors of the encoder are searched.

    Args:
        search: as :func:`plan_search` gives it.

    Raises:
        ValueError: names the bound and its value.
    """
    if "sparse" in compared_kinds(search, encoder):
        return
    for name, value in bounds.items():
        if value is not None:
            raise ValueError(
                f"{name}={value} keeps the largest weights of sparse vectors, which take no part "
                f"in search={search} with this encoder: set it to null"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
