"""What can be asked of an evaluation, and of which encoder."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sparton.arguments import ArgumentError, Instance
from sparton.representations import KINDS
from sparton.retrieval.encoding import check_pool_factor
from sparton.retrieval.settings import (
    RERANK_DEPTH,
    SEARCHES,
    Search,
    check_metrics,
    check_search,
)
from sparton.types import Kind, RetrievalTask, TokenPooling

if TYPE_CHECKING:
    from sparton.models.encoder import Encoder

_COMPARED: dict[Search, tuple[Kind, ...]] = {
    "sparse": ("sparse",),
    "maxsim": ("tokens",),
    "dense": ("dense",),
    "rerank": ("sparse", "tokens"),
    "sum": ("sparse", "tokens", "dense"),
}


def check_texts(task: RetrievalTask) -> None:
    """Refuse a task without texts.

    Raises:
        ValueError: names the side.
    """
    for side, texts in (("documents", task.documents.texts), ("queries", task.queries.texts)):
        if not texts:
            raise ValueError(f"task {task.name} has no {side}: check its files and the split")


def plan_search(
    encoder: "Encoder",
    *,
    metrics: Sequence[str],
    k: int = 1000,
    search: Search | None = None,
    rerank_depth: int = RERANK_DEPTH,
) -> Search:
    """How :func:`~sparton.evaluation.tasks.evaluate_encoder` will search with what the encoder
    gives; nothing is encoded.

    Raises:
        ValueError: the encoder does not give what ``search`` compares, or a metric does not exist
            or looks deeper than the rankings.
    """
    check_search(search, rerank_depth)
    check_metrics(metrics, k)
    chosen = _choose_search(search, encoder)
    if chosen in ("rerank", "sum"):
        check_metrics(metrics, rerank_depth, "rerank_depth")
    return chosen


def bm25_finds(search: Search, encoder: "Encoder") -> bool:
    """Whether the candidates of ``search``, as :func:`plan_search` gives it, come from BM25."""
    return search == "rerank" and "sparse" not in encoder.kinds


def _choose_search(search: Search | None, encoder: "Encoder") -> Search:
    if search is None:
        return next(each for each in SEARCHES if {*_COMPARED[each]} == {*encoder.kinds})
    if missing := _needed(search) - {*encoder.kinds}:
        offered = [each for each in SEARCHES if _needed(each) <= {*encoder.kinds}]
        raise ArgumentError(
            "{search} compares {}, which {} does not give: set {search:name}={}, or leave it out",
            KINDS[min(missing)],
            type(encoder).__name__,
            " or ".join(offered),
            search=search,
        )
    return search


def _needed(search: Search) -> set[Kind]:
    """Without which there is no such search; BM25 can stand in for the sparse vectors of rerank."""
    return {"tokens"} if search == "rerank" else {*_COMPARED[search]}


def compared_kinds(search: Search, encoder: "Encoder") -> Collection[Kind]:
    """What ``search``, as :func:`plan_search` gives it, takes of the encoder."""
    return tuple(kind for kind in encoder.kinds if kind in _COMPARED[search])


def check_index(index: object, search: Search, encoder: "Encoder") -> None:
    """Refuse what makes indexes of vectors, by its ``needs``, that are not compared, or of token
    vectors of length 1 where the encoder's have any.

    Args:
        index: an :class:`~sparton.retrieval.indexes.exact.IndexBuilder`.
        search: as :func:`plan_search` gives it.

    Raises:
        ValueError: names the index and the vectors.
    """
    needs: frozenset[Kind] = getattr(index, "needs", frozenset())
    for kind in sorted(needs.difference(compared_kinds(search, encoder))):
        raise ArgumentError(
            "{} needs {}, which search={} does not compare with {}: set {index}",
            type(index).__name__,
            KINDS[kind],
            search,
            type(encoder).__name__,
            index=Instance("exact_index"),
        )
    if needs and "dense" in compared_kinds(search, encoder):
        raise ArgumentError(
            "{} does not compare dense vectors, as search={} does with {}: set {search}, or "
            "{index}",
            type(index).__name__,
            search,
            type(encoder).__name__,
            search="rerank",
            index=Instance("exact_index"),
        )
    unit = getattr(encoder, "token_pooling", TokenPooling()).normalize
    if "tokens" in needs and not unit:
        raise ArgumentError(
            "{} needs token vectors of length 1, which {} with {normalize} does not give: set "
            "{index}",
            type(index).__name__,
            type(encoder).__name__,
            normalize=False,
            index=Instance("exact_index"),
        )


def check_pooling(pool_factor: float | None, search: Search, encoder: "Encoder") -> None:
    """Refuse to pool tokens where ``search``, as :func:`plan_search` gives it, compares none.

    Raises:
        ValueError: names the factor.
    """
    check_pool_factor(pool_factor, compared_kinds(search, encoder), encoder)


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
                f"in search={search} with this encoder: leave it out"
            )
