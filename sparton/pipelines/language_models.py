"""The language model that an adaptation starts from, and in which numbers it learns."""

from pathlib import Path

import torch

from sparton.arguments import ArgumentError, refuse_ignored
from sparton.models.backbone import Backbone
from sparton.models.backbones import minilm, pretrained
from sparton.models.causal_lm import Attention, is_causal_lm
from sparton.models.lora import Lora
from sparton.pipelines.masked_language import Objective, mask_token
from sparton.training.precision import Precision
from sparton.types import BodyOptions


def load_language_model(
    backbone: str | Path | Backbone | None,
    objective: Objective,
    precision: str | None,
    device: torch.device,
    options: BodyOptions,
) -> tuple[Backbone, Precision]:
    """A language model that predicts as the objective asks it to, on the CPU, and how it computes.

    Args:
        backbone, precision, options: see :func:`~sparton.pipelines.adapt_lm`.
        device: where it is to learn.

    Raises:
        ValueError: see :func:`~sparton.pipelines.adapt_lm`.
        OSError: there is no such model.
    """
    lora = options.get("lora")
    dtype = None
    if isinstance(backbone, Backbone):
        refuse_ignored("a loaded backbone", **{key: each or None for key, each in options.items()})
        dtype = backbone.lora and backbone.lora.dtype
    elif lora is not None:
        Lora.of(lora)  # refuses what cannot be
        dtype = lora.get("dtype")
    in_bf16 = device.type == "cuda" or dtype == "bf16"
    number_format = Precision(precision or ("bf16" if in_bf16 else "fp32"), device)
    if lora is not None:
        fitting = "fp32" if number_format.name == "fp32" else "bf16"
        options = {**options, "lora": {"dtype": fitting, **lora}}
    if not isinstance(backbone, Backbone):
        backbone = _load(backbone, objective, options)
    _check_objective(backbone, objective)
    _check_adapters(backbone, number_format)
    return backbone, number_format


def _load(name: str | Path | None, objective: Objective, options: BodyOptions) -> Backbone:
    if name is None:
        if lora := options.get("lora"):
            raise ArgumentError(
                "{lora} lets adapters learn alone, but MiniLM comes without a head, and a new one "
                "must learn as a whole: leave that out, or give {backbone:name} a language model",
                lora=dict(lora),
                backbone=None,
            )
        return minilm(**options)
    if objective == "mlm":
        return pretrained(str(name), **options)
    attention: Attention = "causal" if objective == "clm" else "bidirectional"
    return pretrained(str(name), attention=attention, special_tokens="none", **options)


def _check_objective(backbone: Backbone, objective: Objective) -> None:
    """Refuse a model that does not predict as the objective asks it to."""
    kind = type(backbone.model).__name__
    if is_causal_lm(backbone.model.config) != (objective != "mlm"):
        others = "mlm" if objective != "mlm" else "mntp or clm"
        raise ArgumentError(
            "{objective} is for {} language models, and {} is none: choose {}",
            "masked" if objective == "mlm" else "causal",
            kind,
            others,
            objective=objective,
        )
    if objective != "mlm" and backbone.is_causal != (objective == "clm"):
        wanted = "causal" if objective == "clm" else "bidirectional"
        raise ArgumentError(
            "{objective} needs attention that is {}: load {} with attention={!r}",
            wanted,
            kind,
            wanted,
            objective=objective,
        )
    if objective != "clm":
        mask_token(backbone.tokenizer)
    if objective == "mlm" and backbone.decoder.bias is None:
        raise ValueError(
            f"the decoder of {type(backbone.model).__name__} has no bias, by which the number of "
            "active terms is set: choose a backbone that has one"
        )


def _check_adapters(backbone: Backbone, precision: Precision) -> None:
    """Refuse adapters that the precision would not keep, or that no folder could have alone."""
    if backbone.lora is None:
        return
    lora = backbone.lora._asdict()
    if precision.name == "bf16_pure":
        raise ArgumentError(
            "{precision} would keep the adapters of {lora} in 16 bits, in which small updates are "
            "lost: choose bf16, with which the frozen weights are in bf16, too",
            precision=precision.name,
            lora=lora,
        )
    if precision.name == "fp32" and backbone.lora.dtype != "fp32":
        raise ArgumentError(
            "{precision} has no products with the frozen weights of {lora}, which are in bf16: "
            "choose the dtype fp32, or bf16 as {precision:name}",
            precision=precision.name,
            lora=lora,
        )
    if not backbone.saves_adapters_alone:
        return
    backbone.need_base()
    if backbone.decoder.bias is not None and backbone.logit_bias is None:
        raise ArgumentError(
            "{lora} saves adapters alone, but the number of active terms is set by the decoder's "
            "bias, which is one of the frozen weights of {}: save them merged",
            type(backbone.model).__name__,
            lora=lora,
        )
