"""Attention within packed sequences by the kernel that Hopper has, against float64."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from sparton.kernels.launch import multiprocessors
from sparton.kernels.varlen_attention import backward as backwards
from sparton.kernels.varlen_attention import forward as forwards
from sparton.kernels.varlen_attention import operands
from sparton.kernels.varlen_attention.backward import backward_tiling, varlen_attention_backward
from sparton.kernels.varlen_attention.forward import forward_tiling, varlen_attention_forward
from sparton.kernels.varlen_attention.hopper_attention import attention_hopper
from sparton.kernels.varlen_attention.hopper_backward import attention_backward_hopper
from sparton.kernels.varlen_attention.hopper_rings import (
    MOST_CHUNKS,
    SHORT,
    TILE,
    WAVES,
    suits_hopper,
)
from sparton.kernels.varlen_attention.reference import varlen_attention_reference
from tests.kernels.test_encoder_layer import HALVES
from tests.kernels.test_varlen_attention import (
    Problem,
    assert_as_exact_as_eager,
    check_norms,
    errors,
    make_problem,
)

LONGEST = TILE.value * MOST_CHUNKS
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")


def drawn(count: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, longest + 1, (count,), generator=generator).tolist())


def packed(problem: Problem) -> operands.AttentionOperands:
    scale = problem.states[0].shape[-1] ** -0.5
    return operands.attention_operands(*problem.given(), scale)


def on_hopper_kernel(
    given: operands.AttentionOperands, *, lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """What the kernel makes of them, however few."""
    query = given.query
    out = torch.full(query.shape, float("nan"), dtype=query.dtype, device="cuda")
    sums = torch.full(query.shape[1::-1], float("nan"), device="cuda") if lse else None
    attention_hopper(given, out, sums)
    return out, sums


def gradients_on_hopper(
    problem: Problem, given: operands.AttentionOperands | None = None
) -> list[Tensor]:
    """What the kernels make of them, however few, forward and backward."""
    given = packed(problem) if given is None else given
    out, lse = on_hopper_kernel(given)
    assert lse is not None
    shapes = given.query.shape, given.key.shape, given.value.shape
    nan = float("nan")
    dquery, dkey, dvalue = (torch.full(x, nan, dtype=out.dtype, device="cuda") for x in shapes)
    gradients, of_out = (dquery, dkey, dvalue), (out, lse, problem.grad)
    norms = [torch.full(each.shape[1::-1], nan, device="cuda") for each in gradients]
    attention_backward_hopper(given, of_out, gradients, norms)
    check_norms(gradients, norms)
    alone = [torch.full_like(each, nan) for each in gradients]
    attention_backward_hopper(given, of_out, tuple(alone))
    assert all(map(torch.equal, gradients, alone))
    return [out, *gradients]


cases = pytest.mark.parametrize(
    ("lengths", "key_lengths"),
    [
        ((65,), None),
        ((64, 128, 65, 1, 63), None),
        (drawn(40, LONGEST), None),
        (drawn(40, 200, 1), drawn(40, 300, 2)),
        ((0, 0, 70), (80, 0, 0)),
        (tuple([LONGEST] * 9), None),
    ],
)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [32, 64])
@cases
def test_results_are_as_exact_as_eager(lengths, key_lengths, d, dtype):
    problem = make_problem(lengths, key_lengths, H=3, d=d, dtype=dtype)
    given = packed(problem)
    out, lse = on_hopper_kernel(given)
    assert torch.equal(out, on_hopper_kernel(given, lse=False)[0])
    truth = varlen_attention_reference(*(x.double() for x in problem.states), *problem.bounds)
    eager = varlen_attention_reference(*problem.states, *problem.bounds)
    (allowed,) = errors([eager], [truth])
    allowed += torch.finfo(dtype).eps / 4
    assert errors([out], [truth])[0] <= allowed
    if truth.any():
        assert errors([1.02 * out.double()], [truth])[0] > allowed
    _, sums = varlen_attention_forward(given, tiling=forward_tiling(d, given.max_key))
    assert lse is not None and sums is not None
    assert torch.allclose(lse, sums, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(lse + 1e-3, sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [32, 64])
@cases
def test_gradients_are_as_exact_as_eager(lengths, key_lengths, d, dtype):
    problem = make_problem(lengths, key_lengths, H=3, d=d, dtype=dtype)
    found = gradients_on_hopper(problem)
    assert_as_exact_as_eager(found, problem, noticed=0.02)
    assert all(map(torch.equal, gradients_on_hopper(problem), found))


def test_gradients_do_not_depend_on_what_lies_between_sums(monkeypatch):
    """What is not written there may be anything."""
    problem = make_problem(drawn(40, 200), H=3, d=64)
    expected = gradients_on_hopper(problem)
    allocate = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda x, *shape: allocate(x, *shape).fill_(float("nan"))
    )
    assert all(map(torch.equal, gradients_on_hopper(problem), expected))


def test_rings_go_round_often_and_bits_are_the_same():
    """A thousand sequences for each program, of no tile, one and many, in any order."""
    lengths = drawn(9000, 200) + drawn(2000, 60, 1)
    few = make_problem((1,), H=12, d=64)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    query, key, value, grad = (  # on the GPU: the CPU would take most of a minute
        torch.randn(sum(lengths), 12, 64, dtype=few.grad.dtype, device="cuda") for _ in range(4)
    )
    longest = (max(lengths),) * 2
    problem = few._replace(
        states=(query, key, value), bounds=(bounds,) * 2, longest=longest, grad=grad
    )
    given = packed(problem)
    assert suits_hopper(given)
    out, _ = varlen_attention_forward(given)
    tiled, _ = varlen_attention_forward(given, tiling=forward_tiling(64, given.max_key))
    assert errors([out], [tiled.double()])[0] < 1e-3
    for _ in range(5):
        assert torch.equal(varlen_attention_forward(given)[0], out)
    lse = varlen_attention_forward(given)[1]
    assert lse is not None
    gradients = varlen_attention_backward(problem.grad, given, out, lse)
    tiled = varlen_attention_backward(problem.grad, given, out, lse, tiling=backward_tiling(64))
    assert max(errors(list(gradients), [x.double() for x in tiled])) < 1e-3
    for _ in range(5):
        again = varlen_attention_backward(problem.grad, given, out, lse)
        assert all(map(torch.equal, again, gradients))


def test_operands_of_any_strides():
    """Heads first, tokens first, and all three in one."""
    problem = make_problem(drawn(30, 300), H=4, d=64)
    expected = gradients_on_hopper(problem)
    for lay in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack([x, x, x], 1)[:, 1],
    ):
        laid = problem.with_states(*map(lay, problem.states))._replace(grad=lay(problem.grad))
        assert all(map(torch.equal, gradients_on_hopper(laid), expected))


def test_others_have_the_portable_kernels(monkeypatch):
    called: list[str] = []

    def counted(hopper):
        return lambda *args: called.append(hopper.__name__) or hopper(*args)

    monkeypatch.setattr(forwards, "attention_hopper", counted(attention_hopper))
    monkeypatch.setattr(backwards, "attention_backward_hopper", counted(attention_backward_hopper))

    def run(problem: Problem, window: int = -1) -> list[str]:
        called.clear()
        given = packed(problem)._replace(window=window)
        out, lse = varlen_attention_forward(given)
        assert lse is not None
        varlen_attention_backward(problem.grad, given, out, lse)
        return called

    enough = WAVES * multiprocessors(torch.device("cuda"))
    many = (SHORT + 2,) + (1,) * (enough // 2)
    problem = make_problem(many, H=2, d=64)
    assert run(problem) == ["attention_hopper", "attention_backward_hopper"]
    for other in (
        make_problem(many[: enough // 2 - 1], H=2, d=64),
        make_problem((SHORT, *many[1:]), H=2, d=64),
        make_problem((LONGEST + 1, *many[1:]), H=2, d=64),
        make_problem((LONGEST + 1, *many[1:]), many, H=2, d=64),
        make_problem(many, H=2, d=128),
    ):
        assert not suits_hopper(packed(other))
        assert run(other) == []
    assert run(problem, window=8) == []
    wide = problem.grad.new_empty(len(problem.grad), 2, 65)[..., 1:]
    assert run(problem._replace(grad=wide.copy_(problem.grad))) == ["attention_hopper"]
