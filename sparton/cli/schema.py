"""The typed top level of configurations, and what makes a run the run it is.

The groups (backbone, head, ...) are plain YAML with ``_target_``; the scalars here are typed, so
that ``batch=lots`` and ``bacth=512`` stop before any work.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from sparton.cli.overrides import cell_name, fixed_settings, folder_name

# What may differ between the parts of one run: it changes neither the model nor its selection.
_INCIDENTAL = {
    "name", "study", "gpus", "sharding", "micro_batch", "log_every", "checkpoint_every",
    "num_workers", "logger", "metrics",
}  # fmt: skip
FOLDERS_OF_THEIR_OWN = {"name", "study", "gpus", "seed"}


@dataclass
class TrainConfig:
    """Everything ``train.py`` reads. ``configs/train.yaml`` holds the values."""

    seed: int
    name: str | None
    study: str
    data_dir: str
    init_from: str | None
    gpus: int
    batch: int
    micro_batch: int | str | None
    steps: int | None
    examples: int
    num_negatives: int
    query_length: int
    document_length: int
    precision: str
    sharding: str
    clip_norm: float | None
    weight_decay: float
    log_every: int
    checkpoint_every: int | None
    num_workers: int
    unique_positives: bool
    metrics: list[str]
    search: str | None
    rerank_depth: int
    backbone: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    query_encoder: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    query_regularizer: dict[str, Any] = field(default_factory=dict)
    document_regularizer: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    averaging: dict[str, Any] = field(default_factory=dict)
    refresh: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvaluateConfig:
    """Everything ``evaluate.py`` reads. ``configs/evaluate.yaml`` holds the values."""

    model: str
    split: str
    output: str | None
    data_dir: str
    gpus: int
    device: str | None
    query_length: int | None
    document_length: int | None
    documents: str | None
    width: int | None
    metrics: list[str]
    encoder: dict[str, Any] = field(default_factory=dict)
    bm25: dict[str, Any] = field(default_factory=dict)
    index: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)


@dataclass
class EncodeConfig:
    """Everything ``encode.py`` reads. ``configs/encode.yaml`` holds the values."""

    model: str
    data: Any
    source: str
    columns: Any
    output: str
    append: bool
    side: str
    gpus: int
    device: str | None
    length: int | None
    kinds: list[str] | None
    max_terms: int | None
    vector_dtype: str
    pool_factor: float | None
    precision: str | None
    rows_per_shard: int | None
    batch_tokens: int | None
    on_error: str
    progress: bool


SCHEMAS = {"train": TrainConfig, "evaluate": EvaluateConfig, "encode": EncodeConfig}


def register() -> None:
    """Make the schemas known to Hydra, ``train_schema`` for one, and as resolvers the names of
    folders and ``required``. What an experiment leaves to the user is ``${required:WHAT}`` in its
    file: ``???`` is no value there, and leaves the value that the setting has without it.

    A run is found again with other incidental settings; cells of a sweep may differ in them alone.
    ``sweep_name`` and ``fixed`` stay in all cells what they are in their sweep, as Hydra's ``now``
    does.
    """
    for command, schema in SCHEMAS.items():
        ConfigStore.instance().store(name=f"{command}_schema", node=schema)
    run_name = partial(_named, left_out=_INCIDENTAL | FOLDERS_OF_THEIR_OWN)
    sweep_name = partial(_named, left_out=FOLDERS_OF_THEIR_OWN)
    of_cell = partial(cell_name, left_out=FOLDERS_OF_THEIR_OWN)
    OmegaConf.register_new_resolver("required", _required, replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    OmegaConf.register_new_resolver("cell_name", of_cell, replace=True)
    OmegaConf.register_new_resolver("fixed", fixed_settings, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("sweep_name", sweep_name, replace=True, use_cache=True)


def _required(what: str) -> None:
    raise ValueError(f"has no value: set it to {what}")


def _named(name: str | None, overrides: Sequence[str], left_out: Collection[str]) -> str:
    """The name that a user has given, or that of the overrides."""
    return folder_name(overrides, left_out) if name is None else name


def total_steps(cfg: DictConfig) -> int:
    """``steps``, or as many as ``examples`` makes at this batch."""
    return cfg.steps if cfg.steps is not None else cfg.examples // cfg.batch


def without_replaced(cfg: DictConfig) -> DictConfig:
    """The settings that count: of a backbone that ``init_from`` replaces, those of
    :func:`body_options`."""
    if cfg.init_from is None:
        return cfg
    cfg = cfg.copy()
    cfg.backbone = {name: cfg.backbone.get(name) for name in body_options()}
    return cfg


def body_options() -> list[str]:
    """The settings of a backbone that say how it runs and learns, whatever its weights."""
    from sparton.types import BodyOptions

    return list(BodyOptions.__annotations__)


def identity(cfg: DictConfig) -> dict[str, str]:
    """What makes a run the run it is: dotted key to value. A checkpoint belongs to one identity."""
    own = {}
    for each in fields(TrainConfig):
        if each.name not in _INCIDENTAL:
            value = cfg[each.name]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            own[each.name] = value
    flat = flat_settings(own)
    return {key: value for key, value in flat.items() if not key.startswith("evaluation.test")}


def flat_settings(settings: Mapping[Any, Any]) -> dict[str, str]:
    """Dotted keys of plain settings to their values, as text."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= {f"{key}.{name}": below for name, below in flat_settings(value).items()}
        else:
            flat[str(key)] = str(value)
    return flat
