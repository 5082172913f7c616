"""When kernels run inside registered operators."""

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from sparton.kernels.segment_max.operands import needs_operators


def test_only_what_observes_operators_needs_them():
    assert not needs_operators()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert not needs_operators()
    for mode in (FakeTensorMode(), FlopCounterMode(display=False)):
        with mode:
            assert needs_operators()
    assert not needs_operators()
    compiled = torch.compile(lambda x: x + 1 if needs_operators() else x, backend="eager")
    assert compiled(torch.zeros(1)) == 1
