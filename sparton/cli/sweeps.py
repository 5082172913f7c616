"""A sweep of trainings: the command of each cell, its settings, and the report of all."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sparton.cli.overrides import written
from sparton.cli.shipped import shipped


def cell_settings(cfg: DictConfig, hydra_config: HydraConf) -> dict[str, Any]:
    """What sets a cell of a sweep apart, for its report."""
    overrides = sorted(hydra_config.overrides.task)
    scalars = {name: cfg[name] for name in ("batch", "gpus", "seed")}
    return {"head": hydra_config.runtime.choices["head"], **scalars, "overrides": overrides}


def run_command(again: Sequence[str], overrides: Sequence[str], folder: Path) -> list[str]:
    """A training in ``folder`` as a process of its own.

    Args:
        again: starts this program in the same way.
        overrides: of the training.
    """
    return [*again, *overrides, "hydra.mode=RUN", f"hydra.run.dir={written(folder)}"]


class SweepReport(Callback):
    """Writes down each cell of a sweep that has ended, and reports on all when the last one has.

    Args:
        examples: of a whole training, for which the report gives each cell's time.
        published: a table of ``results/paper.json`` to compare with.
    """

    def __init__(self, examples: int | None = None, published: str | None = None):
        self._examples = examples
        self._published = published

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        # What is resolved now is known to all cells: which settings they share.
        OmegaConf.select(config, "hydra.sweep.subdir")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        from sparton.sweeps.report import write_records

        if HydraConfig.get().mode is RunMode.MULTIRUN:
            with suppress(OSError):  # the report that ends the sweep tells of it
                write_records(Path(config.hydra.sweep.dir))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        from sparton.sweeps.report import read_published, write_report

        folder, paper = Path(config.hydra.sweep.dir), None
        try:
            if self._published:
                paper = read_published(shipped("results/paper.json"), self._published)
            unfinished = write_report(folder, self._examples, paper)
        except Exception as error:  # which Hydra would tell of in a warning, and go on
            sys.exit(f"no report of {folder} ({type(error).__name__}: {error})")
        if unfinished:
            sys.exit(1)  # cells without a result, each named by the report
