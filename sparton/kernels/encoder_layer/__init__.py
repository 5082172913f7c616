"""What an encoder layer computes between its matrix products, in one pass over memory each; and
products in FP8 with what follows them."""

from sparton.kernels.encoder_layer.dropout import hashed_dropout
from sparton.kernels.encoder_layer.fp8_function import (
    Layer,
    fp8_linear,
    fp8_linear_gelu,
    fp8_linear_post_norm,
)
from sparton.kernels.encoder_layer.fp8_operands import FP8_MULTIPLE, Fp8Operand, Fp8Rows
from sparton.kernels.encoder_layer.fp8_products import Fp8Weights, fp8_operand, rounded
from sparton.kernels.encoder_layer.gated_function import gated_gelu, gated_silu
from sparton.kernels.encoder_layer.gelu_function import bias_gelu
from sparton.kernels.encoder_layer.norm_function import (
    embedding_norm,
    post_norm,
    post_norm_and_copy,
)
from sparton.kernels.encoder_layer.operands import FLOATS, NormOptions
from sparton.kernels.encoder_layer.pre_norm_function import pre_norm
from sparton.kernels.encoder_layer.reference import (
    bias_gelu_reference,
    gated_gelu_reference,
    gated_silu_reference,
    normed_rotary_reference,
    post_norm_reference,
    pre_norm_reference,
    rotary_reference,
)
from sparton.kernels.encoder_layer.rotary_function import normed_rotary, rotary

__all__ = [
    "FLOATS",
    "FP8_MULTIPLE",
    "Fp8Operand",
    "Fp8Rows",
    "Fp8Weights",
    "Layer",
    "NormOptions",
    "bias_gelu",
    "bias_gelu_reference",
    "embedding_norm",
    "fp8_linear",
    "fp8_linear_gelu",
    "fp8_linear_post_norm",
    "fp8_operand",
    "gated_gelu",
    "gated_gelu_reference",
    "gated_silu",
    "gated_silu_reference",
    "hashed_dropout",
    "normed_rotary",
    "normed_rotary_reference",
    "post_norm",
    "post_norm_and_copy",
    "post_norm_reference",
    "pre_norm",
    "pre_norm_reference",
    "rotary",
    "rotary_reference",
    "rounded",
]
