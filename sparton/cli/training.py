"""A training, from its configuration."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparton.cli.inputs import read_inputs
from sparton.cli.schema import identity, without_replaced

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
    _refuse_other_settings(cfg, folder)
    inputs = read_inputs(cfg, world)
    # What is missing is said by now: the libraries of the models take seconds to import.
    from sparton.cli.assembly import build_run

    build_run(cfg, world, folder, inputs).train()


def _refuse_other_settings(cfg: DictConfig, folder: Path) -> None:
    """Refuse a folder with checkpoints of other settings, which its manifest tells, before data is
    read. Where it does not, and of other data, the checkpoint tells.

    Raises:
        OtherRunError: names what differs.
    """
    if not any((folder / "checkpoints").glob("step-*")):
        return
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        stored = identity(OmegaConf.create(manifest["config"]))
    except (OSError, ValueError, KeyError, OmegaConfBaseException):
        return
    from sparton.training.state import refuse_other_run  # imports the libraries of the models

    refuse_other_run(folder, stored, identity(cfg))
