"""Is the model still alive and sparse? Figures computed at logging steps only.

B rows, V vocabulary terms, T packed tokens, E width of a token's vector.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from sparton.kernels.sparse_vectors import SparseVectors, used_terms
from sparton.losses.rows import Rows, active_terms
from sparton.representations import Representations, TokenVectors

_MOST_ROWS = 256
_ALIKE = 0.95


def describe_representations(reps: Representations) -> dict[str, float]:
    """What :func:`describe_sparse` and :func:`describe_tokens` say of the parts that are there, and
    ``dense_cosine``, the mean over pairs of different texts, of dense vectors beside them."""
    figures = {} if reps.sparse is None else describe_sparse(reps.sparse)
    if reps.dense is not None:
        figures["dense_cosine"] = _mean_cosine(reps.dense.values).item()
    return figures if reps.tokens is None else figures | describe_tokens(reps.tokens)


def describe_sparse(reps: Rows) -> dict[str, float]:
    """Sparsity and collapse of ``reps`` fp32 ``[B, V]``, or of their active entries.

    Returns:
        ``active_terms`` (mean per row), ``dead_rows`` (share of rows with no term), ``used_terms``
        (share of the vocabulary active in some row), ``max_weight``, and ``cosine`` (mean over
        pairs of different rows; near 1 the model says the same of every text).
    """
    active = active_terms(reps)
    weights = reps if isinstance(reps, Tensor) else reps.values
    largest = weights.max() if weights.numel() else weights.new_zeros(())
    figures = torch.stack(
        [
            active.float().mean(),
            (active == 0).float().mean(),
            used_terms(reps).float().mean(),
            largest.float(),
            _mean_cosine(reps if isinstance(reps, Tensor) else _first_rows(reps)),
        ]
    ).tolist()
    names = ("active_terms", "dead_rows", "used_terms", "max_weight", "cosine")
    return dict(zip(names, figures, strict=True))


def describe_tokens(tokens: TokenVectors) -> dict[str, float]:
    """Size and collapse of one vector per token, ``[T, E]``.

    Returns:
        ``vectors`` (mean number that takes part, per text) and ``token_cosine`` (mean over pairs of
        different tokens of a sample; near 1 all tokens look alike).
    """
    values = tokens.values.shape[0] if tokens.mask is None else tokens.mask.sum()
    stride = max(tokens.values.shape[0] // _MOST_ROWS, 1)
    cosine = _mean_cosine(tokens.values[::stride])
    return {"vectors": float(values) / tokens.num_texts, "token_cosine": cosine.item()}


def _first_rows(vectors: SparseVectors) -> Tensor:
    rows = min(vectors.num_vectors, _MOST_ROWS)
    entries = int(vectors.cu_seqlens[rows])
    rest = vectors.num_vectors - rows, vectors.num_entries - entries
    return vectors.split((rows, rest[0]), (entries, rest[1]))[0].dense()


def _mean_cosine(rows: Tensor) -> Tensor:
    """Over pairs of different rows, of the first ones."""
    sample = F.normalize(rows[:_MOST_ROWS].float(), dim=1)
    count = sample.shape[0]
    similarity = sample @ sample.T
    return (similarity.sum() - similarity.diagonal().sum()) / max(count * (count - 1), 1)


def collapse_warning(
    side: str,
    reps: Representations,
    figures: dict[str, float],
    before: dict[str, float] | None,
    *,
    rising: bool = False,
) -> str | None:
    """A sentence for the user when the representations of a side look collapsed, else None.

    Args:
        side: query or document.
        reps: the representations.
        figures: what :func:`describe_representations` says of them.
        before: those of the previous logging step, or None at the first. Dense representations
            that are getting sparser are no cause for alarm.
        rising: whether the weights of the regularizers still are; they have not shown then what
            they can do.
    """
    if figures.get("token_cosine", 0.0) > _ALIKE:
        pooled = figures["vectors"] == 1
        vectors = f"{side} vectors" if pooled else f"vectors of all {side} tokens"
        return (
            f"the {vectors} are nearly the same (mean cosine {figures['token_cosine']:.3f}): "
            "lower the learning rate"
        )
    if figures.get("dense_cosine", 0.0) > _ALIKE:
        return (
            f"the dense {side} vectors are nearly the same (mean cosine "
            f"{figures['dense_cosine']:.3f}): lower the learning rate"
        )
    if reps.sparse is None:
        return None
    # An autoencoder, which brings losses, has no MLM head, and its k no regularizer.
    return (
        _latents_warning(side, figures)
        if reps.losses
        else _terms_warning(side, figures, before, reps.width, rising)
    )


def _latents_warning(side: str, figures: dict[str, float]) -> str | None:
    if figures["dead_rows"] > 0.5:
        return f"{_empty(side, figures)}: lower the learning rate"
    if figures["cosine"] > _ALIKE:
        return (
            f"{_alike(side, figures)}: lower the learning rate, or raise head.reconstruction_weight"
        )
    return None


def _terms_warning(
    side: str,
    figures: dict[str, float],
    before: dict[str, float] | None,
    vocabulary_size: int,
    rising: bool,
) -> str | None:
    if figures["dead_rows"] > 0.5:
        return (
            f"{_empty(side, figures)}: lower the regularizer's weight, lengthen its ramp, or add "
            "the anti_zero regularizer"
        )
    if figures["cosine"] > _ALIKE:
        return (
            f"{_alike(side, figures)}: lower the learning rate, or scale down the MLM head at the "
            "start (logit_scale)"
        )
    falling = rising or before is None or figures["active_terms"] < 0.98 * before["active_terms"]
    if figures["active_terms"] > 0.5 * vocabulary_size and not falling:
        return (
            f"a {side} has {figures['active_terms']:,.0f} active terms of {vocabulary_size:,} and "
            "they do not get fewer: raise the regularizer's weight, shorten its ramp, or let the "
            "logits start lower (center, logit_shift)"
        )
    return None


def _empty(side: str, figures: dict[str, float]) -> str:
    return f"{figures['dead_rows']:.0%} of the {side} representations are empty"


def _alike(side: str, figures: dict[str, float]) -> str:
    return f"the {side} representations are nearly the same (mean cosine {figures['cosine']:.3f})"
