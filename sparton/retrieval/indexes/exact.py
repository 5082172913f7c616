"""Exact search over whatever an encoder gives.

N documents, Q queries, P pairs of both, K results of a query.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.arguments import ArgumentError
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations
from sparton.retrieval.indexes.divided import DividedIndex
from sparton.retrieval.indexes.documents import Documents, TokenParts
from sparton.retrieval.indexes.inverted import inverted_index
from sparton.retrieval.indexes.maxsim import MultiVectorIndex, maxsim_scores
from sparton.retrieval.indexes.protocols import Found, Index, Reranker, check_request
from sparton.retrieval.indexes.sums import SumIndex, dot_pairs, summed_scores
from sparton.retrieval.settings import RERANK_DEPTH
from sparton.types import Kind


class IndexBuilder(Protocol):
    """Makes an index of encoded documents, as :func:`exact_index` does. One that cannot do without
    sparse vectors, or token vectors of length 1, may name these kinds in an attribute ``needs``."""

    def __call__(
        self, documents: Documents, device: torch.device | str, *, rerank_depth: int
    ) -> Index: ...


def exact_index(
    documents: Representations | Documents,
    device: torch.device | str = "cpu",
    *,
    rerank_depth: int = RERANK_DEPTH,
    more_devices: Sequence[torch.device | str] = (),
) -> Index:
    """Exact search by the vectors that documents have.

    Sparse and dense vectors are compared by their dot product, token vectors by MaxSim. With sparse
    and token vectors, the sparse ones find ``rerank_depth`` candidates, which MaxSim puts in order.
    With dense vectors and others, the dense and the sparse ones find as many each, which the
    weighted sum of all scores puts in order.

    Args:
        documents: N texts on the host.
        device: where to score.
        rerank_depth: candidates of a query where documents have several halves.
        more_devices: of the same machine, which share MaxSim's documents with ``device``, or those
            of dense vectors alone: each keeps and searches as many. What sparse vectors find, and
            sums of scores, are found on ``device``.

    Raises:
        ValueError: ``more_devices`` is no list, or PyTorch cannot use one of them.
    """
    devices = [torch.device(device), *_usable(more_devices)]
    documents = Documents.of(documents)
    if documents.kinds == {"dense"}:
        return _index(documents.dense, devices, "dense")
    if "dense" in documents.kinds:
        return SumIndex(documents, device, rerank_depth)
    if "tokens" not in documents.kinds:
        return inverted_index(documents, device)
    exhaustive = _index(documents.tokens, devices, "tokens")
    if "sparse" not in documents.kinds:
        return exhaustive
    return TwoStageIndex(inverted_index(documents, device), exhaustive, rerank_depth)


def _usable(more_devices: Sequence[torch.device | str]) -> list[torch.device]:
    if isinstance(more_devices, str) or not isinstance(more_devices, Sequence):
        raise ArgumentError("{more_devices} must be a list of devices", more_devices=more_devices)
    found = []
    for each in more_devices:
        try:
            found.append(torch.device(each))
            torch.empty(0, device=each)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ArgumentError(
                "{more_devices}: {!r} cannot be used ({}): name devices that PyTorch finds here, "
                "such as cuda:1",
                *(each, str(error).partition("\n")[0]),
                more_devices=more_devices,
            ) from error
    return found


def _index(
    documents: TokenParts, devices: Sequence[torch.device], kind: Kind
) -> MultiVectorIndex | DividedIndex:
    if len(devices) == 1 or not documents.num_tokens:
        return MultiVectorIndex(documents, devices[0], kind=kind)
    return DividedIndex(documents, devices, kind)


class TwoStageIndex:
    """Candidates of an index, put in order by a reranker; an index itself.

    Args:
        first: finds candidates.
        second: orders them.
        depth: candidates of a query. No others are results.
    """

    def __init__(self, first: Index, second: Reranker, depth: int) -> None:
        self._first, self._second, self._depth = first, second, depth
        self.kinds: frozenset[Kind] = first.kinds | second.kinds
        self.exact = first.exact and second.exact
        self.nbytes = first.nbytes + second.nbytes

    def search(
        self,
        queries: Representations,
        k: int,
        *,
        exclude: NDArray[np.int64] | None = None,
        progress: str | None = None,
    ) -> Found:
        """See :meth:`Index.search <sparton.retrieval.indexes.protocols.Index.search>`."""
        check_request(k, exclude, queries.num_texts)
        candidates = self._first.search(queries, self._depth, exclude=exclude).rows
        scores, rows = self._second.rerank(queries, candidates, progress=progress)
        return Found(scores[:, :k], rows[:, :k])


def score_pairs(
    queries: Representations,
    documents: Representations,
    pairs: NDArray[np.int64],
    device: torch.device | str = "cpu",
) -> NDArray[np.float32]:
    """The scores fp32 ``[P]`` of queries and documents by which :func:`exact_index` orders them:
    the weighted sum of all where they have dense vectors, else MaxSim where they have token
    vectors, else the dot product of the sparse ones.

    Args:
        queries, documents: texts on the host with the same vectors.
        pairs: int64 ``[P, 2]``, the number of a query and the number of a document.
        device: where MaxSim is computed.
    """
    asked, answers = torch.from_numpy(pairs).unbind(1)
    if queries.dense is not None and documents.dense is not None:
        held = Documents.of(documents)
        halves = held.sparse, held.vectors
        return summed_scores(queries.take(asked), *halves, pairs[:, 1:], device)[:, 0]
    if queries.tokens is not None and documents.tokens is not None:
        candidates = pairs[:, 1:]
        return maxsim_scores(queries.tokens.take(asked), documents.tokens, candidates, device)[:, 0]
    assert isinstance(queries.sparse, SparseVectors)
    assert isinstance(documents.sparse, SparseVectors)
    return dot_pairs(queries.sparse.take(asked), documents.sparse.take(answers)).numpy()
