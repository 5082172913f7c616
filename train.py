"""Train a retriever: ``python train.py head=sparton batch=512``; configs/ holds every choice."""

import os

# OpenMP threads that spin while they wait would starve the processes that tokenise ahead.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from sparton import config
from sparton.datasets.loader import train_loader
from sparton.evaluation import (
    TaskResult,
    evaluate_encoder,
    mean_metrics,
    packed_tokenizer,
    plan_search,
    results_table,
    write_results,
    write_task_run,
)
from sparton.losses.joint import KINDS, Joint
from sparton.losses.objective import Objective
from sparton.models.assembly import build_encoder
from sparton.models.encoder import Encoder
from sparton.models.folders import load_encoder, save_encoder
from sparton.sweeps.cells import run_cell
from sparton.training.distributed import World, join_world, leave_world
from sparton.training.loggers import JsonlLogger, Logger, ScreenLogger
from sparton.training.loop import LoopSettings, NonFiniteLossError, Trainer
from sparton.training.manifest import describe_environment
from sparton.training.optimization import build_optimizer
from sparton.training.precision import Precision
from sparton.training.processes import run_ranks
from sparton.training.state import CheckpointError
from sparton.training.status import (
    FAILED,
    KILLED,
    OK,
    OOM,
    RUNNING,
    Status,
    describe_failure,
    end_run,
    write_status,
)
from sparton.training.step import ExactStep
from sparton.training.throughput import ThroughputMeter
from sparton.types import RetrievalTask, Tokenizer, TrainBatch

# What a user can mend: shown in one sentence. HYDRA_FULL_ERROR=1 shows where it was raised.
EXPECTED_ERRORS = (
    ValueError,
    OSError,
    InstantiationException,
    NonFiniteLossError,
    CheckpointError,
)
WIDE = 120  # columns of a table where no terminal has a width
PROGRAM = Path(__file__).resolve()
log = logging.getLogger(__name__)
TaskBuilders = Mapping[str, Callable[[], RetrievalTask]]

config.register()
transformers.utils.logging.disable_progress_bar()


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    if hydra_config.mode == RunMode.MULTIRUN:
        if torch.distributed.is_torchelastic_launched():
            sys.exit("train.py: a sweep starts its processes itself: python train.py -m gpus=2 ...")
        command = config.cell_command(PROGRAM, hydra_config, folder)
        run_cell(command, folder, config.cell_settings(cfg, hydra_config))
    elif cfg.gpus > 1 and "RANK" not in os.environ:
        run_on_gpus(cfg.gpus, folder)
    else:
        run_here(cfg, folder)


def run_on_gpus(gpus: int, folder: Path) -> None:
    """This very command once more for each GPU."""
    write_status(folder, Status(RUNNING))
    ended = run_ranks([sys.executable, *sys.argv], gpus)
    if ended.code == 0:
        return
    if ended.code < 0:  # other ends are explained by the rank itself
        print(f"train.py: rank {ended.rank} {ended}; the others were stopped", file=sys.stderr)
    end_run(folder, Status(KILLED if ended.code < 0 else FAILED, f"rank {ended.rank} {ended}"))
    sys.exit(1)


def run_here(cfg: DictConfig, folder: Path) -> None:
    """Train in this process, and leave in ``status.json`` how that ended."""
    rank = os.environ.get("RANK")
    if rank in (None, "0"):
        write_status(folder, Status(RUNNING))
    try:
        run(cfg, join_world(), folder)
    except Exception as error:
        status = describe_failure(error, config.explain(error))
        end_run(folder, status)
        expected = isinstance(error, EXPECTED_ERRORS) or status.state == OOM
        if not expected or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        speaker = f"train.py (rank {rank})" if rank else "train.py"
        print(f"{speaker}: {status.message}", file=sys.stderr)
        sys.exit(1)
    if rank in (None, "0"):
        write_status(folder, Status(OK))


def run(cfg: DictConfig, world: World, folder: Path) -> None:
    """Train, or go on with what ``folder`` holds; then evaluate the best model."""
    config.check(cfg, world.size)
    dev_tasks, tests = build_tasks(cfg) if world.is_main else ([], {})
    trainer, tokenizer = build_trainer(cfg, world, folder, dev_tasks)
    needs_teacher = trainer.step.objective.ranking.needs_teacher
    batches = build_loader(cfg, world, tokenizer, trainer.resume(), needs_teacher)
    if world.is_main:
        trainer.loggers = build_loggers(cfg, folder, trainer)
    try:
        trainer.run(batches)
        if tests:
            encoder = load_encoder(folder / "model", instantiate(cfg.head)).to(world.device)
            tokenizer = packed_tokenizer(encoder, cfg.query_length, cfg.document_length)
            evaluate = partial(build_evaluation(cfg, trainer.step.precision), encoder, tokenizer)
            run_tests(evaluate, tests, folder, describe_run(cfg))
    finally:
        for logger in trainer.loggers:
            logger.close()


def build_tasks(cfg: DictConfig) -> tuple[list[RetrievalTask], TaskBuilders]:
    """The dev tasks, and how to build each test task. Every task is downloaded and checked here,
    before the training and not after it."""
    dev = [instantiate(task) for task in (cfg.evaluation.dev or {}).values()]
    tests = {name: partial(instantiate, task) for name, task in (cfg.evaluation.test or {}).items()}
    for build in tests.values():
        build()
    return dev, tests


def build_trainer(
    cfg: DictConfig, world: World, folder: Path, dev_tasks: list[RetrievalTask]
) -> tuple[Trainer, Tokenizer]:
    """Model, objective, optimizer and the loop around them."""
    torch.manual_seed(cfg.seed)
    precision = Precision(cfg.precision, world.device)
    backbone = instantiate(cfg.backbone)
    encoder = build_encoder(backbone, instantiate(cfg.head))
    encoder = instantiate(cfg.query_encoder)(encoder)
    encoder.to(world.device, precision.parameter_dtype)
    world.broadcast(encoder)
    lengths = {"query_length": cfg.query_length, "document_length": cfg.document_length}
    tokenizer = build_tokenizer(encoder, dev_tasks, **lengths)
    objective = build_objective(cfg, encoder)
    plan_search(encoder, **search_settings(cfg))
    evaluate = partial(build_evaluation(cfg, precision), tokenizer=tokenizer)
    trainer = Trainer(
        step=ExactStep(encoder, objective, world, precision, cfg.micro_batch, cfg.seed),
        optimizer=build_optimizer(
            encoder, instantiate(cfg.optimizer), cfg.weight_decay, encoder.learning_rates()
        ),
        schedule=instantiate(cfg.scheduler),
        settings=LoopSettings(
            steps=config.total_steps(cfg),
            log_every=cfg.log_every,
            evaluate_every=cfg.evaluation.every if cfg.evaluation.dev else None,
            checkpoint_every=cfg.checkpoint_every,
            clip_norm=cfg.clip_norm,
        ),
        folder=folder,
        meter=ThroughputMeter(world.device, encoder.flops_per_token, world.size),
        evaluate=lambda model: mean_metrics([evaluate(model, task=task) for task in dev_tasks]),
        save_model=partial(save_encoder, **lengths),
        identity=config.identity(cfg),
    )
    return trainer, tokenizer


def build_tokenizer(encoder: Encoder, dev_tasks: list[RetrievalTask], **lengths: int) -> Tokenizer:
    """Texts to token batches, or to the rows of embeddings that were made before."""
    rows = encoder.text_rows
    if rows is None:
        return packed_tokenizer(encoder, **lengths)
    rows.check_lengths(**lengths)
    for task in dev_tasks:  # what the cache lacks shows before the training
        rows.queries(task.queries.texts)
        rows.documents(task.documents.texts)
    return rows


def search_settings(cfg: DictConfig) -> dict[str, Any]:
    return {"metrics": list(cfg.metrics), "search": cfg.search, "rerank_depth": cfg.rerank_depth}


def build_evaluation(cfg: DictConfig, precision: Precision) -> Callable[..., TaskResult]:
    """What is still to be given an encoder, its tokenizer and a task."""
    return partial(evaluate_encoder, bf16=precision.is_half, **search_settings(cfg))


def build_objective(cfg: DictConfig, encoder: Encoder) -> Objective:
    """The loss, and the regularizers of the sides that have something to regularize."""
    regularizers = {}
    for side in ("query", "document"):
        regularizers[side] = instantiate(cfg[f"{side}_regularizer"], _convert_="partial")
        if regularizers[side] and side not in encoder.regularized:
            log.info(
                "no %s_regularizer: training cannot make this encoder's %s representations sparser",
                side,
                side,
            )
            regularizers[side] = {}
    loss = instantiate(cfg.loss)
    if isinstance(loss, Joint) and encoder.kinds != KINDS:
        raise ValueError(
            f"the loss {type(loss).__name__} is of a sparse half and of one with vectors of "
            f"tokens, but this encoder has {' and '.join(encoder.kinds)} alone: set "
            "head=sparton_colbert, or loss=infonce"
        )
    return Objective(loss, *regularizers.values(), encoder.loss_weights)


def build_loader(
    cfg: DictConfig,
    world: World,
    tokenizer: Tokenizer,
    start_step: int,
    needs_teacher: bool,
) -> Iterable[TrainBatch]:
    """This process's batches from ``start_step`` on; ``needs_teacher``: with teacher scores."""
    return train_loader(
        instantiate(cfg.data),
        tokenizer,
        batch=cfg.batch,
        steps=config.total_steps(cfg),
        num_negatives=cfg.num_negatives,
        needs_teacher=needs_teacher,
        seed=cfg.seed,
        start_step=start_step,
        rank=world.rank,
        world_size=world.size,
        num_workers=cfg.num_workers,
        unique_positives=cfg.unique_positives,
    )


def build_loggers(cfg: DictConfig, folder: Path, trainer: Trainer) -> list[Logger]:
    """Screen, metrics.jsonl, and what ``logger`` asks for. A part that trains leaves a manifest."""
    manifest = describe_run(cfg)
    steps, start = trainer.settings.steps, trainer.start_step
    if start < steps:
        name = f"manifest-from-step-{start}.json" if start else "manifest.json"
        (folder / name).write_text(json.dumps(manifest, indent=2) + "\n")
    console = Console()
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
    loggers: list[Logger] = [
        ScreenLogger(console, steps),
        JsonlLogger(folder / "metrics.jsonl", start),
        *instantiate(cfg.logger, _convert_="partial").values(),
    ]
    for logger in loggers:
        logger.describe(manifest)
    return loggers


def describe_run(cfg: DictConfig) -> dict[str, Any]:
    return describe_environment() | {"config": OmegaConf.to_container(cfg, resolve=True)}


def run_tests(
    evaluate: Callable[..., TaskResult],
    tasks: TaskBuilders,
    folder: Path,
    description: Mapping[str, Any],
) -> None:
    """One task after the other; ``results.json`` and the runs grow with each, a table ends it."""
    results: list[TaskResult] = []
    for name, build in tasks.items():
        results.append(evaluate(build()._replace(name=name)))
        write_results(results, folder, {"model": str(folder / "model"), **description})
        write_task_run(results[-1], folder)
    width = None if sys.stdout.isatty() else WIDE
    Console(width=width).print(results_table(results, title="test tasks"))


if __name__ == "__main__":
    main()
    leave_world()
