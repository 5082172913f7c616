"""The typed top level of a training configuration; the only module here that knows Hydra.

The groups (backbone, head, ...) are plain YAML with ``_target_``; the scalars here are typed, so
that ``batch=lots`` and ``bacth=512`` stop before any work.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from sparton.training.precision import PRECISIONS


@dataclass
class TrainConfig:
    """Everything ``train.py`` reads. ``configs/train.yaml`` holds the values."""

    seed: int
    study: str
    data_dir: str
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
    backbone: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    query_regularizer: dict[str, Any] = field(default_factory=dict)
    document_regularizer: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)


def register() -> None:
    """Make the schema known to Hydra as ``train_schema``."""
    ConfigStore.instance().store(name="train_schema", node=TrainConfig)


def total_steps(cfg: TrainConfig) -> int:
    """``steps``, or as many as ``examples`` makes at this batch."""
    return cfg.steps if cfg.steps is not None else cfg.examples // cfg.batch


def check(cfg: TrainConfig, world_size: int) -> None:
    """Refuse combinations that could not train.

    Raises:
        ValueError: names the setting, its value, and what would be right.
    """
    positive = ("batch", "examples", "query_length", "document_length", "log_every")
    for name in positive:
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)}: must be at least 1")
    for name in ("micro_batch", "checkpoint_every", "steps"):
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1, or null")
    for name in ("num_negatives", "num_workers"):
        if getattr(cfg, name) < 0:
            raise ValueError(f"{name}={getattr(cfg, name)}: must not be negative")
    if cfg.precision not in PRECISIONS:
        raise ValueError(f"precision={cfg.precision}: choose from {', '.join(PRECISIONS)}")
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
