"""What a layer that begins with its norm computes between its products against float64, on the GPU
or in Triton's interpreter: residual and norm, gated GELU and SiLU, rotary positions and norms of
heads.

T tokens, D columns, H heads of width d. The judge of rounding is the reference in the same dtypes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sparton.kernels.encoder_layer import (
    gated_function,
    gated_gelu,
    gated_gelu_reference,
    gated_silu,
    gated_silu_reference,
    normalization,
    normed_rotary,
    normed_rotary_reference,
    pre_norm,
    pre_norm_function,
    pre_norm_reference,
    rotary,
    rotary_function,
    rotary_reference,
    rotation,
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


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("dtype", "residual"), DTYPES)
@pytest.mark.parametrize(("T", "D"), [(37, 96), (5, 768), (1, 33)])
def test_pre_norm(T, D, dtype, residual, centred):
    operands = norm_problem(T, D, dtype, residual)
    grad = upstream(operands[1], 2 * D)
    reference = summed(pre_norm_reference, centred=centred)
    check_rounding(summed(pre_norm, centred=centred), reference, operands, grad)
    if T > 1:
        with pytest.raises(AssertionError):
            check_rounding(summed(pre_norm, centred=not centred), reference, operands, grad)


@pytest.mark.parametrize("centred", [True, False])
def test_a_program_adds_up_many_rows(centred, monkeypatch):
    monkeypatch.setattr(normalization, "BACKWARD_PROGRAMS", 1)
    operands = norm_problem(37, 96, torch.float32, torch.float32)
    grad = upstream(operands[1], 2 * 96)
    ours, reference = (summed(x, centred=centred) for x in (pre_norm, pre_norm_reference))
    check_rounding(ours, reference, operands, grad)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_norms_of_one_operand(dtype, centred):
    x, _, gain = norm_problem(37, 96, dtype, dtype)
    operands, grad = [2 + x, gain], upstream(x, 96)

    def alone(function: Callable[..., tuple[Tensor, Tensor]], **options: object) -> Callable:
        return lambda x, gain: function(x, None, gain, eps=EPS, **options)[1]

    reference = alone(pre_norm_reference, centred=centred)
    check_rounding(alone(pre_norm, centred=centred), reference, operands, grad)
    with pytest.raises(AssertionError):
        check_rounding(alone(pre_norm, centred=not centred), reference, operands, grad)
    assert pre_norm(x, None, gain, eps=EPS, dtype=torch.float32)[1].dtype == torch.float32


@pytest.mark.parametrize("centred", [True, False])
def test_moments_are_those_that_the_backward_reads(centred):
    x, residual, gain = norm_problem(37, 96, torch.float32, torch.float32)
    _, _, moments = pre_norm_function._operator.registered(
        x, residual, gain, EPS, torch.float32, centred
    )
    total = (x + residual)[0].double()
    mean = total.mean(1, keepdim=True) if centred else torch.zeros(1).to(total)
    inverse = ((total - mean).square().mean(1) + EPS).rsqrt()
    expected = torch.stack((inverse, mean[:, 0])) if centred else inverse[None]
    torch.testing.assert_close(moments, expected.float(), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(("T", "D"), [(37, 96), (19, 1152), (1, 33)])
def test_gated_silu(T, D, dtype):
    generator = torch.Generator().manual_seed(T + D)
    u, v = (3 * torch.randn(1, T, D, generator=generator).to(DEVICE, dtype) for _ in range(2))
    check_rounding(gated_silu, gated_silu_reference, [u, v], upstream(u, D))
    with pytest.raises(AssertionError):
        check_rounding(lambda u, v: gated_silu(v, u), gated_silu_reference, [u, v], upstream(u, D))


def test_silu_of_large_numbers():
    u = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 1e4]], device=DEVICE)
    found = with_gradients(gated_silu, [u, torch.ones_like(u)], torch.ones_like(u), None)
    expected = torch.tensor([0, 0, 0, 0, 88, 1e4]), torch.tensor([0, 0, 0, 0.5, 1, 1])
    for x, y in zip(found, expected):
        torch.testing.assert_close(x.cpu()[0], y.to(x.dtype), rtol=1e-6, atol=1e-30)


def heads(T: int, H: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """States ``[T, H, d]``, and cos and sin of angles."""
    generator = torch.Generator().manual_seed(T + H + d)
    states = torch.randn(T, H, d, generator=generator).to(DEVICE, dtype)
    angles = (torch.arange(T)[:, None] * 10 ** -torch.linspace(0, 4, d // 2)).repeat(1, 2)
    return states, angles.cos().to(DEVICE), angles.sin().to(DEVICE)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    ("T", "H", "copied", "d"), [(37, 36, 12, 64), (5, 9, 3, 32), (9, 2, 0, 24), (1, 16, 0, 128)]
)
def test_rotary(T, H, copied, d, dtype):
    states, cos, sin = heads(T, H, d, dtype)
    grad = upstream(states, d)
    turned = partial(rotary_reference, cos=cos.double(), sin=sin.double(), copied=copied)
    truth = with_gradients(turned, [states], grad, torch.float64)
    allowed = torch.finfo(dtype).eps
    run = partial(rotary, cos=cos, copied=copied)
    found = with_gradients(partial(run, sin=sin), [states], grad, None)
    assert max(errors(found, truth)) < allowed
    for x, given in zip(found, (states, grad), strict=True):
        assert torch.equal(x[:, H - copied :], given[:, H - copied :].double()), "values"
    if T > 1:
        back = with_gradients(partial(run, sin=-sin), [states], grad, None)
        assert min(errors(back, truth)) > 0.1


def normed(function: Callable, *angles: Tensor) -> Callable[..., Tensor]:
    return lambda states, gain: function(states, gain, *angles, eps=EPS)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(("T", "H", "d"), [(37, 20, 64), (5, 3, 32), (9, 1, 24), (70, 2, 128)])
def test_normed_rotary(T, H, d, dtype):
    states, cos, sin = heads(T, H, d, dtype)
    generator = torch.Generator().manual_seed(d)
    operands = [3 * states, 1 + torch.rand(d, generator=generator).to(DEVICE)]
    grad = upstream(states, d)
    reference = normed(normed_rotary_reference, cos.double(), sin.double())
    truth = with_gradients(reference, operands, grad, torch.float64)
    found = with_gradients(normed(normed_rotary, cos, sin), operands, grad, None)
    assert max(errors(found, truth)) < 2 * torch.finfo(dtype).eps
    with_others = [operands[0], operands[1].roll(1)]
    others = with_gradients(normed(normed_rotary, cos, sin), with_others, grad, None)
    assert min(errors(others[:2], truth[:2])) > 0.1, "the gain matters"
    again = with_gradients(normed(normed_rotary, cos, sin), operands, grad, None)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


def test_a_program_adds_up_many_tokens(monkeypatch):
    monkeypatch.setattr(rotation, "BACKWARD_PROGRAMS", 1)
    states, cos, sin = heads(37, 5, 32, torch.float32)
    operands, grad = [states, torch.linspace(1, 2, 32, device=DEVICE)], upstream(states, 32)
    reference = normed(normed_rotary_reference, cos.double(), sin.double())
    truth = with_gradients(reference, operands, grad, torch.float64)
    found = with_gradients(normed(normed_rotary, cos, sin), operands, grad, None)
    assert max(errors(found, truth)) < 1e-6


def test_heads_of_zeros_stay_finite():
    states, cos, sin = heads(5, 3, 32, torch.float32)
    gain = torch.ones(32, device=DEVICE)
    found = with_gradients(
        normed(normed_rotary, cos, sin), [states * 0, gain], torch.ones_like(states), None
    )
    assert all(x.isfinite().all() for x in found) and not found[0].any()


def test_angles_may_be_in_16_bits():
    states, cos, sin = heads(37, 2, 32, torch.float16)
    found = rotary(states, cos.half(), sin.half())
    expected = rotary_reference(states.double(), cos.half().double(), sin.half().double())
    assert errors([found.double()], [expected])[0] < torch.finfo(torch.float16).eps


def test_turned_queries_and_keys_meet_at_their_distance():
    """What positions are for: scores depend on the difference of places alone."""
    states, cos, sin = heads(20, 2, 32, torch.float32)
    turned = rotary(states[:1].expand(20, -1, -1), cos, sin)
    scores = turned[:, 0] @ turned[:, 1].T
    assert torch.allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-4)
    assert not torch.allclose(scores[1:, 1:], scores[1:, :-1], atol=1e-2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("T", [7, 0])
def test_registration(T):
    x, residual, gain = norm_problem(T, 96, torch.float16, torch.float32)
    states, cos, sin = heads(T, 6, 24, torch.float32)
    for operator, operands in (
        (pre_norm_function._operator, (x, residual, gain, EPS, torch.float16, True)),
        (pre_norm_function._operator, (x, residual, gain, EPS, torch.float16, False)),
        (pre_norm_function._norm_operator, (x, gain, EPS, torch.float32, False)),
        (gated_function._gelu_operator, (x,)),
        (gated_function._silu_operator, (x, x.detach().clone())),
        (rotary_function._operator, (states, cos, sin, 2)),
        (rotary_function._normed_operator, (states, gain[:24], cos, sin, EPS)),
    ):
        operands[0].requires_grad_()
        torch.library.opcheck(operator.registered, operands)


@pytest.mark.slow
def test_compiled_they_are_one_graph_for_all_lengths():
    """A break would be an error, by fullgraph=True."""

    def layer(x: Tensor, residual: Tensor, gain: Tensor) -> Tensor:
        total, norm = pre_norm(x, residual, gain, eps=EPS, dtype=torch.float16)
        total, norm = pre_norm(norm, total, gain, eps=EPS, dtype=torch.float16, centred=False)
        states = norm[0].unflatten(-1, (6, -1))
        angles = torch.linspace(0, 1, 16, device=x.device).expand(states.shape[0], -1)
        angles = angles.cos(), angles.sin()
        turned = rotary(states, *angles, copied=2)
        gated = gated_silu(turned, normed_rotary(states, gain[:16], *angles, eps=EPS)).flatten(1)
        return total + gated_gelu(gated.repeat(1, 2))

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
        (gated_silu, (X, X[..., :5]), r"\(1, 3, 8\) .* \(1, 3, 5\)"),
        (rotary, (STATES[..., :7], COS, SIN), r"got \(3, 2, 7\)"),
        (partial(rotary, copied=3), (STATES, COS, SIN), "copied=3: of 2 heads"),
        (
            partial(normed_rotary, eps=EPS),
            (STATES, GAIN[:7], COS, SIN),
            r"gain must be \[d\] = \[8",
        ),
        (rotary, (STATES, COS[:2], SIN), r"\[3, 8\], got \(2, 8\)"),
        (rotary, (STATES, COS.double(), SIN), "torch.float64"),
        (rotary, (STATES, COS.to("meta"), SIN), "one device"),
    ],
)
def test_what_does_not_fit_is_said(function: Callable, operands: Sequence[Tensor], said: str):
    with pytest.raises(ValueError, match=said):
        function(*operands)
