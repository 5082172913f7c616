"""Is the model still alive and sparse? Figures computed at logging steps only.

B rows, V vocabulary terms.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_MOST_ROWS = 256


def describe_representations(reps: Tensor) -> dict[str, float]:
    """Sparsity and collapse of ``reps`` fp32 ``[B, V]``.

    Returns:
        ``active_terms`` (mean per row), ``dead_rows`` (share of rows with no term), ``used_terms``
        (share of the vocabulary active in some row), ``max_weight``, and ``cosine`` (mean over
        pairs of different rows; near 1 the model says the same of every text).
    """
    active = reps > 0
    sample = F.normalize(reps[:_MOST_ROWS].float(), dim=1)
    rows = sample.shape[0]
    similarity = sample @ sample.T
    off_diagonal = (similarity.sum() - similarity.diagonal().sum()) / max(rows * (rows - 1), 1)
    figures = torch.stack(
        [
            active.sum(1).float().mean(),
            (~active.any(1)).float().mean(),
            active.any(0).float().mean(),
            reps.max().float(),
            off_diagonal,
        ]
    ).tolist()
    names = ("active_terms", "dead_rows", "used_terms", "max_weight", "cosine")
    return dict(zip(names, figures, strict=True))


def collapse_warning(
    side: str,
    figures: dict[str, float],
    before: dict[str, float] | None,
    vocabulary_size: int,
) -> str | None:
    """A sentence for the user when the representations of a side look collapsed, else None.

    Args:
        side: query or document.
        figures: of :func:`describe_representations`, now.
        before: those of the previous logging step, or None at the first. Dense representations
            that are getting sparser are no cause for alarm.
        vocabulary_size: V.
    """
    if figures["dead_rows"] > 0.5:
        return (
            f"{figures['dead_rows']:.0%} of the {side} representations are empty: lower the "
            "regularizer's weight, lengthen its ramp, or add the anti_zero regularizer"
        )
    if figures["cosine"] > 0.95:
        return (
            f"the {side} representations are nearly the same (mean cosine "
            f"{figures['cosine']:.3f}): lower the learning rate, or scale down the MLM head at "
            "the start (logit_scale)"
        )
    falling = before is None or figures["active_terms"] < 0.98 * before["active_terms"]
    if figures["active_terms"] > 0.5 * vocabulary_size and not falling:
        return (
            f"a {side} has {figures['active_terms']:,.0f} active terms of {vocabulary_size:,} and "
            "they do not get fewer: raise the regularizer's weight or shorten its ramp"
        )
    return None
