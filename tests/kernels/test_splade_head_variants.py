"""Other activations and poolings of the SPLADE head: kernels, CPU version and autograd."""

import pytest
import torch

from sparton.kernels.segment_max.backward import segment_max_backward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.forward import segment_max_forward
from sparton.kernels.splade_head import (
    function,
    splade_head,
    splade_head_reference,
    sum_function,
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

CUT = BackwardConfig(chunk=16, share=32, block_e=8)
SHAPES = [*SHAPES[:-1], pytest.param(*SHAPES[-1], marks=pytest.mark.slow)]


def launch_max(problem, upstream, activation):
    """Representations and gradients of the Triton kernels for max pooling."""
    reps, argmax = segment_max_forward(*problem, activation=activation, config=SMALL)
    gradients = segment_max_backward(
        upstream, reps, argmax, problem.hidden, problem.weight, problem.cu_seqlens,
        bias_dtype=None if problem.bias is None else problem.bias.dtype,
        activation=activation, config=CUT,
    )  # fmt: skip
    return reps, *(x for x in gradients if x is not None)


def leaves_of(problem):
    return [None if x is None else x.detach().clone().requires_grad_() for x in problem[:3]]


@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize(("lengths", "V", "D", "bias"), SHAPES)
def test_log1p_relu_of_the_maximum(lengths, V, D, bias, dtype, device):
    problem = make_problem(lengths, V, D, device, dtype=dtype, bias=bias)
    upstream = upstream_for(problem)
    results = launch_max(problem, upstream, "log1p_relu")
    assert_close_to_truth(results, problem, upstream, activation="log1p_relu")


@pytest.mark.slow
def test_the_activations_are_told_apart(device):
    """Negative control of every comparison with the truth in this file."""
    problem = make_problem(LENGTHS, 37, 24, device)
    upstream = upstream_for(problem)
    good = launch_max(problem, upstream, "log1p_relu")
    other = launch_max(problem, upstream, "relu")
    for bad in (
        *((*good[:i], other[i], *good[i + 1 :]) for i in range(4)),
        *((*good[:i], good[i] * 1.01, *good[i + 1 :]) for i in range(4)),
    ):
        with pytest.raises(AssertionError):
            assert_close_to_truth(bad, problem, upstream, activation="log1p_relu")


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_tiny_logits_keep_their_precision(activation, device):
    """log1p of a small number is not the logarithm of a rounded sum."""
    hidden = torch.logspace(-12, 3, 40, device=device)[:, None]
    problem = (hidden, torch.ones(1, 1, device=device), None)
    bounds = torch.arange(41, dtype=torch.int32, device=device)
    reps, _ = segment_max_forward(*problem, bounds, activation=activation, config=SMALL)
    exact = splade_head_reference(
        *(None if x is None else x.double() for x in problem), bounds, activation=activation
    )
    torch.testing.assert_close(reps.double(), exact, rtol=5e-7, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close((hidden + 1).log().double(), exact, rtol=5e-7, atol=0)


VARIANTS = [("max", "log1p_relu"), ("sum", "relu"), ("sum", "log1p_relu")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("pooling", "activation"), VARIANTS)
def test_autograd_of_the_operator(pooling, activation, dtype, device):
    """float64 on the CPU alone, where only representations are fp32."""
    variant = {"pooling": pooling, "activation": activation}
    device = torch.device("cpu") if dtype == torch.float64 else device
    problem = make_problem(LENGTHS, 37, 24, device, dtype=dtype)
    upstream = upstream_for(problem)
    leaves = leaves_of(problem)
    reps = splade_head(*leaves, problem.cu_seqlens, **variant)
    truth = with_gradients(problem, upstream, torch.float64, **variant)
    assert reps.dtype == torch.float32
    results = (reps.detach(), *torch.autograd.grad(reps, leaves, upstream))
    for actual, exact in zip(results, truth, strict=True):
        assert error(actual, exact) < 1e-5 < error(actual * 1.01, exact)


def test_registration(device):
    problem = make_problem(LENGTHS, 37, 24, device)
    operands = (*leaves_of(problem), problem.cu_seqlens)
    torch.library.opcheck(function._head.registered, (*operands, "log1p_relu", False, True))
    torch.library.opcheck(sum_function.sum_head.registered, (*operands, "relu"))
    without_bias = (*operands[:2], None, problem.cu_seqlens)
    torch.library.opcheck(sum_function.sum_head.registered, (*without_bias, "log1p_relu"))
    for needs in ((True, True, True), (True, False, False), (False, False, True)):
        hidden, weight, *rest = (x.detach() for x in operands)
        transposed = (x.T.contiguous().T for x in (hidden, weight))
        arguments = (upstream_for(problem), *transposed, *rest, "relu", list(needs))
        torch.library.opcheck(sum_function.sum_head.registered_backward, arguments)


@pytest.mark.parametrize(("pooling", "activation"), VARIANTS)
def test_compiles_into_one_graph(pooling, activation, device):
    problem = make_problem(LENGTHS, 37, 24, device)
    leaves = leaves_of(problem)

    def loss(hidden, weight, bias):
        operands = (hidden * 2, weight, bias, problem.cu_seqlens)
        return splade_head(*operands, pooling=pooling, activation=activation).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(
        torch.autograd.grad(compiled(*leaves), leaves),
        torch.autograd.grad(loss(*leaves), leaves),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_unknown_names_are_refused(device):
    problem = make_problem([2], 3, 4, device)
    with pytest.raises(ValueError, match="activation must be one of relu, log1p_relu, got 'gelu'"):
        splade_head(*problem, activation="gelu")
    with pytest.raises(ValueError, match="pooling must be one of max, sum, got 'mean'"):
        splade_head(*problem, pooling="mean")
    with pytest.raises(ValueError, match="fp8 serves max pooling alone, got pooling='sum'"):
        splade_head(*problem, pooling="sum", fp8=True)
