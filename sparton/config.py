"""The typed top level of a training configuration, and what a sweep needs of it; the only module
here that knows Hydra.

The groups (backbone, head, ...) are plain YAML with ``_target_``; the scalars here are typed, so
that ``batch=lots`` and ``bacth=512`` stop before any work.
"""

import hashlib
import math
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from sparton.evaluation.settings import check_metrics, check_search
from sparton.sweeps.report import read_published, write_report
from sparton.training.loop import SELECT_BY
from sparton.training.precision import PRECISIONS
from sparton.types import BodyOptions

_LONGEST_NAME = 120
_PAPER = Path(__file__).resolve().parents[1] / "results" / "paper.json"
# What may differ between the parts of one run: it changes neither the model nor its selection.
_INCIDENTAL = {
    "study", "gpus", "micro_batch", "log_every", "checkpoint_every", "num_workers", "logger",
    "metrics",
}  # fmt: skip
_FOLDERS_OF_THEIR_OWN = {"study", "gpus", "seed"}
_NO_OVERRIDES = "defaults"


@dataclass
class TrainConfig:
    """Everything ``train.py`` reads. ``configs/train.yaml`` holds the values."""

    seed: int
    study: str
    data_dir: str
    init_from: str | None
    gpus: int
    batch: int
    micro_batch: int | None
    steps: int | None
    examples: int
    num_negatives: int
    query_length: int
    document_length: int
    precision: str
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
    logger: dict[str, Any] = field(default_factory=dict)


def register() -> None:
    """Make the schema known to Hydra as ``train_schema``, and the names of folders as resolvers.

    A run is found again with other incidental settings; cells of a sweep may differ in them alone.
    ``sweep_name`` stays in all cells what it is in their sweep, as Hydra's ``now`` does.
    """
    ConfigStore.instance().store(name="train_schema", node=TrainConfig)
    run_name = partial(folder_name, left_out=_INCIDENTAL | _FOLDERS_OF_THEIR_OWN)
    cell_name = partial(folder_name, left_out=_FOLDERS_OF_THEIR_OWN)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    OmegaConf.register_new_resolver("cell_name", cell_name, replace=True)
    OmegaConf.register_new_resolver("sweep_name", cell_name, replace=True, use_cache=True)


def folder_name(overrides: Sequence[str], left_out: Collection[str] = ()) -> str:
    """Overrides as the name of one folder: what a shell, Hydra and a file system take unquoted.

    Other characters become ``_``; a long name is cut and ends in a digest of the whole text.

    Args:
        left_out: settings and groups of the top level that the name does not tell.
    """
    named = (each for each in overrides if top_level(each) not in left_out)
    text = "+".join(sorted(named)).replace("=", "-")
    name = re.sub(r"[^\w.+@-]+", "_", text).lstrip(".") or _NO_OVERRIDES
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def top_level(override: str) -> str:
    """The setting or group of the top level that an override changes, or changes something in."""
    return re.split("[=.@/]", override.lstrip("+~"), maxsplit=1)[0]


def overrides_in(
    overrides: Sequence[str], groups: Collection[str], but: Collection[str] = ()
) -> list[str]:
    """The overrides of settings and groups of the top level, but for those of some dotted keys."""
    own = (each for each in overrides if top_level(each) in groups)
    return [each for each in own if each.lstrip("+~").partition("=")[0] not in but]


def explain(error: Exception) -> str:
    """What went wrong in the words of who noticed: Hydra wraps errors of the objects it builds."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return str(error.__cause__)
    if isinstance(error, MissingMandatoryValue):  # ??? in a configuration
        group, in_group, _ = str(error.full_key).partition(".")
        place = f"the files in configs/{group}" if in_group else "the first files of configs"
        return f"{error.full_key} has no value: set {error.full_key}=..., see {place}"
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{error} Set micro_batch=N, which changes no gradient and bounds what is encoded at "
            "once, or backbone.gradient_checkpointing=true"
        )
    return str(error)


def identity(cfg: DictConfig) -> dict[str, str]:
    """What makes a run the run it is: dotted key to value. A checkpoint belongs to one identity."""
    flat: dict[str, str] = {}

    def flatten(key: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, below in value.items():
                flatten(f"{key}.{name}", below)
        else:
            flat[key] = str(value)

    for each in fields(TrainConfig):
        if each.name not in _INCIDENTAL:
            value = cfg[each.name]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            flatten(each.name, value)
    return {key: value for key, value in flat.items() if not key.startswith("evaluation.test")}


def without_replaced(cfg: DictConfig) -> DictConfig:
    """The settings that count: of a backbone that ``init_from`` replaces, how it runs."""
    if cfg.init_from is None:
        return cfg
    cfg = cfg.copy()
    cfg.backbone = {name: cfg.backbone.get(name, False) for name in BodyOptions.__annotations__}
    return cfg


def cell_settings(cfg: DictConfig, hydra_config: HydraConf) -> dict[str, Any]:
    """What sets a cell of a sweep apart, for its report."""
    overrides = sorted(hydra_config.overrides.task)
    scalars = {name: cfg[name] for name in ("batch", "gpus", "seed")}
    return {"head": hydra_config.runtime.choices["head"], **scalars, "overrides": overrides}


def run_in(folder: Path) -> str:
    """The override that gives a run its folder."""
    return f"hydra.run.dir='{folder}'"


def cell_command(program: Path, hydra_config: HydraConf, folder: Path) -> list[str]:
    """The cell as a run of its own in ``folder``."""
    overrides = [*hydra_config.overrides.hydra, *hydra_config.overrides.task]
    alone = ["hydra.mode=RUN", run_in(folder)]
    sources = hydra_config.runtime.config_sources
    places = [f"--config-dir={each.path}" for each in sources if each.provider == "command-line"]
    name = f"--config-name={hydra_config.job.config_name}"
    return [sys.executable, str(program), name, *places, *overrides, *alone]


class SweepReport(Callback):
    """Reports on a sweep when its last cell has ended.

    Args:
        examples: of a whole training, for which the report gives each cell's hours.
        published: a table of ``results/paper.json`` to compare with.
    """

    def __init__(self, examples: int | None = None, published: str | None = None):
        self._examples = examples
        self._published = published

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        paper = read_published(_PAPER, self._published) if self._published else None
        if write_report(Path(config.hydra.sweep.dir), self._examples, paper):
            sys.exit(1)  # cells without a result, each named by the report


def total_steps(cfg: DictConfig) -> int:
    """``steps``, or as many as ``examples`` makes at this batch."""
    return cfg.steps if cfg.steps is not None else cfg.examples // cfg.batch


def check(cfg: DictConfig, world_size: int, typed: Sequence[str] = ()) -> None:
    """Refuse combinations that could not train, or that would ignore what was asked for.

    Args:
        typed: the overrides of the command line. An experiment's file may name a backbone that
            ``init_from`` replaces, a user may not.

    Raises:
        ValueError: names the setting, its value, and what would be right.
    """
    _check_numbers(cfg)
    for name in ("head.fp8", "head.sparse.fp8", "query_encoder.head.fp8"):
        if OmegaConf.select(cfg, name) and cfg.precision == "fp32":
            raise ValueError(
                f"{name}=True needs products in 16 bit, got precision=fp32: set precision=bf16 or "
                f"{name}=false"
            )
    if cfg.init_from is not None:
        _check_start(cfg, typed)
    check_search(cfg.search, cfg.rerank_depth)
    check_metrics(cfg.metrics)
    if SELECT_BY not in cfg.metrics:
        raise ValueError(
            f"metrics={list(cfg.metrics)} lack {SELECT_BY}, by which the best model is chosen: "
            "add it"
        )
    for side in ("query_regularizer", "document_regularizer"):
        for name, settings in cfg[side].items():
            if not settings or "_target_" not in settings:
                raise ValueError(
                    f"{side}.{name} has settings (of the experiment, or of the command line) but "
                    f"no such regularizer was chosen: add {name} to regularizer@{side}=[...], or "
                    f"remove them with ~{side}.{name}"
                )
    loss = instantiate(cfg.loss)
    if loss.needs_negatives and cfg.num_negatives < 1:
        raise ValueError(
            f"num_negatives={cfg.num_negatives}, but the loss {type(loss).__name__} compares a "
            "query's positive with negatives of its own: set num_negatives=1 or more, or "
            "loss=infonce"
        )
    if cfg.batch % world_size:
        raise ValueError(
            f"batch={cfg.batch} counts the queries of a step over all processes and must be a "
            f"multiple of their number, {world_size}; try batch="
            f"{max(cfg.batch // world_size, 1) * world_size}"
        )
    if total_steps(cfg) < 1:
        raise ValueError(
            f"examples={cfg.examples} makes no step of batch={cfg.batch}: lower batch or set steps"
        )


def _check_start(cfg: DictConfig, typed: Sequence[str]) -> None:
    """What a trained model says itself."""
    if not cfg.init_from:
        raise ValueError("init_from= is empty: name a folder, or init_from=null for a new model")
    if not cfg.query_encoder["_target_"].endswith(".shared_queries"):
        raise ValueError(
            f"init_from={cfg.init_from} says itself how queries are encoded: leave "
            "query_encoder=shared"
        )
    if cfg.backbone["_target_"].endswith(".CachedBackbone"):
        raise ValueError(
            f"init_from={cfg.init_from} encodes texts, and backbone=cached looks them up: choose "
            "one of them"
        )
    kept = [f"backbone.{name}" for name in BodyOptions.__annotations__]
    ignored = overrides_in(typed, ["backbone"], but=kept)
    if ignored:
        raise ValueError(
            f"init_from={cfg.init_from} brings a backbone of its own and ignores "
            f"{', '.join(ignored)}: leave that out, or init_from. Of a backbone only "
            f"{', '.join(kept)} go with it"
        )


def _check_numbers(cfg: DictConfig) -> None:
    """Numbers out of range, and a precision that does not exist."""
    positive = ("gpus", "batch", "examples", "query_length", "document_length", "log_every")
    for name in positive:
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)}: must be at least 1")
    for name in ("micro_batch", "checkpoint_every", "steps", "evaluation.every"):
        value = OmegaConf.select(cfg, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value}: must be a whole number from 1 on, or null")
    for name in ("weight_decay", "optimizer.lr"):
        value = OmegaConf.select(cfg, name, default=0.0)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: must not be negative, and finite")
    if cfg.clip_norm is not None and cfg.clip_norm <= 0:
        raise ValueError(f"clip_norm={cfg.clip_norm}: must be positive, or null for no clipping")
    for name in ("num_negatives", "num_workers"):
        if getattr(cfg, name) < 0:
            raise ValueError(f"{name}={getattr(cfg, name)}: must not be negative")
    if cfg.precision not in PRECISIONS:
        raise ValueError(f"precision={cfg.precision}: choose from {', '.join(PRECISIONS)}")
