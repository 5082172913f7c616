"""Search by the weighted sum of the scores of all halves that documents have.

N documents, Q queries, C candidates of a query, P pairs of both, K results of a query.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.kernels.boundaries import sequence_ids
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations
from sparton.retrieval.indexes.documents import Documents, TokenParts
from sparton.retrieval.indexes.inverted import inverted_index
from sparton.retrieval.indexes.late_interaction import ordered
from sparton.retrieval.indexes.maxsim import MultiVectorIndex, maxsim_scores, resident
from sparton.retrieval.indexes.protocols import (
    Found,
    Index,
    asked_terms,
    check_kinds,
    check_request,
)
from sparton.types import Kind


class SumIndex:
    """Documents in the order of the weighted sum of all their scores; an
    :class:`~sparton.retrieval.indexes.protocols.Index`.

    The sparse and the dense half find candidates, as many each; their union is ordered. What token
    vectors alone would find is no candidate. The weights are those of the queries.

    Args:
        documents: with several halves, a dense one among them.
        device: where to search.
        depth: candidates of a query that each of these halves finds. No others are results.
    """

    exact = True

    def __init__(self, documents: Documents, device: torch.device | str, depth: int) -> None:
        self._sparse, self._device, self._depth = documents.sparse, torch.device(device), depth
        self._vectors = {
            kind: resident(vectors, self._device) for kind, vectors in documents.vectors.items()
        }
        self.kinds = documents.kinds
        self._finders: list[Index] = [
            MultiVectorIndex(self._vectors["dense"], device, kind="dense")
        ]
        if "sparse" in self.kinds:
            self._finders.append(inverted_index(documents, device))
        self.nbytes = sum(finder.nbytes for finder in self._finders)
        self.nbytes += documents.tokens.nbytes if "tokens" in self.kinds else 0
        for part in self._sparse:
            self.nbytes += part.values.nbytes + part.terms.nbytes + part.cu_seqlens.nbytes

    def search(
        self,
        queries: Representations,
        k: int,
        *,
        exclude: NDArray[np.int64] | None = None,
        progress: str | None = None,
    ) -> Found:
        """See :meth:`Index.search <sparton.retrieval.indexes.protocols.Index.search>`."""
        check_kinds(queries, self.kinds)
        check_request(k, exclude, queries.num_texts)
        candidates = _union(
            [each.search(queries, self._depth, exclude=exclude).rows for each in self._finders]
        )
        scores = summed_scores(
            queries, self._sparse, self._vectors, candidates, self._device, progress=progress
        )
        return ordered(scores, candidates, candidates >= 0, min(k, candidates.shape[1]))


def summed_scores(
    queries: Representations,
    sparse: Sequence[SparseVectors],
    vectors: Mapping[Kind, TokenParts],
    candidates: NDArray[np.int64],
    device: torch.device | str = "cpu",
    *,
    progress: str | None = None,
) -> NDArray[np.float32]:
    """The weighted sums of the scores of each query and each of its candidates in all halves of the
    documents; fp32 ``[Q, C]``.

    Args:
        queries: on the host, with these halves and the weights of their scores.
        sparse: of the documents, in parts on the host; none without this half.
        vectors: the other halves of the documents, on the host or on the device.
        candidates: int64 ``[Q, C]``, document rows; -1 scores 0.
        device: where MaxSim is computed.
        progress: label of a progress bar on standard error; None for no bar.
    """
    found: dict[Kind, NDArray[np.float32]] = {
        kind: maxsim_scores(getattr(queries, kind), held, candidates, device, progress=progress)
        for kind, held in vectors.items()
    }
    if sparse:
        asked = asked_terms(queries, sparse[0].width)
        found["sparse"] = _dot_scores(asked, sparse, candidates)
    total = np.zeros(candidates.shape, np.float32)
    for kind in sorted(found):
        total += np.float32(queries.score_weights.get(kind, 1.0)) * found[kind]
    return total


def dot_pairs(left: SparseVectors, right: SparseVectors) -> torch.Tensor:
    """Products of vector p and vector p; fp32 ``[P]``."""
    products = torch.zeros(left.num_vectors)
    if not left.num_entries or not right.num_entries:
        return products
    # The places of entries, vector by vector and term by term, ascend on both sides.
    wanted, found = left.places, right.places
    slots = torch.searchsorted(found, wanted).clamp_(max=found.numel() - 1)
    shared = found[slots] == wanted
    weights = left.values[shared] * right.values[slots[shared]]
    return products.index_add_(0, wanted[shared] // left.width, weights)


def _dot_scores(
    queries: SparseVectors, parts: Sequence[SparseVectors], candidates: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Dot products of each query and each of its candidates among the documents of all parts."""
    rows, scores = torch.from_numpy(candidates), torch.zeros(candidates.shape)
    ends = [0, *accumulate(part.num_vectors for part in parts)]
    for query in range(len(rows)):
        (weights,) = queries.slice(query, query + 1).dense()
        for part, (first, last) in zip(parts, pairwise(ends), strict=True):
            slots = ((rows[query] >= first) & (rows[query] < last)).nonzero().flatten()
            held = part.take(rows[query, slots] - first)
            owners = slots[sequence_ids(held.cu_seqlens, held.num_entries)]
            scores[query].index_add_(0, owners, held.values * weights[held.terms.long()])
    return scores.numpy()


def _union(found: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The different rows of each query, ascending, -1 before them."""
    rows = np.sort(np.concatenate(found, axis=1), axis=1)
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = -1
    rows.sort(axis=1)
    return rows[:, np.flatnonzero((rows >= 0).any(axis=0))]
