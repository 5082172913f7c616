"""The parts of a training, from its configuration, and the run that they make."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from sparton.cli.devices import shared_index
from sparton.cli.ending import say_the_end
from sparton.cli.folders import mark_latest
from sparton.cli.inputs import Inputs
from sparton.cli.schema import identity, total_steps
from sparton.cli.targets import refuse_wrong_settings
from sparton.cli.tasks import TaskBuilders, dev_identity, has_dev_tasks
from sparton.datasets.lengths import CutCounter, examples_cut
from sparton.datasets.loader import BatchStream, train_loader
from sparton.datasets.mixture import Mixture
from sparton.evaluation import (
    TaskResult,
    evaluate_encoder,
    flat_metrics,
    mean_metrics,
    packed_tokenizer,
    plan_search,
    run_tests,
    task_figures,
    training_tokenizer,
)
from sparton.hub import add_results
from sparton.models.assembly import build_encoder
from sparton.models.asymmetric import AsymmetricEncoder
from sparton.models.encoder import Encoder
from sparton.models.folders import check_saving, load_encoder, save_encoder
from sparton.pipelines.mining.refresh import RefreshedBatches
from sparton.training.assembly import build_objective
from sparton.training.averaging import AveragedWeights
from sparton.training.distributed import World
from sparton.training.learning import LearningWatch
from sparton.training.loggers import Logger, open_loggers
from sparton.training.loop import LoopSettings, Trainer
from sparton.training.manifest import describe_environment
from sparton.training.micro_batch import MicroBatchSearch
from sparton.training.optimization import build_optimizer
from sparton.training.precision import Precision
from sparton.training.settings import FITTING
from sparton.training.sharding import place_weights
from sparton.training.state import frozen_identity
from sparton.training.step import ExactStep
from sparton.training.throughput import ThroughputMeter
from sparton.types import RetrievalTask, Tokenizer, TrainBatch

log = logging.getLogger(__name__)
_PARTS = (
    "backbone", "head", "query_encoder", "loss", "query_regularizer", "document_regularizer",
    "optimizer", "scheduler", "averaging", "refresh",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A training, with all that it needs.

    Attributes:
        trainer: stands where the run goes on.
        batches: this process's share of the steps that are left.
        loggers: of the main process.
        test: evaluates the best model and gives its figures; None where nothing is to be tested.
        public: whether the data are those of a repository on the hub.
    """

    trainer: Trainer
    batches: Iterable[TrainBatch]
    loggers: Sequence[Logger]
    test: Callable[[], dict[str, float]] | None
    public: bool

    def train(self) -> None:
        """Train to the end, test, and say what there is; the loggers are closed afterwards."""
        trainer = self.trainer
        try:
            trainer.run(self.batches, self.loggers)
            if self.test is not None:
                figures = self.test()
                for logger in self.loggers:
                    logger.conclude(figures, trainer.settings.steps)
            if trainer.world.is_main:
                own = getattr(getattr(trainer.encoder, "head", None), "own", None)
                kinds = trainer.encoder.kinds
                say_the_end(trainer.folder, kinds, public=self.public, own_head=own)
        finally:
            for logger in self.loggers:
                logger.close()


def build_run(cfg: DictConfig, world: World, folder: Path, inputs: Inputs) -> Run:
    """A run that begins, or goes on with what ``folder`` holds; nothing is written there before all
    of its parts are there."""
    refuse_wrong_settings(cfg, _PARTS)
    evaluate = build_evaluation(cfg, Precision(cfg.precision, world.device))
    trainer, tokenizer = build_trainer(cfg, world, folder, inputs, evaluate)
    start = trainer.resume()
    batches = build_batches(cfg, trainer, inputs.data, tokenizer)
    loggers: list[Logger] = []
    if world.is_main:
        steps = trainer.settings.steps
        say_what_was_there(folder, start, steps)
        if start < steps:
            examples_cut(inputs.data, tokenizer, seed=cfg.seed, batch=cfg.batch)
        others = [open_logger(start_step=start) for open_logger in inputs.loggers]
        loggers = open_loggers(folder, describe_run(cfg), steps, start, others)
        mark_latest(folder)
    tested = inputs.tests or inputs.dev
    test = partial(test_best, cfg, trainer, inputs, evaluate) if tested else None
    return Run(trainer, batches, loggers, test, public=cfg.data.get("hub") is not None)


def build_trainer(
    cfg: DictConfig, world: World, folder: Path, inputs: Inputs, evaluate: Callable[..., TaskResult]
) -> tuple[Trainer, Tokenizer]:
    """Model, objective, optimizer and the loop around them, which has models evaluated."""
    data, dev_tasks = inputs.data, inputs.dev
    torch.manual_seed(cfg.seed)
    precision = Precision(cfg.precision, world.device)
    encoder = build_model(cfg)
    if hub := cfg.data.get("hub"):
        encoder.origin = encoder.origin._replace(datasets=(hub,))
    check_saving(encoder)
    frozen = frozen_identity(encoder)
    weights = place_weights(encoder, world, precision, sharded=cfg.sharding == "full")
    lengths = {"query_length": cfg.query_length, "document_length": cfg.document_length}
    tokenizer = training_tokenizer(encoder, dev_tasks, **lengths)
    regularizers = {
        side: instantiate(cfg[f"{side}_regularizer"], _convert_="partial")
        for side in ("query", "document")
    }
    steps = total_steps(cfg)
    objective = build_objective(encoder, instantiate(cfg.loss), regularizers, steps)
    plan_search(encoder, **search_settings(cfg))
    fits = cfg.micro_batch == FITTING
    micro_batch = None if fits else cfg.micro_batch
    step = ExactStep(encoder, objective, world, precision, micro_batch, cfg.seed)
    optimizer = build_optimizer(
        encoder, instantiate(cfg.optimizer), cfg.weight_decay, encoder.learning_rates()
    )
    trainer = Trainer(
        step=step,
        optimizer=optimizer,
        schedule=instantiate(cfg.scheduler),
        settings=loop_settings(cfg),
        folder=folder,
        meter=ThroughputMeter(world.device, encoder.flops_per_token, world.size),
        evaluate=lambda model: mean_metrics(
            [evaluate(model, tokenizer, task, timed_queries=0, crew=world) for task in dev_tasks]
        ),
        save_model=partial(save_encoder, **lengths),
        identity=identity(cfg) | frozen | data.identity() | dev_identity(dev_tasks, world),
        watch=LearningWatch(objective.ranking, objective.score_weights),
        fit=MicroBatchSearch(step, optimizer, **lengths) if fits else None,
        sources=list(data.sources),
        averages=AveragedWeights(encoder, instantiate(cfg.averaging), steps)
        if cfg.averaging
        else None,
        weights=weights,
    )
    return trainer, tokenizer


def build_model(cfg: DictConfig) -> Encoder:
    """A head on a backbone, or the model that ``init_from`` names."""
    head = instantiate(cfg.head)
    if cfg.init_from is None:
        return instantiate(cfg.query_encoder)(build_encoder(instantiate(cfg.backbone), head))
    encoder = load_encoder(cfg.init_from, head, **cfg.backbone)
    if isinstance(encoder, AsymmetricEncoder) and "query" in encoder.regularized:
        log.warning("the queries of %s learn at optimizer.lr, as its documents do", cfg.init_from)
    return encoder


def loop_settings(cfg: DictConfig) -> LoopSettings:
    return LoopSettings(
        steps=total_steps(cfg),
        log_every=cfg.log_every,
        evaluate_every=cfg.evaluation.every if has_dev_tasks(cfg) else None,
        checkpoint_every=cfg.checkpoint_every,
        clip_norm=cfg.clip_norm,
    )


def search_settings(cfg: DictConfig) -> dict[str, Any]:
    return {"metrics": list(cfg.metrics), "search": cfg.search, "rerank_depth": cfg.rerank_depth}


def build_evaluation(cfg: DictConfig, precision: Precision) -> Callable[..., TaskResult]:
    """What is still to be given an encoder, its tokenizer and a task."""
    settings = search_settings(cfg) | {"precision": precision.autocast_name}
    return partial(evaluate_encoder, counter=CutCounter(), **settings)


def build_batches(
    cfg: DictConfig, trainer: Trainer, data: Mixture, tokenizer: Tokenizer
) -> Iterable[TrainBatch]:
    """This process's batches of the steps that are left, with what the loss needs of them."""
    loss, world = trainer.step.objective.ranking, trainer.world

    def load(data: Mixture, start: int, stop: int) -> Iterable[TrainBatch]:
        stream = BatchStream(
            data,
            tokenizer,
            cfg.batch,
            num_negatives=cfg.num_negatives,
            needs_negatives=loss.needs_negatives,
            needs_teacher=loss.needs_teacher,
            seed=cfg.seed,
            rank=world.rank,
            world_size=world.size,
            unique_positives=cfg.unique_positives,
        )
        return train_loader(stream, start, stop, num_workers=cfg.num_workers)

    if not cfg.refresh:
        return load(data, trainer.start_step, trainer.settings.steps)
    return RefreshedBatches(
        instantiate(cfg.refresh),
        trainer,
        data,
        load,
        loss=loss,
        query_length=cfg.query_length,
        document_length=cfg.document_length,
        precision=trainer.step.precision.autocast_name,
    )


def say_what_was_there(folder: Path, start: int, steps: int) -> None:
    """Tell what is left of an earlier run in the same folder, and what becomes of it."""
    if start == steps:
        log.info("all %d steps were done before: only the tests are left", steps)
    elif start:
        log.info("goes on from the checkpoint after step %d of %d", start, steps)
    elif (folder / "model").exists():
        log.warning("the model in %s is replaced; name=NAME gives a run another folder", folder)


def test_best(
    cfg: DictConfig, trainer: Trainer, inputs: Inputs, evaluate: Callable[..., TaskResult]
) -> dict[str, float]:
    """The figures of the best model on the test tasks or, where there are none, on those that it
    was chosen by; the folder of the run and the model's card have all of them."""
    model = trainer.folder / "model"
    encoder = load_encoder(model, instantiate(cfg.head)).to(trainer.world.device)
    tokenizer = packed_tokenizer(encoder, cfg.query_length, cfg.document_length)
    world = trainer.world
    evaluate = partial(evaluate, encoder, tokenizer, crew=world, index=shared_index(world))
    split = "test" if inputs.tests else "dev"
    title = "test tasks" if inputs.tests else "dev tasks, by which this model was chosen"
    description = {"model": str(model), "split": split, **describe_run(cfg)}
    tasks: TaskBuilders = inputs.tests or {
        task.name: partial(_the_same, task) for task in inputs.dev
    }
    results = run_tests(
        evaluate, tasks, trainer.folder, description, title=title, quiet=not world.is_main
    )
    if world.is_main:
        add_results(model, [task_figures(each) for each in results])
    return flat_metrics(results, split)


def _the_same(task: RetrievalTask) -> RetrievalTask:
    return task


def describe_run(cfg: DictConfig) -> dict[str, Any]:
    return describe_environment() | {"config": OmegaConf.to_container(cfg, resolve=True)}
