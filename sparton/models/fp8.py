"""Training in FP8: which linear layers of an encoder multiply in it."""

from torch import nn

from sparton.kernels.encoder_layer import FP8_MULTIPLE, Fp8Weights
from sparton.models.bert_families import BERT_FAMILIES
from sparton.models.bert_layers import FusedPart
from sparton.models.body import EncoderBody


def multiply_in_fp8(encoder: nn.Module) -> None:
    """Let the linear layers of all layers of an encoder multiply in FP8 while it trains under
    autocast, in place: queries, keys and values, the end of attention, and both of the feed-forward
    part. Everything else stays as it is: embeddings, heads, decoders, and all of them in evaluation
    mode. Parameters stay as they are.

    Args:
        encoder: all bodies below it are of the families of BERT and RoBERTa.

    Raises:
        ValueError: there is no body, or one that FP8 does not serve.
    """
    bodies = [part for part in encoder.modules() if isinstance(part, EncoderBody)]
    if not bodies:
        raise ValueError(
            "precision=fp8 multiplies in the layers of a transformer, and "
            f"{type(encoder).__name__} has none: take bf16"
        )
    for part in [part for body in bodies for part in _served(body)]:
        part.fp8 = Fp8Weights()


def _served(body: EncoderBody) -> list[FusedPart]:
    """The parts of a body with products.

    Raises:
        ValueError: see :func:`multiply_in_fp8`.
    """
    parts = [part for part in body.modules() if isinstance(part, FusedPart)]
    kind = type(body.model).__name__
    if not parts:
        raise ValueError(
            f"precision=fp8 multiplies in the layers of {', '.join(BERT_FAMILIES)}, and {kind} has "
            "others: take bf16"
        )
    if body.lora is not None:
        raise ValueError(
            "precision=fp8 has no products with adapters (lora) beside frozen weights: take bf16, "
            "or train all weights"
        )
    if any(part._compiled_call_impl is not None for part in body.modules()):
        raise ValueError(
            "precision=fp8 is not compiled: build the backbone with compile=False, or take bf16"
        )
    linears = [each for part in parts for each in part.children() if isinstance(each, nn.Linear)]
    for linear in linears:
        if linear.in_features % FP8_MULTIPLE or linear.out_features % FP8_MULTIPLE:
            raise ValueError(
                f"precision=fp8 multiplies matrices whose sizes are multiples of {FP8_MULTIPLE}, "
                f"and {kind} has a linear layer of {linear.in_features} inputs and "
                f"{linear.out_features} outputs: take bf16"
            )
    return parts
