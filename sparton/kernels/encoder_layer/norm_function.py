"""Dropout, residual and normalisation as a PyTorch operator. T tokens, D columns."""

import torch
from torch import Tensor

from sparton.kernels.dispatch import late, on_its_device
from sparton.kernels.encoder_layer.dropout import draw_seed
from sparton.kernels.encoder_layer.operands import (
    FLOATS,
    Normalised,
    check_operands,
    check_residual,
    rows_of,
)
from sparton.kernels.operator import Operator

_forward_kernel = late("sparton.kernels.encoder_layer.normalization.norm_forward")
_backward_kernel = late("sparton.kernels.encoder_layer.normalization.norm_backward")


def _post_norm(
    x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, seed: Tensor | None,
    p: float, eps: float, dtype: torch.dtype, copy: torch.dtype | None, save: bool,
) -> Normalised:  # fmt: skip
    vectors = (vector.contiguous() for vector in (gain, shift))
    out, second, *saved = _forward_kernel()(
        rows_of(x), bias.contiguous(), rows_of(residual), *vectors, seed,
        p=p, eps=eps, dtype=dtype, copy=copy, save=save,
    )  # fmt: skip
    return Normalised(out.view(x.shape), None if second is None else second.view(x.shape), *saved)


def _fake(
    x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, seed: Tensor | None,
    p: float, eps: float, dtype: torch.dtype, copy: torch.dtype | None,
) -> Normalised:  # fmt: skip
    T, D = x.numel() // x.shape[-1], x.shape[-1]
    return Normalised(
        x.new_empty(x.shape, dtype=dtype),
        None if copy is None else x.new_empty(x.shape, dtype=copy),
        x.new_empty((T, D), dtype=torch.promote_types(x.dtype, residual.dtype)),
        x.new_empty((2, T), dtype=torch.float32),
    )


def _gradients(
    out_grad: Tensor | None, second_grad: Tensor | None, sums: Tensor, moments: Tensor,
    gain: Tensor, seed: Tensor | None, p: float, x_dtype: torch.dtype, bias_dtype: torch.dtype,
    residual_dtype: torch.dtype, shift_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, bias, residual, gain and shift."""
    grads = [x for x in (out_grad, second_grad) if x is not None]
    dx, dresidual, columns = _backward_kernel()(
        rows_of(grads[0]), rows_of(grads[1]) if grads[1:] else None, None, sums, moments,
        gain.contiguous(), seed, vectors=3, p=p, dtypes=(x_dtype, residual_dtype),
    )  # fmt: skip
    dgain, dbias, dshift = columns.unbind(0)
    return (
        dx.view(grads[0].shape), dbias.to(bias_dtype), dresidual.view(grads[0].shape),
        dgain.to(gain.dtype), dshift.to(shift_dtype),
    )  # fmt: skip


def _fake_gradients(
    out_grad: Tensor | None, second_grad: Tensor | None, sums: Tensor, moments: Tensor,
    gain: Tensor, seed: Tensor | None, p: float, x_dtype: torch.dtype, bias_dtype: torch.dtype,
    residual_dtype: torch.dtype, shift_dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    grad, dtypes = out_grad, (x_dtype, bias_dtype, residual_dtype, gain.dtype, shift_dtype)
    if grad is None:
        grad = second_grad
    assert grad is not None
    shapes = (grad.shape, gain.shape, grad.shape, gain.shape, gain.shape)
    return tuple(gain.new_empty(shape, dtype=x) for shape, x in zip(shapes, dtypes, strict=True))


_operator = Operator("sparton::post_norm", _post_norm, fake=_fake, keeps="save")
_operator.differentiable(
    ("x", "bias", "residual", "gain", "shift"),
    _gradients,
    results=Normalised._fields,
    fake=_fake_gradients,
)


@on_its_device
def embedding_norm(
    words: Tensor,
    ids: Tensor,
    added: Tensor,
    places: Tensor,
    positions: Tensor,
    gain: Tensor,
    shift: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """``LayerNorm(words[ids] + added + places[positions])``, computed in fp32: where BERT's kind
    begins, in one pass. It has no gradient.

    Args:
        words: ``[V, D]`` float16, bfloat16 or float32 on a GPU.
        ids: int64 ``[...]``, rows of ``words``. They are not checked: beyond the table lies memory
            of others.
        added: ``[D]``, the same for every token.
        places: ``[P, D]``.
        positions: int64 ``[...]``, rows of ``places``, in the shape of ``ids``.
        gain, shift: ``[D]``, weight and bias of the normalisation.
        eps: added to the variance.
        dtype: of the result.

    Returns:
        ``[..., D]``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    check_operands(words, added, gain, shift)
    check_residual(words[:1], places[:1])
    for name, rows in (("ids", ids), ("positions", positions)):
        if (rows.dtype, rows.shape, rows.device) != (torch.int64, ids.shape, words.device):
            raise ValueError(
                f"{name} must be int64 {tuple(ids.shape)} on {words.device}, got {rows.dtype} "
                f"{tuple(rows.shape)} on {rows.device}"
            )
    added, gain, shift = (vector.contiguous() for vector in (added, gain, shift))
    out = _forward_kernel()(
        words.contiguous(), added, places.contiguous(), gain, shift, None, p=0.0, eps=eps,
        dtype=dtype, copy=None, save=False, tables=(ids.flatten(), positions.flatten()),
    ).out  # fmt: skip
    return out.view(*ids.shape, words.shape[1])


def post_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    *,
    eps: float,
    p: float = 0.0,
    seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``LayerNorm(residual + dropout(x + bias))``, computed in fp32.

    Args:
        x: ``[..., D]`` float16, bfloat16 or float32 on a GPU: a linear layer's product.
        bias: ``[D]``, of that layer.
        residual: ``[..., D]``, the same shape, of any of these dtypes.
        gain, shift: ``[D]``, weight and bias of the normalisation.
        eps: added to the variance.
        p: share of the numbers that dropout sets to 0, below 1.
        seed: int32 ``[]`` that says which, see :func:`hashed_dropout`; None draws one from
            PyTorch's global generator.
        dtype: of the result; None: the wider of those of x and residual, in which they are added
            in any case.

    Returns:
        ``[..., D]``. Differentiable once, with respect to all tensors but the seed; gradients of
        vectors are summed in fp32 in a fixed order.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, p outside of [0, 1).
    """
    return _normalised(x, bias, residual, gain, shift, seed, p, eps, dtype, None)[0]


def post_norm_and_copy(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    *,
    eps: float,
    p: float = 0.0,
    seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
    copy: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The result of :func:`post_norm` in two dtypes, as the next residual and as what the next
    product reads: rounded where it is made, and the gradients of both are added where they are
    read.

    Args:
        x, bias, residual, gain, shift, eps, p, seed, dtype: see :func:`post_norm`.
        copy: dtype of the second result.

    Returns:
        ``[..., D]`` in ``dtype`` and in ``copy``, both differentiable.

    Raises:
        ValueError: as :func:`post_norm`.
    """
    return _normalised(x, bias, residual, gain, shift, seed, p, eps, dtype, copy)


def _normalised(
    x: Tensor, bias: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, seed: Tensor | None,
    p: float, eps: float, dtype: torch.dtype | None, copy: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_operands(x, bias, gain, shift)
    check_residual(x, residual)
    if seed is not None and (seed.dtype, seed.shape, seed.device) != (torch.int32, (), x.device):
        raise ValueError(
            f"seed must be int32 [] on {x.device}, got {seed.dtype} {tuple(seed.shape)} on "
            f"{seed.device}"
        )
    for name, wanted in (("dtype", dtype), ("copy", copy)):
        if wanted is not None and wanted not in FLOATS:
            raise ValueError(f"{name} must be float16, bfloat16 or float32, got {wanted}")
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    seed = (draw_seed(x.device) if seed is None else seed) if p else None
    dtype = torch.promote_types(x.dtype, residual.dtype) if dtype is None else dtype
    return _operator(x, bias, residual, gain, shift, seed, p, eps, dtype, copy)
