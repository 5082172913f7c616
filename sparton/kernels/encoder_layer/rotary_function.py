"""Rotary positions, with a norm of each head before or not, as PyTorch operators.

T tokens, H heads, d the width of a head.
"""

from torch import Tensor

from sparton.kernels.dispatch import late
from sparton.kernels.encoder_layer.operands import FLOATS
from sparton.kernels.operator import Operator

_kernel = late("sparton.kernels.encoder_layer.rotation.rotate")
_normed_backward_kernel = late("sparton.kernels.encoder_layer.rotation.normed_rotary_backward")


def _turned(
    states: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, *, eps: float = 0.0,
    copied: int = 0, back: bool = False,
) -> Tensor:  # fmt: skip
    gain = None if gain is None else gain.contiguous()
    operands = (states.contiguous(), gain, cos.contiguous(), sin.contiguous())
    return _kernel()(*operands, eps=eps, copied=copied, back=back)


def _rotary(states: Tensor, cos: Tensor, sin: Tensor, copied: int) -> Tensor:
    return _turned(states, None, cos, sin, copied=copied)


def _gradient(grad: Tensor, cos: Tensor, sin: Tensor, copied: int) -> Tensor:
    return _turned(grad, None, cos, sin, copied=copied, back=True)


_operator = Operator(
    "sparton::rotary", _rotary, fake=lambda states, *_: states.new_empty(states.shape)
)
_operator.differentiable(
    ("states",), _gradient, fake=lambda grad, *_: (grad.new_empty(grad.shape),)
)


def _normed_rotary(states: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return _turned(states, gain, cos, sin, eps=eps)


def _normed_gradients(
    grad: Tensor, states: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    operands = (x.contiguous() for x in (grad, states, gain, cos, sin))
    dx, dgain = _normed_backward_kernel()(*operands, eps)
    return dx, dgain.to(gain.dtype)


_normed_operator = Operator(
    "sparton::normed_rotary",
    _normed_rotary,
    fake=lambda states, *_: states.new_empty(states.shape),
)
_normed_operator.differentiable(("states", "gain"), _normed_gradients)


def rotary(states: Tensor, cos: Tensor, sin: Tensor, *, copied: int = 0) -> Tensor:
    """Heads turned by the angles of their tokens (Su et al., arXiv 2104.09864); computed in fp32.

    Entry i of the first half of a head and entry i of the second are turned together:
    ``(u, v)`` becomes ``(u cos - v sin, v cos + u sin)``.

    Args:
        states: ``[T, H, d]`` queries or keys of each token, or both, float16, bfloat16 or float32
            on a GPU; d is even.
        cos, sin: ``[T, d]`` of the angles, in any of these dtypes; both halves of a row are alike,
            and the first is read.
        copied: the number of last heads that stay as they are: values beside the others.

    Returns:
        ``[T, H, d]``, contiguous, in the dtype of ``states``, with respect to which it is
        differentiable once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    _check(states, cos, sin)
    if not 0 <= copied <= states.shape[1]:
        raise ValueError(f"copied={copied}: of {states.shape[1]} heads")
    return _operator(states, cos, sin, copied)


def normed_rotary(states: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, *, eps: float) -> Tensor:
    """:func:`rotary` of heads that RMSNorm brings to one length before; nothing is rounded between.

    Args:
        states, cos, sin: as there.
        gain: ``[d]``, weight of the normalisation, of any of these dtypes.
        eps: added to the mean square.

    Returns:
        ``[T, H, d]``, contiguous, in the dtype of ``states``. Differentiable once; the gain's
        gradient is summed in fp32 in a fixed order.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    _check(states, cos, sin, gain)
    if gain.shape != states.shape[2:]:
        raise ValueError(f"gain must be [d] = [{states.shape[2]}], got {tuple(gain.shape)}")
    return _normed_operator(states, gain, cos, sin, eps)


def _check(states: Tensor, cos: Tensor, sin: Tensor, *others: Tensor) -> None:
    if states.dim() != 3 or states.shape[2] % 2:
        raise ValueError(f"states must be [T, H, d] with an even d, got {tuple(states.shape)}")
    T, _, d = states.shape
    if not cos.shape == sin.shape == (T, d):
        raise ValueError(
            f"cos and sin must be [T, d] = [{T}, {d}], got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    operands = (states, cos, sin, *others)
    if any(x.dtype not in FLOATS for x in operands):
        raise ValueError(
            "states, cos, sin and gain must be float16, bfloat16 or float32, got "
            f"{', '.join(str(x.dtype) for x in operands)}"
        )
    if len(devices := {x.device for x in operands}) > 1:
        raise ValueError(f"operands must be on one device, got {sorted(map(str, devices))}")
