"""What a training reads before its model is built."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from sparton.cli.schema import total_steps
from sparton.cli.targets import refuse_wrong_settings
from sparton.cli.tasks import (
    TaskBuilders,
    are_ours,
    build_first,
    hold_out_dev,
    say_how_often,
    task_builders,
)
from sparton.errors import MissingDataError
from sparton.training.settings import OF_SOME_DEVICES

if TYPE_CHECKING:
    from sparton.datasets.mixture import Mixture
    from sparton.training.distributed import World
    from sparton.training.loggers import OpenLogger
    from sparton.types import RetrievalTask


class Inputs(NamedTuple):
    """What a training reads and asks for before its model is built.

    Attributes:
        loggers: beside those that every run has.
        dev: tasks on which models are compared.
        tests: what builds each of the tasks of the best model.
    """

    loggers: "Sequence[OpenLogger]"
    data: "Mixture"
    dev: "Sequence[RetrievalTask]"
    tests: TaskBuilders


def read_inputs(cfg: DictConfig, world: "World") -> Inputs:
    """Ask for the loggers, and read data and tasks; only the main process logs. Every test task is
    downloaded and checked here, before the training and not after it, by the main process before
    the others read it. What this device lacks is said before anything is read.

    Raises:
        ValueError: a precision that the device does not have, a logger that is made already, or
            what data and tasks raise.
    """
    refuse_wrong_settings(cfg, ("logger", "data", "evaluation"))
    if cfg.precision in OF_SOME_DEVICES:
        from sparton.training.precision import Precision

        Precision(cfg.precision, world.device)
    loggers = instantiate(cfg.logger) if world.is_main else {}
    for name, each in loggers.items():
        if not callable(each):
            raise ValueError(
                f"logger.{name} makes a {type(each).__name__} already: it is made with start_step, "
                "for which its settings have _partial_: true"
            )
    data, dev = hold_out_dev(cfg, _read_data(cfg))
    builders = [cache(build) for build in dev.values()]
    say_how_often(data, total_steps(cfg), cfg.batch)
    tests = task_builders(cfg, "test")
    build_first(tests.values(), builders, world, together=are_ours(cfg, "dev"))
    return Inputs(list(loggers.values()), data, [build() for build in builders], tests)


def _read_data(cfg: DictConfig) -> "Mixture":
    """The training data; of files that are missing it is said which setting leads to them."""
    try:
        return instantiate(cfg.data)
    except InstantiationException as error:
        if not isinstance(missing := error.__cause__, MissingDataError):
            raise
        if "root" in cfg.data:
            remedy = " (data.root=FOLDER says where data is)"
        elif "${data_dir}" in OmegaConf.to_yaml(cfg.data):
            remedy = " (data_dir=FOLDER says where data is)"
        else:
            remedy = ""
        raise MissingDataError(f"{missing}{remedy}") from error
