"""FP8 search for the maximum, on the GPU or in Triton's interpreter; its emulation on any machine.

N sequences, T packed tokens, D hidden, V vocabulary. The interpreter multiplies e4m3 operands
correctly, but its conversion to e4m3 loses NaN, and the carry of a rounding that reaches the next
power of two. There the kernels get operands that PyTorch rounded.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor

from sparton.kernels.segment_max.backward import segment_max_backward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.forward import (
    HOPPER_FP8,
    PORTABLE_FP8,
    forward_configs,
    segment_max_forward,
)
from sparton.kernels.segment_max.hopper import HopperConfig
from sparton.kernels.segment_max.operands import check_fp8
from sparton.kernels.segment_max.portable import PortableConfig
from sparton.kernels.segment_max.quantize_cpu import Norms, Quantized, quantize_operands_cpu
from sparton.kernels.splade_head import fp8, fp8_cpu, function, splade_head
from sparton.kernels.splade_head.fp8 import (
    RescoreConfig,
    rescore,
    splade_head_forward_fp8,
)
from sparton.kernels.splade_head.fp8_cpu import splade_head_forward_fp8_cpu
from tests.kernels import problems
from tests.kernels.problems import Problem, error

SERVED = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not SERVED, reason="this GPU has no FP8 tensor cores"
)
needs_gpu = pytest.mark.skipif(not SERVED, reason="needs a GPU with FP8 tensor cores")
SMALL = PortableConfig(False, 16, 32, 32, num_warps=4, num_stages=2, segment=16, group_tokens=40)
LENGTHS = [5, 0, 17, 64, 1, 3, 0, 0, 33, 2, 0]


@pytest.fixture(autouse=True)
def rounded_by_pytorch(monkeypatch):
    if not SERVED:
        monkeypatch.setattr(fp8, "quantize_operands", quantize_operands_cpu)


def make_problem(lengths, V, D, device, *, dtype=torch.bfloat16, bias=-2.0, spread=0):
    """``spread``: the norms of vocabulary rows vary by up to 2 ** spread, those of sequences, which
    share a scale, by no more than 2 ** 8."""
    problem = problems.make_problem(lengths, V, D, device, bias=bias)
    generator = torch.Generator().manual_seed(spread)
    hidden, weight = problem[:2]
    if spread:
        sequences, rows = (
            torch.exp2(-most * torch.rand(n, 1, generator=generator)).to(device)
            for n, most in ((len(lengths), min(spread, 8)), (V, spread))
        )
        hidden = hidden * sequences.repeat_interleave(problem.cu_seqlens.diff().long(), dim=0)
        weight = weight * rows
    return problem._replace(hidden=hidden.to(dtype), weight=weight.to(dtype))


def launch(problem: Problem, **options) -> tuple[Tensor, Tensor]:
    if not SERVED:
        options.setdefault("config", SMALL)
    return splade_head_forward_fp8(*problem, **options)


def logits_of(problem: Problem) -> Tensor:
    """float64 ``[T, V]``."""
    logits = problem.hidden.double() @ problem.weight.double().T
    return logits if problem.bias is None else logits + problem.bias.double()


def per_sequence(problem: Problem, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its first token of every sequence."""
    rows = []
    for start, stop in pairwise(problem.cu_seqlens.tolist()):
        if start == stop:
            nothing = logits.new_zeros(logits.shape[1])
            rows.append((nothing, (nothing - 1).int()))
        else:
            best, token = logits[start:stop].max(0)
            rows.append((best, (token + start).int()))
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def at(logits: Tensor, argmax: Tensor) -> Tensor:
    return logits.gather(0, argmax.clamp_min(0).long())


@pytest.mark.parametrize("cast", [torch.float8_e4m3fn, torch.float16])
@pytest.mark.parametrize(("V", "D", "bias"), [(37, 24, -2.0), (21, 31, None), (1, 1, 3.0)])
def test_scaled_search_against_float64(V, D, bias, cast, device):
    """float16 holds every e4m3 number: the products are the same."""
    problem = make_problem(LENGTHS, V, D, device, bias=bias, spread=4)
    *rounded, scales = quantize_operands_cpu(*(x.cpu() for x in problem[:2]))
    scales = tuple(scale.to(device) for scale in scales)
    operands = [x.float().to(device, cast) for x in rounded]
    config = None if SERVED else SMALL
    reps, argmax = segment_max_forward(*operands, *problem[2:], scales=scales, config=config)
    restored = (x.double() * scale[:, None] for x, scale in zip(operands, scales, strict=True))
    best, token = per_sequence(problem, logits_of(Problem(*restored, *problem[2:])))
    truth = best.relu().log1p()
    active = reps > 0
    allowed = 1e-3 if SERVED and cast == torch.float8_e4m3fn else 1e-6
    assert error(reps, truth) <= allowed < error(reps * 1.002, truth)
    assert (argmax == token)[active].double().mean() > 0.98
    unscaled, _ = segment_max_forward(*(x.float() for x in operands), *problem[2:], config=SMALL)
    assert error(unscaled, truth) > allowed


@pytest.mark.parametrize("config", [*HOPPER_FP8, *PORTABLE_FP8])
def test_every_configuration(config, device):
    if isinstance(config, HopperConfig) and device.type == "cpu":
        pytest.skip("Gluon has no interpreter")
    if config.descriptors and device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    problem = make_problem([300, 20, 0, 256, 1, 90, 33], config.block_v + 3, 136, device)
    reps, argmax = launch(problem, config=config._replace(group_tokens=320))
    expected, expected_argmax = splade_head_forward_fp8_cpu(*(x.cpu() for x in problem))
    active = (reps > 0).cpu()
    assert active.double().mean() > 0.2
    same = argmax.cpu() == expected_argmax
    assert same[active].double().mean() > 0.99
    assert error(reps.cpu()[same], expected[same].double()) < 1e-6


def test_the_configurations():
    assert forward_configs(torch.float8_e4m3fn, (9, 0)) == HOPPER_FP8 + PORTABLE_FP8
    assert forward_configs(torch.float8_e4m3fn, (8, 9)) == PORTABLE_FP8


def forwards(device):
    return [launch, splade_head_forward_fp8_cpu] if device.type == "cpu" else [launch]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "V", "D", "bias", "spread"),
    [
        (LENGTHS, 37, 24, -2.0, 0),
        ([3, 0, 20], 37, 24, None, 10),
        ([1], 1, 1, 3.0, 0),
        ([0, 1, 0], 17, 7, 1.0, 0),
        ([13] * 7, 61, 31, 0.0, 4),
        pytest.param([40, 9] * 18, 35, 300, 0.0, 0, marks=pytest.mark.slow),
    ],
)
def test_values_are_exact_at_the_winners(lengths, V, D, bias, spread, dtype, device):
    problem = make_problem(lengths, V, D, device, dtype=dtype, bias=bias, spread=spread)
    logits = logits_of(problem)
    bounds = problem.cu_seqlens
    for forward in forwards(device):
        reps, argmax = forward(problem) if forward is launch else forward(*problem)
        active = reps > 0
        assert active.any()
        truth = at(logits, argmax).relu().log1p() * active
        assert error(reps, truth) <= 2e-6 < error(reps * 1.001, truth)
        inside = (argmax >= bounds[:-1, None]) & (argmax < bounds[1:, None])
        assert inside[active].all()
        assert not reps[bounds.diff() == 0].any()
        assert (argmax[bounds.diff() == 0] == -1).all()


def test_kernels_and_emulation_agree(device):
    problem = make_problem(LENGTHS, 61, 40, device)
    reps, argmax = launch(problem)
    expected, expected_argmax = splade_head_forward_fp8_cpu(*(x.cpu() for x in problem))
    same = argmax.cpu() == expected_argmax
    assert same.double().mean() > (0.99 if SERVED else 0.9999)
    torch.testing.assert_close(reps.cpu()[same], expected[same], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entries_that_are_barely_active_stay(dtype, device, monkeypatch):
    problem = make_problem([30] * 5, 400, 64, device, dtype=dtype, bias=-6.0)
    exact = (logits_of(problem).view(5, 30, -1).amax(1) > 0).to(device)
    assert 0.005 < exact.double().mean() < 0.1

    def kept(forward):
        reps, _ = forward(problem) if forward is launch else forward(*problem)
        assert not ((reps > 0) & ~exact).any()
        return float(((reps > 0) & exact).sum() / exact.sum())

    # Of two tokens that nearly tie at zero, the one below it may win.
    assert all(kept(forward) > 0.985 for forward in forwards(device))
    monkeypatch.setattr(fp8_cpu, "MARGIN", 0.0)
    assert all(kept(forward) < 0.97 for forward in forwards(device))


def one_scale(hidden: Tensor, weight: Tensor, *, by: str, norms: Norms) -> Quantized:
    """One scale for all rows of the vocabulary, too."""
    return moved(
        quantize_operands_cpu(hidden.cpu(), weight.cpu(), by="matrix", norms=norms), hidden.device
    )


def one_bit(hidden: Tensor, weight: Tensor, *, by: str, norms: Norms) -> Quantized:
    """The scales that are asked for, but only the first of e4m3's three bits."""
    *rounded, scales = quantize_operands_cpu(hidden.cpu(), weight.cpu(), by=by, norms=norms)
    tokens, rows = ((x.view(torch.uint8) & 0xFC).view(torch.float8_e4m3fn) for x in rounded)
    return moved((tokens, rows, scales), hidden.device)


def moved(quantized: Quantized, device: torch.device) -> Quantized:
    tokens, rows, (of_tokens, of_rows) = quantized
    assert of_tokens is None
    return tokens.to(device), rows.to(device), (None, of_rows.to(device))


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "worse"), [(0, one_bit), (24, one_bit), (24, one_scale)])
def test_winners_agree_with_the_exact_ones(spread, worse, device, monkeypatch):
    """Random logits, the hardest case: among 48 of them the first two are often close.

    One scale for a whole matrix is as good until norms differ by more than e4m3's own range: those
    of rows of the vocabulary may.
    """
    problem = make_problem([48] * 12, 96, 64, device, bias=None, spread=spread)
    logits = logits_of(problem)
    best, token = per_sequence(problem, logits)

    def agreement() -> float:
        argmax = launch(problem)[1]
        return float((argmax == token)[best > 0].double().mean())

    assert agreement() > 0.92
    monkeypatch.setattr(fp8, "quantize_operands", worse)
    assert agreement() < 0.9


def test_a_wrong_winner_nearly_ties(device):
    """What is lost is at most what rounding moved the two logits by."""
    problem = make_problem([48] * 12, 96, 64, device, bias=None)
    logits = logits_of(problem)
    best, token = per_sequence(problem, logits)
    tokens, rows, (_, scale) = quantize_operands_cpu(
        *(x.cpu() for x in problem[:2]), by="weight_row"
    )
    restored = tokens[:, :64].double().to(device), (rows.double() * scale[:, None]).to(device)
    restored = restored[0], restored[1][:, :64]
    moved = (logits_of(Problem(*restored, *problem[2:])) - logits).abs()
    reps, argmax = launch(problem)
    # Hopper's tensor cores add products of e4m3 with 13 bits below the largest one.
    allowed = (at(moved, token) + at(moved, argmax)) * 1.001 + (5e-3 if SERVED else 1e-6)

    def within(winners: Tensor) -> Tensor:
        return best - at(logits, winners) <= allowed

    assert within(argmax).all()
    assert (argmax != token).any()
    neighbour = argmax // 48 * 48 + (argmax + 1) % 48
    assert within(neighbour).double().mean() < 0.5
    exact = best.relu().log1p()
    assert error(reps, exact) < 5e-3 < error(at(logits, neighbour).relu().log1p(), exact)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [768, 384, 100])
def test_real_sizes(D, dtype, device):
    lengths = [*range(5, 65, 3), 0, *range(20, 257, 7), 512, 0]
    problem = make_problem(lengths, 5003, D, device, dtype=dtype, bias=-3.0)
    logits = logits_of(problem)
    best, token = per_sequence(problem, logits)
    configs = forward_configs(torch.float8_e4m3fn, torch.cuda.get_device_capability())
    if D <= 128 and triton.__version__ < "3.7":
        # It does not compile one chunk of the portable kernel's for Hopper.
        configs = tuple(x for x in configs if isinstance(x, HopperConfig) or not x.descriptors)
    for config in (None, *configs):
        reps, argmax = launch(problem, config=config)
        active = reps > 0
        truth = at(logits, argmax).relu().log1p() * active
        assert error(reps, truth) < 2e-6 < error(reps * 1.001, truth)
        assert 0.2 < active.double().mean() < 0.9
        assert (argmax == token)[active].double().mean() > 0.9
        exact, others = best.relu().log1p(), at(logits, argmax.roll(1, dims=1)).relu().log1p()
        assert error(reps, exact) < 1.5e-2 < error(others, exact)
        assert all(
            torch.equal(*pair) for pair in zip((reps, argmax), launch(problem, config=config))
        )


def test_zero_rows_and_huge_rows(device):
    problem = make_problem([7, 9, 20], 19, 24, device, bias=0.5)
    problem.hidden[2] = problem.hidden[7:16] = 0
    problem.weight[3] = 0
    problem.hidden[16:30] *= 1e20
    problem.weight[5] *= 1e6
    reps, argmax = launch(problem)
    token = per_sequence(problem, logits_of(problem))[1]
    won = at(logits_of(problem), argmax).relu().log1p()
    active = reps > 0
    assert reps.isfinite().all()
    assert error(reps, won * active) < 1e-6
    torch.testing.assert_close(reps[1], problem.bias.relu().log1p(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(reps[:, 3], reps[1, 3].expand(3), rtol=1e-6, atol=1e-6)
    assert (argmax == token)[active].double().mean() > 0.8


def test_faults_stay_visible(device):
    problem = make_problem([3, 4, 6], 8, 8, device, bias=1.0)
    problem.hidden[3:7] = float("nan")
    problem.hidden[8, 2] = float("inf")
    # The interpreter reads a NaN in e4m3 as a number.
    reps, _ = launch(problem) if SERVED else splade_head_forward_fp8_cpu(*problem)
    assert reps[0].isfinite().all()
    assert reps[1].isnan().all()
    assert not reps[2].isfinite().all()


@pytest.mark.parametrize(
    "config",
    [
        RescoreConfig(),
        RescoreConfig(8, 16, 4, 16, num_warps=2),
        RescoreConfig(2, 4, 8, 32, num_stages=2),
        RescoreConfig(64, 256, 16),
    ],
)
def test_rescoring_touches_only_positive_entries(config, device):
    problem = make_problem([5] * 11, 37, 24, device, bias=0.0)
    generator = torch.Generator().manual_seed(1)
    argmax = torch.randint(0, 55, (11, 37), generator=generator, dtype=torch.int32).to(device)
    before = torch.randn(11, 37, generator=generator).to(device)
    before[2] = float("nan")
    before[3:5] = 0
    before[7] = 1
    truth = at(logits_of(problem), argmax).relu().log1p()
    reps = before.clone()
    rescore(reps, argmax.where(before > 0, -(2**30)), *problem[:3], config=config)
    active = before > 0
    assert torch.equal(reps[~active].nan_to_num(9), before[~active].nan_to_num(9))
    assert error(reps[active], truth[active]) < 1e-6 < error(reps[active] * 1.001, truth[active])
    negative = active & (truth == 0)
    assert negative.any()
    assert not reps[negative].any()


def test_bitwise_repeatable(device):
    problem = make_problem(LENGTHS, 37, 24, device)
    first, second = launch(problem), launch(problem)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    alone, nothing = launch(problem, argmax=False)
    assert torch.equal(alone, first[0])
    assert nothing.numel() == 0


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_no_tokens(lengths, device):
    problem = make_problem(lengths, 9, 8, device, bias=5.0)
    reps, argmax = launch(problem)
    assert reps.shape == argmax.shape == (len(lengths), 9)
    assert not reps.any()


@pytest.mark.slow
def test_gradients_are_those_at_the_winners(device):
    problem = make_problem(LENGTHS, 37, 24, device, dtype=torch.float16)
    reps, argmax = launch(problem)
    upstream = torch.randn(reps.shape, generator=torch.Generator().manual_seed(3)).to(device)
    cut = BackwardConfig() if SERVED else BackwardConfig(chunk=16, share=32, block_e=8)
    gradients = segment_max_backward(
        upstream, reps, argmax, *problem[:2], problem.cu_seqlens,
        bias_dtype=torch.float32, config=cut,
    )  # fmt: skip
    leaves = [x.double().requires_grad_() for x in problem[:3]]
    won = at(logits_of(Problem(*leaves, problem.cu_seqlens)), argmax)
    values = won.relu().log1p() * (reps > 0)
    for actual, truth in zip(gradients, torch.autograd.grad(values, leaves, upstream.double())):
        assert error(actual, truth) < 5e-4 < error(actual * 1.01, truth)


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_the_operator(activation, device):
    problem = make_problem(LENGTHS, 37, 24, device)
    leaves = [x.detach().requires_grad_() for x in problem[:3]]
    reps = splade_head(*leaves, problem.cu_seqlens, activation=activation, fp8=True)
    forward = splade_head_forward_fp8 if SERVED else splade_head_forward_fp8_cpu
    expected, argmax = forward(*problem, activation=activation)
    assert torch.equal(reps, expected)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    won = at(logits_of(Problem(*exact, problem.cu_seqlens)), argmax).relu().log1p()
    truth = (won.log1p() if activation == "log1p_relu" else won) * (reps > 0)
    assert error(reps.detach(), truth.detach()) < 2e-6
    upstream = torch.randn(reps.shape, generator=torch.Generator().manual_seed(3)).to(device)
    gradients = torch.autograd.grad(reps, leaves, upstream)
    for actual, expected in zip(gradients, torch.autograd.grad(truth, exact, upstream.double())):
        assert error(actual, expected) < 4e-3 < error(actual * 1.01, expected)
    plain = splade_head(*leaves, problem.cu_seqlens, activation=activation)
    assert not torch.equal(plain, reps)


def test_compiles_into_one_graph_and_follows_autocast(device):
    problem = make_problem(LENGTHS, 37, 24, device)

    def run(hidden, weight, bias, cu_seqlens):
        return 3 * splade_head(hidden * 2, weight, bias, cu_seqlens, fp8=True)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*problem), run(*problem))
    full = [x.float() for x in problem[:3]]
    with torch.autocast(device.type, torch.bfloat16):
        reps = splade_head(*full, problem.cu_seqlens, fp8=True)
    assert torch.equal(reps, splade_head(*problem, fp8=True))
    arguments = [x.requires_grad_() for x in problem[:3]]
    torch.library.opcheck(
        function._head.registered, (*arguments, problem.cu_seqlens, "relu", True, True)
    )


def test_what_fp8_does_not_serve(device, monkeypatch):
    problem = make_problem([5, 3], 9, 8, device, dtype=torch.float32)
    for forward in forwards(device):
        with pytest.raises(ValueError, match=r"float32.*autocast"):
            forward(problem) if forward is launch else forward(*problem)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda:0")
    with pytest.raises(ValueError, match=r"8\.9.*8\.0 of Old GPU; leave fp8 off"):
        check_fp8(on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_fp8(on_gpu)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        *rounded, _ = quantize_operands_cpu(*(x.cpu() for x in problem[:2]))
        rounded = [x.to(device) for x in rounded]
        segment_max_forward(*rounded, *problem[2:], config=SMALL)
