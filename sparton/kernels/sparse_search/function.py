"""The best documents for sparse queries, by the postings of the documents' terms.

Q queries, N documents, V terms, K results, M excluded documents of a query.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sparton.kernels.sort_keys import from_keys
from sparton.kernels.sparse_search.postings import GROUP, Postings
from sparton.kernels.sparse_vectors import SparseVectors

CPU_KEYS, GPU_SCORES = 2**24, 2**28  # of all queries that are searched at once
FEW_KEYS = 2**15  # a GPU takes longer to begin with them than a host takes to read them


def search_postings(
    postings: Postings, queries: SparseVectors, k: int, excluded: Tensor
) -> tuple[Tensor, Tensor]:
    """The K documents with the largest dot products, of those above zero.

    A score is summed in fp32 in ascending order of terms, each product rounded before it is added:
    a CPU and a GPU give the same bits. Equal scores are ordered by document, lower first.

    Args:
        postings: on the device that searches.
        queries: on the host, over the terms of the documents.
        k: K, at least 1 if there are documents.
        excluded: int64 ``[Q]`` or ``[Q, M]`` on the host, documents that are no result; -1 for
            none.

    Returns:
        scores fp32 and numbers of documents int64, ``[Q, K]`` each, on the host; 0 and -1 where
        there is no result.

    Raises:
        ValueError: k is less than 1, or queries over another number of terms.
    """
    if k < min(postings.num_documents, 1) or queries.width != postings.width:
        raise ValueError(
            f"k must be at least 1 and queries over the {postings.width} terms of the documents, "
            f"got k={k} and {queries.width} terms"
        )
    scores = np.zeros((queries.num_vectors, k), np.float32)
    rows = np.full((queries.num_vectors, k), -1, np.int64)
    if postings.num_documents and queries.num_vectors:
        search = _search_gpu if postings.places.is_cuda else _search_cpu
        first, excluded = 0, excluded.view(queries.num_vectors, -1)
        for landing in _one_behind(map(_Landing, search(postings, queries, k, excluded))):
            found, numbers = landing.results()
            own = slice(first, first + len(found)), slice(found.shape[1])
            scores[own], rows[own] = found.numpy(), numbers.numpy()
            first += len(found)
    return torch.from_numpy(scores), torch.from_numpy(rows)


class _Landing:
    """Results of some queries, whose copies to the host have begun."""

    def __init__(self, keys: Tensor) -> None:
        # Many are read where they are: a host may be slower at it.
        self._are_keys = keys.numel() <= FEW_KEYS
        parts = (keys,) if self._are_keys else _read(keys)
        self._parts = [part.to("cpu", non_blocking=True) for part in parts]
        self._event = torch.cuda.Event() if keys.is_cuda else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(keys.device))

    def results(self) -> tuple[Tensor, Tensor]:
        """Scores and numbers of documents, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        first, last = self._parts[0], self._parts[-1]
        return _read(first) if self._are_keys else (first, last)


def _read(keys: Tensor) -> tuple[Tensor, Tensor]:
    found, numbers = from_keys(keys)
    numbers.masked_fill_(found <= 0, -1)
    return found.clamp_(min=0), numbers


def _one_behind(landings: Iterator[_Landing]) -> Iterator[_Landing]:
    """Each once the next one has begun: a GPU searches while the host takes what it has found."""
    before = next(landings)
    for landing in landings:
        yield before
        before = landing
    yield before


def _search_cpu(
    postings: Postings, queries: SparseVectors, k: int, excluded: Tensor
) -> Iterator[Tensor]:
    """Keys of the best documents, of some queries after the other."""
    from sparton.kernels.sparse_search.cpu import best_keys_cpu

    at_once = max(CPU_KEYS // min(2 * k + GROUP, postings.num_documents), 1)
    for first in range(0, queries.num_vectors, at_once):
        last = min(first + at_once, queries.num_vectors)
        yield best_keys_cpu(postings, queries.slice(first, last), k, excluded[first:last])


def _search_gpu(
    postings: Postings, queries: SparseVectors, k: int, excluded: Tensor
) -> Iterator[Tensor]:
    from sparton.kernels.sparse_search.kernels import best_keys_gpu

    device = postings.places.device
    num_scores = postings.num_blocks * postings.block
    # A key is twice as large as a score, and topk holds some twice.
    of_query = num_scores + 4 * min(k * GROUP, num_scores)
    at_once = min(max(GPU_SCORES // of_query, 1), queries.num_vectors)
    scores = torch.empty(at_once * num_scores, dtype=torch.float32, device=device)
    for first in range(0, queries.num_vectors, at_once):
        last = min(first + at_once, queries.num_vectors)
        asked = queries.slice(first, last)
        left_out, bounds, terms, values = in_one_copy(
            (excluded[first:last].flatten(), asked.cu_seqlens, asked.terms, asked.values), device
        )
        asked = SparseVectors(values, terms, bounds, asked.width)
        yield best_keys_gpu(postings, asked, k, left_out, scores)


def in_one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Vectors of the host on a device, by one copy, which takes as long as one of few numbers.

    Args:
        tensors: contiguous, those with the widest numbers first.
    """
    held = np.concatenate([each.numpy().view(np.uint8) for each in tensors])
    parts = torch.from_numpy(held).to(device).split([each.nbytes for each in tensors])
    return [part.view(each.dtype) for part, each in zip(parts, tensors, strict=True)]
