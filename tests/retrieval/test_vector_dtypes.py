"""Token vectors in each dtype in which they may be stored. N documents, Q queries."""

import pytest
import torch

from sparton.kernels.maxsim import maxsim_reference
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.compression import CompressedIndexBuilder
from sparton.retrieval.indexes.documents import Documents, TokenParts
from sparton.retrieval.indexes.maxsim import MultiVectorIndex
from sparton.retrieval.ordering import in_order
from sparton.retrieval.storing import VECTOR_DTYPES, query_dtype, store_tokens

# Of a component, and of the largest of its vector where that is more.
ROUNDING = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}
STORED = [dtype for dtype in VECTOR_DTYPES if dtype != "float32"]
WIDTH = 128


def unit_vectors(texts: int, seed: int) -> TokenVectors:
    """Of 0 to 8 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (texts,), generator=generator)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randn(int(bounds[-1]), WIDTH, generator=generator)
    return TokenVectors(torch.nn.functional.normalize(values, dim=1), bounds)


def within(dtype: str, factor: float = 1.0) -> bool:
    """Whether components are what they were but for rounding."""
    vectors = unit_vectors(40, seed=0).values
    stored = store_tokens(unit_vectors(40, seed=0), dtype).restored().values.double()
    # Below are the subnormal numbers of fp16, and of FP8 beside the largest of a vector.
    least = {"float16": 2**-14, "float8_e4m3fn": 2**-14 * float(vectors.abs().max())}
    bound = vectors.abs().double().clamp(min=least.get(dtype, 0))
    return bool(((stored - vectors).abs() <= factor * ROUNDING[dtype] * bound).all())


@pytest.mark.parametrize("dtype", VECTOR_DTYPES)
def test_components_are_rounded_to_the_nearest(dtype):
    assert within(dtype)
    assert dtype == "float32" or not within(dtype, 0.9)


def test_fp8_takes_half_the_bytes_of_16_bits_and_four_for_each_token():
    vectors = unit_vectors(40, seed=0)
    tokens = int(vectors.cu_seqlens[-1])
    stored = store_tokens(vectors, "float8_e4m3fn")
    assert stored.values.nbytes + stored.scales.nbytes == tokens * (WIDTH + 4)
    assert store_tokens(vectors).values.nbytes == tokens * WIDTH * 2
    rows = TokenParts([stored]).nbytes - 8 * 41
    assert rows == tokens * (WIDTH + 4)


@pytest.mark.parametrize("dtype", STORED)
def test_scores_are_those_of_what_is_stored(dtype):
    documents, queries = unit_vectors(60, seed=1), unit_vectors(20, seed=2)
    stored = store_tokens(documents, dtype)
    asked = store_tokens(queries, query_dtype(dtype))
    found = MultiVectorIndex(stored).search(Representations(tokens=asked), 60)

    def exact(left: TokenVectors, right: TokenVectors) -> torch.Tensor:
        bounds = left.cu_seqlens, right.cu_seqlens
        return maxsim_reference(left.values.double(), right.values.double(), *bounds)

    ours = torch.zeros(20, 60, dtype=torch.float64)
    filled = torch.from_numpy(found.rows >= 0)
    queried, _ = filled.nonzero(as_tuple=True)
    scores, rows = (torch.from_numpy(each)[filled] for each in found)
    ours[queried, rows] = scores.double()
    own = exact(asked, stored.restored())
    torch.testing.assert_close(ours, own, rtol=0, atol=1e-5)
    # Against vectors that were never rounded: as much as a token of a query may change by.
    change = (ours - exact(queries, documents)).abs().amax(1)
    allowed = queries.lengths * (ROUNDING[dtype] + ROUNDING[query_dtype(dtype)])
    assert (change <= allowed).all() and (change > allowed / 1000)[queries.lengths > 0].any()
    shuffled = exact(asked, stored.restored().take(torch.arange(59, -1, -1)))
    assert ((shuffled - exact(queries, documents)).abs().amax(1) > allowed).any()


@pytest.mark.parametrize("dtype", VECTOR_DTYPES)
def test_parts_come_in_the_order_of_their_texts(dtype):
    vectors = unit_vectors(30, seed=3)
    stored = store_tokens(vectors, dtype)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    places = order.numpy()
    parts = [Representations(tokens=stored.take(order[few])) for few in (slice(0, 7), slice(7, 30))]
    again = in_order(parts, places).tokens
    assert torch.equal(again.restored().values, stored.restored().values)
    assert (again.scales is None) == (dtype != "float8_e4m3fn")
    moved = stored.take(order).restored().values
    assert not torch.equal(moved, stored.restored().values)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "component nan: the model diverged"),
        (1e6, r"component 1e\+06: float8_e4m3fn cannot hold it; store float32"),
    ],
)
def test_fp8_refuses_what_it_would_lose(value, message):
    vectors = unit_vectors(5, seed=0)
    vectors.values[0, 3] = value
    with pytest.raises(ValueError, match=message):
        store_tokens(vectors, "float8_e4m3fn")


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_documents_in_parts_are_searched_as_in_one_piece(dtype):
    stored = store_tokens(unit_vectors(90, seed=4), dtype)
    queries = Representations(tokens=store_tokens(unit_vectors(9, seed=5)))
    parts = [stored.slice(*ends) for ends in ((0, 1), (1, 40), (40, 41), (41, 90))]
    one = MultiVectorIndex(stored, chunk_tokens=50)
    several = MultiVectorIndex(TokenParts(parts), chunk_tokens=50)
    assert one.nbytes == several.nbytes
    candidates = one.search(queries, 30).rows
    for found in ("search", "rerank"):
        asked = (queries, 100) if found == "search" else (queries, candidates)
        ours, theirs = (getattr(index, found)(*asked) for index in (several, one))
        assert (ours.rows == theirs.rows).all() and (ours.scores == theirs.scores).all()
    swapped = MultiVectorIndex(TokenParts([parts[1], parts[0], *parts[2:]]), chunk_tokens=50)
    assert (swapped.search(queries, 100).rows != one.search(queries, 100).rows).any()


def test_a_compressed_index_is_made_of_parts_and_of_fp8():
    vectors = unit_vectors(120, seed=6)
    queries = Representations(tokens=store_tokens(unit_vectors(9, seed=7)))
    stored = store_tokens(vectors, "float8_e4m3fn")
    parts = [Representations(tokens=stored.slice(*ends)) for ends in ((0, 50), (50, 120))]
    build = CompressedIndexBuilder(nbits=8)
    one = build(Representations(tokens=stored)).search(queries, 10)
    several = build(Documents(frozenset({"tokens"}), lambda: parts)).search(queries, 10)
    assert (one.rows == several.rows).all() and (one.scores == several.scores).all()
    exact = MultiVectorIndex(store_tokens(vectors)).search(queries, 10)
    shared = [len({*a} & {*b}) for a, b in zip(one.rows.tolist(), exact.rows.tolist())]
    assert sum(shared) > 0.7 * 90
