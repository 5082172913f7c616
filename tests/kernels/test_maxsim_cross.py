"""MaxSim's cross product on segment_max against float64, on the GPU or in Triton's interpreter.

Q queries, N documents, T packed tokens, E embedding.
"""

import pytest
import torch

from sparton.kernels.maxsim import cross
from sparton.kernels.maxsim.cpu import maxsim_backward_cpu, maxsim_forward_cpu
from sparton.kernels.maxsim.cross import cross_backward, cross_forward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from tests.kernels.maxsim_problems import (
    DOCUMENT_LENGTHS,
    QUERY_LENGTHS,
    assert_close_to_truth,
    gradients_at,
    make_problem,
    tolerances,
    upstream_for,
    winners,
    with_gradients,
)
from tests.kernels.problems import DTYPES, SMALL, error, first_of

ON_CPU = not torch.cuda.is_available()
CUT = {"config": BackwardConfig(chunk=32, share=16, block_e=2, block_t=2)} if ON_CPU else {}


def launch(problem, upstream, *, normalize=False):
    """Scores, gradients and winners of the kernels."""
    config = SMALL if ON_CPU else None
    scores, argmax = cross_forward(problem, normalize=normalize, argmax=True, config=config)
    gradients = cross_backward(upstream, argmax, problem, normalize=normalize, **CUT)
    return scores, *gradients, argmax


@pytest.mark.quick(3)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_values_and_gradients_against_float64(dtype, masked, normalize, device):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device, dtype=dtype, masked=masked)
    upstream = upstream_for(problem)
    *results, argmax = launch(problem, upstream, normalize=normalize)
    assert [x.dtype for x in results] == [torch.float32, dtype, dtype]
    expected = winners(problem, normalize=normalize)
    if dtype == torch.float32 or not normalize:
        assert_close_to_truth(tuple(results), problem, upstream, normalize=normalize)
        assert torch.equal(argmax, expected)
        return
    # Normalised tokens are rounded before they are compared.
    assert torch.equal(argmax >= 0, expected >= 0)
    assert (argmax == expected).double().mean() > 0.95
    exact, *_ = with_gradients(problem, upstream, torch.float64, normalize=True)
    truth = (exact, *gradients_at(problem, argmax, upstream, normalize=True))
    for actual, right, most in zip(results, truth, tolerances(problem, True), strict=True):
        assert error(actual, right) <= most < error(actual * 1.02, right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query_lengths", "document_lengths", "E"),
    [((1,), (1,), 1), ((3, 31), (31,), 64), ((70,), (9, 64), 96), ((2,) * 7, (5,) * 17, 7)],
)
def test_odd_shapes(query_lengths, document_lengths, E, device):
    for masked in (False, True):
        problem = make_problem(query_lengths, document_lengths, E, device, masked=masked)
        upstream = upstream_for(problem)
        *results, argmax = launch(problem, upstream)
        assert_close_to_truth(tuple(results), problem, upstream)
        assert torch.equal(argmax, winners(problem))


def test_the_tolerances_notice_small_faults(device):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device, dtype=torch.float16)
    upstream = upstream_for(problem)
    *good, argmax = launch(problem, upstream)
    lost = good[0].clone()
    lost[2, 5] = 0
    starts = problem.document_cu_seqlens[:-1, None]
    shifted = torch.where(argmax > starts, argmax - 1, argmax)
    wrong = cross_backward(upstream, shifted, problem, normalize=False, **CUT)
    padding_wins = launch(problem._replace(document_mask=None), upstream)[0]
    for bad in (
        (lost, *good[1:]),
        (padding_wins, *good[1:]),
        *((*good[:i], good[i] * 1.01, *good[i + 1 :]) for i in range(3)),
        (good[0], *wrong),
    ):
        with pytest.raises(AssertionError):
            assert_close_to_truth(bad, problem, upstream)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_parts_do_not_change_the_result(masked, device, monkeypatch):
    """Query tokens in parts, which cut queries: the same winners, sums in another order."""
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device, masked=masked)
    upstream = upstream_for(problem)
    expected = launch(problem, upstream)
    monkeypatch.setattr(cross, "MAXIMA_AT_ONCE", 9 * 8)
    monkeypatch.setattr(cross, "ROWS_APART", 3)
    scores, *gradients, argmax = launch(problem, upstream)
    torch.testing.assert_close(scores, expected[0], rtol=1e-6, atol=1e-5)
    for actual, same in zip((*gradients, argmax), expected[1:], strict=True):
        assert torch.equal(actual, same)


def test_negative_similarities_beside_padding(device):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device)
    documents = torch.where(problem.document_mask[:, None], -problem.documents.abs(), 0)
    problem = problem._replace(queries=problem.queries.abs(), documents=documents)
    upstream = upstream_for(problem)
    *results, argmax = launch(problem, upstream)
    assert results[0][2].sum() < 0
    assert (results[0] <= 0).all()
    assert_close_to_truth(tuple(results), problem, upstream)
    assert torch.equal(argmax, winners(problem))
    assert not results[2][~problem.document_mask].any()
    assert not results[1][~problem.query_mask].any()


@pytest.mark.parametrize("normalize", [False, True])
def test_masked_tokens_may_hold_anything(normalize, device):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device)
    upstream = upstream_for(problem)
    dirty = problem._replace(
        queries=torch.where(problem.query_mask[:, None], problem.queries, float("nan")),
        documents=torch.where(problem.document_mask[:, None], problem.documents, float("nan")),
    )
    results = (launch(each, upstream, normalize=normalize) for each in (dirty, problem))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("everything", ["query_mask", "document_mask"])
def test_everything_masked(everything, device):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device)
    mask = torch.zeros_like(getattr(problem, everything))
    problem = problem._replace(**{everything: mask})
    *results, argmax = launch(problem, upstream_for(problem), normalize=True)
    assert not any(x.any() for x in results)
    assert (argmax == -1).all()


@pytest.mark.parametrize("lengths", [((), (3, 2)), ((3, 0), ()), ((0, 0), (3,)), ((3,), (0, 0))])
def test_no_tokens(lengths, device):
    problem = make_problem(*lengths, 8, device)
    *results, argmax = launch(problem, upstream_for(problem), normalize=True)
    assert results[0].shape == (len(lengths[0]), len(lengths[1]))
    assert not any(x.any() for x in results)
    assert (argmax == -1).all()


def test_hot_and_empty_destinations(device):
    """One document token wins everything, no other wins anything."""
    problem = make_problem((40, 33), (9, 5), 48, device, dtype=torch.float16, masked=False)
    documents = problem.documents.clone()
    documents[[4, 10]] += 40 * torch.ones(48, device=device, dtype=torch.float16)
    problem = problem._replace(queries=problem.queries.abs(), documents=documents)
    upstream = upstream_for(problem)
    *results, argmax = launch(problem, upstream)
    assert (argmax == torch.tensor([[4], [10]], device=device)).all()
    assert_close_to_truth(tuple(results), problem, upstream)
    cold = torch.ones(14, dtype=torch.bool, device=device)
    cold[[4, 10]] = False
    assert not results[2][cold].any()


def test_ties_go_to_the_first_token(device):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 16, device)
    queries = (problem.queries * 8).round()  # sums are exact in any order
    problem = problem._replace(queries=queries, documents=torch.ones_like(problem.documents))
    _, argmax = cross_forward(
        problem, normalize=False, argmax=True, config=SMALL if ON_CPU else None
    )
    assert torch.equal(argmax, winners(problem))


@pytest.mark.parametrize("normalize", [False, True])
def test_bitwise_repeatable_and_blind_to_upstream_strides(normalize, device):
    problem = make_problem((5, 17), (3, 21, 7), 48, device, dtype=torch.float16)
    upstream = upstream_for(problem)
    strided = torch.stack((upstream, torch.full_like(upstream, float("nan"))), -1)[..., 0]
    expected = launch(problem, upstream, normalize=normalize)
    for again in (upstream, strided):
        results = launch(problem, again, normalize=normalize)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_without_winners_the_scores_are_the_same(device):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device)
    config = SMALL if ON_CPU else None
    scores, _ = cross_forward(problem, normalize=False, argmax=True, config=config)
    alone, nothing = cross_forward(problem, normalize=False, argmax=False, config=config)
    assert torch.equal(alone, scores)
    assert nothing is None


@pytest.mark.parametrize("wanted", ["queries", "documents"])
def test_only_wanted_gradients(wanted, device):
    problem = make_problem((5, 3), (9, 4), 16, device)
    upstream = upstream_for(problem)
    both = launch(problem, upstream)[1:3]
    _, argmax = cross_forward(
        problem, normalize=False, argmax=True, config=SMALL if ON_CPU else None
    )
    needs = {"need_queries": wanted == "queries", "need_documents": wanted == "documents"}
    dqueries, ddocuments = cross_backward(
        upstream, argmax, problem, normalize=False, **needs, **CUT
    )
    assert (dqueries is None, ddocuments is None) == (wanted != "queries", wanted != "documents")
    alone, expected = (dqueries, both[0]) if wanted == "queries" else (ddocuments, both[1])
    assert torch.equal(alone, expected)


def test_agrees_with_the_cpu_version(device):
    """Either backward serves either forward: the winners mean the same."""
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device)
    on_cpu = problem._replace(
        **{k: v.cpu() for k, v in problem._asdict().items() if torch.is_tensor(v)}
    )
    upstream = upstream_for(problem)
    scores, *gradients, argmax = launch(problem, upstream)
    expected, argmax_cpu = maxsim_forward_cpu(on_cpu, normalize=False, argmax=True)
    assert torch.equal(argmax.cpu(), argmax_cpu)
    assert error(scores.cpu(), expected) < 1e-6
    crossed = maxsim_backward_cpu(upstream.cpu(), argmax.cpu(), on_cpu, normalize=False)
    for actual, other in zip(gradients, crossed, strict=True):
        assert error(actual.cpu(), other) < 1e-6
        assert error(actual.cpu() * 1.01, other) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 7, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_lengths_that_the_host_knows_change_nothing(masked, length, device):
    """Equal lengths shorten the way to the same scores, winners and gradients; of 8 tokens, whole
    queries fit into a tile."""
    problem = make_problem((length,) * 5, (9,) * 4, 48, device, masked=masked)
    known = problem._replace(query_length=length, longest_document=9)
    if masked:
        problem, known = (x._replace(query_mask=None) for x in (problem, known))
    upstream = upstream_for(problem)
    expected = launch(problem, upstream)
    for actual, right in zip(launch(known, upstream), expected, strict=True):
        assert error(actual, right.double()) < 1e-6
    alone, _ = cross_forward(known, normalize=False, argmax=False, config=SMALL if ON_CPU else None)
    assert error(alone, expected[0].double()) < 1e-6 < error(alone * 1.01, expected[0].double())
