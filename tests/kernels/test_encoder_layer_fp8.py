"""Linear layers in FP8 against float64, on the GPU or in Triton's interpreter.

T rows, K inputs, N outputs. On a CPU products are those of the twin, which a GPU's are compared
with.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from sparton.kernels import dispatch
from sparton.kernels.dispatch import has_fp8
from sparton.kernels.encoder_layer import (
    Fp8Operand,
    Fp8Rows,
    Fp8Weights,
    Layer,
    NormOptions,
    bias_gelu_reference,
    fp8_linear,
    fp8_linear_gelu,
    fp8_linear_post_norm,
    fp8_operand,
    fp8_products,
    post_norm_reference,
)
from sparton.kernels.encoder_layer.fp8_limits import limits_of
from sparton.kernels.encoder_layer.fp8_operands import Limits, unknown_limits
from sparton.kernels.encoder_layer.fp8_products import (
    fp8_weight_gradient,
    gelu_gradient_limits,
    product_limits,
    round_weights,
    scaled_product,
    scaled_product_reference,
)
from sparton.kernels.encoder_layer.fp8_tiles import Rounded, round_tiles
from sparton.kernels.encoder_layer.gelu import gelu_backward, gelu_forward
from sparton.kernels.encoder_layer.normalization import norm_backward, norm_forward
from tests import interpreter
from tests.kernels.problems import error

on_gpu = torch.cuda.is_available()
DEVICE = torch.device("cuda" if on_gpu else "cpu")
BF16, FP32 = torch.bfloat16, torch.float32
# e4m3 numbers are 1/8 apart: an element is wrong by 1/16 at most, evenly distributed errors have
# 1/16 / sqrt(3) of the norm, and a product has those of both operands.
TOLERANCE = 0.05
SMALLEST = 2.0**-100

pytestmark = pytest.mark.skipif(
    on_gpu and not has_fp8(DEVICE), reason="this GPU has no FP8 tensor cores"
)


@pytest.fixture(autouse=True)
def right_rounding() -> Iterator[None]:
    with nullcontext() if on_gpu else interpreter.rounding():
        yield


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def row_norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.double(), dim=1)


def rounded(x: Tensor) -> Fp8Rows:
    return round_tiles(x, limits_of(x), turned=False).rows


def e4m3(x: Tensor) -> Tensor:
    """float64 to the nearest number of 3 bits behind the first and exponents from -6 on, ties to
    the even one."""
    exponents = x.abs().clamp_min(2.0**-20).log2().floor().clamp_min(-6)
    steps = torch.exp2(exponents - 3)
    return (x / steps).round() * steps


def by_hand(x: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """float64 values and scales of rows ``x`` with these limits, ``[T]`` or ``[]``."""
    scales = torch.exp2(limits.double().clamp_min(SMALLEST).log2().ceil() - 8)
    return e4m3(x.double() / scales.expand(len(x))[:, None]), scales


def assert_same(found: Fp8Rows, expected: Fp8Rows) -> None:
    """Bit for bit."""
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize(("T", "D"), [(9, 16), (9, 100), (150, 1040), (1, 48)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_tiles_by_hand(T, D, dtype):
    x = normal(T, D, dtype=dtype)
    for row, factor in zip(range(1, T), (0, 1e-10, 1e-17, 1e10, 1e-4, 3)):
        x[row] *= factor
    limits = limits_of(x)
    norms = limits.norms
    found = round_tiles(x, limits, turned=True, sums=True)
    values, scales = by_hand(x, norms)
    assert torch.equal(found.rows.values.double(), values)
    assert torch.equal(found.rows.scales.double(), scales)
    values, scale = by_hand(x, norms.max())
    padded = found.turned.values.shape[1]
    assert padded % 16 == 0 and 0 <= padded - T < 16
    assert torch.equal(found.turned.values[:, :T].double(), values.t())
    assert not found.turned.values[:, T:].float().any()
    assert torch.equal(found.turned.scales.double(), scale.expand(D))
    assert error(found.sums, x.double().sum(0)) < 1e-6
    assert torch.equal(found.sums, round_tiles(x, limits_of(x), turned=True, sums=True).sums)
    # By half a step at most of a row's largest value, where it is not below the smallest.
    wrong = (found.rows.restored() - x.float()).abs().amax(1)
    assert (wrong <= x.abs().amax(1).float() / 16 + SMALLEST).all() and wrong[0] > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reaches_its_row_of_a_product_alone(bad):
    x, weight = normal(4, 32), rounded(normal(16, 32, seed=1))
    x[2, 5] = bad
    product = scaled_product(rounded(x), weight, None, BF16)
    assert product[2].isnan().all()
    assert product[[0, 1, 3]].isfinite().all()
    # Over rows there is no other row.
    found = round_tiles(x, limits_of(x), turned=True).turned
    assert fp8_weight_gradient(found, found, FP32)[5].isnan().all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("D", [48, 1536])
def test_gelu_ends_in_fp8(D):
    """As its kernels without FP8 have it, within limits that come of the product's operands."""
    K, T = 32, 137
    x, into, bias = normal(T, K), normal(D, K, seed=1) / 4, normal(D, seed=2, dtype=FP32)
    outof, upstream = normal(K, D, seed=3) / 4, 1e-3 * normal(T, K, seed=4)
    product, grad = (x.float() @ into.float().t()).to(BF16), (upstream @ outof).to(BF16)
    limits = product_limits(limits_of(x), round_weights([into]), bias)
    of_gradient = gelu_gradient_limits(limits_of(upstream), round_weights([outof]))
    out = gelu_forward(product.float(), bias)
    dx, dbias = gelu_backward(grad.float(), product.float(), bias)

    def check(found: Rounded, exact: Tensor, limits: Limits) -> None:
        bound = limits.norms * limits.factor + (0 if limits.offset is None else limits.offset)
        assert (exact.abs().amax(1) <= bound).all()
        values, scales = by_hand(exact, bound)
        same = found.rows.values.double() == values
        assert same.double().mean() > 0.999, "a compiler may join other operations"
        assert torch.equal(found.rows.scales.double(), scales)
        assert error(found.rows.restored(), exact) < TOLERANCE
        assert error(found.turned.restored()[:, :T].t(), exact) < TOLERANCE
        assert not found.turned.values[:, T:].float().any()
        assert error(found.rows.restored().roll(1, 0), exact) > 0.5, "negative control"

    check(round_tiles(product, limits, bias=bias, turned=True), out, limits)
    given = {"bias": bias, "grad": grad, "turned": True, "sums": True}
    found = round_tiles(product, of_gradient, **given)
    check(found, dx, of_gradient)
    assert error(found.sums, dbias) < 1e-5


@pytest.mark.quick(1)
@pytest.mark.parametrize("copy", [BF16, None])
@pytest.mark.parametrize(("D", "p"), [(48, 0.1), (768, 0.0)])
def test_a_normalisation_knows_the_norms_of_its_rows(D, p, copy):
    x, residual, grad = (normal(37, D, seed=seed) for seed in range(3))
    bias, gain, shift = (normal(D, seed=seed, dtype=FP32) for seed in range(3))
    seed = torch.tensor(5, dtype=torch.int32, device=DEVICE) if p else None
    options = {"p": p, "eps": 1e-6, "copy": copy, "dtype": FP32 if copy else BF16, "save": True}
    operands = (x, bias, residual, gain, shift, seed)
    limits = unknown_limits(x)
    found = norm_forward(*operands, **options, limits=limits)
    norms, largest, *_ = limits
    for first, second in zip(found, norm_forward(*operands, **options), strict=True):
        assert first is second or torch.equal(first, second)
    bound = 2**-7 if copy is None else 1e-5
    assert torch.equal(largest, norms.amax())
    assert error(norms, row_norms(found.out)) < bound < error(norms.roll(1), row_norms(found.out))
    given = (grad, None, None, found.sums, found.moments, gain, seed)
    limits = unknown_limits(x)
    dx, *others = norm_backward(*given, vectors=3, p=p, dtypes=(BF16, FP32), limits=limits)
    expected = norm_backward(*given, vectors=3, p=p, dtypes=(BF16, FP32))
    for first, second in zip((dx, *others), expected, strict=True):
        assert torch.equal(first, second)
    norms, largest, *_ = limits
    assert torch.equal(largest, norms.amax())
    assert error(norms, row_norms(dx)) < 2**-7 < error(norms.roll(1), row_norms(dx))


def test_the_twin_multiplies_as_pytorch_does():
    x, weight, bias = rounded(normal(20, 32)), rounded(normal(48, 32, seed=1)), normal(48, seed=2)
    expected = torch._scaled_mm(
        *(x.values, weight.values.t(), x.scales[:, None], weight.scales[None], bias),
        out_dtype=BF16,
    )
    found = scaled_product_reference(x, weight, bias, BF16)
    assert error(found, expected) < 2**-8
    assert error(scaled_product_reference(x, weight, None, BF16), expected) > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("T", "K", "N"), [(1, 16, 32), (77, 768, 2304), (4099, 3072, 768), (515, 2304, 768)]
)
def test_products_of_tensor_cores_are_those_of_the_twin(T, K, N, biased):
    x, weight = rounded(normal(T, K)), rounded(normal(N, K, seed=1))
    bias = 30 * normal(N, seed=2) if biased else None
    weight.scales[::2] *= 2
    found = scaled_product(x, weight, bias, BF16)
    expected = scaled_product_reference(x, weight, bias, FP32)
    assert error(found, expected) < 2**-8
    wrong = Fp8Rows(weight.values, weight.scales.roll(1))
    assert error(scaled_product(x, wrong, bias, BF16), expected) > 2**-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("T", "K", "N"), [(1, 16, 32), (4099, 768, 2304), (70_003, 3072, 768)])
def test_gradients_of_weights_of_tensor_cores_are_those_of_the_twin(T, K, N, dtype):
    x, grad = (
        round_tiles(each, limits_of(each), turned=True).turned
        for each in (normal(T, K), normal(T, N, seed=1))
    )
    found = fp8_weight_gradient(grad, x, dtype)
    assert found.dtype == dtype
    expected = scaled_product_reference(grad, x, None, FP32)
    assert error(found, expected) < 2**-8
    assert error(found.roll(1, 0), expected) > 0.5, "negative control"


def parameters(K: int, *sizes: int) -> tuple[list[nn.Parameter], nn.Parameter]:
    weights = [nn.Parameter(normal(N, K, seed=N + i, dtype=FP32)) for i, N in enumerate(sizes)]
    return weights, nn.Parameter(normal(sum(sizes), seed=9, dtype=FP32))


def exactly(x: Tensor) -> tuple[Tensor, Tensor]:
    """What products read of it, float64: ``[T, D]``, and ``[D, T]`` turned."""
    norms = row_norms(x)
    (values, scales), (others, scale) = by_hand(x, norms), by_hand(x, norms.max())
    return values * scales[:, None], (others * scale).t()


def gradients(out: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_linear_layer_of_three_weights(wrong):
    """Exactly what rounded operands give; near what unrounded ones give."""
    x = normal(1, 37, 64).requires_grad_()
    weights, bias = parameters(64, 48, 16, 32)
    grad, in_fp8 = normal(1, 37, 96, seed=7), round_weights(weights)
    if wrong:
        inputs = Fp8Rows(in_fp8.inputs.values, in_fp8.inputs.scales * 2)
        in_fp8 = in_fp8._replace(inputs=inputs)
    leaves = [x, *weights, bias]
    found = gradients(fp8_linear(fp8_operand(x), Layer(weights, bias, in_fp8)), leaves, grad)
    weight = torch.cat(weights).double()
    product = x.double() @ weight.t() + bias.double()
    expected = gradients(product, leaves, grad)
    errors = [error(*pair) for pair in zip(found, expected, strict=True)]
    assert (errors[1] > 2 * TOLERANCE) == wrong
    assert all(each < TOLERANCE for each in errors[:1] + errors[2:])
    assert min(errors[:-1]) > 0.01 > 1e-6 > errors[-1], "all but the sums are in FP8"
    grads, read = exactly(grad[0]), exactly(x.detach()[0])
    assert (error(found[1][0], grads[0] @ exactly(weight.float())[1].t()) < 2**-8) != wrong
    assert error(torch.cat(found[2:5]), grads[1] @ read[1].t()) < 1e-5


@pytest.mark.quick(1)
@pytest.mark.parametrize(("p", "copy"), [(0.0, BF16), (0.1, None)])
def test_a_feed_forward_part(p, copy):
    """Both layers and what follows them, against operators of PyTorch in fp32."""
    x, residual = normal(1, 37, 32).requires_grad_(), normal(1, 37, 32, seed=1, dtype=FP32)
    residual.requires_grad_()
    (first, second), (into, out) = zip(parameters(32, 64), parameters(64, 32), strict=True)
    gain, shift = (nn.Parameter(normal(32, seed=seed, dtype=FP32)) for seed in (3, 4))
    seed = torch.tensor(5, dtype=torch.int32, device=DEVICE) if p else None
    options = NormOptions(1e-5, p, FP32, copy, True)
    middle = fp8_linear_gelu(fp8_operand(x), Layer(first, into, Fp8Weights()(first)))
    layer = Layer(second, out, Fp8Weights()(second))
    result, operand = fp8_linear_post_norm(middle, layer, residual, gain, shift, options, seed=seed)
    assert isinstance(operand, Fp8Operand)
    assert (operand.wide is result) == (copy is None)
    assert_same(operand.rows, rounded(operand.wide.detach()[0]))
    leaves = [x, *first, into, *second, out, residual, gain, shift]
    grad = normal(1, 37, 32, seed=8, dtype=FP32)
    both = result + operand.wide if copy else result
    found = gradients(both, leaves, grad)
    hidden = bias_gelu_reference(x.float() @ first[0].t(), into)
    expected = post_norm_reference(
        hidden @ second[0].t(), out, residual, gain, shift, eps=1e-5, p=p, seed=seed
    )
    expected = gradients(2 * expected if copy else expected, leaves, grad)
    errors = [error(*pair) for pair in zip(found, expected, strict=True)]
    assert max(errors) < 2.5 * TOLERANCE
    shifted = [error(each, truth.roll(1, -1)) for each, truth in zip(found, expected, strict=True)]
    assert min(shifted) > 0.5, "negative control"


def test_without_a_gradient_nothing_is_kept():
    weights, bias = parameters(32, 32)
    given = Layer(weights, bias, Fp8Weights()(weights))
    options = NormOptions(1e-5, 0.0, FP32, BF16, False)
    x, residual = normal(5, 32), normal(5, 32, seed=1)
    with torch.no_grad():
        out, operand = fp8_linear_post_norm(fp8_operand(x), given, residual, bias, bias, options)
    assert not out.requires_grad and operand is None
    expected, _ = fp8_linear_post_norm(fp8_operand(x), given, residual, bias, bias, options)
    assert torch.equal(out, expected.detach()) and expected.requires_grad


@pytest.mark.quick(1)
@pytest.mark.parametrize("first_learns", [True, False])
def test_a_pass_without_a_graph_has_the_results_of_one_with_a_graph(first_learns):
    """The same dropout, as micro-batches ask, and gradients of the second layer where the first
    has none."""
    x, residual = normal(1, 37, 32), normal(1, 37, 32, seed=1, dtype=FP32)
    (first, second), (into, out) = zip(parameters(32, 64), parameters(64, 32), strict=True)
    for each in (*first, into):
        each.requires_grad_(first_learns)
    gain = torch.ones(32, device=DEVICE)
    options = NormOptions(1e-5, 0.3, FP32, BF16, False)

    def result() -> Tensor:
        torch.manual_seed(3)
        middle = fp8_linear_gelu(fp8_operand(x), Layer(first, into, Fp8Weights()(first)))
        layer = Layer(second, out, Fp8Weights()(second))
        return fp8_linear_post_norm(middle, layer, residual, gain, gain, options)[0]

    kept = result()
    with torch.no_grad():
        assert torch.equal(result(), kept.detach())
    assert torch.autograd.grad(kept.square().sum(), second)[0].abs().sum() > 0


def test_the_device_of_an_operand_in_fp8_alone_is_found(monkeypatch):
    looked_at = []
    monkeypatch.setattr(dispatch, "is_elsewhere", lambda x: looked_at.append(x.device.type))
    operand = fp8_operand(normal(3, 16))
    guarded = dispatch.on_its_device(lambda first: None)
    guarded(operand)
    guarded(operand._replace(wide=operand.wide.to("meta")))
    assert looked_at == [DEVICE.type] * 2


def test_weights_are_rounded_once_until_they_change(monkeypatch):
    calls = []
    monkeypatch.setattr(
        fp8_products, "round_weights", lambda weights: calls.append(1) or round_weights(weights)
    )
    (weight, other), _ = parameters(16, 32, 32)
    in_fp8 = Fp8Weights()
    first = in_fp8([weight])
    assert in_fp8([weight]) is first and len(calls) == 1
    assert_same(first.outputs, rounded(weight.detach()))
    assert_same(first.inputs, rounded(weight.detach().t().contiguous()))
    with torch.no_grad():
        weight.mul_(3)
    changed = in_fp8([weight])
    assert len(calls) == 2 and torch.equal(changed.outputs.scales, rounded(weight.detach()).scales)
    weight.data = other.detach().clone()
    assert_same(in_fp8([weight]).outputs, rounded(other.detach()))
    assert len(calls) == 3
    assert in_fp8([other]).outputs.values.shape == (32, 16) and len(calls) == 4
    assert in_fp8([weight, other]).outputs.values.shape == (64, 16)


def test_another_weight_in_the_same_place_is_rounded_anew():
    """As one is that is read into the memory of another: its place and its version may be equal."""
    place = normal(32, 64)
    one, another = place.view(64, 32), place.view(32, 64)
    assert (one._version, one.data_ptr()) == (another._version, another.data_ptr())
    in_fp8 = Fp8Weights()
    assert in_fp8([one]).outputs.values.shape == (64, 32)
    assert in_fp8([another]).outputs.values.shape == (32, 64)


def test_columns_that_tensor_cores_do_not_read_are_refused():
    with pytest.raises(ValueError, match=r"a multiple of 16 columns, got \(3, 40\): pad them"):
        fp8_operand(normal(3, 40))
