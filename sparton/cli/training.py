"""A training, from its configuration."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from sparton.cli.inputs import read_inputs
from sparton.cli.schema import without_replaced

if TYPE_CHECKING:
    from sparton.training.distributed import World


def run_training(cfg: DictConfig, world: "World", folder: Path) -> None:
    """Train, or go on with what ``folder`` holds; then evaluate the best model.

    Args:
        cfg: as :func:`~sparton.cli.checks.check` lets it pass.
    """
    if not world.is_main:  # the main process says the same
        logging.getLogger("sparton").setLevel(logging.ERROR)
    cfg = without_replaced(cfg)
    inputs = read_inputs(cfg, world)
    # What is missing is said by now: the libraries of the models take seconds to import.
    from sparton.cli.assembly import build_run

    build_run(cfg, world, folder, inputs).train()
