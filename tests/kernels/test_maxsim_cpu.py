"""MaxSim on the CPU against float64. Q queries, N documents, T packed tokens, E embedding."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparton.kernels.maxsim import cpu
from sparton.kernels.maxsim.cpu import maxsim_backward_cpu, maxsim_forward_cpu
from tests.kernels.maxsim_problems import (
    DOCUMENT_LENGTHS,
    QUERY_LENGTHS,
    assert_close_to_truth,
    make_problem,
    upstream_for,
    winners,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def compute(problem, upstream, *, normalize=False):
    scores, argmax = maxsim_forward_cpu(problem, normalize=normalize, argmax=True)
    gradients = maxsim_backward_cpu(upstream, argmax, problem, normalize=normalize)
    return scores, *gradients, argmax


def scores_alone(problem):
    return maxsim_forward_cpu(problem, normalize=False, argmax=False)[0]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("per_query", [None, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_against_float64(dtype, per_query, masked, normalize):
    problem = make_problem(
        QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, dtype=dtype, per_query=per_query, masked=masked
    )
    upstream = upstream_for(problem)
    *results, argmax = compute(problem, upstream, normalize=normalize)
    assert [x.dtype for x in results] == [torch.float32, dtype, dtype]
    assert_close_to_truth(tuple(results), problem, upstream, normalize=normalize)
    assert torch.equal(argmax, winners(problem, normalize=normalize))
    scores, nothing = maxsim_forward_cpu(problem, normalize=normalize, argmax=False)
    assert_close_to_truth((scores, *results[1:]), problem, upstream, normalize=normalize)
    assert nothing.numel() == 0


def test_the_tolerances_notice_small_faults():
    for options in ({}, {"normalize": True}):
        problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, dtype=torch.float16)
        upstream = upstream_for(problem)
        *good, argmax = compute(problem, upstream, **options)
        lost = good[0].clone()
        lost[2, 5] = 0
        shifted = torch.where(argmax > 0, argmax - 1, argmax)
        wrong = maxsim_backward_cpu(upstream, shifted, problem, normalize=bool(options))
        unmasked = problem._replace(document_mask=None)
        padding_wins = maxsim_forward_cpu(unmasked, normalize=bool(options), argmax=False)[0]
        for bad in (
            (lost, *good[1:]),
            (padding_wins, *good[1:]),
            *((*good[:i], good[i] * 1.01, *good[i + 1 :]) for i in range(3)),
            (good[0], *wrong),
        ):
            with pytest.raises(AssertionError):
                assert_close_to_truth(bad, problem, upstream, **options)


@pytest.mark.parametrize("budget", [(1, 1), (40, 30), (2**20, 2**20)])
@pytest.mark.parametrize("per_query", [None, 2])
def test_tiles_do_not_change_the_result(per_query, budget, monkeypatch):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, per_query=per_query)
    upstream = upstream_for(problem)
    expected = (*compute(problem, upstream), scores_alone(problem))
    for name in ("SIMILARITIES_AT_ONCE", "OF_A_CORE"):
        monkeypatch.setattr(cpu, name, budget[0])
    monkeypatch.setattr(cpu, "ENTRIES_AT_ONCE", budget[1])
    results = (*compute(problem, upstream), scores_alone(problem))
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("at_once", [1, 200, 2**18])
def test_few_query_tokens_share_products_of_many_documents(at_once, masked, normalize, monkeypatch):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, masked=masked)
    found = []
    for few in (0, len(problem.queries)):
        monkeypatch.setattr(cpu, "FEW_TOKENS", few)
        monkeypatch.setattr(cpu, "OF_FEW_TOKENS", at_once)
        found.append(maxsim_forward_cpu(problem, normalize=normalize, argmax=False)[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0], found[1].roll(1, 1), rtol=1e-5, atol=1e-5)


def test_long_documents_have_calls_of_their_own(monkeypatch):
    """With the same bits; but beside one without tokens."""
    called, split = [], torch.Tensor.split
    watched = lambda x, sizes, *rest: called.append(sizes) or split(x, sizes, *rest)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "split", watched)
    for lengths in ([20, 7, 33], [20, 0, 33]):
        problem = make_problem((3, 2), lengths, 16, masked=False)
        found = []
        for many in (2**30, 1):
            monkeypatch.setattr(cpu, "MANY_OF_EACH", many)
            before = len(called)
            found.append(maxsim_forward_cpu(problem, normalize=True, argmax=False)[0])
            assert (len(called) > before) == (many == 1 and min(lengths) > 0)
        assert torch.equal(*found)


def test_float64_gradients():
    """Scores are fp32, but float64 operands get gradients from float64 sums."""
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, dtype=torch.float64)
    upstream = upstream_for(problem)
    for normalize in (False, True):
        *results, _ = compute(problem, upstream, normalize=normalize)
        assert results[1].dtype == torch.float64
        assert_close_to_truth(
            (results[0].double(), *results[1:]), problem, upstream, normalize=normalize
        )


class LargestResult(TorchDispatchMode):
    """The most elements that the result of an operation has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.layout == torch.strided:
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("per_query", [None, 2])
def test_memory_is_bounded(per_query, monkeypatch):
    """No more similarities or winners at once than allowed; the rest has the size of operands."""
    queries, documents, E = (64,) * 16, (50,) * 32, 8
    problem = make_problem(queries, documents, E, per_query=per_query)
    upstream = upstream_for(problem)
    for normalize in (False, True):
        for budget in (2**9, 2**12):
            monkeypatch.setattr(cpu, "SIMILARITIES_AT_ONCE", budget)
            monkeypatch.setattr(cpu, "OF_A_CORE", budget // torch.get_num_threads())
            monkeypatch.setattr(cpu, "ENTRIES_AT_ONCE", budget)
            with LargestResult() as mode:
                compute(problem, upstream, normalize=normalize)
                scores_alone(problem)
            winners_kept = 32 * 1024 if per_query is None else 2 * 1024
            assert mode.elements <= max(8 * budget, winners_kept, 1600 * E)
    for name in ("SIMILARITIES_AT_ONCE", "OF_A_CORE"):
        monkeypatch.setattr(cpu, name, 2**22)
    with LargestResult() as mode:
        compute(problem, upstream)
    assert (mode.elements > max(winners_kept, 1600 * E)) == (per_query is None)
