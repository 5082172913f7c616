"""The Sparton paper's own design of the SPLADE head, as a baseline: cuBLAS tiles, then Triton."""

from sparton.kernels.hybrid_head.function import hybrid_head

__all__ = ["hybrid_head"]
