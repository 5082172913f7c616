"""MaxSim of lists of pairs, whose tokens are read in place: kernels, in Triton's interpreter or on
a GPU, the CPU's version, and both as PyTorch sees them.

Q queries, N documents, P pairs, T packed tokens, E embedding.
"""

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from sparton.kernels.maxsim import (
    maxsim,
    maxsim_pairs,
    maxsim_reference,
    maxsim_varlen,
    operators,
    paths,
)
from sparton.kernels.maxsim.batches import packed_operands
from sparton.kernels.maxsim.cpu import maxsim_backward_cpu, maxsim_forward_cpu
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.maxsim.streaming import streaming_forward
from sparton.kernels.maxsim.streaming_backward import (
    streaming_backward_lowmem,
    streaming_backward_unified,
)
from sparton.kernels.maxsim.streaming_rows import DEFAULT_CONFIG
from sparton.kernels.maxsim.streaming_tiles import StreamingConfig
from tests.devices import nothing_waits
from tests.kernels.maxsim_problems import (
    DOCUMENT_LENGTHS,
    QUERY_LENGTHS,
    make_problem,
    tolerances,
    upstream_for,
    winners,
)
from tests.kernels.problems import DTYPES, error, first_of

TILES = StreamingConfig(16, 16, 2, 32, num_warps=4, num_stages=2)
CUT = DEFAULT_CONFIG._replace(columns=3, tile_elements=1024, tile_warps=4, block_s=16)
# Of QUERY_LENGTHS and DOCUMENT_LENGTHS: repeated, out of order, with sequences that are empty;
# query 3 and document 6 are in none.
PAIRS = ((2, 1), (0, 4), (2, 7), (2, 1), (1, 1), (0, 1), (2, 2), (2, 5), (2, 3), (0, 0), (2, 4))


def pairs_of(problem: MaxSimOperands, pairs: Tensor) -> MaxSimOperands:
    longest = int(problem.query_cu_seqlens.diff().max())
    return problem._replace(pairs=pairs.int().to(problem.queries.device), longest_query=longest)


def listed(E: int, device, *, pairs=PAIRS, **options) -> MaxSimOperands:
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, E, device, **options)
    return pairs_of(problem, torch.tensor(pairs))


def with_gradients(problem, upstream, dtype, **options) -> tuple[Tensor, ...]:
    """Entries of the cross product of the reference at some precision."""
    assert problem.pairs is not None
    leaves = [x.detach().to(dtype).requires_grad_() for x in problem[:2]]
    every = maxsim_reference(*leaves, *problem[2:6], **options)
    scores = every[tuple(problem.pairs.long().T)][:, None]
    return scores.detach(), *torch.autograd.grad(scores, leaves, upstream.to(dtype))


def expected_winners(problem: MaxSimOperands, **options) -> Tensor:
    """``[P, L]``, -1 beyond a query's tokens."""
    assert problem.pairs is not None
    every, bounds = winners(problem._replace(pairs=None), **options), problem.query_cu_seqlens
    found = torch.full(problem.argmax_shape, -1, dtype=torch.int32, device=every.device)
    for p, (q, n) in enumerate(problem.pairs.tolist()):
        found[p, : bounds[q + 1] - bounds[q]] = every[n, bounds[q] : bounds[q + 1]]
    return found


def run(version, problem, upstream, normalize=False, *, tiles=TILES) -> tuple[Tensor, ...]:
    """Scores, gradients and winners, -1 where none are written."""
    if version == "cpu":
        scores, argmax = maxsim_forward_cpu(problem, normalize=normalize, argmax=True)
        found = maxsim_backward_cpu(upstream, argmax, problem, normalize=normalize)
    else:
        backward = {"lowmem": streaming_backward_lowmem, "unified": streaming_backward_unified}
        options = {"normalize": normalize, "argmax": True}
        scores, argmax = streaming_forward(problem, **options, config=tiles)
        found = backward[version](upstream, argmax, problem, normalize=normalize, config=CUT)
    lengths = problem.query_cu_seqlens.diff()[problem.pairs[:, 0].long()]
    written = torch.arange(argmax.shape[1], device=argmax.device) < lengths[:, None]
    return scores, *found, argmax.where(written, -1)


VERSIONS = ["lowmem", "unified"] + ["cpu"] * (not torch.cuda.is_available())


@pytest.mark.quick(3)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_against_float64(dtype, masked, normalize, version, device):
    problem = listed(48, device, dtype=dtype, masked=masked)
    upstream = upstream_for(problem)
    *results, argmax = run(version, problem, upstream, normalize)
    truth = with_gradients(problem, upstream, torch.float64, normalize=normalize)
    allowed = tolerances(problem, normalize)
    for actual, exact, most in zip(results, truth, allowed, strict=True):
        assert actual.shape == exact.shape
        assert error(actual, exact) <= most < error(actual * 1.02, exact)
    assert torch.equal(argmax, expected_winners(problem, normalize=normalize))
    dqueries, ddocuments = results[1:]
    assert not dqueries[problem.query_cu_seqlens[3] :].any()
    assert not ddocuments[slice(*problem.document_cu_seqlens[6:8].tolist())].any()
    assert not results[0][[4, 6]].any(), "empty sequences"


@pytest.mark.parametrize("version", VERSIONS)
def test_one_pair_more_or_less_is_no_rounding_error(version, device):
    problem = listed(48, device)
    upstream = upstream_for(problem)
    truth = with_gradients(problem, upstream, torch.float64)
    wrong = problem.pairs.clone()
    wrong[7, 1] = 4
    results = run(version, problem._replace(pairs=wrong), upstream)[:3]
    for actual, exact, most in zip(results, truth, tolerances(problem), strict=True):
        assert error(actual, exact) > 100 * most


@pytest.mark.parametrize("few", [1, 2, 256])
def test_tiles_of_long_queries_side_by_side_or_in_turn(few, device):
    problem = make_problem((5, 90), (37, 20), 32, device)
    problem = pairs_of(problem, torch.tensor([[1, 0], [0, 1], [1, 1]]))
    upstream = upstream_for(problem)
    results = run("lowmem", problem, upstream, tiles=TILES._replace(few_programs=few))
    truth = with_gradients(problem, upstream, torch.float64)
    for actual, exact, most in zip(results, truth, tolerances(problem)):
        assert error(actual, exact) <= most
    assert torch.equal(results[3], expected_winners(problem))


@pytest.mark.parametrize("version", VERSIONS)
def test_lists_of_one_query_and_of_one_document(version, device):
    """Many pairs share what is summed: split among programs, or not."""
    for pairs in ([(2, n) for n in range(8)] * 3, [(q, 1) for q in (0, 2, 3)] * 5):
        problem = listed(24, device, pairs=pairs)
        upstream = upstream_for(problem)
        truth = with_gradients(problem, upstream, torch.float64)
        results = run(version, problem, upstream)
        for actual, exact, most in zip(results, truth, tolerances(problem)):
            assert error(actual, exact) <= most
        if version != "unified":
            again = run(version, problem, upstream.T.contiguous().T)
            assert all(torch.equal(a, b) for a, b in zip(again, results, strict=True))


def gradients(scores, leaves, *, retain=False):
    upstream = torch.arange(1.0, 1 + scores.numel(), device=scores.device).view(scores.shape)
    return torch.autograd.grad(scores, leaves, upstream, retain_graph=retain)


def assert_same(actual, expected, leaves):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    both = (gradients(x, leaves, retain=True) for x in (actual, expected))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.fixture
def packed(device):
    """Leaves, boundaries, masks."""
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 24, device)
    leaves = [x.requires_grad_() for x in problem[:2]]
    return leaves, problem[2:4], problem[4:6]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_public_functions(packed, dtype, normalize, device):
    leaves, bounds, masks = packed
    pairs = torch.tensor(PAIRS, dtype=dtype, device=device)
    rows, columns = pairs.long().T
    expected = maxsim_varlen(*leaves, *bounds, *masks, normalize=normalize)[rows, columns]
    for longest in ({}, {"query_max_seqlen": 17}, {"document_max_seqlen": 50}):
        options = {"pairing": pairs, "normalize": normalize, **longest}
        scores = maxsim_varlen(*leaves, *bounds, *masks, **options)
        assert scores.shape == (len(PAIRS),)
        assert_same(scores, expected, leaves)
    first = torch.stack((torch.arange(4), torch.arange(4)), 1).to(device)
    own = (bounds[0], bounds[1][:5])
    documents, mask = leaves[1][: own[1][-1]], masks[1][: own[1][-1]]
    arguments = (leaves[0], documents, *own, masks[0], mask)
    paired = maxsim_varlen(*arguments, pairing="pairs")
    assert_same(maxsim_varlen(*arguments, pairing=first), paired, leaves)


def test_padded_batches(device):
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(*shape, 24, generator=generator).to(device).requires_grad_()
        for shape in ((3, 6), (5, 9))
    ]
    masks = [(torch.rand(x.shape[:2], generator=generator) > 0.3).to(device) for x in leaves]
    pairs = torch.tensor([(2, 4), (0, 0), (2, 1), (2, 4)], device=device)
    expected = maxsim(*leaves, *masks)[tuple(pairs.T)]
    assert_same(maxsim_pairs(*leaves, *masks, pairs=pairs), expected, leaves)
    with torch.autocast(device.type, torch.bfloat16):
        scores = maxsim_pairs(*leaves, *masks, pairs=pairs)
    assert (scores - expected).abs().max() > 1e-3
    rounded = maxsim(*(x.detach().bfloat16().float() for x in leaves), *masks)
    torch.testing.assert_close(scores, rounded[tuple(pairs.T)], rtol=1e-5, atol=1e-5)


def test_no_pairs(packed, device):
    leaves, bounds, masks = packed
    nothing = torch.zeros(0, 2, dtype=torch.int32, device=device)
    scores = maxsim_varlen(*leaves, *bounds, *masks, pairing=nothing)
    assert scores.shape == (0,)
    assert not any(x.any() for x in torch.autograd.grad(scores.sum(), leaves))
    operands = packed_operands(*leaves, *bounds, *masks, nothing).with_room_for_winners()
    scores, argmax = streaming_forward(operands, normalize=False, argmax=True)
    for backward in (streaming_backward_lowmem, streaming_backward_unified):
        found = backward(scores, argmax, operands, normalize=True)
        assert [x.shape for x in found] == [x.shape for x in leaves]
        assert not any(x.any() for x in found)


def test_compiles_into_one_graph(packed, device):
    leaves, bounds, masks = packed
    pairs = torch.tensor(PAIRS, device=device)

    def score(queries, documents, pairs, **longest):
        return 2 * maxsim_varlen(
            queries * 2, documents, *bounds, *masks, pairing=pairs, normalize=True, **longest
        )

    for dynamic in (False, True):
        compiled = torch.compile(score, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        expected = score(*leaves, pairs)
        actual = compiled(*leaves, pairs, query_max_seqlen=17)
        assert torch.equal(actual, expected)
        both = zip(gradients(actual, leaves), gradients(expected, leaves), strict=True)
        assert all(torch.equal(a, b) for a, b in both)
    with torch.no_grad():
        assert torch.equal(compiled(*leaves, pairs), expected)
    with pytest.raises(Exception, match=r"need query_max_seqlen=.*under torch.compile"):
        compiled(*leaves, pairs)


def test_registration(packed, device):
    leaves, bounds, masks = packed
    pairs = torch.tensor(PAIRS, device=device)
    operands = packed_operands(*leaves, *bounds, *masks, pairs, 17)
    forward = operators._operator.registered
    torch.library.opcheck(forward, (*operands, True, "auto", True))
    scores, argmax = forward(*operands, True, "auto", True)
    tensors = [x.detach() for x in (scores, argmax, *operands[:2])]
    arguments = (*tensors, *operands[2:], True, "auto", [True, True])
    torch.library.opcheck(operators._operator.registered_backward, arguments)


def test_the_longest_query_is_read_only_for_gradients(packed, device, monkeypatch):
    leaves, bounds, masks = packed
    read = []
    original = MaxSimOperands.with_room_for_winners

    def spy(self):
        read.append(self.longest_query)
        return original(self)

    monkeypatch.setattr(MaxSimOperands, "with_room_for_winners", spy)
    pairs = torch.tensor(PAIRS, device=device)
    with torch.no_grad():
        maxsim_varlen(*leaves, *bounds, *masks, pairing=pairs)
    assert read == []
    maxsim_varlen(*leaves, *bounds, *masks, pairing=pairs)
    maxsim_varlen(*leaves, *bounds, *masks, pairing=pairs, query_max_seqlen=20)
    assert read == [None, 20]


@pytest.mark.parametrize("wrong", [(4, 0), (-1, 0), (0, 8), (0, -1)])
def test_numbers_that_there_are_not(wrong, packed, device_assertions):
    leaves, bounds, masks = packed
    pairs = torch.tensor([(2, 1), wrong])
    message = rf"4 queries .* 8 documents, from 0 on; pair 1 is \({wrong[0]}, {wrong[1]}\)"
    with pytest.raises(ValueError, match=message):
        maxsim_varlen(*leaves, *bounds, *masks, pairing=pairs)
    side = "query" if wrong[1] == 0 else "document"
    operands = packed_operands(*leaves, *bounds, *masks, pairs)
    with pytest.raises(InterpreterError, match=f"pairs name a {side} that there is not"):
        paths.maxsim_forward_cuda(operands, normalize=False, argmax=False)


@pytest.mark.parametrize("wrong", [(2**32, 0), (-(2**32), 0), (0, 2**32 + 1)])
def test_numbers_beyond_int32_are_not_cut_to_others(wrong, packed, device_assertions):
    leaves, bounds, masks = packed
    pairs = torch.tensor([(2, 1), wrong])
    with pytest.raises(ValueError, match=r"4 queries .* 8 documents, from 0 on; pair 1 is"):
        maxsim_varlen(*leaves, *bounds, *masks, pairing=pairs)
    side = "query" if wrong[0] else "document"
    operands = packed_operands(*leaves, *bounds, *masks, pairs)
    with pytest.raises(InterpreterError, match=f"pairs name a {side} that there is not"):
        paths.maxsim_forward_cuda(operands, normalize=False, argmax=False)


def test_lists_that_do_not_fit(packed, device):
    leaves, bounds, masks = packed
    for pairs, message in (
        (torch.zeros(3), r"int32 or int64 \[P, 2\], .*, got torch.float32 \(3,\)"),
        (torch.zeros(3, 3).int(), r"torch.int32 \(3, 3\)"),
        (torch.zeros(3, 2), r"torch.float32 \(3, 2\)"),
        (torch.zeros(3, 2, device="meta").int(), "meta"),
    ):
        if pairs.device.type != "meta":
            pairs = pairs.to(device)
        with pytest.raises(ValueError, match=message):
            maxsim_varlen(*leaves, *bounds, *masks, pairing=pairs)
        with pytest.raises(ValueError, match=message):
            maxsim_pairs(leaves[0][None], leaves[1][None], pairs=pairs)
    with pytest.raises(ValueError, match=r"documents \[N, Ld, E\], got"):
        own = torch.zeros(1, 2, 3, 24, device=device)
        maxsim_pairs(leaves[0][None], own, pairs=torch.zeros(3, 2, device=device).int())


@pytest.mark.gpu
def test_no_copies_and_no_waiting():
    """A thousand pairs of 40 documents: gathered tokens would take far more memory."""
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn(count * 64, 128, device="cuda", generator=generator).bfloat16().requires_grad_()
        for count in (8, 40)
    ]
    bounds = [torch.arange(count + 1, device="cuda") * 64 for count in (8, 40)]
    pairs = torch.randint(0, 8, (1000, 2), device="cuda", generator=generator)
    pairs[:, 1] *= 5

    def step():
        scores = maxsim_varlen(*leaves, *bounds, pairing=pairs, query_max_seqlen=64)
        scores.sum().backward()
        with torch.no_grad():
            return maxsim_varlen(*leaves, *bounds, pairing=pairs)

    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with nothing_waits():
        scores = step()
    gathered = 1000 * 64 * 128 * 2
    assert torch.cuda.max_memory_allocated() - before < gathered
    every = maxsim_varlen(*(x.detach() for x in leaves), *bounds)
    torch.testing.assert_close(scores, every[tuple(pairs.T)], rtol=1e-4, atol=1e-4)
