"""MaxSim for inference with FP8 (e4m3) products.

Q queries, N documents, L tokens, E embedding.
"""

import logging
from typing import Literal

import torch
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.maxsim.function import maxsim
from sparton.kernels.maxsim.operands import padded_operands
from sparton.kernels.maxsim.packing import compact
from sparton.kernels.segment_max.quantize_cpu import LARGEST, SCALE_BOUNDS, quantize_rows_cpu

log = logging.getLogger(__name__)

Scales = Literal["token", "tensor"]


def _round_tensor_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for all rows."""
    amax = x.abs().amax().float().clamp(*SCALE_BOUNDS)
    rounded = (x.float() * (LARGEST / amax)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return rounded, amax / LARGEST


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _dequantized(x: Tensor, scales: Scales) -> Tensor:
    if x.numel() == 0:
        return x.float()
    rounded, scale = (quantize_rows_cpu if scales == "token" else _round_tensor_cpu)(
        x.flatten(0, -2)
    )
    return (rounded.float() * scale.view(-1, 1))[:, : x.shape[-1]].view(x.shape)


@torch.no_grad()
def maxsim_fp8(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    scales: Scales = "token",
) -> Tensor:
    """MaxSim of every query with every document, its products in FP8; sums and maxima in fp32.

    For inference: the result has no gradient. Nothing waits for the device. GPUs without FP8
    (compute capability below 8.9) run :func:`~sparton.kernels.maxsim.maxsim` on the operands as
    they are, with a warning in the log; CPU tensors run it on rounded operands, an emulation.

    Args:
        queries: ``[Q, Lq, E]`` float16 or bfloat16.
        documents: ``[N, Ld, E]``, the same dtype.
        query_mask: bool ``[Q, Lq]`` or None.
        document_mask: bool ``[N, Ld]`` or None.
        scales: "token", a scale of its own for each token, or "tensor", one for all queries and one
            for all documents. Tokens of unit length lose little by the latter.

    Returns:
        fp32 ``[Q, N]``.

    Raises:
        ValueError: another dtype or name of scales, or what maxsim refuses.
    """
    if scales not in ("token", "tensor"):
        raise ValueError(f"scales must be token or tensor, got {scales!r}")
    if queries.dtype not in (torch.float16, torch.bfloat16) or queries.dtype != documents.dtype:
        raise ValueError(
            "queries and documents must both be float16 or bfloat16, got "
            f"{queries.dtype} and {documents.dtype}; for others use maxsim"
        )
    if documents.dim() != 3:
        raise ValueError(f"documents must be [N, Ld, E], got {tuple(documents.shape)}")
    if _has_fp8(queries.device):
        return _cross_fp8(queries, documents, query_mask, document_mask, scales)
    if queries.is_cuda:
        name = torch.cuda.get_device_name(queries.device)
        log.warning("%s has no FP8 tensor cores: maxsim_fp8 runs in %s", name, queries.dtype)
    else:
        queries, documents = (_dequantized(x, scales) for x in (queries, documents))
    return maxsim(queries, documents, query_mask, document_mask)


@on_its_device
def _cross_fp8(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    scales: Scales,
) -> Tensor:
    from sparton.kernels.maxsim.cross import equal_queries_forward
    from sparton.kernels.segment_max.forward import segment_max_forward
    from sparton.kernels.segment_max.quantize import quantize_matrix, quantize_rows

    operands = padded_operands(queries, documents, query_mask, document_mask).flat()
    tokens, cu_seqlens = operands.documents, operands.document_cu_seqlens
    if operands.document_mask is not None:
        rows, cu_seqlens = compact(operands.document_mask, cu_seqlens)
        tokens = tokens.index_select(0, rows)
    (Q, Lq), N = queries.shape[:2], documents.shape[0]
    if not (operands.queries.shape[0] and tokens.shape[0]):
        return torch.zeros(Q, N, dtype=torch.float32, device=queries.device)
    quantize = quantize_rows if scales == "token" else quantize_matrix
    (rounded, scale), (query_rounded, query_scale) = map(quantize, (tokens, operands.queries))
    factors: tuple[Tensor | None, Tensor] = (scale, query_scale)
    if scales == "tensor":
        # A factor of all documents changes no winner.
        factors = (None, scale.expand(query_rounded.shape[0]) * query_scale)
    if query_mask is None:
        return equal_queries_forward(
            rounded, query_rounded, cu_seqlens, Lq, argmax=False, scales=factors
        )[0]
    maxima, _ = segment_max_forward(
        rounded, query_rounded, None, cu_seqlens, activation="none", argmax=False, scales=factors
    )
    return maxima.view(N, Q, Lq).masked_fill_(~query_mask, 0).transpose(0, 1).sum(2)
