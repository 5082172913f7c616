"""Vectors without their zeros: there and back, cut and joined."""

import pytest
import torch

from sparton.kernels import sparse_vectors
from sparton.kernels.sparse_vectors import SparseVectors, mean_flops, used_terms


def random_rows(rows: int, width: int, density: float, seed: int = 0) -> torch.Tensor:
    """fp32, not negative; the first and the last row are empty, the middle one is full."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.rand(rows, width, generator=generator) + 0.1
    matrix *= torch.rand(rows, width, generator=generator) < density
    matrix[rows // 2] = torch.rand(width, generator=generator) + 0.1
    matrix[0] = matrix[-1] = 0
    return matrix


@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("at_once", [1, 30, 2**27])
def test_nothing_but_zeros_is_lost(density, at_once, monkeypatch):
    monkeypatch.setattr(sparse_vectors, "_ENTRIES_AT_ONCE", at_once)
    dense = random_rows(9, 23, density)
    vectors = SparseVectors.from_dense(dense)
    assert torch.equal(vectors.dense(), dense)
    assert vectors.num_vectors == 9 and vectors.num_entries == (dense > 0).sum()
    assert vectors.terms.dtype == torch.int32 and vectors.cu_seqlens.dtype == torch.int64
    assert torch.equal(vectors.lengths, (dense > 0).sum(1))
    for row in range(9):
        terms = vectors.terms[vectors.cu_seqlens[row] : vectors.cu_seqlens[row + 1]]
        assert torch.equal(terms.long(), dense[row].nonzero().squeeze(1))


def test_a_diverged_model_is_not_hidden():
    assert SparseVectors.from_dense(torch.tensor([[0.0, torch.nan]])).values.isnan().all()


def test_no_vectors_and_no_terms():
    for shape in ((0, 5), (3, 0)):
        vectors = SparseVectors.from_dense(torch.zeros(shape))
        assert vectors.num_entries == 0 and vectors.dense().shape == shape


def test_parts_are_joined_and_cut_again():
    dense = random_rows(9, 23, 0.3)
    sizes = [2, 0, 6, 1]
    parts = [SparseVectors.from_dense(part) for part in dense.split(sizes)]
    whole = SparseVectors.concatenate(parts)
    assert torch.equal(whole.dense(), dense)
    again = whole.split(sizes, [part.num_entries for part in parts])
    for part, expected in zip(again, parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(part[:3], expected[:3], strict=True))
    assert again[2].values.untyped_storage().data_ptr() == whole.values.data_ptr()


def test_the_dense_form_passes_gradients_to_the_active_entries():
    dense = random_rows(5, 7, 0.4)
    vectors = SparseVectors.from_dense(dense)
    vectors = vectors._replace(values=vectors.values.requires_grad_())
    gradient = torch.randn(5, 7)
    vectors.dense().backward(gradient)
    assert torch.equal(vectors.values.grad, gradient[dense > 0])


def test_used_terms_are_the_same_of_either_form():
    dense = random_rows(9, 40, 0.05)
    dense[4, 7:] = 0
    dense[4, 3], dense[5, 39] = -1, torch.nan
    dense[:, 4] = 0
    used = used_terms(dense)
    assert used[[3, 39]].all() and not used[4] and 0 < used.sum() < 40
    assert torch.equal(used_terms(SparseVectors.from_dense(dense)), used)
    assert not used_terms(SparseVectors.from_dense(torch.zeros(2, 3))).any()


def test_values_are_at_least_fp32():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values = SparseVectors.from_dense(torch.tensor([[0, 1.5]], dtype=dtype)).values
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert values.dtype == wanted and values.item() == 1.5


def test_mean_flops_is_the_mean_number_of_shared_terms():
    queries, documents = random_rows(7, 12, 0.2, seed=1), random_rows(31, 12, 0.2, seed=2)
    shared = ((queries[:, None] != 0) & (documents[None] != 0)).sum(-1).double().mean().item()
    found = mean_flops(SparseVectors.from_dense(queries), SparseVectors.from_dense(documents))
    assert found == pytest.approx(shared, rel=1e-12)
    assert found > 0
