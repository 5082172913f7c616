"""From a command line to a training or an evaluation.

What is asked for is composed and checked first, without PyTorch and before a folder is made.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from sparton.cli.checks import check, check_places, find_models
from sparton.cli.command_line import Request
from sparton.cli.composing import composer
from sparton.cli.evaluation_checks import check_evaluation


def train(request: Request, program: Sequence[str]) -> None:
    """Run a training, or a sweep of them.

    Args:
        program: the words that start this command in another process, without its arguments.

    Raises:
        EXPECTED_ERRORS: what a user can mend.
    """
    with composer(request) as opened:
        variants = opened.variants()
        sweeps = opened.sweeps(variants[0])
        for cfg in variants:
            check_places(cfg)
            check(cfg, int(os.environ.get("WORLD_SIZE", cfg.gpus)), cfg.hydra.overrides.task)
        find_models(variants)
        from sparton.cli.launching import run_cell_of_sweep, run_training_here
        from sparton.sweeps.jobs import refuse_torchrun

        again = [*program, *request.again()]
        if sweeps:
            refuse_torchrun()
            opened.sweep(partial(run_cell_of_sweep, again=again))
        else:
            _raise_error(opened.run(partial(run_training_here, again=again)))


def evaluate(request: Request) -> None:
    """Run an evaluation, or a sweep of them.

    Raises:
        EXPECTED_ERRORS: what a user can mend.
    """
    with composer(request) as opened:
        variants = opened.variants()
        for cfg in variants:
            check_evaluation(cfg, cfg.hydra.overrides.task)
        from sparton.cli.evaluation import evaluate_here

        if opened.sweeps(variants[0]):
            for job in opened.sweep(evaluate_here)[0]:
                _raise_error(job.return_value)
        else:
            _raise_error(opened.run(evaluate_here))


def _raise_error(ended: Any) -> None:
    """A task gives the errors that a user can mend back: Hydra would tell of those it sees."""
    if isinstance(ended, Exception):
        raise ended
