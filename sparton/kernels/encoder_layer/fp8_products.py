"""Products of FP8 matrices, and the weights for them. T rows, K inputs, N outputs of a layer.

Both operands are e4m3. With a scale for each row nothing of a gradient is out of its range, so that
the third bit of the mantissa is worth more than the exponents of e5m2.
"""

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.dispatch import late
from sparton.kernels.encoder_layer.fp8_operands import FP8_MULTIPLE, Fp8Operand, Fp8Rows, Limits

_limits_of = late("sparton.kernels.encoder_layer.fp8_limits.limits_of")
_round = late("sparton.kernels.encoder_layer.fp8_tiles.round_tiles")


class Fp8Weight(NamedTuple):
    """A weight in FP8, rounded once for each of the products that read it.

    Attributes:
        outputs: ``[N, K]``, a scale for each output.
        inputs: ``[K, N]``, for the gradient of what the layer reads.
        largest: fp32 ``[]``, of the norms of its N rows.
    """

    outputs: Fp8Rows
    inputs: Fp8Rows
    largest: Tensor


class Fp8Weights:
    """Weights of a layer, one above the other, in FP8: rounded when they are first asked for, and
    again when one of them has changed.

    A change is seen by the version that PyTorch counts, by another place in memory, or by another
    tensor. What writes to ``weight.data``, or an optimizer that is fused, must count it
    (``torch.autograd.graph.increment_version``).
    """

    def __init__(self) -> None:
        # They are held, so that no others come to lie where they do.
        self._weights: list[Tensor] = []
        self._state: list[tuple[int, int]] = []
        self._rounded: Fp8Weight | None = None

    def __call__(self, weights: Sequence[Tensor]) -> Fp8Weight:
        """The weights ``[N_i, K]`` as one matrix ``[N, K]``, N being the sum of all N_i."""
        state = [(weight._version, weight.data_ptr()) for weight in weights]
        same = state == self._state and all(map(is_, weights, self._weights))
        if self._rounded is None or not same:
            self._rounded = round_weights(weights)
            self._weights, self._state = list(weights), state
        return self._rounded


@torch.no_grad()
def round_weights(weights: Sequence[Tensor]) -> Fp8Weight:
    """Weights ``[N_i, K]`` of any float dtype, one above the other; all sizes are multiples of
    :data:`FP8_MULTIPLE`."""
    weight = (weights[0] if len(weights) == 1 else torch.cat(list(weights))).contiguous()
    limits = _limits_of()(weight)
    rows, turned, _ = _round()(weight, limits, turned=True)
    return Fp8Weight(rows, turned, limits.largest)


def fp8_operand(x: Tensor) -> Fp8Operand:
    """``x [..., K]``, of a float dtype, in FP8; turned, too, if gradients are recorded.

    Raises:
        ValueError: K is no multiple of :data:`FP8_MULTIPLE`.
    """
    if x.shape[-1] % FP8_MULTIPLE:
        raise ValueError(
            f"rows in FP8 have a multiple of {FP8_MULTIPLE} columns, got {tuple(x.shape)}: pad them"
        )
    return rounded(x, None, turned=torch.is_grad_enabled())


def rounded(x: Tensor, limits: Limits | None, *, turned: bool) -> Fp8Operand:
    """``x [..., K]`` in FP8.

    Args:
        limits: of its rows; None: they are looked at.
        turned: whether the gradient of a weight will read it.
    """
    flat = x.detach().flatten(0, -2).contiguous()
    limits = _limits_of()(flat) if limits is None else limits
    rows, other, _ = _round()(flat, limits, turned=turned)
    return Fp8Operand(x, rows, other, limits)


def product_limits(x: Limits, weight: Fp8Weight, bias: Tensor) -> Limits:
    """The limits of ``x weight^T + bias``, and of GELU of it, given those of x, which are norms."""
    offset = torch.linalg.vector_norm(bias.detach(), torch.inf, dtype=torch.float32)
    return x._replace(factor=weight.largest, offset=offset)


def attention_limits(x: Limits, weight: Fp8Weight, bias: Tensor) -> Limits:
    """The limits of what attention makes of ``x weight^T + bias``, among which its values are: a
    mean of some values is no larger than the largest of all."""
    return product_limits(x, weight, bias)._replace(norms=None)


def gelu_gradient_limits(grad: Limits, weight: Fp8Weight) -> Limits:
    """The limits of the gradient of what GELU read, given those of the gradient of a product of
    GELU's result with this weight, which are norms."""
    values, scales = weight.inputs
    return grad._replace(factor=_limits_of()(values).largest * scales[0])


def fp8_weight_gradient(grad: Fp8Rows, x: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """``grad x^T [N, K]`` of ``grad [N, T]`` and ``x [K, T]``, each with one scale in all rows; for
    a weight in fp32 as it was summed, otherwise in bfloat16. Sums over all tokens are long: they
    are kept in fp32."""
    dtype = dtype if dtype == torch.float32 else torch.bfloat16
    if not x.values.shape[1]:
        return torch.zeros(len(grad.values), len(x.values), dtype=dtype, device=x.values.device)
    if not x.values.is_cuda:
        return scaled_product_reference(grad, x, None, dtype)
    # With a scale for each row products are given in bfloat16 alone.
    return torch._scaled_mm(
        grad.values, x.values.t(), scale_a=grad.scales[0], scale_b=x.scales[0], out_dtype=dtype
    )


def scaled_product(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``x [T, K] @ weight [N, K].T + bias`` in this dtype, ``bias [N]``, too. Tensor cores add up
    with fewer bits than fp32 has, of which some thousand columns lose less than the rounding of
    their numbers does: a fifth of the time.

    On a CPU in fp32, for tests.
    """
    if not x.values.is_cuda:
        return scaled_product_reference(x, weight, bias, dtype)
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales[:, None],
        scale_b=weight.scales[None, :],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def scaled_product_reference(
    x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same from restored operands in fp32."""
    product = x.restored() @ weight.restored().t()
    return (product if bias is None else product + bias.float()).to(dtype)
