"""When kernels run inside registered operators, and on which device."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from sparton.kernels import dispatch
from sparton.kernels.dispatch import needs_operators, on_its_device


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


def test_launches_go_to_the_device_of_the_operands(monkeypatch):
    """A current device that is another one changes nothing."""
    current = []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(dispatch, "is_elsewhere", lambda tensor: True)
    launch = on_its_device(lambda *operands, wanted: [x is wanted for x in current])
    first, second = torch.zeros(2), torch.ones(3)
    assert launch(first, second, wanted=first) == [True]
    assert launch((second, first), first, wanted=second) == [True]
    assert not current


def test_the_current_device_is_not_set_again(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: nullcontext(entered.append(x)))
    own = {"is_cuda": True, "is_meta": False}
    devices = [SimpleNamespace(**own, get_device=lambda i=i: i) for i in range(3)]
    operands = [(device,) for device in devices]
    launch = on_its_device(lambda operands, *, twice: 2 * twice)
    assert [launch(x, twice=21) for x in operands] == [42] * 3
    assert entered == [operands[0][0], operands[2][0]]
