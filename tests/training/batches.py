"""Batches of which queries have different numbers of documents."""

import torch

from sparton.types import DocumentCounts, TrainBatch
from tests.training.bag_encoder import random_batch


def uneven_batch(counts: list[int], seed: int) -> TrainBatch:
    """Queries with so many documents each, of two sources in turn; the first documents that each
    query of a random batch has."""
    most = max(counts)
    whole = random_batch(len(counts), most - 1, seed)
    kept = [row * most + place for row, count in enumerate(counts) for place in range(count)]
    documents = whole.documents.take(torch.tensor(kept))
    sources = torch.arange(len(counts)) % 2
    return TrainBatch(
        whole.queries, documents, None, DocumentCounts(torch.tensor(counts), most), sources
    )
