"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685) of a body's linear layers, by peft.

A layer ``W x`` becomes ``W x + alpha / rank * B A x``: the weights W of the model are frozen, A and
B learn. An adapter is saved as a part of the weights, or alone, in the files of peft.
"""

import copy
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparton.arguments import ArgumentError
from sparton.errors import MissingExtraError
from sparton.models.damage import read_tensors
from sparton.models.repository import Source, join

Saving = Literal["merged", "adapter"]
Model = TypeVar("Model", bound=nn.Module)

ALL = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_NAME = "default"  # peft's, of an adapter that has no other
_PREFIX = "base_model.model."  # of names in peft's files
_ADAPTED = "adapted_weights"  # in the metadata of the weights, which peft passes over


class Lora(NamedTuple):
    """The settings of the adapters of a body.

    Attributes:
        rank: rows of A and columns of B.
        alpha: ``alpha / rank`` scales what an adapter adds.
        dropout: of what A reads.
        targets: names of the linear layers that get adapters, or the ends of these names, such as
            ``["q_proj", "v_proj"]``; "all-linear" for all but the decoder.
        dtype: of the frozen matrices, "bf16" or "fp32". Vectors (biases, norms) and adapters are
            fp32 in any case.
        save: how the model is saved: "merged" for complete weights in fp32 that need no peft, or
            "adapter" for the adapters alone, which need the model that training began with.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL
    dtype: str = "bf16"
    save: Saving = "merged"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Lora":
        """Settings by their names; those that are left out have their defaults.

        Raises:
            ValueError: an unknown name, or a value that cannot be.
        """
        if not isinstance(options, Mapping):
            raise ArgumentError(
                "{lora:name} is {!r}, and must be settings by their names, such as {lora}",
                options,
                lora={"rank": 16},
            )
        if unknown := [name for name in options if name not in cls._fields]:
            raise ArgumentError(
                "{lora} has {}, and adapters have only {}",
                ", ".join(unknown),
                ", ".join(cls._fields),
                lora=dict(options),
            )
        lora = cls(**options)
        if not isinstance(lora.targets, str):
            lora = lora._replace(targets=list(lora.targets))
        for name, is_right, rule in (
            ("rank", type(lora.rank) is int and lora.rank > 0, "a whole number from 1 on"),
            ("alpha", _is_number(lora.alpha) and 0 < lora.alpha < inf, "a finite number above 0"),
            ("dropout", _is_number(lora.dropout) and 0 <= lora.dropout < 1, "from 0 to below 1"),
            ("targets", bool(lora.targets), f"{ALL} or names of linear layers"),
            ("dtype", lora.dtype in DTYPES, "bf16 or fp32: quantised weights (QLoRA) cannot train"),
            ("save", lora.save in get_args(Saving), "merged or adapter"),
        ):
            if not is_right:
                raise ArgumentError(
                    "{lora} has {}={!r}, which must be {}",
                    name,
                    getattr(lora, name),
                    rule,
                    lora=dict(options),
                )
        return lora

    def names_in(self, model: nn.Module) -> list[str]:
        """The linear layers of a model that get adapters.

        Raises:
            ValueError: there are none, or a target names none.
        """
        linears = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
        targets = [self.targets] if isinstance(self.targets, str) else list(self.targets)
        if targets == [ALL]:
            targets = linears or [ALL]
        found: set[str] = set()
        for target in targets:
            named = [name for name in linears if f".{name}".endswith(f".{target}")]
            if not named:
                ends = sorted({name.rpartition(".")[2] for name in linears})
                raise ArgumentError(
                    "{lora} has the target {!r}, and {} has no linear layer of that name: its "
                    "layers end in {}",
                    target,
                    type(model).__name__,
                    ", ".join(ends) or "none",
                    lora=self._asdict(),
                )
            found.update(named)
        return [name for name in linears if name in found]

    def peft_config(self, names: list[str], base: str | None, revision: str | None = None) -> Any:
        """peft's configuration of adapters in layers of these names.

        Raises:
            ModuleNotFoundError: peft is not installed.
        """
        return _peft().LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=names,
            base_model_name_or_path=base,
            revision=revision,
        )


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Put fresh adapters into a model, in place: A is random, from the global generator, and B
    zero, so that its outputs stay the same.

    Raises:
        ValueError: see :meth:`Lora.names_in`.
        ModuleNotFoundError: peft is not installed.
    """
    config = lora.peft_config(lora.names_in(model), None)
    _peft().inject_adapter_in_model(config, model, _NAME)
    for layer in _adapted(model).values():
        layer.cast_input_dtype_enabled = False  # autocast does it, and would undo a cast to fp32


@torch.no_grad()
def freeze(module: nn.Module, lora: Lora) -> None:
    """Let nothing but adapters learn, and bring all parameters to their dtypes, in place."""
    for name, parameter in module.named_parameters():
        learns = ".lora_" in name
        in_fp32 = learns or parameter.ndim < 2
        parameter.data = parameter.data.to(torch.float32 if in_fp32 else DTYPES[lora.dtype])
        parameter.requires_grad_(learns)


@torch.no_grad()
def merged(model: Model) -> Model:
    """A copy of a model in which adapters are part of the weights, fp32 on the CPU. The model
    itself is left alone: to merge and unmerge weights of 16 bits would change them."""
    # What deepcopy is to take in the place of an object, by the object's identity.
    copies: dict[int, Any] = {}
    layers = _adapted(model).values()
    for layer in layers:
        weight = layer.get_base_layer().weight
        copies[id(weight)] = _on_cpu(weight.float() + layer.get_delta_weight(_NAME))
    for parameter in model.parameters():
        if id(parameter) not in copies:
            copies[id(parameter)] = _on_cpu(parameter)
    for layer in layers:
        copies[id(layer)] = copy.deepcopy(layer.get_base_layer(), copies)
    return copy.deepcopy(model, copies)


def save_adapter(model: nn.Module, lora: Lora, base: Source, folder: Path) -> None:
    """Write the adapters of a model alone, as peft does, and a digest of what they were trained on.

    Args:
        base: where the model is without them.
    """
    layers = _adapted(model)
    lora.peft_config(list(layers), base.name, base.revision).save_pretrained(folder)
    tensors = {
        f"{_PREFIX}{name}.{part}.weight": getattr(layer, part)[_NAME].weight.detach().cpu()
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }
    metadata = {"format": "pt", _ADAPTED: _adapted_weights(model)}
    save_file(tensors, folder / WEIGHTS, metadata=metadata)


def own_base(source: Source, subfolder: str) -> Source | None:
    """Where files of peft can say that a model is which was read from there; None where it is in a
    subfolder, or the folder holds an adapter alone."""
    return source if not subfolder and source.file("config.json") is not None else None


def adapter_base(source: Source, subfolder: str) -> Source | None:
    """Where the model is that an adapter belongs to; None where the folder has a model of its own,
    or no adapter.

    Raises:
        ValueError: the adapter does not say, or is of another kind than LoRA.
        FileNotFoundError: there is no such model.
    """
    if source.file("config.json", subfolder) is not None:
        return None
    if source.file(CONFIG, subfolder) is None:
        return None
    fields = source.fields(CONFIG, subfolder)
    if fields.need("peft_type", str) != "LORA":
        fields.refuse("peft_type", "'LORA', the only kind of adapter that is read here")
    base = source._replace(
        name=fields.need("base_model_name_or_path", str), revision=fields.get("revision", str)
    )
    why = f"{base}: no model is in a folder of this name or on the hub, or that cannot be reached"
    try:
        found = base.file("config.json") or base.file(CONFIG)
    except OSError as error:
        found, why = None, str(error)
    if found is None:
        raise FileNotFoundError(
            f"the model that the adapters in {join(source.name, subfolder)} belong to is not there "
            f"({why}): put it there, or write where it is into {CONFIG}, as base_model_name_or_path"
        )
    return base


def adapts_head(source: Source, subfolder: str, body: str) -> bool:
    """Whether the adapter in a folder belongs to a model with a head: its names then begin with
    ``body``, where such a model keeps its body."""
    weights = source.file(WEIGHTS, subfolder)
    if weights is None:
        return False
    with safe_open(weights, "pt") as file:
        names = list(file.keys())
    return any(name.startswith(f"{_PREFIX}{body}.") for name in names)


def with_adapter(model: PreTrainedModel, source: Source, subfolder: str) -> PreTrainedModel:
    """A model with an adapter of a folder in its weights, which are changed in place and learn as
    before.

    Raises:
        ValueError: the adapter does not fit the model, or is damaged, or the model has other
            weights than those that it was trained on.
        FileNotFoundError: its weights are missing.
        ModuleNotFoundError: peft is not installed.
    """
    peft, place = _peft(), join(source.name, subfolder)
    configured, weights = source.file(CONFIG, subfolder), source.file(WEIGHTS, subfolder)
    if configured is None or weights is None:
        raise FileNotFoundError(f"{place} has {CONFIG}, but no {WEIGHTS}: copy or download it")
    config = peft.PeftConfig.from_pretrained(str(configured.parent))
    config.inference_mode = True
    tensors = read_tensors(weights)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        adapted = peft.PeftModel(model, config)
        found = peft.set_peft_model_state_dict(adapted, tensors)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{place}: the adapter does not fit its model ({error})") from error
    lacking = [name for name in found.missing_keys if ".lora_" in name]
    if strange := [*found.unexpected_keys, *lacking]:
        raise ValueError(
            f"{place}: the adapter does not fit {type(model).__name__}, of which {WEIGHTS} and the "
            f"model do not both have {', '.join(strange[:4])}: it belongs to another model"
        )
    with safe_open(weights, "pt") as file:
        trained_on = (file.metadata() or {}).get(_ADAPTED)
    if trained_on is not None and trained_on != _adapted_weights(adapted):
        raise ValueError(
            f"{place}: the adapter was trained on other weights than those that "
            f"{config.base_model_name_or_path} has now (the same ones rounded to fp16 since count "
            "as others): put back that model, or train the adapter on this one"
        )
    whole: PreTrainedModel = adapted.merge_and_unload()
    for parameter in learning:  # which peft has frozen
        parameter.requires_grad_(True)
    return whole


def _on_cpu(weight: Tensor) -> nn.Parameter:
    copied = weight.detach().to("cpu", torch.float32, copy=True)
    return nn.Parameter(copied, requires_grad=False)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)}


def _adapted_weights(model: nn.Module) -> str:
    """A digest of the weights of the layers with adapters, in bf16, whatever they are held in."""
    digest = xxhash.xxh3_128()
    for _, layer in sorted(_adapted(model).items()):
        weight = layer.get_base_layer().weight.detach().to("cpu", torch.bfloat16)
        digest.update(weight.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "LoRA needs peft, which is an extra: pip install 'sparton[lora]'"
        ) from error
    return peft
