"""Negatives that the model in training mines anew, again and again, as ANCE does (Xiong et al.,
arXiv 2007.00808).

The mined examples are files of the run's folder. Their names have a digest of the weights that
mined them, and checkpoints have their names: what goes on with the same weights goes on with the
same negatives. Those of which no checkpoint is left are removed when others have taken their place.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sparton.arguments import ArgumentError, Instance, refuse_below
from sparton.datasets.demands import without_negatives
from sparton.datasets.lookup import Records, Rest, Source, whole_of
from sparton.datasets.mixture import Mixture
from sparton.datasets.sources import mined_records
from sparton.errors import CheckpointError
from sparton.losses.contract import Loss
from sparton.models.identity import weights_digest
from sparton.pipelines.mining.miners import TrainedModel
from sparton.pipelines.mining.pipeline import mine_hard_negatives
from sparton.pipelines.mining.selection import Rule
from sparton.training.loop import Trainer
from sparton.training.state import learned_state, newest_first, step_of
from sparton.types import TrainBatch

log = logging.getLogger(__name__)

FOLDER = "negatives"  # of the run's
# Batches of the steps from one on, and to before another.
Load = Callable[[Mixture, int, int], Iterable[TrainBatch]]


@dataclass(frozen=True)
class Refresh:
    """When and how a training mines negatives with its own model.

    Attributes:
        every: steps between two minings.
        at_start: mine before the first step, too; until the first mining, examples have the
            negatives of the data.
        rule: which ranks become negatives; ``share`` keeps false ones out.

    Raises:
        ArgumentError: ``every`` below 1.
    """

    every: int = 1000
    at_start: bool = False
    rule: Rule = Rule()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        refuse_below(1, every=self.every)

    def due(self, step: int) -> bool:
        """Whether negatives are mined before a step."""
        return step % self.every == 0 and (step > 0 or self.at_start)


class RefreshedBatches:
    """The batches of what is left of a run, mined anew at the steps of a plan.

    They are taken by the loop whose model mines: between two steps, with its averaged weights if it
    has such. The main process mines, the others wait for it.

    Args:
        refresh: the plan.
        trainer: stands where the run goes on.
        data: of the training; each of its sources is mined in its own collection, or in its
            positives where its examples are written out as texts.
        load: gives batches.
        query_length, document_length: of the model's texts.
        precision: see :func:`~sparton.retrieval.encoding.encode_texts`.

    Raises:
        ArgumentError: a loss that follows a teacher, who scores nothing during a training.
        ValueError: a source that cannot be mined, a rule that leaves no negatives, or what ``load``
            refuses.
        CheckpointError: the negatives of the checkpoint are gone.
    """

    def __init__(
        self,
        refresh: Refresh,
        trainer: Trainer,
        data: Mixture,
        load: Load,
        *,
        loss: Loss,
        query_length: int,
        document_length: int,
        precision: str,
    ) -> None:
        self._refresh, self._trainer, self._load = refresh, trainer, load
        self._folder = trainer.folder / FOLDER
        lengths = {"query_length": query_length, "document_length": document_length}
        encoder = trainer.encoder
        self._miner = TrainedModel(encoder, **lengths, precision=precision)
        _check(data, loss, encoder.text_rows is None)
        self._data = data if trainer.mined is None else self._read(data, trainer.mined)
        start = trainer.start_step
        # What is wrong with the data appears here and not in the run.
        self._first = None if self._mines(start) else load(self._data, start, self._end(start))

    def __iter__(self) -> Iterator[TrainBatch]:
        step, steps = self._trainer.start_step, self._trainer.settings.steps
        batches = self._first
        while step < steps:
            if batches is None:
                if self._mines(step):
                    self._data = self._mine(step)
                batches = self._load(self._data, step, self._end(step))
            yield from batches
            step, batches = self._end(step), None

    def _mines(self, step: int) -> bool:
        return self._refresh.due(step) and step < self._trainer.settings.steps

    def _end(self, step: int) -> int:
        """The first step that is not of the same data."""
        every = self._refresh.every
        return min((step // every + 1) * every, self._trainer.settings.steps)

    def _mine(self, step: int) -> Mixture:
        trainer, begin = self._trainer, time.perf_counter()
        with trainer.meter.paused():
            with trainer.averaged():
                own = f"step-{step:08d}-{weights_digest(learned_state(trainer.encoder))[:12]}"
                trainer.mined = trainer.world.share(own)
                if trainer.world.is_main:
                    for name, source in _mined_sources(self._data):
                        self._mine_source(name, source, self._folder / trainer.mined)
            trainer.world.barrier()
            mined = self._read(self._data, trainer.mined)
            self._refuse_nothing(step, mined)
            trainer.world.barrier()  # none begins to train, and to save, while others read
            if trainer.world.is_main:
                self._remove_older(step)
        seconds = time.perf_counter() - begin
        log.info("step %d: negatives were mined anew in %.0f s", step, seconds)
        return mined

    def _remove_older(self, step: int) -> None:
        """Remove minings from before the one that the oldest checkpoint goes on with, the newest
        before its step."""
        checkpoints = newest_first(self._trainer.folder / "checkpoints")
        oldest = min([step, *map(step_of, checkpoints)])
        before = {
            folder: mined
            for folder in self._folder.glob("step-*")
            if (mined := int(folder.name.split("-")[1])) < oldest
        }
        newest = max(before.values(), default=0)
        for folder, mined in before.items():
            if mined < newest:
                shutil.rmtree(folder, ignore_errors=True)

    def _refuse_nothing(self, step: int, mined: Mixture) -> None:
        """Refuse a rule that has left no negative to any example."""
        wholes = {name: len(whole_of(source)) for name, source in mined.sources.items()}
        if without_negatives(mined, 1) == wholes:
            rule = self._refresh.rule
            limits = {"share": rule.share, "margin": rule.margin, "depth": rule.depth}
            given = {name: value for name, value in limits.items() if value is not None}
            raise ArgumentError(
                "before step {} mining left no negative to any example, under "
                f"{', '.join(f'{{{name}}}' for name in given)}: let them pass more, or mine later, "
                "when the model tells documents apart",
                step + 1,
                **given,
            )

    def _mine_source(self, name: str, source: Records, folder: Path) -> None:
        output = folder / f"{name}.jsonl"
        if output.exists():  # mined by the same weights before the run was stopped
            return
        counts = mine_hard_negatives(
            source,
            output,
            miners=[self._miner],
            rule=self._refresh.rule,
            short="former",
            ids=source.texts is not None,
            device=str(self._trainer.world.device),
            progress=False,
        )
        log.info(
            "%s: %d negatives for %d examples, of which %d keep their former ones",
            *(name, counts["negatives"], counts["examples"], counts["none"]),
        )

    def _read(self, data: Mixture, mined: str) -> Mixture:
        """The data with the negatives of a mining; the main process prepares the tables."""
        sources: dict[str, Source] = dict(data.sources)
        for main in (True, False):
            if self._trainer.world.is_main == main:
                for name, source in _mined_sources(data):
                    file = self._folder / mined / f"{name}.jsonl"
                    if not file.exists():
                        raise CheckpointError(
                            f"{file} is missing, whose negatives the run had after its last "
                            "checkpoint: put it back, or delete the checkpoints to start from "
                            "step 0"
                        )
                    fresh = mined_records(source, file, cache_dir=str(file.parent))
                    part = data.sources[name]
                    sources[name] = Rest(fresh, part.without) if isinstance(part, Rest) else fresh
            self._trainer.world.barrier()
        return data.of(sources)


def _mined_sources(data: Mixture) -> Iterator[tuple[str, Records]]:
    """The whole of each source whose negatives are used."""
    for name, source in data.sources.items():
        whole = whole_of(source)
        assert isinstance(whole, Records)
        if whole.negatives != "none":
            yield name, whole


def _check(data: Mixture, loss: Loss, reads_texts: bool) -> None:
    if loss.needs_teacher:
        raise ArgumentError(
            "the loss follows a teacher, who has not scored the negatives that a training mines: "
            "take a loss without one, such as {loss}",
            loss=Instance("InfoNCE"),
        )
    if not reads_texts:
        raise ValueError(
            "a training on embeddings that were made before mines no negatives: its model reads no "
            "texts"
        )
    for name, source in data.sources.items():
        whole = whole_of(source)
        if not isinstance(whole, Records):
            raise ValueError(
                f"source {name} is a {type(whole).__name__}, and negatives are mined for sources "
                "that are read from files alone: leave it out, or mine none"
            )
