"""MaxSim for inference with FP8 (e4m3) products.

Q queries, N documents, L tokens, E embedding.
"""

import functools
import logging
from typing import Literal

import torch
from torch import Tensor

from sparton.kernels.dispatch import on_its_device, without_autocast
from sparton.kernels.maxsim.batches import padded_operands
from sparton.kernels.maxsim.function import maxsim
from sparton.kernels.maxsim.packing import compact
from sparton.kernels.segment_max.quantize_cpu import By, rounded

log = logging.getLogger(__name__)

Scales = Literal["token", "tensor"]


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


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
    by: By = "row" if scales == "token" else "matrix"
    if _has_fp8(queries.device):
        return _cross_fp8(queries, documents, query_mask, document_mask, by)
    if queries.is_cuda:
        name = torch.cuda.get_device_name(queries.device)
        log.warning("%s has no FP8 tensor cores: maxsim_fp8 runs in %s", name, queries.dtype)
    else:
        # To be refused here, not halfway.
        padded_operands(queries, documents, query_mask, document_mask)
        queries, documents = (
            rounded(_scaled_tokens(x, mask, by).flatten(0, 1), by=by).view(x.shape)
            for x, mask in ((queries, query_mask), (documents, document_mask))
        )
    with without_autocast(queries.device):
        return maxsim(queries, documents, query_mask, document_mask)


def _scaled_tokens(tokens: Tensor, mask: Tensor | None, by: By) -> Tensor:
    """Without those that a mask leaves out, where all tokens share a scale: zeros do not enter."""
    return tokens if mask is None or by == "row" else tokens.masked_fill(~mask[..., None], 0)


@on_its_device
def _cross_fp8(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    by: By,
) -> Tensor:
    from sparton.kernels.maxsim.cross import equal_queries_forward
    from sparton.kernels.segment_max.forward import segment_max_forward
    from sparton.kernels.segment_max.quantize import quantize_operands

    operands = padded_operands(queries, documents, query_mask, document_mask)
    queries = _scaled_tokens(queries, query_mask, by)
    tokens = _scaled_tokens(documents, document_mask, by)
    cu_seqlens = operands.document_cu_seqlens
    if operands.document_mask is not None:
        rows, cu_seqlens = compact(operands.document_mask, cu_seqlens)
        tokens = tokens.flatten(0, 1).index_select(0, rows)
    (Q, N), Lq = operands.scores_shape, queries.shape[1]
    if not (operands.num_query_tokens and tokens.numel()):
        return torch.zeros(Q, N, dtype=torch.float32, device=queries.device)
    tokens8, queries8, factors = quantize_operands(tokens, queries, by=by)
    if query_mask is None:
        return equal_queries_forward(
            tokens8, queries8, cu_seqlens, Lq, argmax=False, scales=factors
        )[0]
    maxima, _ = segment_max_forward(
        tokens8, queries8, None, cu_seqlens, activation="none", argmax=False, scales=factors
    )
    return maxima.view(N, Q, Lq).masked_fill_(~query_mask, 0).transpose(0, 1).sum(2)
