"""Heads that are called twice on the same texts look for their maxima once; any device."""

from collections import deque
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparton.kernels.splade_head import HeadMemory, function, splade_head
from sparton.kernels.splade_head import memory as memory_module
from tests.kernels.problems import Problem, make_problem, upstream_for

SPARSE, DENSE = -6.0, 2.0  # biases
VARIANTS = [{}, {"activation": "log1p_relu"}, {"fp8": True}]


def problems(device: torch.device, bias: float = SPARSE) -> list[Problem]:
    lengths = ([5, 0, 17, 1], [30, 2])
    options = {"dtype": torch.bfloat16, "bias": bias}
    return [make_problem(each, 64, 32, device, **options) for each in lengths]


def run(problem: Problem, **options: object) -> list[Tensor]:
    """Representations and gradients."""
    *operands, cu_seqlens = problem
    leaves = [x.detach().requires_grad_() for x in operands]
    reps = splade_head(*leaves, cu_seqlens, **options)
    return [reps.detach(), *torch.autograd.grad(reps, leaves, upstream_for(problem))]


@pytest.fixture
def searches(monkeypatch) -> Iterator[list[bool]]:
    """One entry for each time that maxima were looked for."""
    made: list[bool] = []
    forward = function._head._function.run

    def spy(*arguments: object) -> tuple[Tensor, Tensor]:
        made.append(bool(arguments[-1]))
        return forward(*arguments)

    monkeypatch.setattr(function._head._function, "run", spy)
    return made


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_what_is_repeated_has_the_same_bits(variant, device, searches):
    if "fp8" in variant and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a newer GPU")
    given = problems(device)
    expected = [run(problem, **variant) for problem in given]
    memory = HeadMemory()
    with torch.no_grad():
        kept = [splade_head(*problem, **variant, memory=memory) for problem in given]
    assert all(torch.equal(reps, result[0]) for reps, result in zip(kept, expected))
    searches.clear()
    memory.rewind()
    found = [run(problem, **variant, memory=memory) for problem in given]
    assert not searches
    for result, truth in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(result, truth, strict=True))
        assert all(x.any() for x in truth)


def test_what_was_kept_is_what_is_given(device):
    """Negative control: other texts get the results of those that were kept."""
    first, _ = problems(device)
    other = first._replace(hidden=first.hidden.flip(0))
    memory = HeadMemory()
    with torch.no_grad():
        reps = splade_head(*first, memory=memory)
    memory.rewind()
    assert torch.equal(run(other, memory=memory)[0], reps)
    assert not torch.equal(run(other)[0], reps)


def test_many_active_entries_are_looked_for_again(device, searches):
    problem, _ = problems(device, DENSE)
    assert float((splade_head(*problem) > 0).double().mean()) > memory_module.MOST_ACTIVE
    memory, expected = HeadMemory(), run(problem)
    with torch.no_grad():
        splade_head(*problem, memory=memory)
    assert memory._found == deque([None])
    searches.clear()
    memory.rewind()
    found = run(problem, memory=memory)
    assert searches == [True]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_sums_and_calls_outside_are_not_kept(device):
    problem, _ = problems(device)
    memory = HeadMemory()
    with torch.no_grad():
        splade_head(*problem, pooling="sum", memory=memory)
        splade_head(*problem)
    assert not memory._found


def test_another_order_is_refused(device):
    first, second = problems(device)
    memory = HeadMemory()
    with torch.no_grad():
        splade_head(*first, memory=memory)
    memory.rewind()
    with pytest.raises(RuntimeError, match=r"representations \[2, 64\] where \[4, 64\] were"):
        splade_head(*second, memory=memory)
    with pytest.raises(RuntimeError, match="more often than it was called"):
        splade_head(*first, memory=memory)
