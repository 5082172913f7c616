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
from sparton.kernels.encoder_layer.fp8_operands import (
    FP8_MULTIPLE,
    Fp8Operand,
    Fp8Rows,
    empty_rows,
)

_round_rows = late("sparton.kernels.encoder_layer.fp8_rows.round_rows")


class Fp8Weight(NamedTuple):
    """A weight in FP8, rounded once for each of the products that read it.

    Attributes:
        outputs: ``[N, K]``, a scale for each output.
        inputs: ``[K, N]``, a scale for each input: for the gradient of what the layer reads.
    """

    outputs: Fp8Rows
    inputs: Fp8Rows


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
    """Weights ``[N_i, K]`` of any float dtype, one above the other."""
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    return Fp8Weight(*(_rounded(x.contiguous()) for x in (weight, weight.t())))


def fp8_operand(x: Tensor) -> Fp8Operand:
    """``x [..., K]``, of a float dtype, with its rows in FP8.

    Raises:
        ValueError: K is no multiple of :data:`FP8_MULTIPLE`.
    """
    if x.shape[-1] % FP8_MULTIPLE:
        raise ValueError(
            f"rows in FP8 have a multiple of {FP8_MULTIPLE} columns, got {tuple(x.shape)}: pad them"
        )
    return Fp8Operand(x, _rounded(x.detach().flatten(0, -2).contiguous()))


def linear_product(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """What a linear layer makes of ``x [T, K]``; see :func:`scaled_product`."""
    return scaled_product(x, weight.outputs, bias, dtype, fast=True)


def input_gradient(grad: Fp8Rows, inputs: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """The gradient of what it reads, given that of its product ``[T, N]`` and the inputs of its
    weight. Gradients are small differences of many products: they are added up in fp32."""
    return scaled_product(grad, inputs, None, dtype, fast=False)


def scaled_product(
    x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """``x [T, K] @ weight [N, K].T + bias`` in this dtype.

    On a CPU in fp32, for tests.

    Args:
        bias: ``[N]``, in the same dtype.
        fast: whether tensor cores add up with fewer bits, as a forward can bear.
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
        use_fast_accum=fast,
    )


def scaled_product_reference(
    x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same from restored operands in fp32."""
    product = x.restored() @ weight.restored().t()
    return (product if bias is None else product + bias.float()).to(dtype)


def _rounded(x: Tensor) -> Fp8Rows:
    rows = empty_rows(x)
    _round_rows()(x, rows)
    return rows
