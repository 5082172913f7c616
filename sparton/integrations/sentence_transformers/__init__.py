"""Fused kernels and packed tokens for the models and losses of sentence-transformers 6.

One call before training or encoding; trainers, losses, evaluators and saved folders stay theirs::

    model = fuse(SparseEncoder("naver/splade-v3"))
    trainer = SparseEncoderTrainer(model=model, loss=SpladeLoss(model, ...), ...)

    model = fuse(MultiVectorEncoder("lightonai/GTE-ModernColBERT-v1"))
    loss = fuse_scores(MultiVectorMultipleNegativesRankingLoss(model))
    trainer = MultiVectorEncoderTrainer(model=model, loss=loss, ...)
"""

import importlib.util

if importlib.util.find_spec("sentence_transformers") is None:
    raise ModuleNotFoundError(
        "sparton.integrations.sentence_transformers needs sentence-transformers 6: "
        "pip install 'sparton[sentence-transformers]'"
    )

from sparton.integrations.sentence_transformers.fusing import fuse, unfuse
from sparton.integrations.sentence_transformers.logit_bias import LogitBias
from sparton.integrations.sentence_transformers.scores import (
    colbert_kd_scores,
    colbert_scores,
    colbert_scores_pairwise,
    fuse_scores,
    mean_colbert_kd_scores,
    mean_colbert_scores,
    mean_colbert_scores_pairwise,
)

__all__ = [
    "LogitBias",
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "fuse",
    "fuse_scores",
    "mean_colbert_kd_scores",
    "mean_colbert_scores",
    "mean_colbert_scores_pairwise",
    "unfuse",
]
