"""What only a GPU can show: bfloat16, real tile sizes, long sequences, more than 2^31 elements."""

from contextlib import nullcontext

import pytest
import torch

from sparton.kernels.segment_max.backward import segment_max_backward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.forward import (
    FULL_PRECISION,
    PORTABLE,
    forward_configs,
    segment_max_forward,
)
from sparton.kernels.segment_max.hopper import HopperConfig
from sparton.kernels.splade_head import splade_head, splade_head_reference
from tests.devices import nothing_waits
from tests.kernels.gpu_problems import DTYPES, gradients, operands
from tests.kernels.problems import error

pytestmark = pytest.mark.gpu


def real_lengths(seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(5, 65, (40,), generator=generator).tolist()
    documents = torch.randint(20, 257, (40,), generator=generator).tolist()
    return [*queries, 0, *documents, 0]


def gradients_at(argmax, exact, leaves, upstream):
    """float64 gradients if these were the winning tokens. Sums in fp32 may settle near-ties
    differently from float64, and one entry that moves outweighs all rounding."""
    hidden, weight = (x.detach().double() for x in leaves[:2])
    g = upstream.double() * torch.exp(-exact.double()) * (exact > 0)
    logits = torch.zeros(hidden.shape[0], weight.shape[0], dtype=torch.float64, device="cuda")
    columns = torch.arange(weight.shape[0], device="cuda").expand_as(argmax)
    logits.index_put_((argmax.clamp_min(0).long(), columns), g, accumulate=True)
    return logits @ weight, logits.T @ hidden, g.sum(0)


@pytest.mark.parametrize("bias", [1.0, -3.0])
@pytest.mark.parametrize("D", [768, 384, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes_against_float64(dtype, D, bias):
    """A vocabulary of odd size; D = 100 in 16 bit is too narrow for tensor descriptors."""
    hidden, weight, shift, cu_seqlens = operands(real_lengths(), 5003, D, dtype, bias=bias)
    leaves = [x.requires_grad_() for x in (hidden, weight, shift)]
    upstream = torch.randn(cu_seqlens.numel() - 1, 5003, device="cuda")
    reps = splade_head(*leaves, cu_seqlens)
    truth = [x.detach().double().requires_grad_() for x in leaves]
    exact = splade_head_reference(*truth, cu_seqlens)
    rounded = [x.detach().to(dtype).requires_grad_() for x in leaves]
    eager = splade_head_reference(*rounded, cu_seqlens)
    assert error(reps, exact) < 2e-5 < error(reps * 1.001, exact)
    assert error(reps, exact) <= error(eager, exact) + 5e-6

    _, argmax = segment_max_forward(*(x.detach() for x in leaves), cu_seqlens)
    logits = truth[0].detach() @ truth[1].detach().T + truth[2].detach()
    won = logits.gather(0, argmax.clamp_min(0).long()).relu().log1p()
    active = reps > 0
    assert error(won[active], exact[active].detach()) < 2e-5
    assert (argmax[cu_seqlens.diff() == 0] == -1).all()
    stored = torch.finfo(dtype).eps / 2 + 2e-5
    results = zip(
        gradients(reps, leaves, upstream),
        gradients_at(argmax, exact.detach(), leaves, upstream),
        gradients(exact, truth, upstream),
        gradients(eager, rounded, upstream),
        strict=True,
    )
    for actual, at_winners, expected, same_precision in results:
        assert error(actual, at_winners) <= stored < error(actual * 1.01, at_winners)
        assert error(actual, expected) <= error(same_precision, expected) + 1e-2


def listed_configs():
    return [(dtype, i) for dtype in DTYPES for i in range(len(forward_configs(dtype, (9, 0))))]


@pytest.mark.parametrize(("dtype", "index"), listed_configs())
def test_every_listed_configuration(dtype, index):
    configs = forward_configs(dtype, torch.cuda.get_device_capability())
    if index >= len(configs):
        pytest.skip("not listed for this GPU")
    values = operands(real_lengths(index), 3001, 768, dtype, bias=-1.0)
    reps, argmax = segment_max_forward(*values, config=configs[index])
    # Full precision products of the same operands, in another order of summation.
    expected, expected_argmax = segment_max_forward(
        *(x.float() for x in values[:3]), values[3], config=FULL_PRECISION[0]
    )
    torch.testing.assert_close(reps, expected, rtol=1e-4, atol=1e-5)
    active = reps > 0
    assert active.float().mean() > 0.2
    assert (argmax == expected_argmax)[active].float().mean() > 0.999
    again = segment_max_forward(*values, config=configs[index])
    assert torch.equal(again[0], reps)
    assert torch.equal(again[1], argmax)
    values[0][: values[3][1]] = float("nan")
    broken, _ = segment_max_forward(*values, config=configs[index])
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], reps[1:])


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("bias", [None, -0.5])
def test_the_hopper_kernel_agrees_with_the_portable_one(pooling, activation, bias):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    hidden, weight, b, cu_seqlens = operands(real_lengths(7), 1000, 200, torch.bfloat16, bias=-0.5)
    arguments = (hidden, weight, None if bias is None else b, cu_seqlens)
    options = {"pooling": pooling, "activation": activation}
    expected, winners = segment_max_forward(*arguments, **options, config=PORTABLE[0])
    for config in (HopperConfig(), HopperConfig(128, 128, 3, group_tokens=999, band=3)):
        reps, argmax = segment_max_forward(*arguments, **options, config=config)
        torch.testing.assert_close(reps, expected, rtol=1e-4, atol=1e-5)
        if pooling == "max":
            assert (argmax == winners)[expected > 0].float().mean() > 0.999


@pytest.mark.parametrize("length", [1024, 16384, 600_000])
def test_long_sequences(length):
    values = operands([7, length, 3], 130, 64, torch.bfloat16)
    reps, argmax = segment_max_forward(*values)
    upstream = torch.randn_like(reps)
    results = segment_max_backward(
        upstream, reps, argmax, *values[:2], values[3], bias_dtype=torch.float32
    )
    truth = [x.double().requires_grad_() for x in values[:3]]
    exact = splade_head_reference(*truth, values[3])
    assert error(reps, exact.detach()) < 2e-5
    for actual, expected in zip(results, gradients(exact, truth, upstream), strict=True):
        assert error(actual, expected) < 4e-3


@pytest.mark.parametrize("concentrated", [False, True])
def test_backward_is_repeatable_and_independent_of_the_cut(concentrated):
    hidden, weight, shift, cu_seqlens = operands(real_lengths(), 30522, 384, torch.bfloat16)
    if concentrated:
        hidden[cu_seqlens[:-1].clamp_max(hidden.shape[0] - 1).long()] *= 4
    reps, argmax = segment_max_forward(hidden, weight, shift, cu_seqlens)
    upstream = torch.randn_like(reps)

    def run(config):
        return segment_max_backward(
            upstream, reps, argmax, hidden, weight, cu_seqlens,
            bias_dtype=torch.float32, config=config,
        )  # fmt: skip

    expected = run(BackwardConfig())
    for actual, again in zip(run(BackwardConfig()), expected, strict=True):
        assert torch.equal(actual, again)
    for config in (BackwardConfig(share=64), BackwardConfig(chunk=4096, block_e=32)):
        for actual, other in zip(run(config), expected, strict=True):
            assert error(actual, other) < 2e-3


@pytest.mark.alone
def test_more_than_2_to_the_31_representations():
    """Single tokens, so that N x V is what is large; checked at the far end."""
    N, V, D = 2**14 + 8, 2**17 + 1, 16
    hidden, weight, shift, cu_seqlens = operands([1] * N, V, D, torch.bfloat16, bias=-3.0)
    reps, argmax = segment_max_forward(hidden, weight, shift, cu_seqlens)
    exact = (hidden[-3:].double() @ weight.double().T + shift.double()).relu().log1p()
    assert reps.numel() > 2**31
    assert error(reps[-3:], exact) < 1e-5
    assert (argmax[-1] == N - 1).all()
    upstream = torch.ones(1, 1, device="cuda").expand(N, V)
    dhidden, dweight, dbias = segment_max_backward(
        upstream, reps, argmax, hidden, weight, cu_seqlens, bias_dtype=torch.float32
    )
    g = (reps[-3:] > 0) * torch.exp(-reps[-3:])
    assert error(dhidden[-3:], g.double() @ weight.double()) < 4e-3
    last = (reps[:, -3:] > 0) * torch.exp(-reps[:, -3:])
    assert error(dweight[-3:], last.T.double() @ hidden.double()) < 4e-3
    assert error(dbias[-3:], last.sum(0)) < 1e-5


@pytest.mark.alone
def test_more_than_2_to_the_31_hidden_units():
    T, V, D = 2**21 + 2**12, 64, 1024
    hidden = torch.zeros(T, D, dtype=torch.bfloat16, device="cuda")
    hidden[-5:] = 1
    weight = torch.randn(V, D, device="cuda").bfloat16()
    cu_seqlens = torch.tensor([0, 10, T - 5, T], dtype=torch.int32, device="cuda")
    reps, argmax = segment_max_forward(hidden, weight, None, cu_seqlens)
    assert hidden.numel() > 2**31
    exact = weight.double().sum(1).relu().log1p()
    assert error(reps[2], exact) < 1e-5
    assert not reps[:2].any()
    assert (argmax[2] == T - 5).all()
    dhidden, dweight, _ = segment_max_backward(
        torch.ones_like(reps), reps, argmax, hidden, weight, cu_seqlens, bias_dtype=None
    )
    g = (exact > 0) * torch.exp(-exact)
    assert error(dhidden[-5], g @ weight.double()) < 4e-3
    assert not dhidden[:-5].any()
    assert error(dweight, g[:, None] * torch.ones_like(weight)) < 4e-3


def test_without_gradients_nothing_but_the_result_is_allocated():
    hidden, weight, shift, cu_seqlens = operands([100] * 64, 30522, 384, torch.bfloat16)
    splade_head(hidden, weight, shift, cu_seqlens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        reps = splade_head(hidden, weight, shift, cu_seqlens)
    extra = torch.cuda.max_memory_allocated() - before - reps.numel() * 4
    assert extra < 2**20


def test_compiles_with_inductor_into_one_graph():
    hidden, weight, shift, cu_seqlens = operands([100, 20], 1000, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (hidden, weight, shift)]

    def loss(hidden, weight, shift):
        return splade_head(2 * hidden, weight, shift, cu_seqlens).sum()

    compiled = torch.compile(loss, fullgraph=True)
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    for a, b in zip(actual, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert error(a, b) < 2e-2


def test_nothing_waits_for_the_device():
    hidden, weight, shift, cu_seqlens = operands([100, 20, 0], 1000, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (hidden, weight, shift)]
    for each in (nullcontext(), nothing_waits()):  # the first round compiles
        with each:
            splade_head(*leaves, cu_seqlens).sum().backward()


@pytest.mark.alone
def test_long_sequences_of_a_real_model():
    """Sampled tokens and terms against full-precision sums at the winners that were returned."""
    hidden, weight, shift, cu_seqlens = operands([16384, 3, 65536], 30522, 768, torch.bfloat16)
    reps, argmax = segment_max_forward(hidden, weight, shift, cu_seqlens)
    exact = splade_head_reference(hidden.float(), weight.float(), shift, cu_seqlens)
    assert error(reps, exact) < 2e-5 < error(reps * 1.001, exact)
    starts, stops = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    assert ((argmax >= starts) & (argmax < stops))[reps > 0].all()
    upstream = torch.randn_like(reps)
    dhidden, dweight, dbias = segment_max_backward(
        upstream, reps, argmax, hidden, weight, cu_seqlens, bias_dtype=torch.float32
    )
    g = (upstream * torch.exp(-reps) * (reps > 0)).double()
    terms = torch.tensor([0, 15000, 30521], device="cuda")
    rows = hidden[argmax[:, terms].clamp_min(0)].double()
    assert error(dweight[terms], (g[:, terms, None] * rows).sum(0)) < 4e-3
    won = argmax[2].mode().values
    expected = ((argmax[2] == won) * g[2]) @ weight.double()
    assert error(dhidden[won], expected) < 4e-3
    assert error(dbias, g.sum(0)) < 1e-5
    never = torch.ones(hidden.shape[0], dtype=torch.bool, device="cuda")
    never[argmax[reps > 0].long()] = False
    assert never.any()
    assert not dhidden[never].any()


@pytest.mark.alone
def test_more_than_2_to_the_31_representations_without_winners():
    """A multilingual vocabulary, forward only, sequences of one to three tokens."""
    lengths, V = [1 + n % 3 for n in range(9000)], 250002
    hidden, weight, shift, cu_seqlens = operands(lengths, V, 64, torch.bfloat16, bias=-1.0)
    with torch.no_grad():
        reps = splade_head(hidden, weight, shift, cu_seqlens)
    assert reps.numel() > 2**31
    assert all(part.isfinite().all() for part in reps.split(1000))
    for rows in (slice(0, 3), slice(8590, 8593), slice(8997, 9000)):  # V x 8590 is beyond 2^31
        bounds = cu_seqlens[rows.start : rows.stop + 1]
        part = hidden[bounds[0] : bounds[-1]].double()
        exact = splade_head_reference(part, weight.double(), shift.double(), bounds - bounds[0])
        assert error(reps[rows], exact) < 1e-5


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_a_batch_without_tokens(lengths):
    hidden, weight, shift, cu_seqlens = operands(lengths, 30522, 768, torch.bfloat16, bias=9.0)
    leaves = [x.requires_grad_() for x in (hidden, weight, shift)]
    reps = splade_head(*leaves, cu_seqlens)
    assert reps.shape == (len(lengths), 30522)
    assert not reps.any()
    assert not any(g.any() for g in torch.autograd.grad(reps.sum(), leaves))


@pytest.mark.parametrize("backward", [False, True])
def test_a_cuda_graph_replays_with_new_operands_and_boundaries(backward):
    static = operands([100, 0, 20, 300, 7], 3001, 384, torch.bfloat16)
    fresh = operands([7, 200, 0, 119, 101], 3001, 384, torch.bfloat16, seed=1)
    upstream = torch.randn(5, 3001, device="cuda")

    def run(hidden, weight, shift, cu_seqlens):
        leaves = [x.detach().requires_grad_(backward) for x in (hidden, weight, shift)]
        reps = splade_head(*leaves, cu_seqlens)
        return [reps, *torch.autograd.grad(reps, leaves, upstream)] if backward else [reps]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            before = run(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(*static)
    expected = run(*fresh)
    for mine, new in zip(static, fresh, strict=True):
        mine.copy_(new)
    for _ in range(2):
        graph.replay()
        for actual, truth, old in zip(outputs, expected, before, strict=True):
            assert torch.equal(actual, truth)
            assert not torch.equal(old, truth)
