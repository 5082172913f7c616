"""A rehearsal takes the memory of a step, counted in bytes of tensors that live at one time."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops, l1
from sparton.models.backbones import random_bert
from sparton.models.heads import SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import TokenBatch, TrainBatch

CPU = torch.device("cpu")
SHARE = 12


class Living(TorchDispatchMode):
    """Counts the bytes of what operations give until nobody has it any more."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


@pytest.fixture(scope="module")
def step() -> ExactStep:
    encoder = SpladeEncoder(random_bert(500, 32, 2, 2, max_length=64), SpartonHead()).train()
    penalties = {"l1": Regularizer(l1, 0.01)}, {"flops": Regularizer(flops, 0.1)}
    objective = Objective(InfoNCE(), *penalties)
    return ExactStep(encoder, objective, World(0, 1, CPU), Precision("fp32", CPU))


def batch(queries: int) -> TrainBatch:
    return TrainBatch(*(TokenBatch.from_lists([list(range(5, 5 + n))] * queries) for n in (16, 48)))


def peak(step: ExactStep, run) -> int:
    step.encoder.zero_grad(set_to_none=True)
    gc.collect()
    with Living() as living:
        run()
    return living.peak


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "parts", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 12))]
)
def test_a_rehearsal_takes_the_memory_of_a_step(parts, step):
    step.micro_batch = SHARE // parts
    part = batch(step.micro_batch)
    real = peak(step, lambda: step(batch(SHARE), 0))
    assert peak(step, lambda: step.rehearse(part, parts)) == pytest.approx(real, rel=0.02)
    if parts < SHARE:
        less = batch(step.micro_batch - 1)
        assert peak(step, lambda: step.rehearse(less, parts)) < 0.97 * real, "negative control"
