"""Top-k retrieval by MaxSim, in chunks."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from sparton.kernels.maxsim import maxsim_topk, maxsim_varlen
from sparton.kernels.maxsim.topk_keys import keys_beside
from sparton.kernels.sort_keys import sort_keys

LENGTHS = [3, 0, 7, 1, 12, 4, 4, 9]


def make_problem(seed=0, E=8):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(11, E, generator=generator)
    documents = torch.randn(sum(LENGTHS), E, generator=generator)
    return (
        queries,
        documents,
        torch.tensor([0, 4, 4, 11], dtype=torch.int32),
        torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32),
    )


def sorted_scores(scores, k):
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), order


@pytest.mark.parametrize("tokens_at_once", [1, 8, 1000])
@pytest.mark.parametrize("k", [1, 3, len(LENGTHS)])
def test_equals_a_stable_sort_of_all_scores(k, tokens_at_once):
    problem = make_problem()
    scores = maxsim_varlen(*problem)
    assert (scores < 0).any()
    assert (scores > 0).any()
    expected, order = sorted_scores(scores, k)
    found = maxsim_topk(*problem, k, tokens_at_once=tokens_at_once)
    # On a CPU the last bits depend on which documents share a product.
    torch.testing.assert_close(found.scores, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found.scores, expected * (1 + 1e-5), rtol=1e-6, atol=1e-6)
    assert torch.equal(found.documents, order)
    assert (found.documents[1] == torch.arange(k)).all(), "an empty query: all tie at 0"


def test_masks_and_normalisation_reach_the_scores():
    problem = make_problem(1)
    generator = torch.Generator().manual_seed(2)
    masks = [torch.rand(len(x), generator=generator) > 0.4 for x in problem[:2]]
    expected, order = sorted_scores(maxsim_varlen(*problem, *masks, normalize=True), 4)
    found = maxsim_topk(*problem, 4, *masks, normalize=True, tokens_at_once=5)
    torch.testing.assert_close(found.scores, expected)
    assert torch.equal(found.documents, order)
    plain = maxsim_topk(*problem, 4)
    assert not torch.equal(plain.documents, order)


@pytest.mark.parametrize(
    ("N", "kept", "first"), [(5, 0, 0), (1, 3, 7), (1030, 9, 2**31 - 1100), (9, 2, 2**31 - 5)]
)
def test_keys_in_one_launch(N, kept, first, device):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, N, generator=generator)
    scores[0, 0], scores[1, 0], scores[2, 0] = 0.0, -0.0, float("-inf")
    scores[0, -1], scores[1, -1] = torch.nan, -torch.tensor(torch.nan)
    best = sort_keys(torch.randn(3, kept, generator=generator), 0)
    expected = torch.cat((best, sort_keys(scores, first)), 1)
    keys = keys_beside(scores.to(device), best.to(device), first)
    assert torch.equal(keys.cpu(), expected)
    later = keys_beside(scores.to(device), best.to(device), first + 1)
    assert not torch.equal(later.cpu(), expected)
    strided = scores.T.contiguous().T.to(device)
    assert torch.equal(keys_beside(strided, best.to(device), first).cpu(), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({3: [0, 3, 3, 10, 11, 23, 27, 31, 99]}, "from 0 to the number of tokens, 40; it goes fr"),
        ({3: [1, 3, 3, 10, 11, 23, 27, 31, 40]}, "it goes from 1 to 40"),
        ({3: [0, 3, 10, 3, 11, 23, 27, 31, 40]}, "entry 2 is 10 and the next one 3"),
        ({3: [0.0, 40.0]}, "document_cu_seqlens must be int32"),
        ({6: [True] * 41}, r"document_mask must be bool \(40,\)"),
    ],
)
def test_malformed_collections_are_refused(change, words):
    """Wherever a chunk begins: each alone might look right."""
    arguments = [*make_problem(), 1, None, None]
    for place, value in change.items():
        arguments[place] = torch.tensor(value)
    with pytest.raises(ValueError, match=words):
        maxsim_topk(*arguments, tokens_at_once=5)


@pytest.mark.parametrize("k", [0, 9, 2.5])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"from 1 to the N = 8 documents, got {k}"):
        maxsim_topk(*make_problem(), k)
    assert maxsim_topk(*make_problem(), np.int64(3)).scores.shape == (3, 3)


def test_documents_elsewhere_than_on_the_cpu_or_beside_the_queries_are_refused():
    queries, documents, *bounds = make_problem()
    with pytest.raises(ValueError, match="where the queries are, cpu, got meta"):
        maxsim_topk(queries, documents.to("meta"), *bounds, 1)


@pytest.mark.gpu
def test_a_collection_on_the_cpu_with_queries_on_a_gpu():
    queries, documents, query_cu_seqlens, cu_seqlens = make_problem(E=64)
    expected = maxsim_topk(queries, documents, query_cu_seqlens, cu_seqlens, 3)
    found = maxsim_topk(
        queries.cuda(), documents, query_cu_seqlens.cuda(), cu_seqlens, 3, tokens_at_once=8
    )
    assert found.scores.is_cuda
    torch.testing.assert_close(found.scores.cpu(), expected.scores)
    assert torch.equal(found.documents.cpu(), expected.documents)
