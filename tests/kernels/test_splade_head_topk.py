"""The largest entries of each representation against a stable sort of the dense ones."""

import pytest
import torch

from sparton.kernels.splade_head import splade_head, splade_head_topk, topk
from tests.kernels.problems import make_problem

LENGTHS = [5, 0, 17, 64, 1, 3]
V = 700  # three slices of 256, the last one short


@pytest.fixture
def narrow_slices(monkeypatch):
    monkeypatch.setattr(topk, "REPS_AT_ONCE", 1)


def exact_problem(device, bias):
    """Logits without rounding, so that they do not depend on how the work is cut."""
    problem = make_problem(LENGTHS, V, 8, device, bias=bias)
    hidden, weight = (x.mul(8).round() / 8 for x in problem[:2])
    return problem._replace(hidden=hidden, weight=weight)


def expected(reps, k):
    values, indices = reps.sort(dim=1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def assert_same(actual, reps, k):
    values, indices = expected(reps, k)
    assert actual.values.dtype == torch.float32
    assert actual.indices.dtype == torch.int64
    assert torch.equal(actual.values, values)
    assert torch.equal(actual.indices, indices)


@pytest.mark.parametrize("k", [1, 13, 300, V])
@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.usefixtures("narrow_slices")
def test_equals_a_stable_sort(k, pooling, activation, device):
    """Rows with more and with fewer than k positive entries, and an empty sequence."""
    problem = exact_problem(device, -4.0)
    reps = splade_head(*problem, pooling=pooling, activation=activation)
    positive = (reps > 0).sum(1)
    assert positive[1] == 0 < positive.max() < V
    assert_same(splade_head_topk(*problem, k, pooling=pooling, activation=activation), reps, k)


@pytest.mark.usefixtures("narrow_slices")
def test_equal_values_go_by_index(device):
    """Every vocabulary row four times, far apart."""
    problem = exact_problem(device, 1.0)
    weight, bias = problem.weight[: V // 4].repeat(4, 1), problem.bias[: V // 4].repeat(4)
    problem = problem._replace(weight=weight, bias=bias)
    reps = splade_head(*problem)
    assert torch.equal(reps[:, :175], reps[:, 525:])
    actual = splade_head_topk(*problem, 50)
    assert_same(actual, reps, 50)
    assert (actual.values.diff() == 0).any()
    reversed_ties = V - 1 - expected(reps.flip(1), 50)[1]
    assert not torch.equal(actual.indices, reversed_ties)


def test_one_slice_without_bias_under_autocast(device):
    problem = make_problem(LENGTHS, 90, 8, device, bias=None)
    with torch.autocast(device.type, torch.bfloat16):
        reps = splade_head(*problem)
        assert_same(splade_head_topk(*problem, 7), reps, 7)


def test_nan_is_the_largest(device):
    problem = make_problem([3, 4], 40, 8, device)
    problem.bias[[5, 9]] = torch.tensor([float("nan"), -float("nan")], device=device)
    actual = splade_head_topk(*problem, 3)
    assert actual.values[:, :2].isnan().all()
    assert actual.indices[:, :2].tolist() == [[5, 9], [5, 9]]


def test_no_sequences_and_no_tokens(device):
    for lengths in ([], [0, 0]):
        actual = splade_head_topk(*make_problem(lengths, 9, 8, device, bias=5.0), 4)
        assert actual.values.shape == actual.indices.shape == (len(lengths), 4)
        assert not actual.values.any()
        assert actual.indices.tolist() == [[0, 1, 2, 3]] * len(lengths)


def test_has_no_gradient(device):
    problem = make_problem(LENGTHS, 90, 8, device)
    problem.hidden.requires_grad_()
    assert not splade_head_topk(*problem, 7).values.requires_grad


def test_a_bias_of_another_length_is_refused_whatever_the_slices(device, monkeypatch):
    hidden, weight, _, cu_seqlens = make_problem([3], 256, 8, device)
    for budget in (1, topk.REPS_AT_ONCE):
        monkeypatch.setattr(topk, "REPS_AT_ONCE", budget)
        for length in (255, 300):
            with pytest.raises(ValueError, match=rf"bias must be \[V\] = \[256\].*\({length},\)"):
                splade_head_topk(hidden, weight, torch.zeros(length, device=device), cu_seqlens, 2)


@pytest.mark.parametrize("k", [0, 10, -1, 2.5])
def test_k_is_checked(k, device):
    with pytest.raises(ValueError, match=rf"from 1 to the V = 9 vocabulary entries, got {k}"):
        splade_head_topk(*make_problem([3], 9, 8, device), k)
