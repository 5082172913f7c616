"""Sparse representations by rows, and exact search over them.

N documents, Q queries, V terms, P stored weights, K results per query.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from sparton.ranges import boundaries_of, ranges_within

_LOW_32_BITS = 2**32 - 1


class SparseRows(NamedTuple):
    """N sparse vectors over V terms, in CSR form. Only weights other than zero are stored.

    Attributes:
        indptr: int64 ``[N + 1]``, row n owns the entries ``indptr[n] : indptr[n + 1]``.
        indices: int32 ``[P]``, term of each weight, ascending and unique within a row.
        values: fp32 ``[P]``.
        width: V.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]
    width: int

    @classmethod
    def from_dense(cls, reps: Tensor) -> "SparseRows":
        """Keep what is not zero of ``reps [N, V]``, on any device and of any float dtype.

        Raises:
            ValueError: a weight is NaN or infinite.
        """
        active = reps != 0
        return cls._from_active(active, active.nonzero()[:, 1], reps, reps.shape[1])

    @classmethod
    def from_topk(cls, values: Tensor, indices: Tensor, width: int) -> "SparseRows":
        """Keep what is not zero of the entries ``values [N, k]`` at terms ``indices [N, k]``, which
        differ within a row; on any device.

        Raises:
            ValueError: a weight is NaN or infinite.
        """
        indices, order = indices.sort(1)
        values = values.gather(1, order)
        active = values != 0
        return cls._from_active(active, indices[active], values, width)

    @classmethod
    def _from_active(
        cls, active: Tensor, indices: Tensor, weights: Tensor, width: int
    ) -> "SparseRows":
        indptr = np.zeros(active.shape[0] + 1, np.int64)
        np.cumsum(active.sum(1).cpu().numpy(), out=indptr[1:])
        values = weights[active].float().cpu().numpy()
        broken = np.flatnonzero(~np.isfinite(values))
        if broken.size:
            row = int(np.searchsorted(indptr, broken[0], side="right")) - 1
            raise ValueError(
                f"row {row} of a batch of representations has the weight {values[broken[0]]}: "
                "the model diverged or overflowed its precision; evaluate an earlier checkpoint, "
                "or in fp32"
            )
        return cls(indptr, indices.int().cpu().numpy(), values, width)

    @classmethod
    def concatenate(cls, parts: Sequence["SparseRows"]) -> "SparseRows":
        """The rows of all parts, in order. At least one part; all of the same width."""
        lengths = np.concatenate([part.row_lengths for part in parts])
        return cls(
            boundaries_of(lengths),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.values for part in parts]),
            parts[0].width,
        )

    def take(self, rows: NDArray[np.int64]) -> "SparseRows":
        """The given rows, in the given order."""
        lengths = self.row_lengths[rows]
        indptr = boundaries_of(lengths)
        entries = np.repeat(self.indptr[rows] - indptr[:-1], lengths) + np.arange(indptr[-1])
        return SparseRows(indptr, self.indices[entries], self.values[entries], self.width)

    def slice(self, start: int, stop: int) -> "SparseRows":
        """Rows ``start : stop``; their weights are not copied."""
        first, last = self.indptr[start], self.indptr[stop]
        indptr = self.indptr[start : stop + 1] - first
        return SparseRows(indptr, self.indices[first:last], self.values[first:last], self.width)

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """Active terms of each row; int64 ``[N]``."""
        return np.diff(self.indptr)

    @property
    def mean_active_terms(self) -> float:
        """Mean number of stored weights per row; 0 without rows."""
        return len(self.indices) / max(self.num_rows, 1)


def mean_flops(queries: SparseRows, documents: SparseRows) -> float:
    """Expected number of multiplications to score one query against one document.

    The sum over the terms of p_q(v) p_d(v), p the share of the queries (documents) in which term
    v is active: the FLOPS measure of Formal et al., SPLADE, 2021.
    """
    query_share = np.bincount(queries.indices, minlength=queries.width) / max(queries.num_rows, 1)
    counts = np.bincount(documents.indices, minlength=documents.width)
    return float(query_share @ (counts / max(documents.num_rows, 1)))


class SparseIndex:
    """Exact search by dot product over sparse documents.

    The index holds the documents' non-zero weights on its device, 8 bytes each, and nothing else.
    A search multiplies document chunks with query blocks, so that its working memory is bounded
    (under 0.5 GB on a CPU and 2 GB on a GPU) whatever the number of documents and queries.

    Args:
        documents: N rows.
        device: where to search.
        chunk_documents: most documents scored at a time.
        chunk_weights: most weights in one chunk, unless a single document has more.
    """

    def __init__(
        self,
        documents: SparseRows,
        device: torch.device | str = "cpu",
        *,
        chunk_documents: int = 65_536,
        chunk_weights: int = 2**26,
    ) -> None:
        self.num_documents = documents.num_rows
        self.width = documents.width
        self.device = torch.device(device)
        self._query_block = 512 if self.device.type == "cuda" else 128
        self._chunks = [
            _Chunk.build(documents, start, stop, self.device)
            for start, stop in ranges_within(documents.indptr, chunk_documents, chunk_weights)
        ]

    @torch.inference_mode()
    def search(
        self, queries: SparseRows, k: int, *, exclude: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The K best documents of each query.

        Only documents with a score above zero are results: a query without terms has none. Equal
        scores are ordered by document row, lower first. Scores are summed in fp32 in the order
        of the documents' terms; a CPU and a GPU may differ in the last bits.

        Args:
            queries: Q rows over the same terms.
            k: K, at least 1; may exceed the number of documents.
            exclude: ``[Q]``, one document row per query to leave out; -1 leaves out nothing.

        Returns:
            scores fp32 ``[Q, K]``, best first, and document rows int64 ``[Q, K]``; slots that no
            document fills hold score 0 and row -1.
        """
        self._check(queries, k, exclude)
        keys = torch.zeros(queries.num_rows, k, dtype=torch.int64, device=self.device)
        left_out = np.full(queries.num_rows, -1) if exclude is None else exclude
        excluded = torch.from_numpy(left_out).to(self.device)
        for start in range(0, queries.num_rows, self._query_block):
            stop = min(start + self._query_block, queries.num_rows)
            block = _dense_columns(queries, start, stop, self.device)
            best = keys[start:stop, :0]
            for chunk in self._chunks:
                found = chunk.best(block, k, excluded[start:stop])
                best = _best(torch.cat([best, found], dim=1), k) if best.shape[1] else found
            keys[start:stop, : best.shape[1]] = best
        scores, rows = _unpack(keys)
        return scores.cpu().numpy(), rows.cpu().numpy()

    def _check(self, queries: SparseRows, k: int, exclude: NDArray[np.int64] | None) -> None:
        if queries.width != self.width:
            raise ValueError(
                f"queries have {queries.width} terms but the index has {self.width}: "
                "encode both with the same model"
            )
        check_request(k, exclude, queries.num_rows)


def check_request(k: int, exclude: NDArray[np.int64] | None, num_queries: int) -> None:
    """Refuse what no index can answer.

    Raises:
        ValueError: ``k`` below 1, or ``exclude`` without one row per query.
    """
    if k < 1:
        raise ValueError(f"k is {k}, must be at least 1")
    if exclude is not None and exclude.shape != (num_queries,):
        raise ValueError(
            f"exclude has the shape {exclude.shape}, must hold one document row for each "
            f"of the {num_queries} queries"
        )


class _Chunk(NamedTuple):
    """Documents ``first_row : first_row + n`` on the index's device."""

    first_row: int
    indices: Tensor
    offsets: Tensor
    values: Tensor

    @classmethod
    def build(cls, documents: SparseRows, start: int, stop: int, device: torch.device) -> "_Chunk":
        rows = documents.slice(start, stop)
        return cls(
            start,
            torch.from_numpy(rows.indices).to(device),
            torch.from_numpy(rows.indptr.astype(np.int32)).to(device),
            torch.from_numpy(rows.values).to(device),
        )

    def best(self, block: Tensor, k: int, excluded: Tensor) -> Tensor:
        """Keys of the best documents for the queries in ``block [V, Q]``; int64 ``[Q, <= k]``."""
        scores = F.embedding_bag(
            self.indices,
            block,
            self.offsets,
            mode="sum",
            per_sample_weights=self.values,
            include_last_offset=True,
        )
        num_documents, num_queries = scores.shape
        rows = excluded - self.first_row
        inside = (rows >= 0) & (rows < num_documents)
        query_rows = torch.arange(num_queries, device=block.device)
        scores[rows[inside], query_rows[inside]] = 0
        return _best(_pack(scores, self.first_row), k)


def _best(keys: Tensor, k: int) -> Tensor:
    return keys.topk(min(k, keys.shape[1]), dim=1).values


def _pack(scores: Tensor, first_row: int) -> Tensor:
    """Scores ``[N, Q]`` and their rows as sortable int64 keys ``[Q, N]``.

    The bits of a positive float order like an integer. They take the upper half; the lower half
    counts rows downwards, so keys are unique and the lower row wins among equal scores.
    """
    num_documents, num_queries = scores.shape
    keys = torch.empty(num_queries, num_documents, dtype=torch.int64, device=scores.device)
    keys.copy_(scores.view(torch.int32).t())
    keys.bitwise_left_shift_(32)
    rows = torch.arange(first_row, first_row + num_documents, device=scores.device)
    return keys.bitwise_or_(_LOW_32_BITS - rows)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`_pack`; keys whose score is not above zero become score 0, row -1."""
    scores = (keys >> 32).int().view(torch.float32)
    rows = _LOW_32_BITS - (keys & _LOW_32_BITS)
    found = scores > 0
    return scores.where(found, torch.zeros_like(scores)), rows.where(found, -torch.ones_like(rows))


def _dense_columns(rows: SparseRows, start: int, stop: int, device: torch.device) -> Tensor:
    """Rows ``start : stop`` as the columns of a dense fp32 ``[V, stop - start]``."""
    first, last = rows.indptr[start], rows.indptr[stop]
    columns = np.repeat(np.arange(stop - start), rows.row_lengths[start:stop])
    block = torch.zeros(rows.width, stop - start, device=device)
    terms = torch.from_numpy(rows.indices[first:last]).to(device).long()
    weights = torch.from_numpy(rows.values[first:last]).to(device)
    block[terms, torch.from_numpy(columns).to(device)] = weights
    return block
