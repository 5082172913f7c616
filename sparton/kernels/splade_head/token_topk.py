"""The SPLADE head of which each token gives its k largest terms alone.

N sequences, T packed tokens, D hidden, V vocabulary, G groups of the vocabulary.

A tile of tokens has its logits in memory, at most LOGITS_AT_ONCE of them; of each token k stay.
The maximum over a sequence is taken of these T k entries, and its backward is that of the plain
head, which reads nothing but values and winners.

No tile is sorted. The k largest of a row lie in the k groups of neighbours with the largest maxima,
where equal maxima count by the lower group: any other entry is behind one of each of these.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.boundaries import read_boundaries
from sparton.kernels.segment_max.operands import check_operands, sequence_of_tokens
from sparton.kernels.sort_keys import from_keys, sort_keys
from sparton.kernels.splade_head.variants import activate

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**25}
GROUP = 64  # terms whose maximum is looked at first
MOST_BY_KERNEL = 128  # a program holds k groups in registers


def token_topk_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str,
    token_topk: int,
    argmax: bool,
) -> tuple[Tensor, Tensor]:
    """Representations fp32 and the tokens that won them int32, ``[N, V]`` each, -1 where none did;
    without ``argmax`` the latter are empty. The arguments are those of ``splade_head``."""
    check_operands(hidden, weight, bias, cu_seqlens)
    T, V = hidden.shape[0], weight.shape[0]
    if not hidden.is_cuda:
        read_boundaries("cu_seqlens", cu_seqlens, T)
    values, terms = _largest_logits(hidden, weight, bias, min(token_topk, V))
    shape = (cu_seqlens.numel() - 1, V)
    places = (sequence_of_tokens(cu_seqlens, T).long()[:, None] * V + terms).flatten()
    best, entries = first_maxima(values.flatten(), places, shape[0] * V, first=argmax)
    reps = activate(best, activation).view(shape)
    if not argmax:
        return reps, entries
    tokens = torch.where(entries < values.numel(), entries // values.shape[1], -1)
    return reps, tokens.view(shape)


def largest_of_rows(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, largest first, among equal ones the first.

    Args:
        values: fp32 ``[T, V]``, none below zero. NaN counts as the largest.
        k: from 1 to V.

    Returns:
        Values fp32 ``[T, k]`` and their columns int64 ``[T, k]``.
    """
    T, V = values.shape
    if k * GROUP >= V:
        return from_keys(sort_keys(values, non_negative=True).topk(k).values)
    groups = F.pad(values, (0, -V % GROUP)).view(T, -1, GROUP)
    maxima = sort_keys(groups.amax(2), non_negative=True)
    # In ascending order, so that places among the candidates are in the order of the columns.
    chosen = from_keys(maxima.topk(k, sorted=False).values)[1].sort(1).values
    candidates = groups.gather(1, chosen[..., None].expand(T, k, GROUP)).view(T, k * GROUP)
    best, places = from_keys(sort_keys(candidates, non_negative=True).topk(k).values)
    return best, chosen.gather(1, places // GROUP) * GROUP + places % GROUP


def first_maxima(
    values: Tensor, places: Tensor, size: int, *, first: bool = True
) -> tuple[Tensor, Tensor]:
    """The largest of the entries that share a place, the same bits every time.

    Args:
        values: fp32 ``[M]``, none below zero. NaN counts as the largest.
        places: int64 ``[M]``, below ``size``.
        first: whether it is asked which entries these are.

    Returns:
        The maxima fp32 ``[size]``, 0 where there is no entry, and the first entry that attains
        each, int32 ``[size]``, M where there is none; empty unless it is asked for.
    """
    best = values.new_zeros(size).scatter_reduce(0, places, values, "amax")
    M = values.numel()
    if not first:
        return best, places.new_zeros(0, dtype=torch.int32)
    entries = torch.arange(M, dtype=torch.int32, device=values.device)
    wins = torch.where((values == best[places]) | values.isnan(), entries, M)
    return best, entries.new_full((size,), M).scatter_reduce(0, places, wins, "amin")


def _largest_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """The k largest of ``relu(hidden @ weight.T + bias)`` of each token and their terms,
    ``[T, k]`` each, see :func:`largest_of_rows`."""
    T, V = hidden.shape[0], weight.shape[0]
    values = hidden.new_zeros((T, k), dtype=torch.float32)
    terms = torch.zeros((T, k), dtype=torch.int64, device=hidden.device)
    size = max(LOGITS_AT_ONCE["cuda" if hidden.is_cuda else "cpu"] // max(V, 1), 1)
    for start in range(0, T, size):
        rows = slice(start, start + size)
        logits = _product(hidden[rows], weight.T)
        if logits.is_cuda and k <= MOST_BY_KERNEL:
            from sparton.kernels.splade_head.token_topk_kernels import largest_of_logits

            shift = None if bias is None else bias.contiguous()
            largest_of_logits(logits, shift, values[rows], terms[rows])
            continue
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        values[rows], terms[rows] = largest_of_rows(logits.relu_().float(), k)
    return values, terms


def _product(hidden: Tensor, columns: Tensor) -> Tensor:
    """Logits of at least fp32."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, columns, out_dtype=torch.float32)
    logits = hidden @ columns
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
