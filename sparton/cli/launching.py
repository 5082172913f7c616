"""What one process of ``sparton train`` does: start the cells of a sweep, or a process for each
GPU, or train."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sparton.cli.checks import check
from sparton.cli.command_line import Request
from sparton.cli.composing import Composer, composer
from sparton.cli.errors import EXPECTED_ERRORS, explain
from sparton.cli.sweeps import cell_settings, run_command
from sparton.cli.training import run_training
from sparton.sweeps.cells import run_cell
from sparton.sweeps.jobs import join_job, refuse_torchrun
from sparton.training.distributed import join_world, leave_world
from sparton.training.outcome import run_here, run_on_gpus
from sparton.training.status import only_writer


def launch(request: Request, program: Sequence[str]) -> None:
    """Do what a command line asks of this process.

    Args:
        program: the words that start the command again, without its arguments.

    Raises:
        ValueError: there is nothing that could train; no folder was made.
        RunError: one of the processes of the run failed.
        EXPECTED_ERRORS: what a user can mend has ended the training.
    """
    again = [*program, *request.again()]
    with composer(request) as opened:
        variants = opened.variants()
        sweeps = opened.sweeps(variants[0])
        if sweeps:
            refuse_torchrun()
        for cfg in variants:
            check(cfg, int(os.environ.get("WORLD_SIZE", cfg.gpus)), cfg.hydra.overrides.task)
        if sweeps:
            opened.sweep(partial(_cell, again=again))
        else:
            _train(opened, again)


def _train(opened: Composer, again: Sequence[str]) -> None:
    ended = opened.run(partial(_training, again=again))
    if isinstance(ended, Exception):
        raise ended
    leave_world()


def _cell(cfg: DictConfig, again: Sequence[str]) -> None:
    """One of a sweep, in processes of its own."""
    rank = join_job()
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    command = run_command(again, hydra_config.overrides.task, folder)
    run_cell(command, folder, cell_settings(cfg, hydra_config), rank)


def _training(cfg: DictConfig, again: Sequence[str]) -> Exception | None:
    """In this process, or in one for each GPU.

    Returns:
        An error that a user can mend: where one is raised, Hydra tells of it in its own words.
    """
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    is_rank = "RANK" in os.environ
    try:
        with nullcontext() if is_rank else only_writer(folder):
            if cfg.gpus > 1 and not is_rank:
                # Where the folder's name has a time in it, every rank would have one of its own.
                command = run_command(again, hydra_config.overrides.task, folder)
                run_on_gpus(command, cfg.gpus, folder)
            else:
                work = partial(_work, cfg, folder)
                run_here(work, folder, EXPECTED_ERRORS, explain)
    except EXPECTED_ERRORS as error:
        return error
    return None


def _work(cfg: DictConfig, folder: Path) -> None:
    run_training(cfg, join_world(), folder)
