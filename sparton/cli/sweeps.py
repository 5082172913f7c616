"""A sweep of trainings: the command of each cell, its settings, and the report of all."""

import sys
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sparton.sweeps.report import read_published, write_report

_PAPER = Path(__file__).resolve().parents[2] / "results" / "paper.json"


def cell_settings(cfg: DictConfig, hydra_config: HydraConf) -> dict[str, Any]:
    """What sets a cell of a sweep apart, for its report."""
    overrides = sorted(hydra_config.overrides.task)
    scalars = {name: cfg[name] for name in ("batch", "gpus", "seed")}
    return {"head": hydra_config.runtime.choices["head"], **scalars, "overrides": overrides}


def cell_command(program: Path, hydra_config: HydraConf, folder: Path) -> list[str]:
    """The cell as a run of its own in ``folder``."""
    overrides = [*hydra_config.overrides.hydra, *hydra_config.overrides.task]
    alone = ["hydra.mode=RUN", run_in(folder)]
    sources = hydra_config.runtime.config_sources
    places = [f"--config-dir={each.path}" for each in sources if each.provider == "command-line"]
    name = f"--config-name={hydra_config.job.config_name}"
    return [sys.executable, str(program), name, *places, *overrides, *alone]


def run_in(folder: Path) -> str:
    """The override that gives a run its folder."""
    return f"hydra.run.dir='{folder}'"


class SweepReport(Callback):
    """Reports on a sweep when its last cell has ended.

    Args:
        examples: of a whole training, for which the report gives each cell's hours.
        published: a table of ``results/paper.json`` to compare with.
    """

    def __init__(self, examples: int | None = None, published: str | None = None):
        self._examples = examples
        self._published = published

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        paper = read_published(_PAPER, self._published) if self._published else None
        if write_report(Path(config.hydra.sweep.dir), self._examples, paper):
            sys.exit(1)  # cells without a result, each named by the report
