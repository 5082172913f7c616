"""What a training's configuration is refused for, before any work.

What is refused often is looked at first, and without PyTorch, which takes longer to import than all
of this.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from sparton.arguments import ArgumentError
from sparton.cli.folders import LATEST
from sparton.cli.numeric_checks import check_lora, check_precision, check_sharding
from sparton.cli.overrides import (
    cell_name,
    changed_groups,
    overrides_in,
    typed_overrides,
    written,
)
from sparton.cli.schema import FOLDERS_OF_THEIR_OWN, body_options, flat_settings, total_steps
from sparton.cli.targets import refuse_wrong_settings
from sparton.retrieval.settings import check_metrics, check_search
from sparton.training.settings import FITTING, SELECT_BY

# What every training has.
_OBJECTS = ("backbone", "head", "query_encoder", "loss", "data", "optimizer", "scheduler")
_LONGEST_NAME = 255  # bytes of a file's name


def check(cfg: DictConfig, world_size: int, typed: Sequence[str] = ()) -> None:
    """Refuse combinations that could not train, or that would ignore what was asked for.

    Args:
        typed: the overrides of the command line. An experiment's file may name a backbone that
            ``init_from`` replaces, a user may not.

    Raises:
        ValueError: names the setting, its value, and what would be right.
    """
    _check_names(cfg)
    _check_objects(cfg)
    _check_backbone(cfg)
    _check_numbers(cfg)
    check_precision(cfg)
    check_lora(cfg)
    check_sharding(cfg)
    _check_evaluation(cfg)
    _check_regularizers(cfg)
    _check_steps(cfg, world_size)
    if cfg.init_from is not None:
        _check_start(cfg, typed)
    refuse_wrong_settings(cfg, changed_groups(typed))  # imports PyTorch
    _check_refresh(cfg)
    _check_loss(cfg)
    _check_parts(cfg)


def _check_names(cfg: DictConfig) -> None:
    """Names that folders could not have."""
    names = [("study", part) for part in cfg.study.split("/")]
    names += [] if cfg.name is None else [("name", cfg.name)]
    for setting, name in names:
        if not re.fullmatch(r"\w[\w.+@-]*", name) or len(name.encode()) > _LONGEST_NAME:
            raise ValueError(
                f"{setting}={cfg[setting]}: a folder is called so, give it letters, digits and "
                f". _ - + @ alone, {_LONGEST_NAME} at most"
            )
    if LATEST in cfg.study.split("/"):
        raise ValueError(f"study={cfg.study}: runs/{LATEST} is the run that began last; rename it")


def check_cells(variants: Sequence[DictConfig]) -> None:
    """Refuse a sweep of which not all cells would lie in one folder, or two in the same.

    Raises:
        ValueError: names the settings.
    """
    for setting in ("study", "name"):
        values = dict.fromkeys(str(cfg[setting]) for cfg in variants)
        if len(values) > 1:
            raise ValueError(
                f"{setting}=... has several values ({', '.join(values)}): a sweep has one, as its "
                f"folder has; set {setting} to one of your own"
            )
    overrides = [typed_overrides(cfg.hydra) for cfg in variants]
    shared = set.intersection(*map(set, overrides))
    seen: dict[tuple, list[str]] = {}
    for cfg, each in zip(variants, overrides, strict=True):
        own = [override for override in each if override not in shared]
        folder = (cell_name(own or each, (), FOLDERS_OF_THEIR_OWN), cfg.gpus, cfg.seed)
        other = seen.setdefault(folder, own)
        if other != own:
            raise ValueError(
                f"{' '.join(other)} and {' '.join(own)} would lie in one folder, {folder[0]}: run "
                "them one after the other, each with a name=... of its own"
            )


def check_required(cfg: DictConfig) -> None:
    """Refuse what an experiment leaves to the user, who has not set it.

    Raises:
        InterpolationResolutionError: names the setting, and what it must be.
    """
    unresolved: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, raw in flat_settings(unresolved).items():
        if raw.startswith("${required:"):
            OmegaConf.select(cfg, key)


def _check_objects(cfg: DictConfig) -> None:
    """Groups that were taken away, and files of the user's own that name no class."""
    for name in _OBJECTS:
        if "_target_" not in cfg[name]:
            raise ValueError(
                f"{name} names no class in _target_, and a training needs one: choose a file of "
                f"configs/{name}, or complete your own"
            )


def _check_backbone(cfg: DictConfig) -> None:
    """One that has a name, but where ``init_from`` brings another."""
    nameless = "name" in cfg.backbone and OmegaConf.select(cfg.backbone, "name") is None
    if nameless and not OmegaConf.is_missing(cfg.backbone, "name") and cfg.init_from is None:
        raise ValueError(
            "backbone.name=null: name a folder or a model of the hub, or let init_from name a "
            "trained model"
        )


def _check_numbers(cfg: DictConfig) -> None:
    """Numbers out of range."""
    if not -(2**63) <= cfg.seed < 2**64:
        raise ValueError(f"seed={cfg.seed}: must be a number of 64 bits, from -2^63 to 2^64 - 1")
    positive = ("gpus", "batch", "examples", "query_length", "document_length", "log_every")
    for name in positive:
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)}: must be at least 1")
    for name in ("micro_batch", "checkpoint_every", "steps", "evaluation.every"):
        value, words = OmegaConf.select(cfg, name), "or null"
        if name == "micro_batch":
            words = f"{FITTING}, {words}"
            value = None if value == FITTING else value
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={written(value)}: must be a whole number from 1 on, {words}")
    held_out = cfg.evaluation.get("holdout") or OmegaConf.create()
    if not OmegaConf.is_dict(held_out):
        raise ValueError(
            f"evaluation.holdout={written(held_out)}: must be settings with names, such as "
            "evaluation.holdout.share=0.02, or null for no dev set"
        )
    known = ("share", "most", "documents", "seed")
    if unknown := [name for name in map(str, held_out) if name not in known]:
        raise ValueError(
            f"evaluation.holdout.{unknown[0]}: there is no such setting, choose from "
            f"{', '.join(known)}"
        )
    for name, least in (("most", 1), ("documents", 1), ("seed", 0)):
        value = held_out.get(name, least)
        if type(value) is not int or value < least:
            raise ValueError(
                f"evaluation.holdout.{name}={written(value)}: must be a whole number from {least} "
                "on"
            )
    for name in ("weight_decay", "optimizer.lr", "evaluation.holdout.share"):
        value = OmegaConf.select(cfg, name, default=0.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}={written(value)}: must be a number")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: must not be negative, and finite")
    if cfg.clip_norm is not None and cfg.clip_norm <= 0:
        raise ValueError(f"clip_norm={cfg.clip_norm}: must be positive, or null for no clipping")
    for name in ("num_negatives", "num_workers"):
        if getattr(cfg, name) < 0:
            raise ValueError(f"{name}={getattr(cfg, name)}: must not be negative")


def _check_refresh(cfg: DictConfig) -> None:
    """Negatives that would never be mined, or that no query would have."""
    if not cfg.refresh:
        return
    if cfg.num_negatives < 1:
        raise ValueError(
            f"num_negatives={cfg.num_negatives}: no query would have the negatives that refresh "
            "mines; set num_negatives=7, say, or refresh=none"
        )
    refresh, steps = instantiate(cfg.refresh), total_steps(cfg)
    if refresh.every >= steps and not refresh.at_start:
        raise ValueError(
            f"refresh.every={refresh.every}: nothing would be mined in {steps} steps; make it "
            "smaller, or set refresh.at_start=true to mine before the first step"
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
    kept = [f"backbone.{name}" for name in body_options()]
    ignored = overrides_in(typed, ["backbone"], but=kept)
    if ignored:
        raise ValueError(
            f"init_from={cfg.init_from} brings a backbone of its own and ignores "
            f"{', '.join(ignored)}: leave that out, or init_from. Of a backbone only "
            f"{', '.join(kept)} go with it"
        )


def _check_evaluation(cfg: DictConfig) -> None:
    check_search(cfg.search, cfg.rerank_depth)
    check_metrics(cfg.metrics)
    if SELECT_BY not in cfg.metrics:
        raise ValueError(
            f"metrics={list(cfg.metrics)} lack {SELECT_BY}, by which the best model is chosen: "
            "add it"
        )


def _check_regularizers(cfg: DictConfig) -> None:
    for side in ("query_regularizer", "document_regularizer"):
        for name, settings in cfg[side].items():
            if not settings or "_target_" not in settings:
                raise ValueError(
                    f"{side}.{name} has settings (of the experiment, or of the command line) but "
                    f"no such regularizer was chosen: add {name} to regularizer@{side}=[...], or "
                    f"remove them with ~{side}.{name}"
                )


def _check_loss(cfg: DictConfig) -> None:
    from sparton.losses.contract import checked_loss  # imports PyTorch, as losses do

    loss = checked_loss(instantiate(cfg.loss))
    if loss.needs_negatives and cfg.num_negatives < 1:
        raise ValueError(
            f"num_negatives={cfg.num_negatives}, but the loss {type(loss).__name__} compares a "
            "query's positive with negatives of its own: set num_negatives=1 or more, or "
            "loss=infonce"
        )


def _check_parts(cfg: DictConfig) -> None:
    """Settings that the small objects of a training refuse when they are made."""
    from torch import nn, zeros

    for name in ("scheduler", "averaging"):
        if cfg[name]:
            _built(cfg, name)
    for side in ("query_regularizer", "document_regularizer"):
        for name in cfg[side]:
            _built(cfg, f"{side}.{name}")
    if not cfg.optimizer["_target_"].startswith("torch.optim."):
        return  # what others do when they are made is not known
    optimizer = _built(cfg, "optimizer")
    try:
        optimizer([{"params": [nn.Parameter(zeros(1, 1))]}])
    except Exception as error:  # of any kind: types are not looked at
        given: Any = OmegaConf.to_container(cfg.optimizer, resolve=True)
        settings = {name: value for name, value in given.items() if not name.startswith("_")}
        raise ValueError(
            f"optimizer={written(settings)} cannot be made: {type(error).__name__}: {error}"
        ) from error


def _built(cfg: DictConfig, place: str) -> Any:
    try:
        return instantiate(OmegaConf.select(cfg, place))
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) and not isinstance(cause, ArgumentError):
            raise ValueError(f"{place}: {cause}") from error
        raise


def _check_steps(cfg: DictConfig, world_size: int) -> None:
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
