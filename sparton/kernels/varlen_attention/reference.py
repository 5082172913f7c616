"""Attention over packed sequences in plain PyTorch: the meaning of the kernels beside it.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.
"""

import torch
from torch import Tensor


def varlen_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """``softmax(scale * q k^T) v`` within each sequence, in both directions, without dropout.

    Query tokens of sequence n attend to the key tokens of sequence n. Tokens of a sequence without
    keys get zeros.

    Args:
        query: ``[Tq, H, d]``, any float dtype, in which everything is computed.
        key, value: ``[Tk, H, d]``, the same dtype.
        query_cu_seqlens: int ``[N + 1]``, boundaries of the sequences; from 0 to Tq, ascending.
        key_cu_seqlens: int ``[N + 1]``, from 0 to Tk.
        scale: factor of the scores, ``d ** -0.5`` when None.
        window: a token attends to those at a distance of at most this number; None: to all.

    Returns:
        ``[Tq, H, d]``, differentiable.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    sides = ((query, query_cu_seqlens), (key, key_cu_seqlens), (value, key_cu_seqlens))
    pieces = (x.transpose(0, 1).split(cu.diff().tolist(), dim=1) for x, cu in sides)
    mixed = [
        (scale * q @ k.mT).masked_fill(_far(q, k, window), -torch.inf).softmax(-1) @ v
        for q, k, v in zip(*pieces, strict=True)
    ]
    return torch.cat(mixed, dim=1).transpose(0, 1) if mixed else torch.zeros_like(query)


def _far(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """Which keys are beyond the window of which queries, bool ``[queries, keys]``."""
    places = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    queries, keys = places
    distances = (queries[:, None] - keys).abs()
    return distances > (distances.numel() if window is None else window)
