"""Causal language models as encoders of texts."""

from typing import Literal, get_args

from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from sparton.arguments import refuse_other

Attention = Literal["bidirectional", "causal"]
SpecialTokens = Literal["none", "eos"]


def is_causal_lm(config: PreTrainedConfig) -> bool:
    """Whether transformers has the architecture as a causal language model alone."""
    kind = type(config)
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING


def set_attention(
    config: PreTrainedConfig, attention: Attention | None, name: str
) -> PreTrainedConfig:
    """Make the configuration of a causal language model that of an encoder of texts, in place, and
    return it; others stay as they are. It neither keeps a cache nor caps its logits.

    Args:
        config: of the checkpoint.
        attention: whether a token attends to those behind it too ("bidirectional") or not
            ("causal"). The configuration keeps it, so that transformers does the same with a saved
            model; None leaves what it says.
        name: of the checkpoint, for messages.

    Raises:
        ValueError: causal attention of a model that is no causal language model, or an attention
            that does not exist.
    """
    if attention is not None:
        refuse_other(get_args(Attention), attention=attention)
    if not is_causal_lm(config):
        if attention == "causal":
            raise ValueError(
                f"attention={attention!r} is for causal language models, and {name} is none, but a "
                f"{type(config).__name__.removesuffix('Config')}: leave it out"
            )
        return config
    if attention is not None:
        config.is_causal = attention == "causal"
    config.use_cache = False
    # A bound of the logits keeps their order and would be one more pass over all of them.
    if getattr(config, "final_logit_softcapping", None) is not None:
        config.final_logit_softcapping = None
    return config


def set_special_tokens(
    tokenizer: PreTrainedTokenizerFast, special_tokens: SpecialTokens | None
) -> None:
    """Choose the tokens that a tokenizer puts around every text, in place; its files keep them.

    Args:
        tokenizer: of a language model.
        special_tokens: "none", or "eos" for the token that ends a text, behind it; None leaves what
            the tokenizer does. What causal language models put before a text, such as Llama's
            ``<|begin_of_text|>``, makes the same terms win in all texts if its logits are pooled.

    Raises:
        ValueError: a choice that does not exist, or "eos" of a tokenizer without such a token.
    """
    from tokenizers.processors import TemplateProcessing

    if special_tokens is None:
        return
    refuse_other(get_args(SpecialTokens), special_tokens=special_tokens)
    end, number = tokenizer.eos_token, tokenizer.eos_token_id
    if special_tokens == "none":
        processor = TemplateProcessing(single="$A", special_tokens=[])
    elif end is None:
        raise ValueError("special_tokens='eos': the tokenizer has no token that ends a text")
    else:
        processor = TemplateProcessing(single=["$A", end], special_tokens=[(end, number)])
    tokenizer.backend_tokenizer.post_processor = processor
