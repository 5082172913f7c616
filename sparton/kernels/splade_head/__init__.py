"""Fused LM head of SPLADE: logits, pooling over the sequence, relu and log1p in one kernel."""

from sparton.kernels.splade_head.function import splade_head
from sparton.kernels.splade_head.memory import HeadMemory
from sparton.kernels.splade_head.reference import splade_head_reference
from sparton.kernels.splade_head.topk import TopK, splade_head_topk

__all__ = ["HeadMemory", "TopK", "splade_head", "splade_head_reference", "splade_head_topk"]
