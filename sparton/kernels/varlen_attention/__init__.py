"""Attention within packed sequences, for the short ones that retrievers train on."""

from sparton.kernels.varlen_attention.function import varlen_attention
from sparton.kernels.varlen_attention.operands import DTYPES, WIDTHS
from sparton.kernels.varlen_attention.reference import varlen_attention_reference
from sparton.kernels.varlen_attention.stacked import varlen_self_attention

__all__ = [
    "DTYPES",
    "WIDTHS",
    "varlen_attention",
    "varlen_attention_reference",
    "varlen_self_attention",
]
