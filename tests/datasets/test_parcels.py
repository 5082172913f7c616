"""A batch comes out of a parcel as it went in."""

import pickle

import pytest
import torch

from sparton.datasets.parcels import Parcel
from sparton.types import TokenBatch, TokenRows, TrainBatch

QUERIES = TokenBatch.from_lists([[2, 7, 3], [], [2, 8, 9, 3]])
DOCUMENTS = TokenBatch.from_lists([[5], [6, 7], [8] * 11])
KEYS = TokenRows(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 2, 3], dtype=torch.int32), 2)
POOLED = TokenRows(torch.tensor([2, 6]), torch.tensor([0, 1, 1, 2], dtype=torch.int32), 1)
BATCHES = {
    "plain": TrainBatch(QUERIES, DOCUMENTS),
    "scores and keys": TrainBatch(
        QUERIES._replace(keys=KEYS, pooled=POOLED), DOCUMENTS, torch.tensor([[1.5], [2.5], [-1.0]])
    ),
    "empty": TrainBatch(TokenBatch.from_lists([]), TokenBatch.from_lists([[]])),
    "strided": TrainBatch(QUERIES, DOCUMENTS, torch.arange(6.0).view(2, 3).T),
}


def assert_same(left, right) -> None:
    assert type(left) is type(right)
    if isinstance(left, tuple):
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert torch.equal(left, right)
    else:
        assert left == right


@pytest.mark.parametrize("name", BATCHES)
def test_what_went_in_comes_out(name):
    batch = BATCHES[name]
    assert_same(Parcel(batch).batch(), batch)
    assert_same(pickle.loads(pickle.dumps(Parcel(batch))).batch(), batch)


def test_all_tensors_share_one_block():
    batch = Parcel(BATCHES["scores and keys"]).batch()
    tensors = [*batch.queries[:3], *batch.queries.keys[:2], *batch.queries.pooled[:2]]
    blocks = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, batch.teacher_scores)}
    assert len(blocks) == 1


@pytest.mark.gpu
def test_pinned_views():
    batch = Parcel(BATCHES["plain"]).pin_memory().batch()
    assert batch.documents.input_ids.is_pinned()
    assert_same(batch.documents.to("cuda", non_blocking=True).to("cpu"), batch.documents)
