"""What can be asked of a search; it is checked without PyTorch, before anything is read."""

from collections.abc import Sequence
from typing import Literal, get_args

from sparton.retrieval.metrics import metric_depth

Search = Literal["sparse", "maxsim", "dense", "rerank", "sum"]
SEARCHES: tuple[Search, ...] = get_args(Search)
RERANK_DEPTH = 1000


def check_term_bounds(**bounds: object) -> None:
    """Refuse bounds of a text's terms that are neither a positive int nor None.

    Raises:
        ValueError: names the bound and its value.
    """
    for name, value in bounds.items():
        if value is not None and not _is_count(value):
            raise ValueError(
                f"{name}={value}: must be a whole number of terms from 1 on, or left out for all"
            )


def check_search(search: object, rerank_depth: object) -> None:
    """Refuse a way to search that does not exist.

    Raises:
        ValueError: names the setting and its value.
    """
    if search is not None and search not in SEARCHES:
        raise ValueError(
            f"search={search}: must be {', '.join(SEARCHES)}, or left out for all that the encoder "
            "gives"
        )
    if not _is_count(rerank_depth):
        raise ValueError(f"rerank_depth={rerank_depth}: must be a whole number from 1 on")


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


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
