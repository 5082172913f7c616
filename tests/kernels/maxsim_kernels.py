"""MaxSim's public functions on its kernels, in Triton's interpreter where there is no GPU."""

from functools import partial

import pytest
import torch

from sparton.kernels.maxsim import operators, paths
from sparton.kernels.maxsim.cross import cross_backward, cross_forward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from tests.kernels.problems import SMALL

CUT = BackwardConfig(chunk=32, share=16, block_e=2, block_t=2)


def use_kernels(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """On a CPU too; products from ``few`` query tokens on."""
    monkeypatch.setattr(paths, "FEW", few)
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(paths, "cross_forward", partial(cross_forward, config=SMALL))
    monkeypatch.setattr(paths, "cross_backward", partial(cross_backward, config=CUT))
    backward = partial(paths.maxsim_backward_cuda, backward="auto")
    monkeypatch.setattr(operators, "maxsim_forward_cpu", paths.maxsim_forward_cuda)
    monkeypatch.setattr(operators, "maxsim_backward_cpu", backward)
