"""MaxSim for inference with FP8 (e4m3) products.

Q queries, N documents, L tokens, T packed document tokens, E embedding.
"""

import logging
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.dispatch import has_fp8, on_its_device, without_autocast
from sparton.kernels.maxsim.batches import packed_operands, padded_operands
from sparton.kernels.maxsim.boundaries import equal_cu_seqlens
from sparton.kernels.maxsim.fp8_tokens import Fp8Tokens, restore_fp8
from sparton.kernels.maxsim.function import maxsim, maxsim_varlen
from sparton.kernels.maxsim.operands import MaxSimOperands, flat_mask
from sparton.kernels.maxsim.packing import compact
from sparton.kernels.segment_max.quantize_cpu import By, padded_size, rounded

log = logging.getLogger(__name__)

Scales = Literal["token", "tensor"]
Masks = tuple[Tensor | None, Tensor | None]


@torch.no_grad()
def maxsim_fp8(
    queries: Tensor,
    documents: Tensor | Fp8Tokens,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    document_cu_seqlens: Tensor | None = None,
    scales: Scales = "token",
) -> Tensor:
    """MaxSim of every query with every document, its products in FP8; sums and maxima in fp32.

    For inference: the result has no gradient. Nothing waits for the device. GPUs without FP8
    (compute capability below 8.9) run :func:`~sparton.kernels.maxsim.maxsim` on the operands as
    they are, with a warning in the log; CPU tensors run it on rounded operands, an emulation.

    Args:
        queries: ``[Q, Lq, E]`` float16 or bfloat16.
        documents: ``[N, Ld, E]``, or packed ``[T, E]`` with ``document_cu_seqlens``, the same
            dtype: rounded in every call. Or what
            :func:`~sparton.kernels.maxsim.fp8_tokens.quantize_fp8` made of them, with the same
            scores.
        query_mask: bool ``[Q, Lq]`` or None.
        document_mask: bool ``[N, Ld]`` or ``[T]``, or None.
        document_cu_seqlens: int32 or int64 ``[N + 1]``, from 0 to T.
        scales: "token", a scale of its own for each token, or "tensor", one for all queries and one
            for all documents. Tokens of unit length lose little by the latter. Stored documents
            have a scale for each token.

    Returns:
        fp32 ``[Q, N]``.

    Raises:
        ValueError: another dtype or name of scales, or what maxsim refuses.
    """
    _check(queries, documents, document_cu_seqlens, scales)
    by: By = "row" if scales == "token" else "matrix"
    masks = (query_mask, document_mask)
    operands = _operands(queries, documents, masks, document_cu_seqlens)
    if has_fp8(queries.device):
        return _cross_fp8(operands, queries, documents, masks, by)
    if queries.is_cuda:
        name = torch.cuda.get_device_name(queries.device)
        log.warning("%s has no FP8 tensor cores: maxsim_fp8 runs in %s", name, queries.dtype)
        if isinstance(documents, Fp8Tokens):
            documents = restore_fp8(documents).to(queries.dtype)
    else:
        queries = _emulated(queries, query_mask, by)
        if isinstance(documents, Fp8Tokens):
            documents = restore_fp8(documents)
        else:
            documents = _emulated(documents, document_mask, by)
    with without_autocast(queries.device):
        if document_cu_seqlens is None:
            return maxsim(queries, documents, *masks)
        return maxsim_varlen(queries.flatten(0, 1), documents, *operands[2:6])


def _check(
    queries: Tensor, documents: Tensor | Fp8Tokens, cu_seqlens: Tensor | None, scales: str
) -> None:
    """ValueError for what is refused nowhere else."""
    if scales not in ("token", "tensor"):
        raise ValueError(f"scales must be token or tensor, got {scales!r}")
    stored = isinstance(documents, Fp8Tokens)
    if stored and scales != "token":
        raise ValueError(
            f"stored documents have a scale for each token: scales must be token, got {scales!r}"
        )
    values = documents.values if isinstance(documents, Fp8Tokens) else documents
    if queries.dtype not in (torch.float16, torch.bfloat16) or (
        values.dtype != (torch.float8_e4m3fn if stored else queries.dtype)
    ):
        raise ValueError(
            "queries must be float16 or bfloat16, and documents the same or Fp8Tokens of "
            f"float8_e4m3fn, got {queries.dtype} and {values.dtype}; for others use maxsim"
        )
    expected = "[N, Ld, E]" if cu_seqlens is None else "[T, E] with document_cu_seqlens"
    if queries.dim() != 3 or values.dim() != (3 if cu_seqlens is None else 2):
        raise ValueError(
            f"queries must be [Q, Lq, E] and documents {expected}, got {tuple(queries.shape)} and "
            f"{tuple(values.shape)}"
        )
    if isinstance(documents, Fp8Tokens):
        _check_stored(documents)


def _check_stored(documents: Fp8Tokens) -> None:
    values, scales = documents
    if scales.shape != values.shape[:-1] or scales.dtype != torch.float32:
        raise ValueError(
            f"scales of stored documents must be float32 {tuple(values.shape[:-1])}, one for each "
            f"token, got {scales.dtype} {tuple(scales.shape)}"
        )
    if scales.device != values.device:
        raise ValueError(
            f"values and scales of stored documents must be on one device, got {values.device} and "
            f"{scales.device}"
        )


def _operands(
    queries: Tensor, documents: Tensor | Fp8Tokens, masks: Masks, cu_seqlens: Tensor | None
) -> MaxSimOperands:
    """After every check; in the place of stored documents a tensor without memory of their own that
    has their shape and the dtype of the queries."""
    if isinstance(documents, Fp8Tokens):
        values = documents.values
        documents = torch.empty((), dtype=queries.dtype, device=values.device).expand(values.shape)
    if cu_seqlens is None:
        return padded_operands(queries, documents, *masks)
    query_mask, document_mask = masks
    Q, Lq, _ = queries.shape
    query_mask = flat_mask("query_mask", query_mask, (Q, Lq))
    bounds = (equal_cu_seqlens(Q, Lq, queries.device), cu_seqlens)
    return packed_operands(
        queries.flatten(0, 1), documents, *bounds, query_mask, document_mask, "cross"
    )


def _scaled_tokens(tokens: Tensor, mask: Tensor | None, by: By) -> Tensor:
    """Without those that a mask leaves out, where all tokens share a scale: zeros do not enter."""
    return tokens if mask is None or by == "row" else tokens.masked_fill(~mask[..., None], 0)


def _emulated(tokens: Tensor, mask: Tensor | None, by: By) -> Tensor:
    """fp32: what is left of them in e4m3."""
    flat = _scaled_tokens(tokens, mask, by).flatten(0, -2)
    return rounded(flat, by=by).view(tokens.shape)


def _rows_of(stored: Fp8Tokens, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values, of whole 16 bytes, and scales, of these rows or of all."""
    values, scales = stored.values.flatten(0, -2), stored.scales.flatten()
    # As bytes: not all that follows is made for e4m3.
    E, raw = values.shape[1], values.view(torch.uint8)
    if rows is not None:
        raw, scales = raw.index_select(0, rows), scales.index_select(0, rows)
    if padded_size(E) > E:
        raw = F.pad(raw, (0, padded_size(E) - E))
    return raw.contiguous().view(torch.float8_e4m3fn), scales.contiguous()


@on_its_device
def _cross_fp8(
    operands: MaxSimOperands,
    queries: Tensor,
    documents: Tensor | Fp8Tokens,
    masks: Masks,
    by: By,
) -> Tensor:
    """``operands`` say where sequences are."""
    from sparton.kernels.maxsim.cross import equal_queries_forward
    from sparton.kernels.segment_max.forward import segment_max_forward
    from sparton.kernels.segment_max.quantize import quantize_operands

    (Q, N), Lq = operands.scores_shape, queries.shape[1]
    query_mask, document_mask = masks
    queries = _scaled_tokens(queries, query_mask, by)
    rows, cu_seqlens = None, operands.document_cu_seqlens
    if operands.document_mask is not None:
        rows, cu_seqlens = compact(operands.document_mask, cu_seqlens)
    if not (operands.num_query_tokens and operands.documents.numel()):
        return torch.zeros(Q, N, dtype=torch.float32, device=queries.device)
    if isinstance(documents, Fp8Tokens):
        tokens8, token_scales = _rows_of(documents, rows)
        _, queries8, (_, query_scales) = quantize_operands(queries[:0], queries)
        factors: tuple[Tensor | None, Tensor] = (token_scales, query_scales)
    else:
        tokens = _scaled_tokens(documents, document_mask, by)
        if rows is not None:
            tokens = tokens.flatten(0, -2).index_select(0, rows)
        tokens8, queries8, factors = quantize_operands(tokens, queries, by=by)
    if query_mask is None:
        return equal_queries_forward(
            tokens8, queries8, cu_seqlens, Lq, argmax=False, scales=factors
        )[0]
    maxima, _ = segment_max_forward(
        tokens8, queries8, None, cu_seqlens, activation="none", argmax=False, scales=factors
    )
    return maxima.view(N, Q, Lq).masked_fill_(~query_mask, 0).transpose(0, 1).sum(2)
