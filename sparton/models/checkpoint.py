"""Reading Hugging Face checkpoints strictly: nothing missing is made up in silence."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from sparton.models.body import without_attention_dropout
from sparton.models.layouts import without_warnings
from sparton.models.repository import optional_file

Attention = Literal["bidirectional", "causal"]
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
)


def load_lm(
    name: str,
    *,
    attention: Attention | None = None,
    revision: str | None = None,
    subfolder: str = "",
) -> PreTrainedModel:
    """The language model of a checkpoint, masked or causal, in fp32 and without attention dropout.

    A causal one neither keeps a cache nor caps its logits.

    Args:
        name: hub name or local folder.
        attention: of a causal language model, see :func:`set_attention`.
        revision: branch, tag or commit on the hub.
        subfolder: where in it the checkpoint lies.

    Raises:
        ValueError: weights are missing from the checkpoint, a weights file is damaged, or
            ``attention`` is said of a masked language model.
        OSError: no such folder or hub name, no ``config.json`` or no weights in it.
    """
    config = set_attention(_config(name, revision, subfolder), attention, name)
    kind: Any = AutoModelForCausalLM if is_causal_lm(config) else AutoModelForMaskedLM
    model, report = kind.from_pretrained(
        name,
        config=config,
        revision=revision,
        subfolder=subfolder,
        dtype=torch.float32,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{name} is not a complete language model, its checkpoint lacks "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}. Name a checkpoint that "
            "was trained with masked-language modelling (bert-base-uncased, say) or causal "
            "language modelling, not a bare encoder or a classifier"
        )
    return model


def load_body(
    name: str,
    *,
    attention: Attention | None = None,
    revision: str | None = None,
    subfolder: str = "",
) -> PreTrainedModel:
    """The body of a checkpoint without any head or pooler, in fp32 and without attention dropout.

    Args:
        name, attention, revision, subfolder: as in :func:`load_lm`.

    Raises:
        ValueError: weights of the encoder are missing, or a weights file is damaged.
        OSError: no such folder or hub name, no ``config.json`` or no weights in it.
    """
    # Heads that a body leaves behind are no news, and what it lacks is an error here.
    with without_warnings():
        model, report = AutoModel.from_pretrained(
            name,
            config=set_attention(_config(name, revision, subfolder), attention, name),
            revision=revision,
            subfolder=subfolder,
            dtype=torch.float32,
            output_loading_info=True,
        )
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ValueError(
            f"{name} is not a complete {type(model).__name__}, its checkpoint lacks "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}"
        )
    if hasattr(model, "pooler"):
        model.pooler = None  # reads the first state only, and nobody reads it
    return model


def is_causal_lm(config: PreTrainedConfig) -> bool:
    """Whether transformers has the architecture as a causal language model alone."""
    kind = type(config)
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING


def set_attention(
    config: PreTrainedConfig, attention: Attention | None, name: str
) -> PreTrainedConfig:
    """Make the configuration of a causal language model that of an encoder of texts, in place, and
    return it; others stay as they are.

    Args:
        config: of the checkpoint.
        attention: whether a token attends to those behind it too ("bidirectional") or not
            ("causal"). The configuration keeps it, so that transformers does the same with a saved
            model; None leaves what it says.
        name: of the checkpoint, for messages.

    Raises:
        ValueError: a masked language model, whose attention is bidirectional, or an attention that
            does not exist.
    """
    if attention not in (None, "bidirectional", "causal"):
        raise ValueError(f"attention={attention!r}: must be bidirectional or causal")
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


def load_tokenizer(
    name: str, *, revision: str | None = None, subfolder: str = ""
) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a checkpoint.

    Raises:
        FileNotFoundError: there are no tokenizer files (transformers alone would go on with an
            empty vocabulary).
        ValueError: the tokenizer has no fast implementation.
    """
    found = any(optional_file(name, file, revision, subfolder) for file in VOCABULARY_FILES)
    if not found:
        raise FileNotFoundError(
            f"no tokenizer in {name}: none of {', '.join(VOCABULARY_FILES)} is there; save the "
            "model's tokenizer into the same folder (tokenizer.save_pretrained)"
        )
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        name, revision=revision, subfolder=subfolder
    )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{name} has a slow tokenizer ({type(tokenizer).__name__}); convert it")
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # for libraries that pad, as Llama's has none
    return tokenizer


def _config(name: str, revision: str | None, subfolder: str) -> PreTrainedConfig:
    """The configuration of a checkpoint that is there and whose weights can be opened."""
    if optional_file(name, "config.json", revision, subfolder) is None:
        raise FileNotFoundError(
            f"no config.json in {name}: no Hugging Face model is in a folder of this name, nor on "
            "the hub, or the hub cannot be reached"
        )
    _check_weights(Path(name) / subfolder)
    config = AutoConfig.from_pretrained(name, revision=revision, subfolder=subfolder)
    return without_attention_dropout(config)


def _check_weights(folder: Path) -> None:
    """Open every safetensors file of a local folder; the library's own error names no file."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{path} is damaged ({error}; {path.stat().st_size} bytes): "
                "copy or download it again"
            ) from error
