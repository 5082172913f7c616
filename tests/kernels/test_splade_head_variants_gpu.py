"""Sum pooling, the second log1p and the largest entries at real sizes, on a GPU."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from sparton.kernels.segment_max.forward import (
    FULL_PRECISION,
    forward_configs,
    segment_max_forward,
)
from sparton.kernels.segment_max.portable import PortableConfig
from sparton.kernels.splade_head import (
    splade_head,
    splade_head_reference,
    splade_head_topk,
    topk,
)
from sparton.kernels.splade_head.sum_backward import SumBackwardConfig, splade_head_sum_backward
from tests.devices import nothing_waits
from tests.kernels.gpu_problems import DTYPES, gradients, operands
from tests.kernels.problems import error

pytestmark = pytest.mark.gpu
VARIANTS = [("max", "log1p_relu"), ("sum", "relu"), ("sum", "log1p_relu")]
LENGTHS = [*range(5, 65, 2), 0, *range(20, 257, 6), 0]


@torch.no_grad()
def is_ambiguous(hidden, weight, bias, cu_seqlens, *, pooling, **_):
    """Entries ``[N, V]`` whose gradient may go elsewhere in fp32 than in float64: the sign of a
    logit is not sure, or which of two is the greater."""
    logits = hidden.double() @ weight.double().T + bias.double()
    found = torch.zeros(len(cu_seqlens) - 1, len(weight), dtype=torch.bool, device="cuda")
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        part = logits[start:stop]
        if pooling == "sum":
            found[n] = (part.abs() < 1e-5).any(0)
        elif stop > start:
            first, second = part.sort(0, descending=True).values[:2]
            found[n] = (first.abs() < 1e-5) | (first - second < 1e-5)
    return found


def peak_beyond(function, *results):
    """Bytes at the peak of a second call beyond what was allocated before it and ``results``."""
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() - before - sum(results)


@pytest.mark.parametrize("bias", [1.0, -3.0])
@pytest.mark.parametrize("D", [768, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pooling", "activation"), VARIANTS)
def test_real_sizes_against_float64(pooling, activation, dtype, D, bias):
    """A vocabulary of odd size; D = 100 in 16 bit is too narrow for tensor descriptors."""
    variant = {"pooling": pooling, "activation": activation}
    values = operands(LENGTHS, 5003, D, dtype, bias=bias)
    leaves = [x.requires_grad_() for x in values[:3]]
    upstream = torch.randn(len(LENGTHS), 5003, device="cuda")
    unsure = is_ambiguous(*values, **variant)
    assert unsure.float().mean() < 0.05
    upstream[unsure] = 0.0
    reps = splade_head(*values, **variant)
    truth = [x.detach().double().requires_grad_() for x in leaves]
    exact = splade_head_reference(*truth, values[3], **variant)
    rounded = [x.detach().to(dtype).requires_grad_() for x in leaves]
    eager = splade_head_reference(*rounded, values[3], **variant)
    assert error(reps, exact) < 2e-5 < error(reps * 1.001, exact)
    assert error(reps, exact) <= error(eager, exact) + 5e-6
    assert not reps[[30, -1]].any()

    allowed = torch.finfo(dtype).eps / 2 + 2e-3
    for actual, expected, same_precision in zip(
        gradients(reps, leaves, upstream),
        gradients(exact, truth, upstream),
        gradients(eager, rounded, upstream),
        strict=True,
    ):
        assert error(actual, expected) <= error(same_precision, expected) + allowed
        assert error(actual, expected) <= allowed < error(actual * 1.01, expected)


def listed_configs(kinds=(object,)):
    return [
        (dtype, i)
        for dtype in DTYPES
        for i, config in enumerate(forward_configs(dtype, (9, 0)))
        if isinstance(config, kinds)
    ]


def config_of(dtype, index):
    configs = forward_configs(dtype, torch.cuda.get_device_capability())
    if index >= len(configs):
        pytest.skip("not listed for this GPU")
    return configs[index]


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize(("dtype", "index"), listed_configs())
def test_sums_by_every_listed_configuration(dtype, index, activation):
    values = operands(LENGTHS, 3001, 768, dtype, bias=-1.0, seed=index)
    variant = {"pooling": "sum", "activation": activation}
    reps, _ = segment_max_forward(*values, **variant, config=config_of(dtype, index))
    # Full precision products of the same operands, in another order of summation.
    expected, _ = segment_max_forward(
        *(x.float() for x in values[:3]), values[3], **variant, config=FULL_PRECISION[0]
    )
    torch.testing.assert_close(reps, expected, rtol=1e-4, atol=1e-4)
    assert (reps > 0).float().mean() > 0.5
    again, _ = segment_max_forward(*values, **variant, config=config_of(dtype, index))
    assert torch.equal(again, reps)
    values[0][: values[3][1]] = float("nan")
    broken, _ = segment_max_forward(*values, **variant, config=config_of(dtype, index))
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], reps[1:])


@pytest.mark.parametrize(("dtype", "index"), listed_configs((PortableConfig,)))
def test_gradients_of_sums_by_every_listed_configuration(dtype, index):
    """Several tiles of either kind, the last ones short; then one tile for all."""
    values = operands(LENGTHS, 3001, 768, dtype, bias=-1.0, seed=index)
    upstream = torch.randn(len(LENGTHS), 3001, device="cuda")
    launch = config_of(dtype, index)
    cut = SumBackwardConfig(tokens=1000, logits=600_000, launch=launch)
    results = splade_head_sum_backward(upstream, *values, config=cut)
    expected = splade_head_sum_backward(
        upstream, *(x.float() for x in values[:3]), values[3],
        config=SumBackwardConfig(launch=FULL_PRECISION[0]),
    )  # fmt: skip
    again = splade_head_sum_backward(upstream, *values, config=cut)
    whole = splade_head_sum_backward(upstream, *values, config=SumBackwardConfig(launch=launch))
    allowed = torch.finfo(dtype).eps / 2 + 2e-3
    for actual, truth, same, other in zip(results, expected, again, whole, strict=True):
        assert error(actual, truth) < allowed < error(actual * 1.01, truth)
        assert torch.equal(actual, same)
        assert error(actual, other) < torch.finfo(dtype).eps / 2 + 1e-6


@pytest.mark.parametrize("length", [1024, 16384, 600_000])
def test_long_sums(length):
    values = operands([7, length, 3], 130, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in values[:3]]
    reps = splade_head(*values, pooling="sum")
    truth = [x.detach().double().requires_grad_() for x in leaves]
    exact = splade_head_reference(*truth, values[3], pooling="sum")
    upstream = torch.randn_like(reps)
    assert error(reps, exact) < 2e-5
    for actual, expected in zip(
        gradients(reps, leaves, upstream), gradients(exact, truth, upstream), strict=True
    ):
        assert error(actual, expected) < 6e-3


def test_memory_of_sums_does_not_grow_with_the_logits():
    """Forward: the representations alone. Backward: beside gradients and a contiguous upstream
    gradient a tile of 64 MiB and fp32 sums; the logits would be 1.7 GiB."""
    values = operands([128] * 128, 54_001, 256, torch.bfloat16)
    leaves = [x.requires_grad_() for x in values[:3]]
    with torch.no_grad():
        assert peak_beyond(lambda: splade_head(*values, pooling="sum"), 128 * 54_001 * 4) < 2**20
    reps = splade_head(*values, pooling="sum").sum()
    assert peak_beyond(lambda: torch.autograd.grad(reps, leaves, retain_graph=True)) < 2**28


def test_topk_equals_a_stable_sort_and_stays_in_bounds(monkeypatch):
    values = operands(LENGTHS, 30_522, 384, torch.bfloat16, bias=-2.5)
    reps = splade_head(*values)
    expected, indices = reps.sort(dim=1, descending=True, stable=True)
    for at_once in (topk.REPS_AT_ONCE, 2**18):
        monkeypatch.setattr(topk, "REPS_AT_ONCE", at_once)
        actual = splade_head_topk(*values, 400)
        assert torch.equal(actual.values, expected[:, :400])
        assert torch.equal(actual.indices, indices[:, :400])
    assert peak_beyond(lambda: splade_head_topk(*values, 400)) < 2**24
    assert reps.numel() * 12 > 2**24


def test_inductor_compiles_sums_into_one_graph():
    values = operands([100, 20], 1000, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in values[:3]]

    def loss(hidden, weight, bias):
        return splade_head(2 * hidden, weight, bias, values[3], pooling="sum").sum()

    compiled = torch.compile(loss, fullgraph=True)
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    for a, b in zip(actual, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert error(a, b) < 2e-2


def test_nothing_waits_for_the_device():
    values = operands([100, 20, 0], 1000, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in values[:3]]
    for each in (nullcontext(), nothing_waits()):  # the first round compiles
        with each:
            for pooling, activation in VARIANTS:
                reps = splade_head(*leaves, values[3], pooling=pooling, activation=activation)
                reps.sum().backward()
            splade_head_topk(*values, 400)
