"""Reading Hugging Face checkpoints strictly: nothing missing is made up in silence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
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
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from sparton.arguments import ArgumentError
from sparton.models.body import ATTENTION_DROPOUTS, without_attention_dropout
from sparton.models.causal_lm import Attention, is_causal_lm, set_attention
from sparton.models.damage import check_finite, check_weights, read_tensors, readable
from sparton.models.gte import translated
from sparton.models.layouts import without_warnings
from sparton.models.lora import adapter_base, adapts_head, with_adapter
from sparton.models.repository import Source, join
from sparton.reading import Fields

VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
)
LOGIT_BIAS = "1_LogitBias"  # folder beside a checkpoint, as sentence-transformers would name it
TRANSFORMER_FILE = "sentence_bert_config.json"  # of a Transformer module of sentence-transformers
# The older and the newer names of sentence-transformers; ours are the older.
_NEWER = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}
# What is not to be chosen: where files lie, and what this project needs to be as it sets it.
_PLACE = ("revision", "cache_dir", "subfolder")
# What would run code of others: classes, pickles, and kernels that are fetched from the hub.
_CODE = (
    "trust_remote_code", "code_revision", "auto_map", "weights_only", "attn_implementation",
    "_attn_implementation", "experts_implementation", "_experts_implementation", "use_kernels",
    "kernel_config", "adapter_kwargs",
)  # fmt: skip
_SET_HERE = {
    "model_args": (
        *_PLACE, *_CODE, "config", "dtype", "torch_dtype", "device_map",
        "quantization_config", "output_loading_info", "ignore_mismatched_sizes",
    ),
    "tokenizer_args": (*_PLACE, *_CODE, "config", "use_fast", "padding_side", "truncation_side"),
    "config_args": (*_PLACE, *_CODE, "return_unused_kwargs", *ATTENTION_DROPOUTS),
}  # fmt: skip
MOST_LAYERS = 1000  # more would be built for hours before their weights are missed


def load_lm(
    source: str | Path | Source,
    *,
    attention: Attention | None = None,
    subfolder: str = "",
    halves: bool = False,
) -> PreTrainedModel:
    """The language model of a checkpoint, masked or causal, in fp32 and without attention dropout.

    Args:
        source: path or hub name, or a source that says more. A folder of an adapter alone stands
            for the model that it belongs to, with the adapter in its weights.
        attention: of a causal language model, see :func:`~sparton.models.causal_lm.set_attention`.
        subfolder: where in it the checkpoint lies.
        halves: leave weights in bf16 that are stored so.

    Raises:
        ValueError: weights are missing from the checkpoint, or a weights file is damaged, or an
            argument of the source is not to be chosen, or an adapter does not say whether
            attention is causal.
        OSError: no such folder or hub name, no ``config.json`` or no weights in it.
    """
    source = Source.of(source)
    if base := adapter_base(source, subfolder):
        base, attention = _as_adapted(base, attention, source, subfolder)
        return with_adapter(load_lm(base, attention=attention), source, subfolder)
    config = _config(source, attention, subfolder)
    kind = AutoModelForCausalLM if is_causal_lm(config) else AutoModelForMaskedLM
    model, missing = _load(kind, source, config, subfolder, halves)
    if missing:
        raise ValueError(
            f"{source} is not a complete language model, its checkpoint lacks "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}. Name a checkpoint that "
            "was trained with masked-language modelling (bert-base-uncased, say) or causal "
            "language modelling, not a bare encoder or a classifier"
        )
    return model


def load_body(
    source: str | Path | Source,
    *,
    attention: Attention | None = None,
    subfolder: str = "",
    halves: bool = False,
) -> PreTrainedModel:
    """The body of a checkpoint without any head or pooler, in fp32 and without attention dropout.

    Args:
        source, attention, subfolder, halves: as in :func:`load_lm`.

    Raises:
        ValueError: weights of the encoder are missing, or a weights file is damaged, or an
            argument of the source is not to be chosen, or an adapter does not say whether
            attention is causal.
        OSError: no such folder or hub name, no ``config.json`` or no weights in it.
    """
    source = Source.of(source)
    if base := adapter_base(source, subfolder):
        base, attention = _as_adapted(base, attention, source, subfolder)
        body: Any = MODEL_MAPPING[type(_config(base, None, ""))]
        has_head = adapts_head(source, subfolder, body.base_model_prefix)
        load = load_lm if has_head else load_body
        adapted = with_adapter(load(base, attention=attention), source, subfolder)
        return cast(PreTrainedModel, adapted.base_model)
    config = _config(source, attention, subfolder)
    # Heads that a body leaves behind are no news, and what it lacks is an error here.
    with without_warnings():
        model, missing = _load(AutoModel, source, config, subfolder, halves)
    missing = [key for key in missing if not key.startswith("pooler.")]
    if missing:
        raise ValueError(
            f"{source} is not a complete {type(model).__name__}, its checkpoint lacks "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}"
        )
    if hasattr(model, "pooler"):
        model.pooler = None  # reads the first state only, and nobody reads it
    return model


def save_logit_bias(bias: Tensor | None, folder: Path) -> None:
    """Write beside a checkpoint what it has no place for; see :func:`load_logit_bias`."""
    if bias is not None:
        place = folder / LOGIT_BIAS
        place.mkdir()
        state = {"bias": bias.detach().float().cpu().contiguous()}
        save_file(state, place / "model.safetensors", metadata={"format": "pt"})


def load_logit_bias(source: str | Path | Source, *, subfolder: str = "") -> Tensor | None:
    """What is added to the logits of a language model whose architecture has no such bias, as
    Llama's: fp32 ``[V]``; None where there is none.

    Args:
        source, subfolder: as in :func:`load_lm`.

    Raises:
        ValueError: the file is damaged, or a value is not finite in fp32.
    """
    file = Source.of(source).file("model.safetensors", join(subfolder, LOGIT_BIAS))
    if file is None:
        return None
    tensors = read_tensors(file)
    if tensors.keys() != {"bias"}:
        raise ValueError(
            f"{file} must hold one tensor, 'bias', and holds {sorted(tensors)}: copy or download "
            "it again"
        )
    return tensors["bias"].float()


def load_tokenizer(source: str | Path | Source, *, subfolder: str = "") -> PreTrainedTokenizerFast:
    """The fast tokenizer of a checkpoint; it makes texts lower-case where a Transformer module of
    sentence-transformers has ``do_lower_case``.

    Args:
        source, subfolder: as in :func:`load_lm`.

    Raises:
        FileNotFoundError: there are no tokenizer files (transformers alone would go on with an
            empty vocabulary).
        ValueError: the tokenizer has no fast implementation, or an argument of the source is not
            to be chosen.
    """
    source = Source.of(source)
    found = any(source.file(file, subfolder) for file in VOCABULARY_FILES)
    if not found:
        raise FileNotFoundError(
            f"no tokenizer in {source}: none of {', '.join(VOCABULARY_FILES)} is there; save the "
            "model's tokenizer into the same folder (tokenizer.save_pretrained)"
        )
    settings = _settings(source, subfolder)
    arguments = _arguments(source, settings, "tokenizer_args")
    has_config = source.file("config.json", subfolder) is not None
    if has_config and (translation := _translation(source, subfolder)) is not None:
        arguments["config"] = AutoConfig.for_model(**translation)
    with readable(source, subfolder, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.name,
            subfolder=subfolder,
            trust_remote_code=False,
            **source.place,
            **arguments,
        )
        tokenizer("a")  # some are found to be damaged at the first text
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{source} has a slow tokenizer ({type(tokenizer).__name__}); convert it")
    if settings.get("do_lower_case", bool):
        _lower_case(tokenizer)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # for libraries that pad, as Llama's has none
    return tokenizer


def _as_adapted(
    base: Source, attention: Attention | None, adapter: Source, subfolder: str
) -> tuple[Source, Attention | None]:
    """The model of an adapter and its attention, as the adapter's folder says."""
    check_weights(Path(adapter.name) / subfolder)
    arguments = _arguments(adapter, _settings(adapter, subfolder), "config_args")
    is_causal = arguments.pop("is_causal", None)
    if attention is None and is_causal is not None:
        attention = "causal" if is_causal else "bidirectional"
    base = base._replace(config_args=arguments)
    config = _config(base, None, "")
    if is_causal_lm(config) and attention is None and not hasattr(config, "is_causal"):
        raise ArgumentError(
            "{} holds an adapter alone, and nothing says whether the tokens of its causal language "
            "model attended to those behind them in training: name it as a backbone, with "
            "{attention} or causal",
            join(adapter.name, subfolder),
            attention="bidirectional",
        )
    return base, attention


def _load(
    kind: Any, source: Source, config: PreTrainedConfig, subfolder: str, halves: bool
) -> tuple[Any, list[str]]:
    """A model of ``kind``, and what its checkpoint lacks."""
    stored = getattr(config, "dtype", None)
    keeps = halves and str(stored).removeprefix("torch.") == "bfloat16"
    arguments = _arguments(source, Fields({}, ""), "model_args")  # those of a folder load elsewhere
    with readable(source, subfolder, "checkpoint"):
        try:
            model, report = kind.from_pretrained(
                source.name,
                config=config,
                subfolder=subfolder,
                dtype=torch.bfloat16 if keeps else torch.float32,
                output_loading_info=True,
                trust_remote_code=False,
                weights_only=True,
                **source.place,
                **arguments,
            )
        except TypeError as error:
            if not arguments:
                raise
            raise ArgumentError(
                "{model_args} are not all arguments of this model: {}", error, model_args=arguments
            ) from error
    check_finite(model.named_parameters(), join(source.name, subfolder))
    return model, sorted(report["missing_keys"])


def _config(source: Source, attention: Attention | None, subfolder: str) -> PreTrainedConfig:
    """The configuration of a checkpoint that is there and whose weights can be opened."""
    if source.file("config.json", subfolder) is None:
        raise FileNotFoundError(
            f"no config.json in {source}: no Hugging Face model is in a folder of this name, nor "
            "on the hub, or the hub cannot be reached"
        )
    check_weights(Path(source.name) / subfolder)
    arguments = _arguments(source, _settings(source, subfolder), "config_args")
    translation = _translation(source, subfolder)
    with readable(source, subfolder, "configuration"):
        if translation is None:
            config, unknown = AutoConfig.from_pretrained(
                source.name,
                subfolder=subfolder,
                return_unused_kwargs=True,
                trust_remote_code=False,
                **source.place,
                **arguments,
            )
        else:
            config, unknown = CONFIG_MAPPING[translation["model_type"]].from_dict(
                translation, return_unused_kwargs=True, **arguments
            )
        # Names of repositories there would be kernels to fetch and run.
        config._attn_implementation = config._experts_implementation = None
        layers = getattr(config, "num_hidden_layers", 0)
        if not 0 <= layers <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers={layers} in config.json")
    if strange := unknown.keys() & (source.config_args or {}).keys():
        raise ArgumentError(
            "{config_args} has {}, which the configuration of {} does not have: leave that out",
            ", ".join(sorted(strange)),
            source,
            config_args=dict(source.config_args or {}),
        )
    return set_attention(without_attention_dropout(config), attention, str(source))


def _translation(source: Source, subfolder: str) -> dict[str, Any] | None:
    """What :func:`~sparton.models.gte.translated` makes of a checkpoint's configuration."""
    with readable(source, subfolder, "configuration"):
        content, _ = PreTrainedConfig.get_config_dict(
            source.name, subfolder=subfolder, **source.place
        )
    return translated(Fields.of(content, join(source.name, subfolder, "config.json")))


def _arguments(source: Source, settings: Fields, name: str) -> dict[str, Any]:
    """What a Transformer module of sentence-transformers says it is loaded with, and what a caller
    gives, who must not set what is set here."""
    stored = settings.object(name) or settings.object(_NEWER[name]) or Fields({}, "")
    kept = {key: value for key, value in stored.as_dict().items() if key not in _SET_HERE[name]}
    given: Mapping[str, Any] = getattr(source, name) or {}
    if chosen := [key for key in given if key in _SET_HERE[name]]:
        raise ArgumentError(
            f"{{{name}}} sets {{}}, which is not to be chosen there: leave that out",
            ", ".join(chosen),
            **{name: dict(given)},
        )
    return kept | dict(given)


def _settings(source: Source, subfolder: str) -> Fields:
    """What a Transformer module of sentence-transformers says of itself, beside its checkpoint."""
    return source.fields(TRANSFORMER_FILE, subfolder)


def _lower_case(tokenizer: PreTrainedTokenizerFast) -> None:
    """Let the tokenizer make texts lower-case before all else, as sentence-transformers does."""
    from tokenizers.normalizers import Lowercase, Sequence

    backend = tokenizer.backend_tokenizer
    own = backend.normalizer
    if own is None or own.normalize_str("A") != "a":
        backend.normalizer = Sequence([Lowercase()] if own is None else [Lowercase(), own])


def lowers_case(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether a tokenizer makes texts lower-case before all else, which the files of some classes
    of tokenizers cannot say."""
    from tokenizers.normalizers import Lowercase, Sequence

    first = tokenizer.backend_tokenizer.normalizer
    if isinstance(first, Sequence):
        try:
            first = first[0]
        except IndexError:  # it has no length to ask for, and may be empty
            return False
    return isinstance(first, Lowercase)
