"""What Hydra calls in a process of ``sparton train``, to start a cell of a sweep or a process for
each GPU, or to train."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sparton.cli.devices import check_gpus
from sparton.cli.errors import EXPECTED_ERRORS, explain
from sparton.cli.folders import kept_if_begun
from sparton.cli.overrides import typed_overrides
from sparton.cli.sweeps import cell_settings, run_command
from sparton.cli.training import run_training
from sparton.sweeps.cells import run_cell
from sparton.sweeps.jobs import join_job
from sparton.training.distributed import join_world, leave_world
from sparton.training.outcome import run_here, run_on_gpus
from sparton.training.status import only_writer

_FORM = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # Hydra's


def run_cell_of_sweep(cfg: DictConfig, again: Sequence[str]) -> None:
    """One of a sweep, in processes of its own.

    Args:
        again: the words that start this program in the same way.
    """
    rank = join_job()
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    command = run_command(again, typed_overrides(hydra_config), folder)
    run_cell(command, folder, cell_settings(cfg, hydra_config), rank)


def run_training_here(cfg: DictConfig, again: Sequence[str], found: Path, log: bool) -> Path:
    """Train in this process, or in one for each GPU, and give the folder of the run.

    Args:
        again: the words that start this program in the same way.
        found: see :func:`~sparton.cli.folders.kept_if_begun`.
        log: whether to set up logging, which no command has done.
    """
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    is_rank = "RANK" in os.environ
    with (
        only_writer(folder),
        nullcontext() if is_rank else kept_if_begun(folder, found),
        _logged(folder / "train.log") if log else nullcontext(),
    ):
        if cfg.gpus > 1 and not is_rank:
            check_gpus(cfg.gpus, None)
            # Where the folder's name has a time in it, every rank would have one of its own.
            command = run_command(again, typed_overrides(hydra_config), folder)
            run_on_gpus(command, cfg.gpus, folder)
        else:
            run_here(partial(_work, cfg, folder), folder, EXPECTED_ERRORS, explain)
            leave_world()
    return folder


def _work(cfg: DictConfig, folder: Path) -> None:
    run_training(cfg, join_world(), folder)


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    """What this package tells goes to a file, and to standard output where nothing listens.
    Afterwards logging is as it was."""
    logger = logging.getLogger("sparton")
    handlers: list[logging.Handler] = [logging.FileHandler(file, encoding="utf-8")]
    if not logger.hasHandlers():
        handlers.append(logging.StreamHandler(sys.stdout))
    before = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORM))
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(before)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
