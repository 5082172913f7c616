"""The tasks that a configuration names, and those that are made of its training data."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from hydra.utils import instantiate
from omegaconf import DictConfig

from sparton.arguments import ArgumentError
from sparton.cli.evaluation_checks import refuse_missing
from sparton.datasets.downloads import fetching_nothing
from sparton.datasets.holdout import held_out_task, hold_out
from sparton.datasets.mixture import Mixture
from sparton.datasets.tasks import tasks_digest
from sparton.types import RetrievalTask

if TYPE_CHECKING:
    from sparton.training.distributed import World

TaskBuilders = dict[str, Callable[[], RetrievalTask]]

_OFTEN = 50  # times that an example is seen, from which on it is asked whether that is meant
log = logging.getLogger(__name__)


def task_builders(cfg: DictConfig, split: str) -> TaskBuilders:
    """What builds each task of a split, "dev" or "test", by name: one entry of the configuration
    for each, or one ``_target_`` that gives them all.

    Raises:
        MissingMandatoryValue: a setting of the evaluation has no value.
        ValueError: two tasks whose results would be one file.
    """
    from sparton.evaluation.results import check_task_names  # imports PyTorch

    refuse_missing(cfg)
    tasks = cfg.evaluation.get(split) or {}
    if "_target_" in tasks:
        builders = instantiate(tasks)
    else:
        builders = {name: partial(instantiate, task) for name, task in tasks.items()}
    check_task_names(builders)
    return builders


def build_first(
    own: Iterable[Callable[[], RetrievalTask]],
    shared: Iterable[Callable[[], RetrievalTask]],
    world: "World",
    *,
    together: bool,
) -> None:
    """Build tasks on the main process, which fetches and checks them, before any process goes on.

    The others build what they will need meanwhile, where it is read from files: they would begin
    only when the main process has gone on, which would wait for them later.

    Args:
        own: what the main process alone builds.
        shared: what all processes need.
        world: this process among all.
        together: whether the others build it meanwhile; its builders keep what they have built.
    """
    if world.is_main:
        for build in (*own, *shared):
            build()
    elif together:
        with suppress(Exception), fetching_nothing():  # what is wrong the main process tells
            for build in shared:
                build()
    world.barrier()


def are_ours(cfg: DictConfig, split: str) -> bool:
    """Whether this library builds all tasks of a split: of others nobody knows what they fetch."""
    tasks = cfg.evaluation.get(split) or {}
    each = [tasks] if "_target_" in tasks else tasks.values()
    return all(str(task.get("_target_", "")).startswith("sparton.") for task in each)


def has_dev_tasks(cfg: DictConfig) -> bool:
    """Whether a training has a dev set, of its own or of its training data."""
    return bool(task_builders(cfg, "dev") or cfg.evaluation.get("holdout"))


def hold_out_dev(cfg: DictConfig, data: Mixture) -> tuple[Mixture, TaskBuilders]:
    """What is trained on, and what builds the dev tasks: where the evaluation names none and has
    settings of ``holdout``, a share of the data.

    Raises:
        ValueError: a setting out of range.
    """
    dev = task_builders(cfg, "dev")
    settings = cfg.evaluation.get("holdout")
    if dev or not settings:
        return data, dev
    options = dict(settings)
    collection = {"documents": options.pop("documents")} if "documents" in options else {}
    try:
        held = hold_out(data, **options)
    except ArgumentError as error:
        raise error.renamed(**{name: f"evaluation.holdout.{name}" for name in options}) from error
    return held.rest, {"holdout": partial(held_out_task, held, **collection)}


def dev_identity(tasks: Sequence[RetrievalTask], world: "World") -> dict[str, str]:
    """``evaluation.dev.content``, a digest of the tasks that models are chosen by, of 60 bits, or 0
    for no tasks; the same on all ranks."""
    own = int(tasks_digest(tasks)[:15], 16) if tasks else 0
    return {"evaluation.dev.content": f"{world.largest(own):x}"}


def say_how_often(data: Mixture, steps: int, batch: int) -> None:
    """How often a training sees each example, or those of each of several sources, and a warning
    where that is hardly meant."""
    times = steps * batch / len(data)
    log.info("%d steps of %d see each of %d examples %.3g times", steps, batch, len(data), times)
    if len(data.sources) > 1:
        shares = [
            f"{name} {share:.1%} (each {steps * batch * share / examples:.3g} times)"
            for name, examples, share in data.describe()
        ]
        log.info("shares of the sources: %s", ", ".join(shares))
    if times > _OFTEN:
        fewer = 3 * len(data) // batch
        told = f"steps={fewer} sees each three times" if fewer else "a batch has more than the data"
        log.warning("each example is seen %.0f times: %s", times, told)
