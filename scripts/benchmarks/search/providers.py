"""Exact searches over sparse vectors: ours, and the products that it replaced."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.search.vectors import PART
from sparton.kernels.boundaries import sequence_ids
from sparton.kernels.sort_keys import from_keys, sort_keys
from sparton.kernels.sparse_search import invert, search_postings
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.packing import ranges_of


class Search(Protocol):
    """An index of some documents.

    Attributes:
        nbytes: of what it holds.
    """

    nbytes: int

    def __call__(self, queries: SparseVectors, k: int) -> tuple[Tensor, Tensor]:
        """Scores and rows ``[Q, K]`` on the host."""
        ...


class Inverted:
    """The postings of the queries' terms, and no other."""

    def __init__(self, parts: Sequence[SparseVectors], device: str, block: int | None) -> None:
        self.postings = invert(parts, block=block, on_gpu=device == "cuda").to(device)
        self.nbytes = self.postings.nbytes

    def __call__(self, queries: SparseVectors, k: int) -> tuple[Tensor, Tensor]:
        nothing = torch.full((queries.num_vectors,), -1)
        return search_postings(self.postings, queries, k, nothing)


class EmbeddingBag:
    """Every document times a block of dense queries, part by part."""

    def __init__(self, parts: Sequence[SparseVectors], device: str, block: int | None) -> None:
        self.parts, self.device = [part.to(device) for part in parts], device
        self.query_block = 512 if device == "cuda" else 128
        self.nbytes = sum(each.nbytes for part in self.parts for each in part[:3])

    @torch.inference_mode()
    def __call__(self, queries: SparseVectors, k: int) -> tuple[Tensor, Tensor]:
        found = [
            self._best(queries.slice(few.start, few.stop).to(self.device), k)
            for few in ranges_of(queries.num_vectors, self.query_block)
        ]
        scores, rows = from_keys(torch.cat(found))
        return scores.cpu(), rows.cpu()

    def _best(self, queries: SparseVectors, k: int) -> Tensor:
        dense = queries.values.new_zeros(queries.width, queries.num_vectors)
        owners = sequence_ids(queries.cu_seqlens, queries.num_entries)
        dense[queries.terms.long(), owners] = queries.values
        best = torch.empty(queries.num_vectors, 0, dtype=torch.int64, device=self.device)
        for number, part in enumerate(self.parts):
            scores = F.embedding_bag(
                part.terms, dense, part.cu_seqlens.int(), mode="sum",
                per_sample_weights=part.values, include_last_offset=True,
            )  # fmt: skip
            keys = sort_keys(scores.t().contiguous(), number * PART, non_negative=True)
            best = torch.cat([best, keys.topk(min(k, keys.shape[1])).values], dim=1)
            best = best.topk(min(k, best.shape[1])).values
        return best


PROVIDERS: dict[str, Callable[[Sequence[SparseVectors], str, int | None], Search]] = {
    "inverted": Inverted,
    "embedding_bag": EmbeddingBag,
}


class Truth(NamedTuple):
    """Scores in float64 ``[Q, N]`` of some queries and all documents."""

    queries: SparseVectors
    scores: Tensor

    @classmethod
    def of(cls, queries: SparseVectors, parts: Sequence[SparseVectors], device: str) -> "Truth":
        dense = queries.dense().double().to(device)
        return cls(queries, torch.cat([_products(dense, part.to(device)) for part in parts], dim=1))

    def errors(self, found: tuple[Tensor, Tensor]) -> dict[str, float]:
        """Largest differences relative to the best score, of what was found from the scores of
        these documents and from the best scores that there are."""
        scores, rows = (each.to(self.scores.device) for each in found)
        right = self.scores.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, 0)
        best = self.scores.topk(min(scores.shape[1], self.scores.shape[1])).values.clamp(min=0)
        best = F.pad(best, (0, scores.shape[1] - best.shape[1]))
        return {
            name: float((scores - each).abs().max() / best.max())
            for name, each in (("scores", right), ("best", best))
        }


def _products(queries: Tensor, documents: SparseVectors) -> Tensor:
    owners = sequence_ids(documents.cu_seqlens, documents.num_entries)
    scores = queries.new_zeros(len(queries), documents.num_vectors)
    for query, row in zip(queries, scores):
        row.index_add_(0, owners, query[documents.terms.long()] * documents.values)
    return scores
