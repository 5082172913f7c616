"""Rotary positions as a PyTorch operator. T tokens, H heads, d the width of a head."""

import torch
from torch import Tensor

from sparton.kernels.dispatch import late
from sparton.kernels.encoder_layer.operands import FLOATS
from sparton.kernels.operator import Operator

_kernel = late("sparton.kernels.encoder_layer.rotation.rotate")


def _turned(states: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    # Contiguous, whatever the strides of the states.
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    _kernel()(states.contiguous(), cos.contiguous(), sin.contiguous(), out, back=back)
    return out


def _rotary(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(states, cos, sin, back=False)


def _gradient(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(grad, cos, sin, back=True)


_operator = Operator(
    "sparton::rotary", _rotary, fake=lambda states, cos, sin: states.new_empty(states.shape)
)
_operator.differentiable(
    ("states",), _gradient, fake=lambda grad, cos, sin: (grad.new_empty(grad.shape),)
)


def rotary(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys turned by the angles of their tokens (Su et al., arXiv 2104.09864), beside
    values as they are; computed in fp32.

    Entry i of the first half of a head and entry i of the second are turned together:
    ``(u, v)`` becomes ``(u cos - v sin, v cos + u sin)``.

    Args:
        states: ``[T, 3, H, d]`` queries, keys and values of each token, float16, bfloat16 or
            float32 on a GPU; d is even.
        cos, sin: ``[T, d]`` of the angles, in any of these dtypes; both halves of a row are alike,
            and the first is read.

    Returns:
        ``[T, 3, H, d]``, contiguous, in the dtype of ``states``, with respect to which it is
        differentiable once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    if states.dim() != 4 or states.shape[1] != 3 or states.shape[3] % 2:
        raise ValueError(f"states must be [T, 3, H, d] with an even d, got {tuple(states.shape)}")
    T, _, _, d = states.shape
    if not cos.shape == sin.shape == (T, d):
        raise ValueError(
            f"cos and sin must be [T, d] = [{T}, {d}], got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    operands = (states, cos, sin)
    if any(x.dtype not in FLOATS for x in operands):
        raise ValueError(
            "states, cos and sin must be float16, bfloat16 or float32, got "
            f"{states.dtype}, {cos.dtype} and {sin.dtype}"
        )
    if len(devices := {x.device for x in operands}) > 1:
        raise ValueError(f"operands must be on one device, got {sorted(map(str, devices))}")
    return _operator(*operands)
