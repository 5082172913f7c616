"""What an index is to those who search it.

N documents, Q queries, C candidates of a query, K results of a query, M excluded of a query.
"""

from collections.abc import Collection
from numbers import Integral
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import ArgumentError, Instance
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import KINDS, Representations
from sparton.types import Kind


class Found(NamedTuple):
    """The results of Q queries.

    Attributes:
        scores: fp32 ``[Q, K]``, best first.
        rows: int64 ``[Q, K]``, numbers of documents; slots that no document fills come last and
            hold score 0 and row -1. There are no more slots than documents.
    """

    scores: NDArray[np.float32]
    rows: NDArray[np.int64]


class Index(Protocol):
    """N encoded documents that can be searched.

    Attributes:
        kinds: the halves of representations that are compared.
        exact: whether the best documents are always found, as :func:`exact_index
            <sparton.retrieval.indexes.exact.exact_index>` finds them; an evaluation says how many
            of them others find.
        nbytes: bytes of the documents' representations and of what it made of them.
    """

    kinds: frozenset[Kind]
    exact: bool
    nbytes: int

    def search(
        self,
        queries: Representations,
        k: int,
        *,
        exclude: NDArray[np.int64] | None = None,
        progress: str | None = None,
    ) -> Found:
        """The best documents of each query; equal scores are ordered by document, lower first.

        Args:
            queries: Q texts on the host, with the halves that the index compares.
            k: at least 1. K is ``k``, or less where there are no more documents or candidates.
            exclude: ``[Q, M]``, documents to leave out for each query; others take their places,
                among candidates as well. -1 leaves out nothing.
            progress: label of a progress bar on standard error; None for no bar.

        Raises:
            ValueError: queries without these halves or of another width, a ``k`` below 1, an
                ``exclude`` without one row per query.
        """
        ...


class Reranker(Protocol):
    """N encoded documents that can put candidates in order; its attributes are those of an
    :class:`Index`."""

    kinds: frozenset[Kind]
    exact: bool
    nbytes: int

    def rerank(
        self,
        queries: Representations,
        candidates: NDArray[np.int64],
        *,
        progress: str | None = None,
    ) -> Found:
        """The candidates of each query in the order of their scores.

        Args:
            queries: Q texts on the host.
            candidates: int64 ``[Q, C]``, documents, different within a row; -1 for none.
            progress: label of a progress bar on standard error; None for no bar.

        Returns:
            K = C results.

        Raises:
            ValueError: candidates of another shape, out of range, or twice in a row.
        """
        ...


def check_kinds(queries: Representations, kinds: Collection[Kind]) -> None:
    """Refuse queries that an index cannot compare with its documents.

    Raises:
        ValueError: names what queries and documents have.
    """
    if missing := [kind for kind in sorted(kinds) if kind not in queries.kinds]:
        given = " and ".join(KINDS[kind] for kind in sorted(queries.kinds)) or "nothing"
        wanted = " and ".join(KINDS[kind] for kind in missing)
        raise ValueError(f"queries have {given}, but the documents are compared by {wanted}")


def refuse_dense(name: str, kinds: Collection[Kind]) -> None:
    """Refuse dense vectors where an index would pass over them.

    Raises:
        ArgumentError: names the index and the remedies.
    """
    if "dense" in kinds:
        raise ArgumentError(
            "{} does not compare dense vectors, which these documents have: leave them out, or set "
            "{index}",
            name,
            index=Instance("exact_index"),
        )


def asked_terms(queries: Representations, width: int) -> SparseVectors:
    """The sparse vectors of queries, over the ``width`` terms of an index.

    Raises:
        ValueError: queries without them, or over another number of terms.
    """
    check_kinds(queries, {"sparse"})
    asked = queries.sparse
    if not isinstance(asked, SparseVectors):
        raise ValueError(
            "the sparse vectors of queries hold all entries: keep the active ones alone, as "
            "Representations.compact() does"
        )
    if asked.width != width:
        raise ValueError(
            f"queries have {asked.width} terms but the index has {width}: "
            "encode both with the same model"
        )
    return asked


def check_request(k: int, exclude: NDArray[np.int64] | None, num_queries: int) -> NDArray[np.int64]:
    """Refuse what no index can answer.

    Returns:
        ``exclude``, of M = 0 documents where it is None.

    Raises:
        ValueError: a ``k`` that is no whole number from 1 on, or an ``exclude`` without one row per
            query.
    """
    if isinstance(k, bool) or not isinstance(k, Integral):
        raise ValueError(f"k={k!r} must be a whole number")
    if k < 1:
        raise ValueError(f"k is {k}, must be at least 1")
    if exclude is None:
        return np.empty((num_queries, 0), np.int64)
    shape = getattr(exclude, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != num_queries:
        given = f"is a {type(exclude).__name__}" if shape is None else f"has the shape {shape}"
        raise ValueError(
            f"exclude {given}, must be an array [Q, M] with the document rows to leave out for "
            f"each of the Q = {num_queries} queries"
        )
    return exclude
