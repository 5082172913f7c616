"""Gradients are added up over the ranks while the backward pass still runs."""

import pytest
import torch
from torch import Tensor, nn

from sparton.training import gradient_sum
from sparton.training.distributed import World
from sparton.training.gradient_sum import GradientSum
from tests.training.ranks import CPU, on_ranks

RANKS, STEPS = 2, 3
SMALL = (0, 50, 10**6)  # nothing is small, biases are, all is
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs"),
        ],
    ),
]


class Branches(nn.Module):
    """Layers of which every rank leaves another one out, and a large one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Linear(20, 20)
        self.first = nn.Linear(20, 20)
        self.branches = nn.ModuleList(nn.Linear(20, 20) for _ in range(RANKS))
        self.last = nn.Linear(20, 3)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.scale * self.last(self.branches[rank](self.first(x)).relu()).double()


def loss(model: Branches, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(5, 20, generator=generator).to(model.scale.device)
    return model(x, rank).square().sum()


def gradients(model: Branches) -> list[Tensor]:
    return [p.grad.cpu().clone() for p in model.parameters()]


def truth(step: int) -> list[Tensor]:
    """Of both ranks, in one process."""
    model = Branches()
    sum(loss(model, rank, step) for rank in range(RANKS)).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def of_rank(world: World) -> list[tuple[list[list[Tensor]], list[int]]]:
    return [summed(world, small) for small in SMALL]


def summed(world: World, small: int) -> tuple[list[list[Tensor]], list[int]]:
    """The gradients of each step, and how many sums had begun before each backward was over."""
    gradient_sum.SMALL = small
    model = Branches().to(world.device)
    total = GradientSum(world, model.parameters())
    started: list[int] = []
    model.first.weight.register_hook(lambda _: started.append(len(total._pending)))
    found = []
    for step in range(STEPS):
        model.zero_grad()
        (loss(model, world.rank, step) / 2).backward()  # an earlier micro-batch
        with total.of_last_backward():
            (loss(model, world.rank, step) / 2).backward()
        found.append(gradients(model))
    return found, started


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_sums_over_ranks(device, tmp_path):
    for results in on_ranks(RANKS, tmp_path, of_rank, device=device):
        for small, (found, started) in zip(SMALL, results, strict=True):
            for step in range(STEPS):
                for gradient, expected in zip(found[step], truth(step), strict=True):
                    torch.testing.assert_close(gradient, expected)
                assert any(not torch.allclose(*each) for each in zip(found[step], truth(step + 1)))
            # Of the two backward passes of each step, the second one of all but the first step.
            early = [count > 0 for count in started]
            assert early == [False, False, *[False, small < 10**6] * (STEPS - 1)]


def test_alone_nothing_is_added():
    model = Branches()
    total = GradientSum(World(0, 1, CPU), model.parameters())
    with total.of_last_backward():
        loss(model, 0, 0).backward()
    assert model.unused.weight.grad is None
    assert model.first.weight.grad.any()
