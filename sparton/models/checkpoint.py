"""Reading Hugging Face checkpoints strictly: nothing missing is made up in silence."""

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from sparton.models.body import without_attention_dropout
from sparton.models.layouts import without_warnings
from sparton.models.repository import optional_file

VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
)


def load_mlm(name: str, *, revision: str | None = None, subfolder: str = "") -> PreTrainedModel:
    """The masked-language model of a checkpoint, in fp32 and without attention dropout.

    Args:
        name: hub name or local folder.
        revision: branch, tag or commit on the hub.
        subfolder: where in it the checkpoint lies.

    Raises:
        ValueError: weights are missing from the checkpoint, or a weights file is damaged.
        OSError: no such folder or hub name, no ``config.json`` or no weights in it.
    """
    config = _config(name, revision, subfolder)
    mlm, report = AutoModelForMaskedLM.from_pretrained(
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
            f"{name} is not a complete masked-language model, its checkpoint lacks "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}. Name a checkpoint that "
            "was trained with masked-language modelling (bert-base-uncased, say), not a bare "
            "encoder or a classifier"
        )
    return mlm


def load_body(name: str, *, revision: str | None = None, subfolder: str = "") -> PreTrainedModel:
    """The encoder of a checkpoint without any head or pooler, in fp32 and without attention
    dropout.

    Args:
        name, revision, subfolder: as in :func:`load_mlm`.

    Raises:
        ValueError: weights of the encoder are missing, or a weights file is damaged.
        OSError: no such folder or hub name, no ``config.json`` or no weights in it.
    """
    # Heads that a body leaves behind are no news, and what it lacks is an error here.
    with without_warnings():
        model, report = AutoModel.from_pretrained(
            name,
            config=_config(name, revision, subfolder),
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
