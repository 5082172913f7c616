"""Fused LM head of SPLADE: logits, maximum over the sequence, relu and log1p in one kernel."""

from sparton.kernels.splade_head.function import splade_head
from sparton.kernels.splade_head.reference import splade_head_reference

__all__ = ["splade_head", "splade_head_reference"]
