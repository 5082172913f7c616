"""What is compiled anew, and what compiled code is launched with."""

import inspect
import weakref
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.amd import driver as amd
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from sparton.kernels import launch as module
from sparton.kernels.launch import (
    Launch,
    cdiv,
    next_power_of_2,
    plan_step,
    run_steps,
    runs_as_known,
)
from sparton.kernels.splade_head import splade_head


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.runs = []

    def run(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata,
        launch_enter_hook, launch_exit_hook, *args,
    ):  # fmt: skip
        self.runs.append(
            (gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata,
             launch_enter_hook, launch_exit_hook, *args)
        )  # fmt: skip


class Kernel(JITFunction):
    """Counts what Triton would bind; two operands, two constants."""

    def __init__(self, arg_names=("x_ptr", "size", "BLOCK", "MODE"), constexprs=(2, 3)):
        self.arg_names, self._constexprs = list(arg_names), list(constexprs)
        self.fn = SimpleNamespace(__name__="kernel")
        self.bound, self.compiled = [], []

    constexprs = property(lambda self: self._constexprs)

    def __getitem__(self, grid):
        def bind(*operands, **constants):
            self.bound.append((grid, operands, constants))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return bind


@pytest.fixture
def kernel(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 77)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(module, "_compiled", defaultdict(dict))
    return Kernel()


def test_the_second_launch_skips_triton(kernel):
    x = torch.zeros(8)
    for size in (32, 48):
        Launch(kernel, (5, 2), size, BLOCK=16, MODE="a", num_warps=4)(x)
    constants = {"BLOCK": 16, "MODE": "a", "num_warps": 4, "enable_fp_fusion": True}
    assert kernel.bound == [((5, 2), (x, 32), constants)]
    (run,) = kernel.compiled[0].runs
    hooks = (None, None, None)
    assert run == (5, 2, 1, 77, "function", "metadata", *hooks, x.data_ptr(), 48, None, None)


@pytest.mark.parametrize(
    "run",
    [
        lambda gridX, gridY, gridZ, stream, function, metadata, *args: None,
        lambda grid, stream, function, *args: None,
        lambda gridX, gridY, gridZ, stream, function: None,
        lambda gridX, gridY, gridZ, stream, function, *args, cluster: None,
        None,
    ],
)
def test_an_unknown_triton_launches_by_itself(kernel, monkeypatch, run):
    """Every time, with the arguments of that time."""
    monkeypatch.setattr(Compiled, "run", run if run is None else staticmethod(run))
    x, y = torch.zeros(8), torch.zeros(8)
    for operand, size in ((x, 32), (y, 48), (x, 64)):
        Launch(kernel, (5, 2), size, BLOCK=16, MODE="a")(operand)
    constants = {"BLOCK": 16, "MODE": "a", "enable_fp_fusion": True}
    launches = [((5, 2), (x, 32)), ((5, 2), (y, 48)), ((5, 2), (x, 64))]
    assert kernel.bound == [(*launch, constants) for launch in launches]


@pytest.mark.parametrize("name", ["run", "function", "packed_metadata", "constexprs"])
def test_a_triton_without_a_private_name_launches_by_itself(kernel, monkeypatch, name):
    monkeypatch.delattr(Kernel if name == "constexprs" else Compiled, name)
    x = torch.zeros(8)
    for size in (32, 48):
        Launch(kernel, (5, 2), size, BLOCK=16, MODE="a")(x)
    assert [operands for _, operands, _ in kernel.bound] == [(x, 32), (x, 48)]


def test_the_installed_triton_is_known():
    """What 3.6 has, too."""
    names = inspect.getsource(CompiledKernel) + inspect.getsource(JITFunction)
    for name in ("function", "packed_metadata", "constexprs"):
        assert f"self.{name} =" in names
    for launcher in (nvidia.CudaLauncher, amd.HIPLauncher):
        assert runs_as_known(Kernel(), compiled(run=launcher.__new__(launcher)))
    of_3_6 = compiled(run=lambda gridX, gridY, gridZ, stream, function, *args: None)
    assert runs_as_known(Kernel(), of_3_6)
    assert not runs_as_known(Kernel(), compiled())


def compiled(**others):
    return SimpleNamespace(function=None, packed_metadata=None, **others)


def launched(kernel, x, size=32, **constants):
    Launch(kernel, (1,), size, **{"BLOCK": 16, "MODE": "a"} | constants)(x)
    return len(kernel.bound)


def test_whatever_code_is_specialised_for_is_told_apart(kernel):
    x = torch.zeros(64)
    assert launched(kernel, x) == 1
    different = [
        (x[1:], 32, {}),
        (x.half(), 32, {}),
        (None, 32, {}),
        (x, 1, {}),
        (x, 33, {}),
        (x, 2**31, {}),
        (x, 32, {"BLOCK": 32}),
        (x, 32, {"MODE": "b"}),
        (x, 32, {"num_warps": 8}),
    ]
    for count, (operand, size, constants) in enumerate(different, start=2):
        assert launched(kernel, operand, size, **constants) == count
        assert launched(kernel, operand, size, **constants) == count, "kept"
    assert launched(kernel, x[4:], 2**30) == len(different) + 1, "as aligned as the first"


def test_devices_have_code_of_their_own(kernel, monkeypatch):
    launched(kernel, torch.zeros(8))
    monkeypatch.setattr(module.driver.active, "get_current_device", lambda: 1)
    assert launched(kernel, torch.zeros(8)) == 2


def test_descriptors_differ_by_block_and_type(kernel):
    def descriptor(dtype=torch.float16, block=(64, 32), padding="zero", **layout):
        base = torch.zeros(8, dtype=dtype)
        return SimpleNamespace(base=base, block_shape=list(block), padding=padding, **layout)

    for count, different in enumerate(
        (
            {},
            {"block": (32, 32)},
            {"dtype": torch.float32},
            {"padding": "nan"},
            {"layout": object()},
            {"layout": object()},
        ),
        start=1,
    ):
        assert launched(kernel, descriptor(**different)) == count
        assert launched(kernel, descriptor(**different)) == count, "kept"


def test_layouts_are_kept(kernel):
    """Another might get the place in memory that tells them apart."""
    layout = frozenset(["swizzled"])
    operand = SimpleNamespace(base=torch.zeros(8), block_shape=[8], padding="zero", layout=layout)
    launched(kernel, operand)
    kept = weakref.ref(layout)
    kernel.bound.clear()
    del operand, layout
    assert kept() is not None


def test_profilers_see_every_launch(kernel, monkeypatch):
    launched(kernel, torch.zeros(8))
    monkeypatch.setattr(module.knobs.runtime.launch_enter_hook, "calls", [print])
    assert launched(kernel, torch.zeros(8)) == 2


@pytest.mark.parametrize(
    ("names", "constexprs"),
    [(("x_ptr", "BLOCK", "size", "MODE"), (1, 3)), (("x_ptr", "size", "more", "MODE"), (3,))],
)
def test_operands_out_of_place_are_refused(kernel, names, constexprs):
    with pytest.raises(TypeError, match="must come last"):
        launched(Kernel(names, constexprs), torch.zeros(8))


@triton.jit(do_not_specialize=["size"])
def _add_kernel(x_ptr, y_ptr, other, size, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < size, 0.0)
    if y_ptr is not None:
        x += tl.load(y_ptr + offs, offs < size, 0.0)
    tl.store(x_ptr + offs, x + other, offs < size)


def test_real_launches(device):
    """In Triton's interpreter, or on a GPU: each case twice, the second time as compiled before."""
    base = torch.arange(200.0, device=device)
    for dtype in (torch.float32, torch.float16):
        for start in (0, 1, 4):
            for other in (1, 3, 16):
                for y in (None, base.to(dtype)):
                    x = base.to(dtype).clone()[start:]
                    expected = x + other if y is None else x + y[: len(x)] + other
                    for _ in range(2):
                        actual = x.clone() if start == 0 else base.to(dtype).clone()[start:]
                        Launch(_add_kernel, (7,), other, len(x), BLOCK=32)(actual, y)
                        assert torch.equal(actual, expected)


@pytest.mark.gpu
def test_both_ways_of_launching_make_the_same_bits(monkeypatch):
    """Of a head and its backward: the public launch of Triton, and the private one."""

    def run():
        torch.manual_seed(0)
        hidden, weight = (
            torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for rows in (300, 1000)
        )
        bounds = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
        reps = splade_head(hidden, weight, None, bounds)
        return reps, *torch.autograd.grad(reps.square().sum(), (hidden, weight))

    of_known = [run() for _ in range(2)][1]
    assert any(code[0] for codes in module._compiled.values() for code in codes.values())
    for codes in module._compiled.values():
        codes.clear()
    monkeypatch.setattr(module, "runs_as_known", lambda kernel, compiled: False)
    of_unknown = [run() for _ in range(2)][1]
    assert not any(code[0] for codes in module._compiled.values() for code in codes.values())
    for codes in module._compiled.values():
        codes.clear()
    assert all(map(torch.equal, of_known, of_unknown))


def test_what_is_kept_takes_any_tensors(kernel):
    """A launch of the same kinds of sizes shares its code; other alignment and types need other."""
    kept, x = Launch(kernel, (1,), 32, BLOCK=16, MODE="a"), torch.zeros(64)
    for count, operand in enumerate((x, x[1:], x.half(), None), start=1):
        for _ in range(2):
            kept(operand)
            assert len(kernel.bound) == count
    assert launched(kernel, x[1:], 48) == count
    assert kernel.compiled[0].runs[-1][-4:] == (x.data_ptr(), 32, None, None)


def test_constants_are_told_apart_by_name(kernel):
    kernel.arg_names = ["x_ptr", "size", "BLOCK", "MODE"]
    for constants in ({"BLOCK": 16, "MODE": 32}, {"MODE": 16, "BLOCK": 32}):
        Launch(kernel, (1,), 32, **constants)(torch.zeros(8))
    assert len(kernel.bound) == 2


def test_steps_take_tensors_by_name(device):
    """Those that the kernel asks for, in its order, whatever else there is."""
    x, y = torch.arange(100.0, device=device), torch.ones(100, device=device)
    tensors = {"y": y, "grad": None, "x": x}
    steps = [plan_step(_add_kernel, (4,), other, 100, BLOCK=32) for other in (1, 20)]
    run_steps(steps, tensors)
    assert torch.equal(x, torch.arange(100.0, device=device) + 23)
    run_steps(steps[:1], {"x": x, "y": None})
    assert torch.equal(x, torch.arange(100.0, device=device) + 24)


def test_a_step_of_one_tensor_is_refused(kernel):
    with pytest.raises(TypeError, match="two or more"):
        plan_step(kernel, (1,), 32, BLOCK=16, MODE="a")


def test_sizes_are_those_of_triton():
    for size in (*range(1, 70), 2**31 - 1, 2**31, 2**31 + 1):
        assert next_power_of_2(size) == triton.next_power_of_2(size)
        assert [cdiv(size, part) for part in (1, 3, 64)] == [
            triton.cdiv(size, part) for part in (1, 3, 64)
        ]
