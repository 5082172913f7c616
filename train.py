"""Train a retriever: ``python train.py head=sparton batch=512``; configs/ holds every choice."""

import os

# OpenMP threads that spin while they wait would starve the processes that tokenise ahead.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import hydra
import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from sparton import config
from sparton.datasets.loader import train_loader
from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import (
    evaluate_encoder,
    mean_metrics,
    results_table,
    write_results,
    write_task_run,
)
from sparton.losses.objective import Objective
from sparton.models.encoder import SpladeEncoder
from sparton.models.folder import load_encoder, save_encoder
from sparton.training.distributed import World, join_world
from sparton.training.loggers import JsonlLogger, ScreenLogger
from sparton.training.loop import LoopSettings, NonFiniteLossError, Trainer
from sparton.training.manifest import describe_environment
from sparton.training.optimization import build_optimizer
from sparton.training.precision import Precision
from sparton.training.state import CheckpointError
from sparton.training.step import ExactStep
from sparton.training.throughput import ThroughputMeter
from sparton.types import RetrievalTask

# What a user can mend: shown in one sentence. HYDRA_FULL_ERROR=1 shows where it was raised.
EXPECTED_ERRORS = (
    ValueError,
    OSError,
    InstantiationException,
    NonFiniteLossError,
    CheckpointError,
)

config.register()
transformers.utils.logging.disable_progress_bar()


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    world = join_world()
    try:
        run(cfg, world, Path(HydraConfig.get().runtime.output_dir))
    except EXPECTED_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"train.py: {error}")
    finally:
        world.close()


def run(cfg: DictConfig, world: World, folder: Path) -> None:
    """Train, or go on with what ``folder`` holds; then evaluate the best model."""
    console = Console(quiet=not world.is_main)
    config.check(cfg, world.size)
    trainer, tokenizer = build_trainer(cfg, world, folder)
    batches = build_loader(cfg, world, tokenizer, trainer.resume())
    tests = {name: partial(instantiate, task) for name, task in (cfg.evaluation.test or {}).items()}
    if world.is_main:
        for build in tests.values():
            build()  # Every task is downloaded and checked before the training, not after it.
        trainer.loggers = build_loggers(cfg, folder, console, trainer.start_step)
    trainer.run(batches)
    if world.is_main and tests:
        model = load_encoder(folder / "model", instantiate(cfg.head)).to(world.device)
        test_model(model, tokenizer, tests, folder, bf16=trainer.step.precision.is_half)


def build_trainer(cfg: DictConfig, world: World, folder: Path) -> tuple[Trainer, PackedTokenizer]:
    """Model, objective, optimizer and the loop around them."""
    torch.manual_seed(cfg.seed)
    precision = Precision(cfg.precision, world.device)
    backbone = instantiate(cfg.backbone)
    encoder = SpladeEncoder(backbone, instantiate(cfg.head))
    encoder.to(world.device, precision.parameter_dtype)
    world.broadcast(encoder)
    lengths = {"query_length": cfg.query_length, "document_length": cfg.document_length}
    tokenizer = PackedTokenizer(encoder.tokenizer, **lengths, max_length=backbone.max_length)
    regularizers = [cfg.query_regularizer, cfg.document_regularizer]
    regularizers = [instantiate(named, _convert_="partial") for named in regularizers]
    objective = Objective(instantiate(cfg.loss), *regularizers)
    dev_tasks = [instantiate(task) for task in (cfg.evaluation.dev or {}).values()]
    evaluate = partial(evaluate_encoder, tokenizer=tokenizer, bf16=precision.is_half)
    trainer = Trainer(
        step=ExactStep(encoder, objective, world, precision, cfg.micro_batch, cfg.seed),
        optimizer=build_optimizer(encoder, instantiate(cfg.optimizer), cfg.weight_decay),
        schedule=instantiate(cfg.scheduler),
        settings=LoopSettings(
            steps=config.total_steps(cfg),
            log_every=cfg.log_every,
            evaluate_every=cfg.evaluation.every if dev_tasks else None,
            checkpoint_every=cfg.checkpoint_every,
            clip_norm=cfg.clip_norm,
        ),
        folder=folder,
        meter=ThroughputMeter(world.device, backbone.flops_per_token, world.size),
        evaluate=lambda model: mean_metrics([evaluate(model, task=task) for task in dev_tasks]),
        save_model=partial(save_encoder, **lengths),
    )
    return trainer, tokenizer


def build_loader(cfg: DictConfig, world: World, tokenizer: PackedTokenizer, start_step: int):
    """This process's batches from ``start_step`` on."""
    return train_loader(
        instantiate(cfg.data),
        tokenizer,
        batch=cfg.batch,
        steps=config.total_steps(cfg),
        num_negatives=cfg.num_negatives,
        seed=cfg.seed,
        start_step=start_step,
        rank=world.rank,
        world_size=world.size,
        num_workers=cfg.num_workers,
        unique_positives=cfg.unique_positives,
    )


def build_loggers(cfg: DictConfig, folder: Path, console: Console, start_step: int) -> list:
    """Screen and metrics.jsonl, and what ``logger`` asks for; the manifest goes to all."""
    manifest = describe_environment() | {"config": OmegaConf.to_container(cfg, resolve=True)}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    console.print(f"run folder: {folder}", highlight=False)
    loggers = [
        ScreenLogger(console, config.total_steps(cfg)),
        JsonlLogger(folder / "metrics.jsonl", start_step),
        *instantiate(cfg.logger, _convert_="partial").values(),
    ]
    for logger in loggers:
        logger.describe(manifest)
    return loggers


def test_model(
    encoder: SpladeEncoder,
    tokenizer: PackedTokenizer,
    tasks: Mapping[str, Callable[[], RetrievalTask]],
    folder: Path,
    *,
    bf16: bool,
) -> None:
    """One task after the other; ``results.json`` and the runs grow with each, a table ends it."""
    results = []
    for name, build in tasks.items():
        task = build()._replace(name=name)
        results.append(evaluate_encoder(encoder, tokenizer, task, bf16=bf16))
        write_results(results, folder, {"model": str(folder / "model")})
        write_task_run(results[-1], folder)
    Console().print(results_table(results, title=str(folder)))


if __name__ == "__main__":
    main()
