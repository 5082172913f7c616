"""The operator as PyTorch sees it: autograd, autocast, torch.compile, errors; any device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparton.kernels.splade_head import cpu, function, splade_head, splade_head_reference

LENGTHS = (5, 0, 17, 30, 1, 3, 0)
V, D = 37, 24


@pytest.fixture
def operands(device):
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor((0, *LENGTHS)).cumsum(0).int().to(device)
    hidden = torch.randn(sum(LENGTHS), D, generator=generator).to(device).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(device).requires_grad_()
    bias = torch.randn(V, generator=generator).to(device).requires_grad_()
    return hidden, weight, bias, cu_seqlens


def gradients(reps, leaves):
    upstream = torch.randn(reps.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(reps, leaves, upstream.to(reps))


def test_matches_the_reference(operands):
    *leaves, cu_seqlens = operands
    reps = splade_head(*operands)
    truth = [x.detach().double().requires_grad_() for x in leaves]
    exact = splade_head_reference(*truth, cu_seqlens)
    torch.testing.assert_close(reps.double(), exact, rtol=1e-6, atol=1e-6)
    for actual, expected in zip(gradients(reps, leaves), gradients(exact, truth), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(actual.double() * 1.01, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("budget", [(1, 1), (40, 7), (2**20, 2**20)])
def test_cpu_tiles_do_not_change_the_result(operands, budget, monkeypatch):
    plain = [x.detach().cpu() for x in operands]
    expected = cpu.splade_head_forward_cpu(*plain)
    monkeypatch.setattr(cpu, "LOGITS_AT_ONCE", budget[0])
    monkeypatch.setattr(cpu, "TOKENS_AT_ONCE", budget[1])
    reps, argmax = cpu.splade_head_forward_cpu(*plain)
    torch.testing.assert_close(reps, expected[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(argmax, expected[1])
    alone, _ = cpu.splade_head_forward_cpu(*plain, argmax=False)
    torch.testing.assert_close(alone, expected[0], rtol=1e-6, atol=1e-6)


def test_float64_gradients_on_the_cpu(operands):
    """Representations are fp32, but float64 operands get gradients from float64 sums."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in operands[:3]]
    reps = splade_head(*leaves, operands[3].cpu())
    exact = splade_head_reference(*leaves, operands[3].cpu())
    assert reps.dtype == torch.float32
    for actual, expected in zip(gradients(reps, leaves), gradients(exact, leaves), strict=True):
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_compiles_into_one_graph(operands):
    def loss(hidden, weight, bias, cu_seqlens):
        return 3 * splade_head(hidden * 2, weight, bias, cu_seqlens)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves = operands[:3]
    for autocast in (False, True):
        with torch.autocast(operands[0].device.type, torch.bfloat16, enabled=autocast):
            expected, actual = loss(*operands), compiled(*operands)
        assert torch.equal(actual, expected)
        for a, b in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
            assert torch.equal(a, b)


def test_registration(operands):
    torch.library.opcheck(function._head.registered, (*operands, "relu", False, True))


def test_autocast_rounds_the_operands_and_returns_full_precision(operands):
    *leaves, cu_seqlens = operands
    with torch.autocast(cu_seqlens.device.type, torch.bfloat16):
        reps = splade_head(*operands)
    assert reps.dtype == torch.float32
    grads = gradients(reps, leaves)
    assert all(g.dtype == torch.float32 for g in grads)
    hidden, weight, bias = (x.detach().double() for x in leaves)
    logits = hidden.bfloat16().double() @ weight.bfloat16().double().T
    if cu_seqlens.device.type == "cpu":  # there the products themselves are rounded, too
        logits = logits.bfloat16().double()
    identity = torch.eye(V, dtype=torch.float64, device=bias.device)
    rounded = splade_head_reference(logits, identity, bias, cu_seqlens)
    full = splade_head_reference(hidden, weight, bias, cu_seqlens)

    def distance(left, right):
        return (left.double() - right).abs().mean()

    assert distance(reps, rounded) < distance(reps, full) / 20
    without_autocast = splade_head(*operands)
    assert distance(without_autocast, full) < distance(without_autocast, rounded) / 20


class Allocations(TorchDispatchMode):
    """Shapes and dtypes of all results of operators."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.made.append((tuple(result.shape), result.dtype))
        return result


def test_winners_get_no_gradient_made_of_zeros(operands):
    reps = splade_head(*operands)
    grad = torch.randn_like(reps)
    with Allocations() as allocations:
        (reps * 2).backward(grad)
    assert ((len(LENGTHS), V), torch.float32) in allocations.made, "sees the engine's operators"
    assert ((len(LENGTHS), V), torch.int32) not in allocations.made


def test_gradients_only_where_needed(operands):
    hidden, weight, bias, cu_seqlens = operands
    reps = splade_head(hidden.detach(), weight, bias.detach(), cu_seqlens)
    reps.sum().backward()
    assert weight.grad is not None
    assert hidden.grad is None
    assert bias.grad is None
    splade_head(hidden, weight.detach(), None, cu_seqlens).sum().backward()
    assert hidden.grad is not None


def test_argmax_only_when_a_gradient_can_follow(operands, monkeypatch):
    asked = []

    def spy(*args):
        asked.append(args[-1])
        return original(*args)

    original = function._head._function.run
    monkeypatch.setattr(function._head._function, "run", spy)
    splade_head(*operands)
    with torch.no_grad():
        splade_head(*operands)
    splade_head(*(x.detach() for x in operands))
    assert asked == [True, False, False]


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (0, torch.zeros(56, D + 1), r"\(56, 25\) and \(37, 24\)"),
        (1, torch.zeros(V, D, dtype=torch.float16), "torch.float16"),
        (2, torch.zeros(V + 1), r"\[37\] of a float dtype, got torch\.float32 \(38,\)"),
        (3, torch.zeros(8, dtype=torch.int16), "torch.int16"),
        (3, torch.zeros(0, dtype=torch.int32), r"\(0,\)"),
    ],
)
def test_operands_that_do_not_fit(operands, index, replacement, message):
    wrong = list(operands)
    wrong[index] = replacement.to(operands[0].device)
    with pytest.raises(ValueError, match=message):
        splade_head(*wrong)


def test_nan_among_other_logits_is_ignored_on_the_cpu_too():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator) for n in (9, 5))
    cu_seqlens = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    expected = splade_head(hidden, weight, None, cu_seqlens)
    broken = hidden.clone()
    broken[4:6] = float("nan")
    broken[7] = float("nan")
    reps = splade_head(broken, weight, None, cu_seqlens)
    assert torch.equal(reps[0], expected[0])
    assert reps[1].isnan().all()
    others = torch.tensor([0, 2], dtype=torch.int32)
    alone = splade_head(hidden[[6, 8]], weight, None, others)[0]
    # Products of other shapes may be rounded otherwise.
    assert (reps[2] - alone).abs().max() < 1e-6 < (reps[2] - alone * 1.001).abs().max()
