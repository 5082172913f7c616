"""The SPLADE head on the padded view in plain PyTorch.

N sequences, S tokens of the longest, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from sparton.kernels.splade_head.token_topk import first_maxima, largest_of_rows
from sparton.kernels.splade_head.variants import Activation, Pooling, activate


def padded_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    pooling: Pooling,
    activation: Activation,
    token_topk: int | None,
) -> Tensor:
    """Algorithm 1 of the Sparton paper: the full logits, then one operation after the other.

    Args:
        hidden: ``[N, S, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        mask: bool ``[N, S]``, True at real tokens.
        pooling, activation, token_topk: see :class:`~sparton.models.heads.SpladeHead`.

    Returns:
        fp32 ``[N, V]``.
    """
    values = _token_values(hidden, weight, bias, mask, activation)
    if token_topk is not None:
        return pool_entries(*largest(values, token_topk), weight.shape[0], pooling)
    if pooling == "sum":
        return values.sum(dim=1, dtype=torch.float32)
    return values.max(dim=1).values.float()


def _token_values(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, activation: Activation
) -> Tensor:
    """Activated logits ``[N, S, V]``."""
    logits = hidden @ weight.mT
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return activate(logits * mask[..., None], activation)


def largest_of_tile(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    activation: Activation,
    k: int,
) -> tuple[Tensor, Tensor]:
    """The :func:`largest` of the activated logits of a tile of the vocabulary."""
    return largest(_token_values(hidden, weight, bias, mask, activation), k)


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The min(k, V) largest of ``values [N, S, V]`` of each token and where they are,
    ``[N, S, min(k, V)]`` each."""
    N, S, V = values.shape
    _, terms = largest_of_rows(values.detach().reshape(N * S, V).float(), min(k, V))
    terms = terms.view(N, S, -1)
    return values.gather(2, terms), terms


def pool_entries(values: Tensor, terms: Tensor, V: int, pooling: Pooling) -> Tensor:
    """Representations fp32 ``[N, V]`` of entries ``values`` at ``terms``, ``[N, S, k]`` each. Of
    equal maxima the first token gets the gradient."""
    N = values.shape[0]
    rows = torch.arange(N, device=values.device)[:, None, None]
    places, values = (rows * V + terms).flatten(), values.float().flatten()
    if pooling == "max":
        _, winners = first_maxima(values.detach(), places, N * V)
        entries = torch.arange(values.numel(), device=values.device)
        values = torch.where(winners[places] == entries, values, 0.0)
    return values.new_zeros(N * V).index_add(0, places, values).view(N, V)
