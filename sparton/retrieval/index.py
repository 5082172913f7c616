"""One index over whatever an encoder gives.

N documents, Q queries, P pairs of both, K results per query.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.retrieval.encoding import KINDS, EncodedTexts
from sparton.retrieval.multivector import MultiVectorIndex, maxsim_scores
from sparton.retrieval.settings import RERANK_DEPTH
from sparton.retrieval.sparse import SparseIndex, SparseRows


class TextIndex:
    """Exact search over encoded documents, by the vectors that they have.

    Sparse vectors are compared by their dot product, token vectors by MaxSim. With both, the
    sparse ones find candidates, which MaxSim puts in order.

    Args:
        documents: N texts.
        device: where to score.
    """

    def __init__(self, documents: EncodedTexts, device: torch.device | str = "cpu") -> None:
        sparse, tokens = documents
        self.kinds = documents.kinds
        self._sparse = None if sparse is None else SparseIndex(sparse, device)
        self._tokens = None if tokens is None else MultiVectorIndex(tokens, device)

    def search(
        self,
        queries: EncodedTexts,
        k: int,
        *,
        exclude: NDArray[np.int64] | None = None,
        rerank_depth: int = RERANK_DEPTH,
        progress: str | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The K best documents of each query.

        Args:
            queries: Q texts with the vectors that the documents have.
            k: K, at least 1; may exceed the number of documents.
            exclude: ``[Q]``, one document row per query to leave out; -1 leaves out nothing.
            rerank_depth: candidates that MaxSim puts in order; no others are results.
            progress: label of a progress bar for MaxSim on standard error; None for no bar.

        Returns:
            scores fp32 ``[Q, K]``, best first, and document rows int64 ``[Q, K]``; slots that no
            document fills come last and hold score 0 and row -1.

        Raises:
            ValueError: queries and documents that have not the same vectors.
        """
        if queries.kinds != self.kinds:
            described = (
                " and ".join(KINDS[kind] for kind in sorted(kinds))
                for kinds in (queries.kinds, self.kinds)
            )
            raise ValueError("queries have {}, but the documents {}".format(*described))
        sparse, tokens = queries
        if self._tokens is None or tokens is None:
            assert self._sparse is not None and sparse is not None
            return self._sparse.search(sparse, k, exclude=exclude)
        if self._sparse is None or sparse is None:
            return self._tokens.search(tokens, k, exclude=exclude, progress=progress)
        _, candidates = self._sparse.search(sparse, rerank_depth, exclude=exclude)
        scores, rows = self._tokens.rerank(tokens, candidates, progress=progress)
        slots = ((0, 0), (0, max(k - rerank_depth, 0)))
        return np.pad(scores[:, :k], slots), np.pad(rows[:, :k], slots, constant_values=-1)


def score_pairs(
    queries: EncodedTexts,
    documents: EncodedTexts,
    pairs: NDArray[np.int64],
    device: torch.device | str = "cpu",
) -> NDArray[np.float32]:
    """The scores fp32 ``[P]`` of queries and documents by which :class:`TextIndex` orders them:
    MaxSim where both have token vectors, else the dot product of the sparse ones.

    Args:
        queries, documents: texts with the same vectors.
        pairs: int64 ``[P, 2]``, the row of a query and the row of a document.
        device: where MaxSim is computed.
    """
    asked, answers = pairs.T
    if queries.tokens is not None and documents.tokens is not None:
        rows = queries.tokens.take(asked)
        return maxsim_scores(rows, documents.tokens, answers[:, None], device)[:, 0]
    assert queries.sparse is not None and documents.sparse is not None
    sparse = (queries.sparse, documents.sparse)
    return np.array([_dot(*sparse, *pair) for pair in pairs.tolist()], np.float32)


def _dot(queries: SparseRows, documents: SparseRows, query: int, document: int) -> float:
    first, last = queries.indptr[query : query + 2]
    start, stop = documents.indptr[document : document + 2]
    _, left, right = np.intersect1d(
        queries.indices[first:last],
        documents.indices[start:stop],
        assume_unique=True,
        return_indices=True,
    )
    return float(queries.values[first:last][left] @ documents.values[start:stop][right])
