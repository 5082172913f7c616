"""Attention over packed sequences for Hugging Face models.

T packed tokens, K of them attended to, N sequences, S the longest of them, H heads, G of which (or
all) have keys and values of their own, d the width of a head.

A model loaded with ``attn_implementation=PACKED_ATTENTION`` takes ``input_ids [1, T]`` without an
attention mask and reads the sequence boundaries from keyword arguments of its forward.
"""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from sparton import packing
from sparton.kernels.varlen_attention import (
    DTYPES,
    WIDTHS,
    varlen_attention,
    varlen_self_attention,
)
from sparton.types import TokenRows

PACKED_ATTENTION = "sparton_packed"
# The same for models that were built with attention dropout, which it leaves out.
DROPLESS_ATTENTION = "sparton_packed_dropless"
# Sequences of up to so many tokens go to our own kernels, which are faster there
# (scripts/benchmark.py attention), longer ones to FlashAttention.
SHORT = 512
_KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


class _Places(NamedTuple):
    """Who attends to whom: tokens of packed sequences, all or ``keys``, at a distance of at most
    ``window``, where a negative one is none, and if ``causal`` those before a token and itself
    alone. And what becomes of their scores: times ``scale``, then softly within ``softcap``."""

    cu_seqlens: Tensor
    max_seqlen: int
    keys: TokenRows | None
    scale: float | None
    window: int = -1
    causal: bool = False
    softcap: float | None = None


def register_packed_attention() -> None:
    """Make :data:`PACKED_ATTENTION` and :data:`DROPLESS_ATTENTION` known to transformers; calling
    it again changes nothing."""
    for name, attend in (
        (PACKED_ATTENTION, packed_attention),
        (DROPLESS_ATTENTION, dropless_attention),
    ):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, no_mask)


def no_mask(*_args: object, **_kwargs: object) -> None:
    """Packed attention needs no mask tensor: the boundaries say which tokens see each other."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    cu_seq_lens_k: Tensor,
    max_length_k: int,
    key_rows: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Self-attention within each packed sequence, in the form transformers calls.

    The trailing keyword arguments of transformers that do not matter here are ignored.

    Args:
        module: the calling attention layer.
        query: ``[1, H, T, d]``, any float dtype.
        key, value: ``[1, G, T, d]``; head h reads those of ``h // (H / G)``. The dtype of the value
            is that of all products.
        attention_mask: must be None.
        scaling: factor of the scores, ``d ** -0.5`` when None.
        dropout: must be 0; the fused kernel has none.
        sliding_window: a token sees those at a distance below this number; None sees the whole
            sequence. A decoder that was made bidirectional by its configuration sees those at this
            very distance too, as in the masks of transformers.
        softcap: c of ``c tanh(score / c)``, which bounds the scaled scores; None leaves them.
        is_causal: whether a token sees those before it and itself alone; None asks the layer.
        cu_seq_lens_q: int32 ``[N + 1]`` boundaries.
        max_length_q: upper bound of the sequence lengths.
        cu_seq_lens_k, max_length_k: the same for the tokens that are attended to.
        key_rows: int64 ``[K]``, the places of these tokens; None for all of them. A token that has
            none of them in its sequence or window gets zeros.

    Returns:
        The mixed values ``[1, T, H, d]`` in the dtype of ``value``, and None for the weights.
    """
    if attention_mask is not None or dropout:
        raise ValueError(
            f"{type(module).__name__}: packed attention takes no attention mask and no attention "
            f"dropout (got dropout {dropout}); set the model's attention dropout to 0 and call it "
            "without attention_mask"
        )
    built_causal = getattr(module, "is_causal", False)
    causal = built_causal if is_causal is None else is_causal
    window = -1
    if sliding_window is not None:
        window = sliding_window if built_causal and not causal else sliding_window - 1
    keys = None if key_rows is None else TokenRows(key_rows, cu_seq_lens_k, max_length_k)
    places = _Places(cu_seq_lens_q, max_length_q, keys, scaling, window, causal, softcap)
    # Under autocast, rotary positions in fp32 widen queries and keys, but not values.
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return _attend(q, k, v, places).unsqueeze(0), None


def dropless_attention(*operands: Any, dropout: float = 0.0, **options: Any) -> tuple[Tensor, None]:
    """:func:`packed_attention`, whatever the dropout that a layer asks for."""
    return packed_attention(*operands, **options)


def packed_self_attention(
    states: Tensor,
    scale: float,
    sliding_window: int | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    cu_seq_lens_k: Tensor,
    max_length_k: int,
    key_rows: Tensor | None = None,
    **_: object,
) -> Tensor:
    """The same for queries, keys and values that lie side by side.

    Args:
        states: ``[T, 3, H, d]``, any float dtype.
        scale: factor of the scores.
        sliding_window: a token sees those at a distance below this number; None sees the whole
            sequence.
        cu_seq_lens_q, max_length_q, cu_seq_lens_k, max_length_k, key_rows: as of
            :func:`packed_attention`.

    Returns:
        The mixed values ``[T, H, d]`` in the dtype of ``states``.
    """
    window = None if sliding_window is None else sliding_window - 1
    if (
        key_rows is None
        and max_length_q <= SHORT
        and has_short_kernel(states, states.dtype, states.shape[-1])
    ):
        own = cu_seq_lens_q, max_length_q
        return varlen_self_attention(states, *own, scale=scale, window=window)
    query, key, value = states.unbind(1)
    keys = None if key_rows is None else TokenRows(key_rows, cu_seq_lens_k, max_length_k)
    window = -1 if window is None else window
    return _attend(query, key, value, _Places(cu_seq_lens_q, max_length_q, keys, scale, window))


def _attend(query: Tensor, key: Tensor, value: Tensor, places: _Places) -> Tensor:
    """``[T, H, d]`` of query ``[T, H, d]``, key and value ``[T, G, d]``, by the best of what this
    device and these lengths have."""
    if places.window >= places.max_seqlen - 1:
        places = places._replace(window=-1)
    attend = _padded
    if _are_short(places, query) and key.shape[1] == query.shape[1]:
        attend = _short
    elif _has_varlen_kernel(places, query):
        attend = _varlen
    return attend(query, key, value, places)


def _are_short(places: _Places, query: Tensor) -> bool:
    """Whether they go to our own kernels."""
    plain = places.window < 0 and not places.causal and places.softcap is None
    short = places.max_seqlen <= SHORT
    return plain and short and has_short_kernel(query, query.dtype, query.shape[-1])


def has_short_kernel(x: Tensor, dtype: torch.dtype, width: int) -> bool:
    """Whether our own kernels serve heads of this width in this dtype where ``x`` is."""
    return x.is_cuda and dtype in DTYPES and width in WIDTHS


def _has_varlen_kernel(places: _Places, query: Tensor) -> bool:
    head_width = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    # FlashAttention takes keys for the last tokens of a sequence, so windows would slip.
    aligned = places.keys is None or (places.window < 0 and not places.causal)
    has_width = head_width % 8 == 0 and head_width <= 256
    return query.is_cuda and half and has_width and aligned and places.softcap is None


def _short(query: Tensor, key: Tensor, value: Tensor, places: _Places) -> Tensor:
    """``[T, H, d]`` each; our kernels, half precision on CUDA, without a window."""
    key, value, bounds, longest = _attended(key, value, places)
    return varlen_attention(query, key, value, *bounds, *longest, scale=places.scale)


def _varlen(query: Tensor, key: Tensor, value: Tensor, places: _Places) -> Tensor:
    """``[T, H, d]``; FlashAttention, half precision on CUDA."""
    grouped = key.shape[1] != query.shape[1]
    # torch 2.11 takes fewer heads of keys as they are and does not know the argument.
    options: dict[str, Any] = {"enable_gqa": True} if grouped and _KNOWS_GROUPS else {}
    key, value, bounds, longest = _attended(key, value, places)
    window = (places.window, 0 if places.causal else places.window)
    output = varlen_attn(
        query, key, value, *bounds, *longest, scale=places.scale, window_size=window, **options
    )
    assert isinstance(output, Tensor)
    return output


def _attended(
    key: Tensor, value: Tensor, places: _Places
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """Key and value of the tokens attended to; then, of the tokens that attend and of those that
    are attended to, boundaries and the most of a sequence."""
    bounds, longest = (places.cu_seqlens, places.cu_seqlens), (places.max_seqlen, places.max_seqlen)
    keys = places.keys
    if keys is not None:
        key, value = key.index_select(0, keys.rows), value.index_select(0, keys.rows)
        bounds, longest = (bounds[0], keys.cu_seqlens), (longest[0], keys.max_seqlen)
    return key, value, bounds, longest


def _padded(query: Tensor, key: Tensor, value: Tensor, places: _Places) -> Tensor:
    """``[T, H, d]``; padded to ``[N, H, S, d]`` for attention alone, then packed again."""
    cu_seqlens, max_seqlen = places.cu_seqlens, places.max_seqlen
    heads = [states.shape[1] for states in (query, key, value)]
    together = packing.pad(torch.cat((query, key, value), dim=1), cu_seqlens, max_seqlen)
    q, k, v = together.transpose(1, 2).split(heads, dim=1)
    seen = _visible(places, query.shape[0])
    # A row of softmax over nothing would be NaN and its gradient would reach the keys of others.
    blind = ~seen.any(dim=-1, keepdim=True)
    if places.softcap is None:
        grouped = k.shape[1] != q.shape[1]
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen | blind, scale=places.scale, enable_gqa=grouped
        )
    else:
        mixed = _capped(q, k, v, seen | blind, places)
    if places.keys is not None:  # else only padding is blind
        mixed = mixed.masked_fill(blind, 0)
    return packing.unpad(mixed.transpose(1, 2), cu_seqlens, query.shape[0])


def _capped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, places: _Places) -> Tensor:
    """Attention ``[N, H, S, d]`` whose scores are bounded; torch's own has no such thing."""
    assert places.softcap is not None
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scale = q.shape[-1] ** -0.5 if places.scale is None else places.scale
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = places.softcap * torch.tanh(scores / places.softcap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype) @ v


def _visible(places: _Places, total: int) -> Tensor:
    """Who sees whom: bool ``[N, 1, 1, S]`` or, with a window or causal, ``[N, 1, S, S]``."""
    cu_seqlens, max_seqlen, keys = places[:3]
    if keys is None:
        seen = packing.padding_mask(cu_seqlens, max_seqlen)
    else:
        slots = packing.padded_slots(cu_seqlens, total, max_seqlen).index_select(0, keys.rows)
        flat = slots.new_zeros((cu_seqlens.numel() - 1) * max_seqlen, dtype=torch.bool)
        seen = flat.index_fill(0, slots, True).unflatten(0, (-1, max_seqlen))
    seen = seen[:, None, None, :]
    if places.window < 0 and not places.causal:
        return seen
    positions = torch.arange(max_seqlen, device=cu_seqlens.device)
    before = positions[:, None] - positions
    if places.window >= 0:
        seen = seen & (before.abs() <= places.window)
    return seen & (before >= 0) if places.causal else seen
