"""Pairs of a query and a compressed document: on the GPU or in the interpreter, and on the CPU.

P pairs, Q queries, N documents, C centroids. The references are the cross product, which has tests
of its own, and MaxSim of the restored tokens.
"""

import pytest
import torch

from sparton.kernels.maxsim import (
    decompress,
    maxsim_centroids,
    maxsim_residual_varlen,
    maxsim_varlen,
)
from sparton.kernels.maxsim.residual import cpu, operators
from sparton.kernels.maxsim.residual.cpu import pair_forward_cpu
from sparton.kernels.maxsim.residual.pair_forward import pair_forward
from tests.kernels.problems import error, first_of
from tests.kernels.test_maxsim_residual import LENGTHS, SMALL, make_problem, reference

QUERIES, COUNT = [3, 0, 19, 1], 20
VERSIONS = [
    pytest.param(pair_forward, id="kernel"),
    pytest.param(
        pair_forward_cpu,
        id="cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has no GPU version"),
    ),
]


def listed(device, count=COUNT, queries=4):
    generator = torch.Generator().manual_seed(count)
    numbers = [torch.randint(n, (count,), generator=generator) for n in (queries, len(LENGTHS))]
    return torch.stack(numbers, 1).int().to(device)


def run(forward, problem, numbers, *, residuals=True, normalize=False, dtype=None, **options):
    operands = problem.operands
    if not residuals:
        operands = operands._replace(residuals=None, inverse_norms=None, bucket_weights=None)
    if forward is pair_forward:
        options.setdefault("config", SMALL)
    else:
        options.clear()
    return forward(operands, numbers, normalize, dtype or problem.queries.dtype, **options)


@pytest.mark.quick(3)
@pytest.mark.parametrize("forward", VERSIONS)
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(("E", "nbits"), [(24, 1), (48, 2), (34, 4), (17, 8)])
def test_against_float64(forward, masks, E, nbits, device):
    """Queries of several tiles among others, repeated pairs, documents and queries without
    tokens."""
    problem = make_problem(QUERIES, LENGTHS, E, nbits, device, masks=masks)
    numbers = listed(device)
    truth = reference(problem)[0][tuple(numbers.cpu().long().T)]
    scores = run(forward, problem, numbers)
    assert (scores.shape, scores.dtype) == ((COUNT,), torch.float32)
    assert error(scores.cpu(), truth) <= 1e-6 < error(scores.cpu() * 1.00001, truth)
    assert error(run(forward, problem, numbers.roll(1, 0)).cpu(), truth) > 0.1
    assert torch.equal(run(forward, problem, numbers), scores)


@pytest.mark.parametrize("forward", VERSIONS)
def test_a_lone_query_of_several_tiles(forward, device):
    problem = make_problem([37], LENGTHS, 32, 2, device, masks=True, shift=-2.0)
    numbers = listed(device, queries=1)
    truth = reference(problem)[0][tuple(numbers.cpu().long().T)]
    assert truth.min() < 0
    assert error(run(forward, problem, numbers).cpu(), truth) <= 1e-6


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_pairs_of_what_was_decompressed(normalize, masks, device):
    """Packed, with lists and without; not normalised, the restored tokens keep their norms."""
    problem = make_problem(QUERIES * 2, LENGTHS, 48, 2, device, masks=masks)
    plain = decompress(problem.codec, problem.documents, normalize=normalize)
    bounds = problem[3:]
    for pairing in (listed(device), listed(device).long(), "pairs"):
        options = {"pairing": pairing, "normalize": normalize}
        truth = maxsim_varlen(problem.queries, plain, *bounds, **options)
        scores = maxsim_residual_varlen(*problem, **options)
        assert scores.shape == truth.shape
        assert error(scores, truth.double()) <= 2e-6 < error(scores * 1.0001, truth.double())


@pytest.mark.parametrize("forward", VERSIONS)
@pytest.mark.parametrize("normalize", [False, True])
def test_centroids_alone(forward, normalize, device):
    problem = make_problem(QUERIES, LENGTHS, 24, 2, device, masks=True)
    numbers = listed(device)
    operands = (problem.queries, problem.documents.codes, problem.codec.centroids, *problem[3:])
    cross = maxsim_centroids(*operands, normalize=normalize).double()
    truth = cross[tuple(numbers.long().T)]
    scores = run(forward, problem, numbers, residuals=False, normalize=normalize)
    assert error(scores, truth) <= 1e-6 < error(run(forward, problem, numbers), truth)
    options = {"pairing": numbers, "normalize": normalize}
    assert error(maxsim_centroids(*operands, **options), truth) <= 1e-6


@pytest.mark.parametrize("nbits", first_of([4, 1, 2, 8]))
@pytest.mark.parametrize("Q", [1, 4])
def test_half_precision(Q, nbits, device):
    """As the cross product rounds: with fp32 sums, near float64 of the rounded operands."""
    problem = make_problem(QUERIES[-Q:], LENGTHS, 64, nbits, device, dtype=torch.float16)
    numbers = listed(device, queries=Q)
    truth = reference(problem)[0][tuple(numbers.cpu().long().T)]
    for config in (SMALL, None):
        scores = run(pair_forward, problem, numbers, config=config).cpu()
        assert error(scores, truth) <= 3e-4 < error(scores * 1.001, truth)


def test_pieces_and_strangers_change_nothing(device, monkeypatch):
    """Of documents that are restored a few at a time; and whatever else is in the list."""
    problem = make_problem(QUERIES, LENGTHS, 32, 2, torch.device("cpu"), masks=True)
    numbers = listed("cpu")
    scores = run(pair_forward_cpu, problem, numbers)
    assert torch.equal(run(pair_forward_cpu, problem, numbers[7:9]), scores[7:9])
    monkeypatch.setattr(cpu, "TOKENS_AT_ONCE", 30)
    torch.testing.assert_close(run(pair_forward_cpu, problem, numbers), scores)


@pytest.mark.parametrize("forward", VERSIONS)
def test_nothing_to_score(forward, device):
    problem = make_problem(QUERIES, LENGTHS, 16, 2, device)
    assert run(forward, problem, listed(device)[:0]).shape == (0,)
    silent = problem._replace(
        queries=problem.queries[:0], query_cu_seqlens=problem.query_cu_seqlens[:2] * 0
    )
    assert torch.equal(run(forward, silent, listed(device, queries=1)).cpu(), torch.zeros(COUNT))


def test_refusals(device):
    problem = make_problem(QUERIES, LENGTHS, 16, 2, device)
    with pytest.raises(ValueError, match='pairing="pairs" of 4 queries needs 4 documents, got 8'):
        maxsim_residual_varlen(*problem, pairing="pairs")
    with pytest.raises(ValueError, match='"cross", "pairs" or a list of pairs'):
        maxsim_residual_varlen(*problem, pairing=2)
    with pytest.raises(ValueError, match=r"pairs must be int32 or int64 \[P, 2\]"):
        maxsim_residual_varlen(*problem, pairing=torch.zeros(3, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="pairing on meta"):
        maxsim_residual_varlen(*problem, pairing=torch.zeros(3, 2, device="meta").int())
    if device.type == "cpu":
        for wrong in ([[0, 8]], [[4, 0]], [[-1, 0]]):
            with pytest.raises(ValueError, match="one of 4 queries and one of 8 documents"):
                maxsim_residual_varlen(*problem, pairing=torch.tensor(wrong))


@pytest.mark.parametrize("wrong", [[[0, 8]], [[4, 0]]])
def test_kernels_assert_what_pairs_name(wrong, device, device_assertions):
    problem = make_problem(QUERIES, LENGTHS, 16, 2, device)
    with pytest.raises(Exception, match="pairs name a"):
        run(pair_forward, problem, torch.tensor(wrong).int())


def test_as_pytorch_sees_it(device):
    """Compiled or not the same bits; no gradient, which would be of nothing."""
    problem = make_problem(QUERIES, LENGTHS, 16, 2, device, masks=True, inverse=None)
    numbers = listed(device)
    queries = problem.queries.clone().requires_grad_()
    scores = maxsim_residual_varlen(queries, *problem[1:], pairing=numbers)
    assert not scores.requires_grad
    compiled = torch.compile(maxsim_residual_varlen, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*problem, pairing=numbers), scores)
    arguments = (*problem.operands, numbers, False, torch.float32)
    torch.library.opcheck(operators._pairs.registered, arguments)
