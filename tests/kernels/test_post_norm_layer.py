"""A whole layer as one function against its parts one after the other, on the GPU or in Triton's
interpreter.

T tokens, D columns.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.dispatch import has_fp8
from sparton.kernels.encoder_layer import (
    Fp8Operand,
    Layer,
    NormOptions,
    bias_gelu,
    fp8_linear,
    fp8_linear_gelu,
    fp8_linear_post_norm,
    fp8_operand,
    post_norm,
    post_norm_and_copy,
)
from sparton.kernels.encoder_layer.fp8_products import round_weights
from sparton.kernels.post_norm_layer import (
    LayerOptions,
    LayerParameters,
    ProductWeights,
    post_norm_layer,
)
from sparton.kernels.varlen_attention import varlen_self_attention
from tests import interpreter
from tests.kernels.problems import error
from tests.kernels.test_encoder_layer import DEVICE, HALVES

LENGTHS, D, WIDE, HEADS = (5, 0, 17, 9), 32, 48, 2
EPS = 1e-6


def parameters(dtype: torch.dtype = torch.float32) -> LayerParameters:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
        return x.to(DEVICE, dtype).requires_grad_()

    shapes = [(D, D)] * 3 + [(D,)] * 3 + [(D, D)] + [(D,)] * 3
    return LayerParameters(
        *(drawn(*shape) for shape in (*shapes, (WIDE, D), (WIDE,), (D, WIDE), *[(D,)] * 3))
    )


def states(dtype: torch.dtype, sums: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(sum(LENGTHS), D, generator=generator).to(DEVICE, sums)
    return residual.to(dtype).requires_grad_(), residual.requires_grad_()


def layer(operand: Tensor, *given: Any) -> tuple[Tensor, Tensor | None]:
    """With products in 16 bits."""
    *found, limits = post_norm_layer(operand, *given)
    assert limits is None
    return tuple(found)


def weights_of(p: LayerParameters, dtype: torch.dtype) -> ProductWeights:
    projection = torch.cat(p[:3]), torch.cat(p[3:6])
    others = p.attention_weight, p.intermediate_weight, p.output_weight
    return ProductWeights(*(x.detach().to(dtype) for x in (*projection, *others)))


def options_of(p: float, sums: torch.dtype, copy: torch.dtype | None) -> LayerOptions:
    bounds = torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    norm = NormOptions(EPS, p, sums, copy)
    return LayerOptions(bounds.to(DEVICE), max(LENGTHS), HEADS, (D // HEADS) ** -0.5, norm, norm)


def by_parts(
    operand: Tensor, residual: Tensor, p: LayerParameters, options: LayerOptions
) -> tuple[Tensor, Tensor | None]:
    """The same of the functions of its parts."""
    dtype = operand.dtype

    def ended(product: Tensor, residual: Tensor, vectors: tuple, norm: NormOptions):
        given = (product, vectors[0], residual, *vectors[1:])
        settings = {"eps": norm.eps, "p": norm.p, "dtype": norm.dtype}
        if norm.copy is None:
            return post_norm(*given, **settings), None
        return post_norm_and_copy(*given, copy=norm.copy, **settings)

    projection = F.linear(operand, torch.cat(p[:3]).to(dtype), torch.cat(p[3:6]).to(dtype))
    heads = projection.view(len(operand), 3, HEADS, -1)
    mixed = varlen_self_attention(heads, options.cu_seqlens, options.max_seqlen)
    product = F.linear(mixed.flatten(1), p.attention_weight.to(dtype))
    middle, copy = ended(product, residual, p[7:10], options.attention)
    product = F.linear(middle if copy is None else copy, p.intermediate_weight.to(dtype))
    activated = bias_gelu(product, p.intermediate_bias)
    product = F.linear(activated, p.output_weight.to(dtype))
    return ended(product, middle, p[13:], options.output)


def gradients(results: tuple, wanted: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros((), device=DEVICE)
    for x in results:
        if x is not None:
            grad = torch.randn(x.shape, generator=generator).to(DEVICE)
            total = total + (x.float() * grad).sum()
    return list(torch.autograd.grad(total, wanted, materialize_grads=True))


FORMS = [  # of products, of sums, of copies
    *((half, torch.float32, half) for half in HALVES),
    *((half, half, None) for half in HALVES),
    (HALVES[-1], torch.float32, None),
]


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "sums", "copy"), FORMS)
def test_results_are_those_of_the_parts(dtype, sums, copy, p):
    if copy is None and sums != dtype:
        # Within a layer there are always both.
        last = NormOptions(EPS, p, sums, None)
        options = options_of(p, sums, dtype)._replace(output=last)
    else:
        options = options_of(p, sums, copy)
    operand, residual = states(dtype, sums)
    learned = parameters()
    wanted = [operand, residual, *learned]
    torch.manual_seed(3)
    own = layer(operand, residual, learned, weights_of(learned, dtype), options)
    torch.manual_seed(3)
    parts = by_parts(operand, residual, learned, options)
    with torch.no_grad():
        torch.manual_seed(3)
        without = layer(operand, residual, learned, weights_of(learned, dtype), options)
    assert (own[1] is None) == (copy is None)
    for x, y, z in zip(own, parts, without, strict=True):
        assert x is y is z is None or (torch.equal(x, y) and torch.equal(x, z))
    found, expected = gradients(own, wanted), gradients(parts, wanted)
    # Products of gradients go to parameters in fp32 here, and rounded to 16 bits there.
    bound = 2 * torch.finfo(dtype).eps
    names = ["operand", "residual", *LayerParameters._fields]
    for name, x, y in zip(names, found, expected, strict=True):
        assert (x.dtype == y.dtype and error(x, y) < bound) or name == "key_bias", name
    # No score depends on the bias of keys.
    assert float(found[6].norm()) < 1e-2 * float(found[5].norm())
    if options.attention.copy is not None:  # else autograd adds gradients in 16 bits
        assert all(torch.equal(x, y) for x, y in zip(found[:2], expected[:2], strict=True))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_tensor_that_is_operand_and_residual_has_the_sum_of_both_gradients(dtype, p):
    operand, _ = states(dtype, dtype)
    residual = operand.detach().clone().requires_grad_()
    learned, options = parameters(), options_of(p, dtype, None)
    weights = weights_of(learned, dtype)
    torch.manual_seed(3)
    apart = layer(operand, residual, learned, weights, options)
    torch.manual_seed(3)
    together = layer(operand, operand, learned, weights, options)
    assert torch.equal(together[0], apart[0])
    first, second, *expected = gradients(apart, [operand, residual, *learned])
    found, *others = gradients(together, [operand, *learned])
    assert all(map(torch.equal, others, expected))
    # Rounded once.
    total = first.double() + second.double()
    assert error(found, total) < torch.finfo(dtype).eps < error(first, total)


@pytest.mark.parametrize("dtype", HALVES)
def test_without_a_graph_gelu_may_be_the_librarys(dtype):
    """Its error is below that of rounding; with a graph nothing changes."""
    operand, residual = states(dtype, dtype)
    learned, options = parameters(), options_of(0.0, dtype, None)
    exact = weights_of(learned, dtype)
    bias = learned.intermediate_bias.detach().to(dtype)

    def run(bias: Tensor | None) -> Tensor:
        weights = exact._replace(intermediate_bias=bias)
        return layer(operand, residual, learned, weights, options)[0]

    expected = run(None)
    assert torch.equal(run(bias), expected)
    with torch.no_grad():
        found, wrong = run(bias), run(bias * 1.1)
    bound = torch.finfo(dtype).eps
    assert 0 < error(found, expected) < bound < 2 * bound < error(wrong, expected)


@pytest.mark.parametrize("fault", ["scale", "gain", "output_weight"])
def test_the_comparison_sees_faults(fault):
    dtype = HALVES[-1]
    operand, residual = states(dtype, torch.float32)
    learned, options = parameters(), options_of(0.0, torch.float32, dtype)
    expected = by_parts(operand, residual, learned, options)[0]
    weights = weights_of(learned, dtype)
    if fault == "scale":
        options = options._replace(scale=options.scale * 1.6)
    elif fault == "gain":
        learned = learned._replace(attention_gain=learned.attention_gain * 1.1)
    else:
        weights = weights._replace(output=weights.output * 1.1)
    found = layer(operand, residual, learned, weights, options)[0]
    assert error(found, expected) > 2 * torch.finfo(dtype).eps


def test_frozen_parameters_get_no_gradient():
    dtype = HALVES[-1]
    operand, residual = states(dtype, torch.float32)
    learned = parameters()
    for x in learned:
        x.requires_grad_(x is learned.output_weight or x is learned.key_weight)
    options = options_of(0.0, torch.float32, dtype)
    out, _ = layer(operand, residual, learned, weights_of(learned, dtype), options)
    expected, _ = by_parts(operand, residual, learned, options)
    wanted = [learned.output_weight, learned.key_weight, operand]
    for x, y in zip(gradients((out,), wanted), gradients((expected,), wanted), strict=True):
        assert error(x, y) < 2 * torch.finfo(dtype).eps
    out, _ = layer(operand, residual, learned, weights_of(learned, dtype), options)
    out.float().sum().backward()
    assert [x.grad is None for x in learned].count(False) == 2


def test_one_gradient_alone_is_enough():
    dtype = HALVES[-1]
    operand, residual = states(dtype, torch.float32)
    learned, options = parameters(), options_of(0.0, torch.float32, dtype)
    given = (operand, residual, learned, weights_of(learned, dtype), options)
    for number in range(2):
        own = [layer(*given)[number]]
        parts = [by_parts(operand, residual, learned, options)[number]]
        assert torch.equal(gradients(own, [residual])[0], gradients(parts, [residual])[0])


def in_fp8(p: LayerParameters) -> ProductWeights:
    matrices = p[:3], [p.attention_weight], [p.intermediate_weight], [p.output_weight]
    first, *others = map(round_weights, matrices)
    return ProductWeights(first, torch.cat(p[3:6]).detach().to(HALVES[-1]), *others)


def parts_in_fp8(
    operand: Fp8Operand, residual: Tensor, p: LayerParameters, options: LayerOptions
) -> tuple[Tensor, Fp8Operand | None]:
    weights = in_fp8(p)
    projection = Layer(p[:3], torch.cat(p[3:6]), weights.projection)
    heads = fp8_linear(operand, projection).view(len(residual), 3, HEADS, -1)
    mixed = varlen_self_attention(heads, options.cu_seqlens, options.max_seqlen).flatten(1)
    end = Layer([p.attention_weight], p.attention_bias, weights.attention)
    middle, read = fp8_linear_post_norm(
        fp8_operand(mixed), end, residual, *p[8:10], options.attention
    )
    into = Layer([p.intermediate_weight], p.intermediate_bias, weights.intermediate)
    activated = fp8_linear_gelu(read, into)
    last = Layer([p.output_weight], p.output_bias, weights.output)
    return fp8_linear_post_norm(activated, last, middle, *p[14:], options.output)


@pytest.mark.skipif(
    DEVICE == "cuda" and not has_fp8(torch.device(DEVICE)),
    reason="this GPU has no FP8 tensor cores",
)
@pytest.mark.parametrize(("copied", "wanted"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_results_in_fp8_are_those_of_the_parts(p, copied, wanted):
    dtype = HALVES[-1]
    sums, copy = (torch.float32, dtype) if copied else (dtype, None)
    options = options_of(p, sums, copy)
    first, last = (options.attention._replace(limits=each) for each in (True, wanted))
    options = options._replace(attention=first, output=last)
    operand, residual = states(dtype, sums)
    operand = operand.detach().clone().requires_grad_()
    learned = parameters()
    leaves = [operand, residual, *learned]
    with nullcontext() if DEVICE == "cuda" else interpreter.rounding():
        read = fp8_operand(operand)
        torch.manual_seed(3)
        out, second, limits = post_norm_layer(read, residual, learned, in_fp8(learned), options)
        torch.manual_seed(3)
        parts, left = parts_in_fp8(read, residual, learned, options)
        found = gradients((out, second), leaves)
        expected = gradients((parts, left.wide if left else None), leaves)
        with torch.no_grad():
            torch.manual_seed(3)
            without = post_norm_layer(read, residual, learned, in_fp8(learned), options)
    assert torch.equal(out, parts) and torch.equal(out, without[0])
    assert (limits is None) == (left is None) == (not wanted)
    if limits is not None:
        for each in (without[2], left.limits):
            assert torch.equal(limits.norms, each.norms)
            assert torch.equal(limits.largest, each.largest)
    names = ["operand", "residual", *LayerParameters._fields]
    for name, x, y in zip(names, found, expected, strict=True):
        assert x.dtype == y.dtype, name
        # Of GELU the layer knows other limits, so that other numbers are too small for e4m3; and
        # without a copy autograd adds the middle's two gradients in 16 bits, as the layer does not.
        assert error(x, y) < (1e-4 if copied else 0.02) or name == "key_bias", name


def test_products_in_fp8_are_coarser_than_those_in_16_bits():
    dtype = HALVES[-1]
    operand, residual = states(dtype, torch.float32)
    learned, options = parameters(), options_of(0.0, torch.float32, dtype)
    expected = layer(operand, residual, learned, weights_of(learned, dtype), options)[0]
    with nullcontext() if DEVICE == "cuda" else interpreter.rounding():
        read = fp8_operand(operand)
        found = post_norm_layer(read, residual, learned, in_fp8(learned), options)[0]
    assert torch.finfo(dtype).eps < error(found, expected) < 0.1
