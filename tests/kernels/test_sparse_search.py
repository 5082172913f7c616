"""Search by postings: scipy's products, the same bits everywhere, parts, blocks and threads.

N documents, Q queries, V terms.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_search import (
    Postings,
    function,
    invert,
    kernels,
    loops,
    search_postings,
    threads,
)
from sparton.kernels.sparse_search.postings import CPU_BLOCK, GPU_BLOCK, LARGEST_BLOCK
from sparton.kernels.sparse_vectors import SparseVectors

Results = tuple[Tensor, Tensor]


def random_vectors(
    rows: int, width: int, density: float, seed: int, *, integers: bool = False
) -> SparseVectors:
    """Some of them empty, a few weights negative; sums of products of integers are exact."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(-1, 4, (rows, width)) if integers else rng.normal(1, 1, (rows, width))
    weights *= rng.random((rows, width)) < density * rng.choice([0, 1, 1, 1], (rows, 1))
    return SparseVectors.from_dense(torch.from_numpy(weights).float())


def matrix_of(vectors: SparseVectors) -> scipy.sparse.csr_array:
    """In float64."""
    arrays = (each.numpy() for each in vectors[:3])
    values, terms, bounds = arrays
    shape = vectors.num_vectors, vectors.width
    return scipy.sparse.csr_array((values.astype(np.float64), terms, bounds), shape)


def nothing(queries: SparseVectors) -> Tensor:
    return torch.full((queries.num_vectors,), -1)


def best_of(scores: np.ndarray, k: int, excluded: Tensor) -> Results:
    """What is documented, of all scores ``[Q, N]``, by sorting them."""
    scores = scores.copy()
    for own, left_out in zip(scores, excluded.numpy(), strict=True):
        own[left_out[left_out >= 0]] = 0
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, axis=1)
    pad = ((0, 0), (0, k - order.shape[1]))
    best, order = np.pad(best, pad), np.pad(order, pad, constant_values=-1)
    rows = np.where(best > 0, order, -1)
    return torch.from_numpy(np.where(rows >= 0, best, 0)), torch.from_numpy(rows)


def sums_in_order(queries: SparseVectors, documents: SparseVectors, step: int = 1) -> np.ndarray:
    """fp32 ``[Q, N]``: rounded products added in ascending (``step=-1``: descending) order."""
    scores = np.zeros((queries.num_vectors, documents.num_vectors), np.float32)
    asked, answers = queries.dense().numpy(), documents.dense().numpy()
    for term in range(queries.width)[::step]:
        scores += asked[:, term, None] * answers[None, :, term]
    return scores


def assert_same(found: Results, expected: Results) -> None:
    scores, rows = found
    assert scores.dtype == torch.float32 and rows.dtype == torch.int64
    assert torch.equal(rows, expected[1])
    assert torch.equal(torch.where(rows < 0, 0, scores), expected[0].float())


def search_with_triton(
    monkeypatch, device, postings: Postings, queries: SparseVectors, k: int, excluded: Tensor
) -> Results:
    monkeypatch.setattr(function, "_search_cpu", function._search_gpu)
    return search_postings(postings.to(device), queries, k, excluded)


@settings(max_examples=150, deadline=None)
@given(
    num_documents=st.integers(0, 400),
    num_queries=st.integers(0, 9),
    width=st.integers(1, 40),
    density=st.sampled_from([0.02, 0.2, 1.0]),
    cuts=st.lists(st.integers(0, 400), max_size=3),
    block=st.sampled_from([None, 64, 128]),
    k=st.sampled_from([1, 2, 10, 399, 500]),
    several=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**16),
)
def test_finds_what_products_of_scipy_do(
    num_documents, num_queries, width, density, cuts, block, k, several, seed
):
    documents = random_vectors(num_documents, width, density, seed, integers=True)
    queries = random_vectors(num_queries, width, density, seed + 1, integers=True)
    bounds = sorted(min(cut, num_documents) for cut in [0, *cuts, num_documents])
    parts = [documents.slice(a, b) for a, b in pairwise(bounds)]
    excluded = torch.from_numpy(
        np.random.default_rng(seed).integers(-1, max(num_documents, 1), (num_queries, several))
    )
    scores = (matrix_of(queries) @ matrix_of(documents).T).toarray()
    if not num_documents:
        excluded.fill_(-1)
    found = search_postings(invert(parts, block=block), queries, k, excluded)
    assert_same(found, best_of(scores, k, excluded))


@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("k", [3, 200])
def test_bits_are_those_of_sums_in_ascending_order_on_every_device(block, k, device, monkeypatch):
    documents, queries = random_vectors(150, 60, 0.3, 0), random_vectors(4, 60, 0.6, 1)
    excluded = torch.tensor([-1, 7, 149, 5000])
    expected = best_of(sums_in_order(queries, documents), k, torch.tensor([-1, 7, 149, -1]))
    postings = invert([documents], block=block)
    assert_same(search_postings(postings, queries, k, excluded), expected)
    arguments = (postings, queries, k, excluded)
    assert_same(search_with_triton(monkeypatch, device, *arguments), expected)
    exact = (matrix_of(queries) @ matrix_of(documents).T).toarray()
    others = sums_in_order(queries, documents, -1), exact.astype(np.float32)
    for scores in others:
        wrong = best_of(scores, k, torch.tensor([-1, 7, 149, -1]))
        assert not torch.equal(wrong[0], expected[0]), "another order, or rounding, is noticed"


def test_triton_orders_ties_and_reads_several_chunks(device, monkeypatch):
    documents = random_vectors(2500, 8, 0.9, 2, integers=True)
    queries = random_vectors(2, 8, 1.0, 3, integers=True)
    excluded = torch.tensor([[0, 2047, 2048], [-1, 2499, -1]])
    scores = (matrix_of(queries) @ matrix_of(documents).T).toarray()
    postings = invert([documents], block=2048)
    assert postings.starts.diff().max() > 1024, "more postings than a chunk has"
    for k in (1, 50, 3000):
        found = search_with_triton(monkeypatch, device, postings, queries, k, excluded)
        assert_same(found, best_of(scores, k, excluded))


def test_programs_lie_along_one_axis(device, monkeypatch):
    """The others end at 65,535, which a collection may have more blocks than."""
    grids: list[tuple[int, ...]] = []
    launch = kernels.Launch
    monkeypatch.setattr(
        kernels, "Launch", lambda kernel, grid, *sizes, **constants: (
            grids.append(grid), launch(kernel, grid, *sizes, **constants)
        )[1],
    )  # fmt: skip
    documents, queries = random_vectors(150, 12, 0.5, 4), random_vectors(3, 12, 0.5, 5)
    postings = invert([documents], block=64)
    search_with_triton(monkeypatch, device, postings, queries, 40, nothing(queries))
    assert grids == [(3 * 3,), (3 * 1,)]


def test_queries_are_searched_in_parts_that_fit(device, monkeypatch):
    documents, queries = random_vectors(100, 12, 0.5, 4), random_vectors(7, 12, 0.5, 5)
    postings, asked = invert([documents], block=64), (queries, 5, torch.arange(7))
    expected = search_postings(postings, *asked)
    monkeypatch.setattr(function, "CPU_KEYS", 11)
    monkeypatch.setattr(function, "GPU_SCORES", 2000)
    assert_same(search_postings(postings, *asked), expected)
    assert_same(search_with_triton(monkeypatch, device, postings, *asked), expected)


def test_one_copy_brings_all_vectors():
    whole = [torch.tensor([-1, 2**40, 7]), torch.zeros(0, dtype=torch.int64)]
    half = [torch.tensor([5, 6, -7], dtype=torch.int32), torch.tensor([0.5, -2.0])]
    found = function.in_one_copy([*whole, *half], torch.device("cpu"))
    for each, expected in zip(found, [*whole, *half], strict=True):
        assert each.dtype == expected.dtype and torch.equal(each, expected)


@pytest.mark.parametrize("scores", ["ascending", "descending", "equal"])
@pytest.mark.parametrize("k", [1, 7, 100])
def test_a_threshold_that_rises_loses_nothing(scores, k):
    """Scores that ascend replace all that was found before; equal ones replace nothing."""
    weights = torch.arange(1, 3001).float()
    weights = {"descending": weights.flip(0), "equal": torch.ones(3000)}.get(scores, weights)
    documents = SparseVectors.from_dense(weights[:, None])
    queries = SparseVectors.from_dense(torch.ones(1, 1))
    expected = best_of(documents.dense().T.numpy(), k, nothing(queries))
    for block in (64, 4096):
        found = search_postings(invert([documents], block=block), queries, k, nothing(queries))
        assert_same(found, expected)


@pytest.mark.parametrize("num_queries", [1, 3, 40])
def test_threads_change_nothing(num_queries):
    documents = random_vectors(3000, 30, 0.3, 6)
    queries = random_vectors(num_queries, 30, 0.5, 7)
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 3, 4):
            torch.set_num_threads(number)
            postings = invert([documents.slice(0, 1000), documents.slice(1000, 3000)], block=64)
            found.append((postings, search_postings(postings, queries, 5, nothing(queries))))
    finally:
        torch.set_num_threads(before)
    expected = best_of(sums_in_order(queries, documents), 5, nothing(queries))
    for postings, results in found:
        assert_same(results, expected)
        assert all(map(torch.equal, postings[:3], found[0][0][:3]))


def test_several_may_search_at_once():
    documents, queries = random_vectors(3000, 30, 0.3, 8), random_vectors(1, 30, 0.9, 9)
    postings = invert([documents], block=64)
    expected = search_postings(postings, queries, 5, nothing(queries))
    with ThreadPoolExecutor(4) as pool:
        searches = [
            pool.submit(search_postings, postings, queries, 5, nothing(queries)) for _ in range(40)
        ]
        for each in searches:
            assert_same(each.result(), expected)


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def answer() -> list[int]:
        """By three threads: each waits for the others."""
        found, all_here = [], Barrier(3)

        def add(*numbers: int) -> None:
            all_here.wait()
            found.append(sum(numbers))

        threads.run_ranges(add, [(0, 1), (1, 5), (5, 9)])
        return sorted(found)

    assert answer() == [1, 7, 16]
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits for threads of its parent
        os._exit(answer() != [1, 7, 16])
    assert os.waitpid(child, 0)[1] == 0


def test_postings_are_ordered_by_block_term_and_document():
    documents = random_vectors(150, 9, 0.5, 10)
    postings = invert([documents], block=64)
    rows, terms = documents.dense().nonzero(as_tuple=True)
    order = np.lexsort((rows, terms, rows // 64))
    np.testing.assert_array_equal(postings.places, rows[order] % 64)
    np.testing.assert_array_equal(postings.weights, documents.dense()[rows, terms][order])
    counts = np.bincount((rows // 64 * 9 + terms).numpy(), minlength=3 * 9)
    np.testing.assert_array_equal(postings.starts.diff(), counts)
    assert postings.nbytes == 6 * len(rows) + 8 * (3 * 9 + 1)


def test_parts_may_be_mapped_from_files(tmp_path):
    documents, queries = random_vectors(300, 20, 0.4, 11), random_vectors(5, 20, 0.4, 12)
    parts = []
    for number, (first, last) in enumerate([(0, 0), (0, 90), (90, 217), (217, 300)]):
        path = tmp_path / f"{number}.safetensors"
        save_file(dict(zip(SparseVectors._fields, documents.slice(first, last)[:3])), path)
        parts.append(SparseVectors(**load_file(path), width=20))
    whole, pieced = invert([documents], block=64), invert(parts, block=64)
    assert all(map(torch.equal, pieced[:3], whole[:3])) and pieced[3:] == whole[3:]
    path = tmp_path / "index.safetensors"
    save_file(whole.arrays(), path)
    assert_same(
        search_postings(Postings.from_arrays(load_file(path)), queries, 9, nothing(queries)),
        search_postings(whole, queries, 9, nothing(queries)),
    )


def test_arrays_that_are_no_postings_are_refused():
    arrays = invert([random_vectors(100, 7, 0.5, 13)]).arrays()
    for wrong in (
        {name: each for name, each in arrays.items() if name != "starts"},
        arrays | {"weights": arrays["weights"].half()},
    ):
        with pytest.raises(ValueError, match="arrays of postings are"):
            Postings.from_arrays(wrong)
    for name in ("places", "weights", "starts"):
        with pytest.raises(ValueError, match=r"have the lengths .* build the index again"):
            Postings.from_arrays(arrays | {name: arrays[name][:-1].clone()})


def test_long_queries_over_a_large_vocabulary():
    """Of thousands of terms; of all that documents have, and of none."""
    rng = np.random.default_rng(14)
    width, sides = 250_002, []
    for rows, size in ((5, 6000), (90, 300)):
        terms = [np.sort(rng.choice(width, size, replace=False)) for _ in range(rows)]
        values = torch.from_numpy(rng.random(rows * size)).float()
        bounds = cu_seqlens_of(torch.full((rows,), size))
        flat = torch.from_numpy(np.concatenate(terms)).int()
        sides.append(SparseVectors(values, flat, bounds, width))
    queries, documents = SparseVectors.concatenate([sides[0], sides[1].slice(3, 4)]), sides[1]
    exact = (matrix_of(queries) @ matrix_of(documents).T).toarray()
    scores, rows = search_postings(invert([documents]), queries, 100, nothing(queries))
    np.testing.assert_allclose(scores, best_of(exact, 100, nothing(queries))[0], rtol=1e-6)
    assert rows[5, 0] == 3 and (rows[:5, 0] >= 0).all()


def test_a_search_for_none_and_queries_over_other_terms_are_refused():
    postings = invert([SparseVectors.from_dense(torch.ones(2, 3))])
    for width, k in ((3, 0), (4, 1)):
        queries = SparseVectors.from_dense(torch.ones(1, width))
        with pytest.raises(ValueError, match=f"over the 3 terms .* got k={k} and {width} terms"):
            search_postings(postings, queries, k, nothing(queries))


@pytest.mark.parametrize("num_documents", [0, 1])
def test_none_and_one_document(num_documents, device, monkeypatch):
    documents = SparseVectors.from_dense(torch.ones(num_documents, 3))
    queries = SparseVectors.from_dense(torch.tensor([[0, 2.0, 0], [0, 0, 0], [-1, 0, 0]]))
    postings = invert([documents])
    arguments = (postings, queries, 2, nothing(queries))
    for scores, rows in (
        search_postings(*arguments),
        search_with_triton(monkeypatch, device, *arguments),
    ):
        assert rows.tolist() == [[0 if num_documents else -1, -1], [-1, -1], [-1, -1]]
        assert scores.tolist()[0] == [2.0 * num_documents, 0]


def test_blocks_grow_with_the_vocabulary():
    one = SparseVectors.from_dense(torch.ones(1, 1))
    assert invert([one]).block == CPU_BLOCK and invert([one], on_gpu=True).block == GPU_BLOCK
    few = random_vectors(LARGEST_BLOCK, 2, 0.5, 15)._replace(width=30_000)
    postings = invert([few])
    assert postings.block == LARGEST_BLOCK and postings.num_blocks == 1
    assert invert([few._replace(width=2)]).block == CPU_BLOCK


@pytest.mark.parametrize(
    ("parts", "block", "message"),
    [
        ([], None, "no parts to index: give at least one"),
        ([(3, 0), (4, 0)], None, "part 1 has 4 terms but part 0 has 3"),
        ([(3, 0), (3, 7)], None, "part 1 has terms from 7 to 7, must be from 0 to 2"),
        ([(3, -1)], None, "part 0 has terms from -1 to -1"),
        ([(3, 0)], 100, "block is 100, must be a power of 2 from 64"),
        ([(3, 0)], 32, "block is 32"),
    ],
)
def test_what_cannot_be_inverted_is_refused(parts, block, message):
    vectors = [
        SparseVectors(torch.ones(1), torch.tensor([term]).int(), torch.tensor([0, 1]), width)
        for width, term in parts
    ]
    with pytest.raises(ValueError, match=message):
        invert(vectors, block=block)


def test_loops_are_compiled_where_no_folder_can_keep_them(monkeypatch):
    compile_loop = loops.numba.njit

    def without_folder(**options):
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function")
        return compile_loop(**options)

    monkeypatch.setattr(loops.numba, "njit", without_folder)
    assert loops._compiled(lambda x: x + 1)(2) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 100, 1000])
def test_a_gpu_gives_the_bits_of_a_cpu(k):
    """100,000 documents, terms that are rare and terms that most documents have."""
    rng = np.random.default_rng(16)
    shares = (0.9 / np.arange(1, 1001) ** 0.8).astype(np.float32)
    sides = []
    for rows, scale in ((100_000, 1), (64, 2)):
        active = rng.random((rows, 1000), np.float32) < scale * shares
        values = rng.gamma(2, 0.4, active.sum()).astype(np.float32)
        terms, bounds = active.nonzero()[1].astype(np.int32), np.zeros(rows + 1, np.int64)
        np.cumsum(active.sum(1), out=bounds[1:])
        sides.append(SparseVectors(*map(torch.from_numpy, (values, terms, bounds)), 1000))
    documents, queries = sides
    excluded = torch.arange(64) - 1
    expected = search_postings(invert([documents]), queries, k, excluded)
    for block in (None, 1024, 2**16):
        postings = invert([documents], block=block, on_gpu=True).to("cuda")
        for _ in range(2):
            assert_same(search_postings(postings, queries, k, excluded), expected)
