"""Token embeddings stored in FP8 (e4m3): half the bytes of 16 bits.

T tokens, E embedding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.dispatch import has_fp8, on_its_device
from sparton.kernels.segment_max.quantize_cpu import rows_in_fp8

TOKENS_AT_ONCE = 2**16


class Fp8Tokens(NamedTuple):
    """Embeddings of T tokens, or of any leading shape: a token is its values times its scale.

    Attributes:
        values: float8_e4m3fn ``[T, E]``.
        scales: fp32 ``[T]``, the token's largest absolute value / 448.
    """

    values: Tensor
    scales: Tensor


@torch.no_grad()
def quantize_fp8(tokens: Tensor) -> Fp8Tokens:
    """Tokens rounded once, to be stored and scored by :func:`~sparton.kernels.maxsim.maxsim_fp8`,
    which rounds in the same way what it gets in 16 bits.

    Args:
        tokens: ``[T, E]``, or of any leading shape; float16, bfloat16 or float32.

    Returns:
        Values of that shape and a scale for each token. NaN stays NaN, an infinite element becomes
        the largest one.

    Raises:
        ValueError: another dtype, or no embeddings.
    """
    if tokens.dtype not in (torch.float16, torch.bfloat16, torch.float32) or tokens.dim() < 2:
        raise ValueError(
            "tokens must be [..., E] float16, bfloat16 or float32, got "
            f"{tokens.dtype} {tuple(tokens.shape)}"
        )
    E = tokens.shape[-1]
    quantize = _quantize_cuda if has_fp8(tokens.device) else rows_in_fp8
    values = torch.empty(tokens.shape, dtype=torch.float8_e4m3fn, device=tokens.device)
    scales = torch.empty(tokens.shape[:-1], dtype=torch.float32, device=tokens.device)
    parts = (x.split(TOKENS_AT_ONCE) for x in (tokens.flatten(0, -2), values.flatten(0, -2)))
    for part, rounded, scale in zip(*parts, scales.flatten().split(TOKENS_AT_ONCE), strict=True):
        found, found_scale = quantize(part)
        rounded.view(torch.uint8).copy_(found.view(torch.uint8)[:, :E])
        scale.copy_(found_scale)
    return Fp8Tokens(values, scales)


@on_its_device
def _quantize_cuda(tokens: Tensor) -> tuple[Tensor, Tensor]:
    from sparton.kernels.segment_max.quantize import quantize_operands

    values, _, (scales, _) = quantize_operands(tokens, tokens[:0])
    assert scales is not None
    return values, scales


def restore_fp8(tokens: Fp8Tokens) -> Tensor:
    """fp32, values times scales."""
    return tokens.values.float() * tokens.scales[..., None]
