"""Products in FP8: which linear layers of an encoder multiply in it, training or encoding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from sparton.kernels.dispatch import has_fp8
from sparton.kernels.encoder_layer import FP8_MULTIPLE, Fp8Weights
from sparton.models.bert_families import BERT_FAMILIES
from sparton.models.bert_parts import FusedPart
from sparton.models.body import EncoderBody
from sparton.models.heads import SpartonHead
from sparton.overlapping import Overlapping

_encoding = Overlapping()  # encoders in FP8


def check_fp8(device: torch.device) -> None:
    """Refuse a device that has no products in FP8.

    Raises:
        ValueError: names it.
    """
    if not has_fp8(device):
        on_gpu = device.type == "cuda"
        raise ValueError(
            "precision=fp8 needs a CUDA GPU of compute capability 8.9 or later (Ada, Hopper), "
            f"got {torch.cuda.get_device_name(device) if on_gpu else 'a CPU'}; use bf16"
        )


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
    for part in _parts(encoder):
        part.fp8 = Fp8Weights()


@contextmanager
def encoding_in_fp8(encoder: nn.Module) -> Iterator[None]:
    """Within, the same layers multiply in FP8 in evaluation mode under autocast to bfloat16, which
    is what scaled products give, and fused heads that can look for their maxima in FP8 do. Blocks
    may overlap, in several threads; what they share is the encoder, for all who encode with it.

    Args:
        encoder: see :func:`multiply_in_fp8`.

    Raises:
        ValueError: there is no body, or one that FP8 does not serve.
    """
    parts = _parts(encoder)
    with _encoding.within(encoder, partial(_encode, encoder, parts)):
        yield


def _encode(encoder: nn.Module, parts: list[FusedPart]) -> Callable[[], None]:
    """Encode in FP8 from now on; what is given undoes it."""
    heads = [each for each in encoder.modules() if isinstance(each, SpartonHead)]
    heads = [head for head in heads if not head.fp8 and head.serves_fp8]
    before = [part.encoding_fp8 for part in parts]
    for part in parts:
        part.encoding_fp8 = part.encoding_fp8 or Fp8Weights()
    for head in heads:
        head.fp8 = True

    def undo() -> None:
        for part, weights in zip(parts, before, strict=True):
            part.encoding_fp8 = weights
        for head in heads:
            head.fp8 = False

    return undo


def _parts(encoder: nn.Module) -> list[FusedPart]:
    """All parts of an encoder with products.

    Raises:
        ValueError: there is no body, or one that FP8 does not serve.
    """
    bodies = [part for part in encoder.modules() if isinstance(part, EncoderBody)]
    if not bodies:
        raise ValueError(
            "precision=fp8 multiplies in the layers of a transformer, and "
            f"{type(encoder).__name__} has none: take bf16"
        )
    return [part for body in bodies for part in _served(body)]


def _served(body: EncoderBody) -> list[FusedPart]:
    """The parts of a body with products.

    Raises:
        ValueError: it is one that FP8 does not serve.
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
