"""Late interaction: the sum over query tokens of the best document token's similarity."""

from sparton.kernels.maxsim.codec import (
    CompressedTokens,
    ResidualCodec,
    compress,
    decompress,
    train_codec,
)
from sparton.kernels.maxsim.fp8 import maxsim_fp8
from sparton.kernels.maxsim.fp8_tokens import Fp8Tokens, quantize_fp8
from sparton.kernels.maxsim.function import maxsim, maxsim_pairs, maxsim_varlen
from sparton.kernels.maxsim.hidden_function import maxsim_from_hidden
from sparton.kernels.maxsim.reference import maxsim_reference
from sparton.kernels.maxsim.residual.function import (
    maxsim_centroids,
    maxsim_residual,
    maxsim_residual_varlen,
)
from sparton.kernels.maxsim.topk import BestDocuments, maxsim_topk

__all__ = [
    "BestDocuments",
    "CompressedTokens",
    "Fp8Tokens",
    "ResidualCodec",
    "compress",
    "decompress",
    "maxsim",
    "maxsim_centroids",
    "maxsim_fp8",
    "maxsim_from_hidden",
    "maxsim_pairs",
    "maxsim_reference",
    "maxsim_residual",
    "maxsim_residual_varlen",
    "maxsim_topk",
    "maxsim_varlen",
    "quantize_fp8",
    "train_codec",
]
