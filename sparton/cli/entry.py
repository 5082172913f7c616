"""From a command line to a training, an evaluation or an encoded collection.

What is asked for is composed and checked first, before a folder is made, and as far as possible
without PyTorch.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.types import TaskFunction
from omegaconf import DictConfig

from sparton.cli.checks import check, check_cells, check_required
from sparton.cli.command_line import Request
from sparton.cli.composing import composer
from sparton.cli.errors import EXPECTED_ERRORS, settings_named
from sparton.cli.evaluation_checks import check_evaluation, refuse_ignored, refuse_missing_values
from sparton.cli.folders import existing, refuse_loss
from sparton.cli.overrides import setting_of, typed_overrides
from sparton.cli.starting_models import check_lengths, check_places, find_models

_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")


def train(request: Request, program: Sequence[str], *, as_command: bool = True) -> Path | None:
    """Run a training, or a sweep of them.

    Args:
        program: the words that start this command in another process, without its arguments.
        as_command: this process is the command's own: logging is set up as Hydra has it, and a
            sweep may run.

    Returns:
        The folder of the run; None for a sweep.

    Raises:
        EXPECTED_ERRORS: what a user can mend.
    """
    with composer(request, "train") as opened:
        variants = opened.variants()
        sweeps = opened.sweeps(variants[0])
        if sweeps and not as_command:
            raise ValueError("this is a sweep, which the command runs: sparton train ...")
        for cfg in variants:
            check_required(cfg)
            check_places(cfg)
            check(cfg, int(os.environ.get("WORLD_SIZE", cfg.gpus)), typed_overrides(cfg.hydra))
        find_models(variants)
        check_lengths(variants)
        from sparton.cli.launching import run_cell_of_sweep, run_training_here
        from sparton.sweeps.jobs import refuse_torchrun

        again = [*program, *request.again()]
        if sweeps:
            check_cells(variants)
            refuse_torchrun()
            opened.sweep(partial(run_cell_of_sweep, again=again))
            return None
        folder = variants[0].hydra.run.dir
        if "RANK" not in os.environ:  # who started the ranks has asked
            refuse_loss(folder)
        found = existing(Path(folder))
        task = partial(run_training_here, again=again, found=found, log=not as_command)
        return _unless_error(opened.run(_giving_errors(task), configure_logging=as_command))


def evaluate(request: Request, program: Sequence[str]) -> None:
    """Run an evaluation, or a sweep of them.

    Args:
        program: the words that start this command in another process, without its arguments.

    Raises:
        EXPECTED_ERRORS: what a user can mend.
    """
    _refuse_folders(request)
    with composer(request, "evaluate") as opened:
        variants = opened.variants()
        for cfg in variants:
            check_evaluation(cfg, typed_overrides(cfg.hydra))
        from sparton.cli.evaluation import evaluate_here
        from sparton.training.outcome import ECHO

        evaluating = partial(evaluate_here, again=[*program, *request.again()])
        task = _giving_errors(evaluating, ECHO)
        if opened.sweeps(variants[0]):
            for job in opened.sweep(task)[0]:
                _unless_error(job.return_value)
        else:
            _unless_error(opened.run(task))


def encode(request: Request, program: Sequence[str]) -> None:
    """Encode a collection.

    Args:
        program: the words that start this command in another process, without its arguments.

    Raises:
        EXPECTED_ERRORS: what a user can mend.
    """
    _refuse_folders(request)
    with composer(request, "encode") as opened:
        (cfg,) = opened.variants()
        if opened.sweeps(cfg):
            raise ValueError("one collection is encoded at a time: leave -m out")
        refuse_missing_values(cfg)
        from sparton.cli.encoding import ECHO, run_encoding

        command = [*program, *request.again(), *typed_overrides(cfg.hydra)]
        with settings_named(query_length="length", document_length="length"):
            task = _giving_errors(partial(run_encoding, command=command), ECHO)
            _unless_error(opened.run(task))


def _refuse_folders(request: Request) -> None:
    """Refuse folders that Hydra would make and nothing would write into."""
    folders = [each for each in request.overrides if setting_of(each) in _FOLDERS]
    refuse_ignored("this command writes to output=FOLDER and", folders)


def _giving_errors(work: Callable[[DictConfig], Any], echo: float = 0.0) -> TaskFunction:
    """What Hydra is to run: ``work``, or the error that has ended it if a user can mend that, as
    Hydra would tell of it in its own words.

    Args:
        echo: seconds in which the main process says the same, and the others say nothing.
    """

    def run(cfg: DictConfig) -> Any:
        try:
            return work(cfg)
        except EXPECTED_ERRORS as error:
            if os.environ.get("RANK", "0") != "0":
                time.sleep(echo)
            return error

    return run


def _unless_error(ended: Any) -> Any:
    """What :func:`_giving_errors` gives back, unless it is an error."""
    if isinstance(ended, Exception):
        raise ended
    return ended
