"""The streaming MaxSim against float64, on the GPU or in Triton's interpreter.

Q queries, N documents, K documents per query, T packed tokens, E embedding.
"""

import pytest
import torch

from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.maxsim.streaming import streaming_forward
from sparton.kernels.maxsim.streaming_backward import (
    streaming_backward_lowmem,
    streaming_backward_unified,
)
from sparton.kernels.maxsim.streaming_rows import DEFAULT_CONFIG
from sparton.kernels.maxsim.streaming_tiles import StreamingConfig, num_splits, streaming_config
from tests.kernels.maxsim_problems import (
    DOCUMENT_LENGTHS,
    QUERY_LENGTHS,
    boundaries,
    make_problem,
    upstream_for,
    winners,
    with_gradients,
)
from tests.kernels.problems import DTYPES, error, first_of

BACKWARDS = [streaming_backward_lowmem, streaming_backward_unified]
# Small tiles cut sequences and embeddings more often, and run faster in the interpreter.
TILES = StreamingConfig(16, 16, 2, 32, num_warps=4, num_stages=2)
CUT = DEFAULT_CONFIG._replace(columns=3, tile_elements=1024, tile_warps=4, block_s=16)
OWN = ((4, 19, 1), (3, 40, 0, 1, 16, 33))


def launch(problem, upstream, *, normalize=False, backward=BACKWARDS[0], tiles=TILES, cut=CUT):
    """Scores, gradients and winners of the kernels."""
    scores, argmax = streaming_forward(problem, normalize=normalize, argmax=True, config=tiles)
    gradients = backward(upstream, argmax, problem, normalize=normalize, config=cut)
    return scores, *gradients, argmax


def assert_both_close(problem, **options):
    """Both backwards against float64, from one forward; returns the winners."""
    upstream = upstream_for(problem)
    *results, argmax = launch(problem, upstream, **options)
    dtype = problem.queries.dtype
    assert [x.dtype for x in results] == [torch.float32, dtype, dtype]
    normalize = options.get("normalize", False)
    assert_close(results, problem, upstream, normalize=normalize)
    cut = options.get("cut", CUT)
    unified = streaming_backward_unified(upstream, argmax, problem, normalize=normalize, config=cut)
    assert_close((results[0], *unified), problem, upstream, normalize=normalize)
    return argmax


def assert_close(results, problem, upstream, *, normalize=False):
    """Sums in fp32, and half a unit in the last place of the gradients' dtype; no worse than the
    reference at the same precision."""
    truth = with_gradients(problem, upstream, torch.float64, normalize=normalize)
    eager = with_gradients(problem, upstream, problem.queries.dtype, normalize=normalize)
    rounding = torch.finfo(problem.queries.dtype).eps / 2
    for actual, exact, same, most in zip(results, truth, eager, (0, rounding, rounding)):
        assert actual.shape == exact.shape
        assert not actual[exact == 0].any()
        assert error(actual, exact) <= most + 3e-6
        assert error(actual, exact) <= error(same, exact) + 3e-6


@pytest.mark.parametrize("normalize", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize("per_query", [None, 2])
def test_values_and_gradients_against_float64(per_query, dtype, normalize, device):
    lengths = (QUERY_LENGTHS, DOCUMENT_LENGTHS) if per_query is None else OWN
    for masked in (False, True):
        problem = make_problem(
            *lengths, 48, device, dtype=dtype, per_query=per_query, masked=masked
        )
        argmax = assert_both_close(problem, normalize=normalize)
        assert torch.equal(argmax, winners(problem, normalize=normalize))


@pytest.mark.parametrize(
    ("query_lengths", "document_lengths", "E", "per_query"),
    [
        ((1,), (1,), 1, None),
        ((3, 31), (31,), 64, None),
        pytest.param((70,), (9, 64), 96, None, marks=pytest.mark.slow),
        pytest.param((2,) * 5, (5,) * 7, 7, None, marks=pytest.mark.slow),
        ((0, 0), (4,), 8, None),
        ((3,), (0, 0), 8, None),
        ((33, 2), (17, 18), 130, 1),
    ],
)
def test_odd_shapes(query_lengths, document_lengths, E, per_query, device):
    for masked in (False, True):
        problem = make_problem(
            query_lengths, document_lengths, E, device, per_query=per_query, masked=masked
        )
        assert torch.equal(assert_both_close(problem), winners(problem))


@pytest.mark.parametrize(
    ("query_lengths", "document_lengths", "per_query"),
    [((), (), 3), ((), (4,), None), ((3, 4), (), None), ((3, 4), (), 0)],
)
def test_without_queries_or_documents(query_lengths, document_lengths, per_query, device):
    problem = make_problem(query_lengths, document_lengths, 8, device, per_query=per_query)
    for backward in BACKWARDS:
        *results, argmax = launch(problem, upstream_for(problem), backward=backward)
        shapes = [problem.scores_shape, problem.queries.shape, problem.documents.shape]
        assert [x.shape for x in results] == shapes
        assert argmax.shape == problem.argmax_shape
        assert not any(x.any() for x in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "E", [48, 64, 96, 128, *(pytest.param(E, marks=pytest.mark.slow) for E in (320, 512, 1024))]
)
@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_default_configurations(E, dtype, device):
    problem = make_problem((9, 30), (5, 21), E, device, dtype=dtype)
    argmax = assert_both_close(problem, normalize=True, tiles=None, cut=DEFAULT_CONFIG)
    assert torch.equal(argmax, winners(problem, normalize=True))


def test_default_tiles_hold_queries_that_share_documents():
    def tile(num_queries, length, cross):
        tokens = num_queries * length
        config = streaming_config(num_queries, tokens, 128, torch.bfloat16, cross=cross)
        return config.group, config.block_q, config.num_warps

    assert tile(1, 32, True) == (1, 32, 4)
    assert tile(8, 32, True) == (4, 32, 8)
    assert tile(8, 32, False) == (1, 32, 4)
    assert tile(3, 20, True) == (4, 32, 8)
    assert tile(1, 1000, True) == (1, 128, 8)
    assert tile(0, 0, True) == (1, 16, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_tolerances_notice_small_faults(dtype, device):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device, dtype=dtype)
    upstream = upstream_for(problem)
    *good, argmax = launch(problem, upstream)
    assert_close(good, problem, upstream)
    lost = good[0].clone()
    lost[2, 5] = 0
    shifted = torch.where(argmax > 0, argmax - 1, argmax)
    wrong = streaming_backward_lowmem(upstream, shifted, problem, normalize=False, config=CUT)
    padding_wins = launch(problem._replace(document_mask=None), upstream)[0]
    coarser = torch.float16 if dtype == torch.float32 else torch.bfloat16
    for bad in (
        (lost, *good[1:]),
        (padding_wins, *good[1:]),
        *((*good[:i], good[i] * 1.01, *good[i + 1 :]) for i in range(3)),
        (good[0], *wrong),
        (*good[:2], good[2].to(coarser).to(dtype)),
    ):
        with pytest.raises(AssertionError):
            assert_close(bad, problem, upstream)


@pytest.mark.quick(1)
@pytest.mark.parametrize("normalize", [False, True])
def test_masked_tokens_are_not_touched(normalize, device):
    """Not even by NaN; a masked document token never beats negative similarities with its 0."""
    clean = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device, dtype=torch.float16)
    poisoned = []
    for x, mask in zip(clean[:2], clean[4:6]):
        poisoned.append(torch.where(mask[:, None], x.abs(), torch.nan))
    negative = clean._replace(queries=-clean.queries.abs(), documents=clean.documents.abs())
    problem = clean._replace(queries=-poisoned[0], documents=poisoned[1])
    upstream = upstream_for(problem)
    for backward in BACKWARDS:
        *results, argmax = launch(problem, upstream, normalize=normalize, backward=backward)
        assert_close(results, negative, upstream, normalize=normalize)
        assert torch.equal(argmax, winners(negative, normalize=normalize))


def test_nan_among_the_tokens_that_take_part_is_not_hidden(device):
    problem = make_problem((5,), (20, 20), 32, device, masked=False)
    problem.documents[7, 3] = torch.nan
    for argmax in (False, True):
        scores, _ = streaming_forward(problem, normalize=False, argmax=argmax, config=TILES)
        assert scores.isnan().tolist() == [[True, False]]


def test_all_masked_scores_zero_and_gets_zero_gradients(device):
    problem = make_problem((5, 7), (20, 3), 32, device)
    problem.document_mask[20:] = False
    problem.query_mask[:] = True
    *results, argmax = launch(problem, upstream_for(problem))
    assert not problem.document_mask.any()
    assert not any(x.any() for x in results)
    assert (argmax == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_hot_rows_and_rows_that_nobody_wins(backward, dtype, device):
    problem = make_problem((60, 50), (40, 33), 32, device, dtype=dtype, masked=False)
    direction = problem.queries[:1].clone()
    problem.queries.abs_().add_(0.1)
    problem.documents.mul_(0.01)
    problem.documents[[17, 60]] = direction.abs() + 1
    upstream = upstream_for(problem)
    *results, argmax = launch(problem, upstream, backward=backward)
    assert argmax.tolist() == [[17] * 110, [60] * 110]
    assert_close(results, problem, upstream)
    others = [t for t in range(73) if t not in (17, 60)]
    assert not results[2][others].any()


@pytest.mark.parametrize("per_query", [None, 1])
def test_ties_go_to_the_first_token(per_query, device):
    """Within a tile, across tiles, and first of all with a mask over the earliest."""
    problem = make_problem((20, 3), (37, 50), 16, device, per_query=per_query, masked=False)
    for x in problem[:2]:  # products of small integers are exact in any order
        x.round_()
    problem.documents[:] = problem.documents[0]
    mask = torch.ones(87, dtype=torch.bool, device=device)
    mask[[0, 1, 37]] = False
    for given, first in ((problem, (0, 37)), (problem._replace(document_mask=mask), (2, 38))):
        *_, argmax = launch(given, upstream_for(given))
        expected = torch.tensor(first, dtype=torch.int32, device=device)[:, None].repeat(1, 23)
        if per_query:
            expected = torch.cat([expected[:1, :20], expected[1:, 20:]], 1)
        assert torch.equal(argmax, expected)


@pytest.mark.slow
def test_without_argmax_the_same_scores_and_nothing_else(device):
    for normalize in (False, True):
        problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device)
        both = [
            streaming_forward(problem, normalize=normalize, argmax=argmax, config=TILES)
            for argmax in (False, True)
        ]
        assert torch.equal(both[0][0], both[1][0])
        assert both[0][1] is None


@pytest.mark.parametrize("normalize", [False, True])
def test_lowmem_gives_the_same_bits(normalize, device):
    """When repeated, whatever the strides of the upstream gradient, whatever is wanted."""
    problem = make_problem((20, 9), (3, 40, 17), 48, device, dtype=torch.float16)
    upstream = upstream_for(problem)
    _, *first, argmax = launch(problem, upstream, normalize=normalize)
    transposed = upstream.T.contiguous().T
    options = {"normalize": normalize, "config": CUT}
    for grad, need in (
        (transposed, (True, True)),
        (upstream, (True, False)),
        (upstream, (False, True)),
    ):
        again = streaming_backward_lowmem(
            grad, argmax, problem, need_queries=need[0], need_documents=need[1], **options
        )
        for a, b, needed in zip(again, first, need):
            assert torch.equal(a, b) if needed else a is None


def test_unified_computes_only_what_is_wanted(device):
    problem = make_problem((20, 9), (3, 40, 17), 48, device)
    upstream = upstream_for(problem)
    scores, _, _, argmax = launch(problem, upstream)
    options = {"normalize": False, "config": CUT}
    dqueries, none = streaming_backward_unified(
        upstream, argmax, problem, need_documents=False, **options
    )
    assert none is None
    none, ddocuments = streaming_backward_unified(
        upstream, argmax, problem, need_queries=False, **options
    )
    assert none is None
    assert_close((scores, dqueries, ddocuments), problem, upstream)


@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_in_16_bit_are_rounded_once(normalize, device):
    """They are the true ones, rounded, but for those close to the middle of two numbers."""
    problem = make_problem((20, 9), (3, 40, 17), 64, device, dtype=torch.float16)
    upstream = upstream_for(problem)
    truth = with_gradients(problem, upstream, torch.float64, normalize=normalize)[1:]

    def share_of_equals(gradients, others):
        equal = [(a == b)[b != 0] for a, b in zip(gradients, others, strict=True)]
        return min(float(x.double().mean()) for x in equal)

    rounded = [x.half() for x in truth]
    for backward in BACKWARDS:
        _, *gradients, _ = launch(problem, upstream, normalize=normalize, backward=backward)
        assert share_of_equals(gradients, rounded) > 0.97
    twice = [(x + x * 2**-12 * torch.randn_like(x)).half() for x in truth]
    assert share_of_equals(twice, rounded) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("per_query", [None, 1])
def test_tiles_of_long_queries_side_by_side_or_in_turn(per_query, device):
    """The same winners, and scores in another order of summation; one query exceeds the average
    that the launch was cut for."""
    problem = make_problem((5, 90), (37, 20), 32, device, per_query=per_query)
    upstream = upstream_for(problem)
    results = []
    for few in (1, 3, 256):
        tiles = TILES._replace(few_programs=few)
        *values, argmax = launch(problem, upstream, tiles=tiles)
        assert_close(values, problem, upstream)
        results.append(argmax)
    assert all(torch.equal(x, winners(problem)) for x in results)
    splits = [num_splits(2, 95, n, TILES) for n in (1, 64, 100, 256, 1000)]
    assert splits == [3, 3, 3, 1, 1]
    tiles = [TILES._replace(few_programs=n) for n in (1, 2, 3)]
    assert [num_splits(2, 95, 1, x) for x in tiles] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("E", [7, 48, 160])
@pytest.mark.parametrize("per_query", [None, 1])
def test_documents_read_through_descriptors(per_query, E, device):
    """The same bits; rows of the next document, NaN here, are left out. Odd rows fit none."""
    lengths = OWN[0] if per_query else QUERY_LENGTHS, (20, 3, 40)
    problem = make_problem(*lengths, E, device, per_query=per_query, dtype=torch.float16)
    documents = problem.documents.clone()
    documents[20:23] = float("nan")
    mask = torch.ones(63, dtype=torch.bool, device=device)
    mask[20:23] = False
    problem = problem._replace(documents=documents, document_mask=mask)
    for normalize in (False, True):
        options = {"normalize": normalize, "argmax": True}
        expected = streaming_forward(problem, **options, config=TILES)
        tiles = TILES._replace(descriptors=True, max_registers=128)
        for actual, right in zip(
            streaming_forward(problem, **options, config=tiles), expected, strict=True
        ):
            assert torch.equal(actual, right)
        assert expected[0].isfinite().all()


def test_an_expanded_upstream_gradient(device):
    problem = make_problem((20, 9), (3, 40, 17), 48, device)
    upstream = upstream_for(problem)[:1, :1].expand(2, 3)
    assert_close(launch(problem, upstream)[:3], problem, upstream)


def test_columns_are_split_only_into_a_bounded_workspace(device, monkeypatch):
    problem = make_problem((20,), (3,) * 20, 32, device, masked=False)
    upstream = upstream_for(problem)
    _, argmax = streaming_forward(problem, normalize=False, argmax=True, config=TILES)
    truth = with_gradients(problem, upstream, torch.float64)[1]
    sizes = []
    allocate = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: sizes.append((x := allocate(*a, **k)).numel()) or x
    )
    for columns, workspace, parts in ((64, 2**20, 1), (4, 2**20, 5), (1, 4 * 20 * 32 * 7, 7)):
        sizes.clear()
        cut = CUT._replace(columns=columns, workspace=workspace)
        options = {"normalize": False, "need_documents": False, "config": cut}
        dqueries, _ = streaming_backward_lowmem(upstream, argmax, problem, **options)
        assert error(dqueries, truth) < 1e-6
        assert sizes == [parts * 20 * 32]


def test_tokens_of_no_sequence_take_no_part(device):
    """Rows beyond the last boundary: winner -1, gradient 0."""
    problem = make_problem((5, 6), (7, 9), 32, device, masked=False)
    longer = MaxSimOperands(
        *(torch.cat([x, x.new_full((20, 32), torch.nan)]) for x in problem[:2]), *problem[2:]
    )
    upstream = upstream_for(problem)
    for backward in BACKWARDS:
        scores, dqueries, ddocuments, argmax = launch(longer, upstream, backward=backward)
        assert (argmax[:, 11:] == -1).all()
        assert not dqueries[11:].any()
        assert not ddocuments[16:].any()
        assert_close((scores, dqueries[:11], ddocuments[:16]), problem, upstream)


@pytest.mark.parametrize("length", [0.0, 1e-14])
def test_normalisation_of_tokens_of_no_length(length, device):
    """They are divided by 1e-12, and so is their gradient, as in torch's normalize."""
    problem = make_problem((3,), (4,), 16, device, masked=False)
    problem.queries[1] *= length
    problem.documents[2:] *= length
    upstream = upstream_for(problem)
    *results, _ = launch(problem, upstream, normalize=True)
    assert_close(results, problem, upstream, normalize=True)
    assert results[1].abs().max() > 1e9 * upstream.abs().max()


def test_refusals(device):
    problem = make_problem((3, 4), (5, 6), 16, device)
    upstream = upstream_for(problem)
    _, argmax = streaming_forward(problem, normalize=False, argmax=True, config=TILES)
    for grad, found in ((upstream[:1], argmax), (upstream, argmax[:, :3])):
        with pytest.raises(ValueError, match="grad and argmax must be"):
            streaming_backward_lowmem(grad, found, problem, normalize=False)
    wide = MaxSimOperands(
        *(torch.zeros(2, 2049, device=device) for _ in range(2)),
        *(boundaries((2,), device) for _ in range(2)), None, None, None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="E <= 2048"):
        streaming_backward_unified(
            torch.zeros(1, 1), torch.zeros(1, 2).int(), wide, normalize=False
        )
