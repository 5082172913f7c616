"""What one process of ``train.py`` does: a cell of a sweep, one more process for each GPU, or a
training."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from sparton.cli.errors import EXPECTED_ERRORS, explain
from sparton.cli.sweeps import cell_command, cell_settings, run_in
from sparton.cli.training import run_training
from sparton.sweeps.cells import run_cell
from sparton.sweeps.jobs import join_job
from sparton.training.distributed import join_world
from sparton.training.outcome import run_here, run_on_gpus
from sparton.training.status import only_writer


def launch(cfg: DictConfig, program: Path) -> str | None:
    """Do what the command line of ``program`` asks of this process.

    Returns:
        What to tell the user, None where all went well.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return _cell(cfg, folder, program)
    is_rank = "RANK" in os.environ
    try:
        with nullcontext() if is_rank else only_writer(folder):
            return _training(cfg, folder, is_rank)
    except BlockingIOError as error:
        return str(error)


def _cell(cfg: DictConfig, folder: Path, program: Path) -> str | None:
    """One of a sweep, in processes of its own."""
    try:
        rank = join_job()
    except ValueError as error:
        return str(error)
    hydra_config = HydraConfig.get()
    command = cell_command(program, hydra_config, folder)
    run_cell(command, folder, cell_settings(cfg, hydra_config), rank)
    return None


def _training(cfg: DictConfig, folder: Path, is_rank: bool) -> str | None:
    """In this process, or in one for each GPU."""
    if cfg.gpus > 1 and not is_rank:
        # Where the folder's name has a time in it, every rank would have a folder of its own.
        command = [sys.executable, *sys.argv, run_in(folder)]
        return run_on_gpus(command, cfg.gpus, folder)
    typed = HydraConfig.get().overrides.task
    return run_here(
        lambda: run_training(cfg, join_world(), folder, typed), folder, EXPECTED_ERRORS, explain
    )
