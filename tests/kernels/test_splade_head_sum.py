"""Sum pooling of the SPLADE head: its kernels against float64, on the GPU or in the interpreter.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

import pytest
import torch

from sparton.kernels.segment_max.forward import segment_max_forward
from sparton.kernels.splade_head import sum_cpu
from sparton.kernels.splade_head.sum_backward import SumBackwardConfig, splade_head_sum_backward
from sparton.kernels.splade_head.sum_cpu import (
    splade_head_sum_backward_cpu,
    splade_head_sum_forward_cpu,
)
from tests.kernels.problems import (
    DTYPES,
    LENGTHS,
    SHAPES,
    SMALL,
    assert_close_to_truth,
    error,
    first_of,
    make_problem,
    upstream_for,
    with_gradients,
)

TILES = SumBackwardConfig(tokens=64, logits=64 * 64, launch=SMALL)


def sum_forward(problem, activation, config=SMALL):
    reps, nothing = segment_max_forward(
        *problem, pooling="sum", activation=activation, config=config
    )
    assert nothing.numel() == 0
    return reps


@pytest.mark.quick(3)
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "V", "D", "bias"), SHAPES)
def test_sums(lengths, V, D, bias, dtype, activation, device):
    problem = make_problem(lengths, V, D, device, dtype=dtype, bias=bias)
    reps = sum_forward(problem, activation)
    exact = with_gradients(
        problem, upstream_for(problem), torch.float64, pooling="sum", activation=activation
    )[0]
    assert reps.dtype == torch.float32
    # The last factor of a product of T numbers is off by T roundings at most.
    assert (reps - exact).abs().max() < 6e-8 * (4 + max(lengths)) + 1e-6 * exact.max()
    assert error(reps, exact) < 2e-6 < error(reps * (1 + 1e-5), exact)
    assert not reps[problem.cu_seqlens.diff() == 0].any()
    assert not reps[exact == 0].any()
    on_cpu = splade_head_sum_forward_cpu(
        *(None if x is None else x.cpu().double() for x in problem[:3]), problem.cu_seqlens.cpu(),
        activation=activation,
    )  # fmt: skip
    assert error(on_cpu, exact.cpu()) < 1e-7


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4, 1e9])
def test_sums_of_many_small_and_large_logits(size, device):
    """No product of factors overflows, and small ones are not lost among them."""
    problem = make_problem([700, 3], 19, 8, device, bias=None)
    problem = problem._replace(hidden=problem.hidden * size)
    exact = with_gradients(problem, upstream_for(problem), torch.float64, pooling="sum")[0]
    reps = sum_forward(problem, "relu")
    assert (reps - exact).abs().max() < 1e-5 + 1e-6 * exact.max()
    assert error(reps, exact) < (1e-2 if size < 1e-3 else 2e-6)


def test_nan_in_a_sum_stays_visible_and_where_it_is(device):
    problem = make_problem([3, 40, 5], 8, 8, device)
    clean = sum_forward(problem, "relu")
    problem.hidden[20] = float("nan")
    reps = sum_forward(problem, "relu")
    assert reps[1].isnan().all()
    assert torch.equal(reps[::2], clean[::2])
    problem.hidden[3:43] = 1e25  # products of these are beyond fp32
    reps = sum_forward(problem, "relu")
    exact = with_gradients(problem, upstream_for(problem), torch.float64, pooling="sum")[0]
    assert not reps[1, exact[1] > 0].isfinite().any()
    assert torch.equal(reps[::2], clean[::2])


def launch_sum(problem, upstream, activation="relu", config=TILES):
    """Representations and gradients of the Triton kernels for sum pooling."""
    reps = sum_forward(problem, activation)
    gradients = splade_head_sum_backward(upstream, *problem, activation=activation, config=config)
    return reps, *(x for x in gradients if x is not None)


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize(("lengths", "V", "D", "bias"), [*SHAPES, (LENGTHS, 150, 12, 0.5)])
def test_gradients_of_sums(lengths, V, D, bias, dtype, activation, device):
    """The last shape has tiles of tokens and of vocabulary; sequences go on in the next tile."""
    problem = make_problem(lengths, V, D, device, dtype=dtype, bias=bias)
    upstream = upstream_for(problem)
    results = launch_sum(problem, upstream, activation)
    variant = {"pooling": "sum", "activation": activation}
    assert [x.dtype for x in results[1:3]] == [dtype, dtype]
    assert_close_to_truth(results, problem, upstream, **variant)


@pytest.mark.slow
def test_gradients_of_sums_notice_small_faults(device):
    problem = make_problem(LENGTHS, 150, 12, device, dtype=torch.float16, bias=0.5)
    upstream = upstream_for(problem)
    good = launch_sum(problem, upstream)
    shuffled = launch_sum(problem, upstream.roll(1, 0))
    dropped_tile = good[2].clone()
    dropped_tile[64:128] = 0
    for bad in (
        *((*good[:i], good[i] * 1.01, *good[i + 1 :]) for i in range(1, 4)),
        (good[0], *shuffled[1:]),
        (*good[:2], dropped_tile, good[3]),
        launch_sum(problem, upstream, "log1p_relu"),
    ):
        with pytest.raises(AssertionError):
            assert_close_to_truth(bad, problem, upstream, pooling="sum")


def test_gradients_of_sums_are_repeatable_and_blind_to_strides(device):
    problem = make_problem([5, 0, 121, 1], 70, 24, device, dtype=torch.float16)
    upstream = upstream_for(problem)
    strided = torch.stack((upstream, torch.full_like(upstream, float("nan"))), -1)[..., 0]
    assert not strided.is_contiguous()
    expected = launch_sum(problem, upstream)
    for again in (upstream, strided):
        for a, b in zip(expected, launch_sum(problem, again), strict=True):
            assert torch.equal(a, b)
    one_tile = launch_sum(problem, upstream, config=SumBackwardConfig(launch=SMALL))
    for a, b in zip(expected, one_tile, strict=True):
        assert error(a, b.double()) < 1e-3


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_sums_of_no_tokens(lengths, device):
    problem = make_problem(lengths, 9, 8, device, bias=5.0)
    reps, *gradients = launch_sum(problem, upstream_for(problem))
    assert reps.shape == (len(lengths), 9)
    assert not any(x.any() for x in (reps, *gradients))


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_only_wanted_gradients_of_sums(wanted, device):
    problem = make_problem([5, 3], 9, 8, device, bias=1.0)
    upstream = upstream_for(problem)
    names = ("hidden", "weight", "bias")
    needs = {f"need_{name}": name == wanted for name in names}
    full = dict(zip(names, launch_sum(problem, upstream)[1:], strict=True))
    gradients = splade_head_sum_backward(upstream, *problem, **needs, config=TILES)
    on_cpu = splade_head_sum_backward_cpu(
        upstream.cpu(), *(x.cpu() for x in problem), activation="relu", **needs
    )
    for name, actual, other in zip(names, gradients, on_cpu, strict=True):
        if name == wanted:
            assert torch.equal(actual, full[name])
            torch.testing.assert_close(actual.cpu(), other)
        else:
            assert actual is None
            assert other is None


def test_the_gradient_of_nan_is_nan(device):
    problem = make_problem([3, 4], 8, 8, device, bias=1.0)
    problem.hidden[3:] = float("nan")
    _, dhidden, dweight, dbias = launch_sum(problem, upstream_for(problem))
    assert dhidden[:3].isfinite().all()
    assert all(x.isnan().all() for x in (dhidden[3:], dweight, dbias))


@pytest.mark.parametrize("budget", [(1, 1), (7, 5), (2**20, 2**20)])
def test_cpu_tiles_of_sums_do_not_change_the_result(budget, monkeypatch):
    problem = make_problem(LENGTHS, 11, 4, torch.device("cpu"), dtype=torch.float64)
    upstream = upstream_for(problem)
    truth = with_gradients(problem, upstream, torch.float64, pooling="sum")
    monkeypatch.setattr(sum_cpu, "TOKENS_AT_ONCE", budget[0])
    monkeypatch.setattr(sum_cpu, "VOCABULARY_AT_ONCE", budget[1])
    gradients = splade_head_sum_backward_cpu(upstream, *problem)
    results = (splade_head_sum_forward_cpu(*problem), *gradients)
    for actual, exact in zip(results, truth, strict=True):
        assert error(actual, exact) < 1e-7


def test_sum_launchers_refuse_what_does_not_fit(device):
    problem = make_problem([5, 3], 9, 8, device)
    with pytest.raises(ValueError, match=r"\[2, 9\], got \(1, 9\)"):
        splade_head_sum_backward(upstream_for(problem)[:1], *problem, config=TILES)
