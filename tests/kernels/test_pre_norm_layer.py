"""What a layer that begins with its norm computes between its products against float64, on the GPU
or in Triton's interpreter: residual and norm, gated GELU, rotary positions.

T tokens, D columns, H heads of width d. The judge of rounding is the reference in the same dtypes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sparton.kernels.encoder_layer import (
    gated_gelu,
    gated_gelu_reference,
    gelu_function,
    normalization,
    pre_norm,
    pre_norm_function,
    pre_norm_reference,
    rotary,
    rotary_function,
    rotary_reference,
)
from tests.kernels.test_encoder_layer import (
    DEVICE,
    DTYPES,
    HALVES,
    check_rounding,
    errors,
    with_gradients,
)

EPS = 1e-5


def norm_problem(T: int, D: int, dtype: torch.dtype, residual: torch.dtype) -> list[Tensor]:
    """x, residual and gain."""
    generator = torch.Generator().manual_seed(T + D)
    x, other = (torch.randn(1, T, D, generator=generator).to(DEVICE) for _ in range(2))
    gain = torch.randn(D, generator=generator).to(DEVICE)
    return [x.to(dtype), (other + 1).to(residual), gain]


def summed(function: Callable[..., tuple[Tensor, Tensor]], **options: object) -> Callable:
    """Sum and norm beside each other, as one result."""

    def both(*operands: Tensor) -> Tensor:
        total, norm = function(*operands, eps=EPS, **options)
        return torch.cat((total, norm.to(total.dtype)), dim=-1)

    return both


def upstream(like: Tensor, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    return torch.randn(*like.shape[:-1], columns, generator=generator).to(like)


@pytest.mark.parametrize(("dtype", "residual"), DTYPES)
@pytest.mark.parametrize(("T", "D"), [(37, 96), (5, 768), (1, 33)])
def test_pre_norm(T, D, dtype, residual):
    operands = norm_problem(T, D, dtype, residual)
    grad = upstream(operands[1], 2 * D)
    check_rounding(summed(pre_norm), summed(pre_norm_reference), operands, grad)


def test_a_program_adds_up_many_rows(monkeypatch):
    monkeypatch.setattr(normalization, "BACKWARD_PROGRAMS", 1)
    operands = norm_problem(37, 96, torch.float32, torch.float32)
    grad = upstream(operands[1], 2 * 96)
    check_rounding(summed(pre_norm), summed(pre_norm_reference), operands, grad)


def test_norms_may_be_narrower_than_sums():
    operands = norm_problem(37, 96, torch.float16, torch.float32)
    total, wide = pre_norm(*operands, eps=EPS)
    assert total.dtype == wide.dtype == torch.float32
    assert torch.equal(total, operands[0] + operands[1])
    same, narrow = pre_norm(*operands, eps=EPS, dtype=torch.float16)
    assert torch.equal(same, total) and torch.equal(narrow, wide.to(torch.float16))
    grad = upstream(operands[1], 2 * 96)
    exact = with_gradients(summed(pre_norm), operands, grad, None)
    found = with_gradients(summed(pre_norm, dtype=torch.float16), operands, grad, None)
    assert 0 < max(errors(found, exact)) < 1e-3


def test_a_gradient_that_is_forgotten_is_not_within_the_tolerance():
    operands = norm_problem(37, 96, torch.float16, torch.float32)
    grad = upstream(operands[1], 2 * 96)

    def forgetful(place: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(*operands: Tensor, **options: object) -> tuple[Tensor, ...]:
            results = pre_norm(*operands, **options)
            return tuple(x.detach() if i == place else x for i, x in enumerate(results))

        return run

    for place in (0, 1):
        with pytest.raises(AssertionError):
            check_rounding(summed(forgetful(place)), summed(pre_norm_reference), operands, grad)


@pytest.mark.parametrize("place", [0, 1])
def test_one_result_may_go_unused(place):
    def one(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        def run(*operands: Tensor) -> Tensor:
            # The sum does not read the gain.
            return function(*operands, eps=EPS)[place] + 0 * operands[2]

        return run

    operands = norm_problem(37, 96, torch.float32, torch.float32)
    truth = with_gradients(one(pre_norm_reference), operands, operands[1], torch.float64)
    found = with_gradients(one(pre_norm), operands, operands[1], None)
    for x, y in zip(found, truth, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(("T", "D"), [(37, 96), (19, 1152), (1, 33)])
def test_gated_gelu(T, D, dtype):
    generator = torch.Generator().manual_seed(T + D)
    x = 3 * torch.randn(1, T, 2 * D, generator=generator).to(DEVICE, dtype)
    grad = upstream(x, D)
    check_rounding(gated_gelu, gated_gelu_reference, [x], grad)
    with pytest.raises(AssertionError):
        check_rounding(lambda x: gated_gelu(x.roll(D, -1)), gated_gelu_reference, [x], grad)


def heads(T: int, H: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """States ``[T, 3, H, d]``, and cos and sin of angles."""
    generator = torch.Generator().manual_seed(T + H + d)
    states = torch.randn(T, 3, H, d, generator=generator).to(DEVICE, dtype)
    angles = (torch.arange(T)[:, None] * 10 ** -torch.linspace(0, 4, d // 2)).repeat(1, 2)
    return states, angles.cos().to(DEVICE), angles.sin().to(DEVICE)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(("T", "H", "d"), [(37, 12, 64), (5, 3, 32), (9, 1, 24), (1, 16, 128)])
def test_rotary(T, H, d, dtype):
    states, cos, sin = heads(T, H, d, dtype)
    grad = upstream(states, d)
    turned = partial(rotary_reference, cos=cos.double(), sin=sin.double())
    truth = with_gradients(turned, [states], grad, torch.float64)
    allowed = torch.finfo(dtype).eps
    found = with_gradients(partial(rotary, cos=cos, sin=sin), [states], grad, None)
    assert max(errors(found, truth)) < allowed
    for x, given in zip(found, (states, grad), strict=True):
        assert torch.equal(x[:, 2], given[:, 2].double()), "values"
    if T > 1:
        back = with_gradients(partial(rotary, cos=cos, sin=-sin), [states], grad, None)
        assert min(errors(back, truth)) > 0.1


def test_angles_may_be_in_16_bits():
    states, cos, sin = heads(37, 2, 32, torch.float16)
    found = rotary(states, cos.half(), sin.half())
    expected = rotary_reference(states.double(), cos.half().double(), sin.half().double())
    assert errors([found.double()], [expected])[0] < torch.finfo(torch.float16).eps


def test_turned_queries_and_keys_meet_at_their_distance():
    """What positions are for: scores depend on the difference of places alone."""
    states, cos, sin = heads(20, 1, 32, torch.float32)
    turned = rotary(states[:1].expand(20, -1, -1, -1), cos, sin)
    scores = turned[:, 0, 0] @ turned[:, 1, 0].T
    assert torch.allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-4)
    assert not torch.allclose(scores[1:, 1:], scores[1:, :-1], atol=1e-2)


@pytest.mark.parametrize("T", [7, 0])
def test_registration(T):
    x, residual, gain = norm_problem(T, 96, torch.float16, torch.float32)
    states, cos, sin = heads(T, 2, 24, torch.float32)
    for operator, operands in (
        (pre_norm_function._operator, (x, residual, gain, EPS, torch.float16)),
        (gelu_function._gated_operator, (x,)),
        (rotary_function._operator, (states, cos, sin)),
    ):
        operands[0].requires_grad_()
        torch.library.opcheck(operator.registered, operands)


def test_compiled_they_are_one_graph_for_all_lengths():
    """A break would be an error, by fullgraph=True."""

    def layer(x: Tensor, residual: Tensor, gain: Tensor) -> Tensor:
        total, norm = pre_norm(x, residual, gain, eps=EPS, dtype=torch.float16)
        states = norm[0].unflatten(-1, (3, 2, -1))
        angles = torch.linspace(0, 1, 16, device=x.device).expand(states.shape[0], -1)
        turned = rotary(states, angles.cos(), angles.sin())
        return total + gated_gelu(turned.flatten(1).repeat(1, 2))

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for T in (7, 5, 12):
        operands = norm_problem(T, 96, torch.float16, torch.float32)
        expected = with_gradients(layer, operands, operands[1], None)
        found = with_gradients(compiled, operands, operands[1], None)
        graphs.append(counter.frame_count)
        for first, second in zip(found, expected, strict=True):
            assert torch.equal(first, second)
    assert graphs[0] == graphs[-1]


X, RESIDUAL, GAIN = norm_problem(3, 8, torch.float32, torch.float32)
STATES, COS, SIN = heads(3, 2, 8, torch.float32)


@pytest.mark.parametrize(
    ("function", "operands", "said"),
    [
        (partial(pre_norm, eps=EPS), (X, RESIDUAL[:, :2], GAIN), "residual must be"),
        (partial(pre_norm, eps=EPS), (X, RESIDUAL, GAIN[:2]), r"\[D\] = \[8\]"),
        (partial(pre_norm, eps=EPS, dtype=torch.int32), (X, RESIDUAL, GAIN), "dtype must be"),
        (gated_gelu, (X[..., :5],), "two halves, got 5"),
        (gated_gelu, (X.double(),), "x must be"),
        (rotary, (STATES[:, :2], COS, SIN), r"got \(3, 2, 2, 8\)"),
        (rotary, (STATES, COS[:2], SIN), r"\[3, 8\], got \(2, 8\)"),
        (rotary, (STATES, COS.double(), SIN), "torch.float64"),
        (rotary, (STATES, COS.to("meta"), SIN), "one device"),
    ],
)
def test_what_does_not_fit_is_said(function: Callable, operands: Sequence[Tensor], said: str):
    with pytest.raises(ValueError, match=said):
        function(*operands)
