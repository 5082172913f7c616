"""The training loop: step, update, log, evaluate, checkpoint; and going on where a run stopped."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from sparton.arguments import ArgumentError, refuse_below
from sparton.errors import CheckpointError
from sparton.models.damage import fault_of
from sparton.training.averaging import AveragedWeights
from sparton.training.diagnostics import collapse_warning, describe_representations
from sparton.training.finite import FiniteWatch
from sparton.training.learning import LearningWatch
from sparton.training.loggers import Logger, Record
from sparton.training.micro_batch import MicroBatchSearch
from sparton.training.optimization import Optimizer, learning_rates, update
from sparton.training.settings import SELECT_BY
from sparton.training.sharding import Weights, WholeWeights
from sparton.training.sources import SourceLosses
from sparton.training.state import learned_state, load_learned_state, refuse_other_run
from sparton.training.step import Step, StepOutput
from sparton.training.throughput import Batch, ThroughputMeter

log = logging.getLogger(__name__)

_STATE = (  # of a checkpoint
    "encoder", "averages", "optimizer", "scaler", "best", "micro_batch", "mined", "identity",
    "source_losses",
)  # fmt: skip
OwnStep = TypeVar("OwnStep", bound=Step)


@dataclass(frozen=True)
class LoopSettings:
    """The plan of a run, in optimizer steps.

    Attributes:
        steps: length of the run.
        log_every, evaluate_every, checkpoint_every: periods; None for never. The last step is
            evaluated and checkpointed whenever the period is not None. The first step is logged in
            any case, and so is the first after a run goes on.
        clip_norm: largest gradient norm, None for no clipping.

    Raises:
        ArgumentError: a number of steps below 1, or a norm that is not positive.
    """

    steps: int
    log_every: int = 50
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        refuse_below(
            1,
            steps=self.steps,
            log_every=self.log_every,
            evaluate_every=self.evaluate_every,
            checkpoint_every=self.checkpoint_every,
        )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ArgumentError(
                "{clip_norm} must be positive, or None for no clipping", clip_norm=self.clip_norm
            )

    def due(self, period: int | None, completed: int) -> bool:
        return period is not None and (completed % period == 0 or completed == self.steps)


@dataclass
class Trainer(Generic[OwnStep]):
    """Runs a plan; every piece is given, nothing is looked up.

    Attributes:
        step: accumulates the exact gradient of one batch.
        schedule: ``(step, steps) -> factor`` on the learning rate.
        folder: of the run. ``checkpoints`` and ``model`` are written below it; ``model`` holds the
            best model on the dev set so far, or the last where there is no dev set.
        save_model: writes the encoder to a folder.
        evaluate: ``encoder -> metrics`` on the dev set, the same on all ranks, which are called
            together; None where the plan has no evaluations.
        identity: the settings and data of the run; a checkpoint of a run with others is refused.
        watch: warns of a run that learns nothing.
        fit: sets the step's micro-batch before the first step, given that step's batch, by what
            fits; ``choice`` is what a checkpoint keeps of it. None where the step has its own.
        sources: names of the sources of the data, by number; their losses are logged if there are
            several.
        averages: of the weights, which are evaluated and saved in their place; None for none.
        mined: the name of the negatives that its model has mined last, which checkpoints keep; None
            while it trains on those of the data.
        weights: where those of the encoder are; None for all of them on every rank.
    """

    step: OwnStep
    optimizer: Optimizer
    schedule: Callable[[int, int], float]
    settings: LoopSettings
    folder: Path
    meter: ThroughputMeter
    save_model: Callable[[nn.Module, Path], Any]
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    best: float = float("-inf")
    start_step: int = 0
    watch: LearningWatch | None = None
    fit: MicroBatchSearch | None = None
    sources: Sequence[str] = ()
    averages: AveragedWeights | None = None
    mined: str | None = None
    weights: Weights | None = None

    def __post_init__(self) -> None:
        self.encoder = self.step.encoder
        self.world = self.step.world
        self._weights = self.weights or WholeWeights(self.encoder, self.world)
        self.scaler = self.step.precision.grad_scaler()
        self._figures: dict[str, dict[str, float]] = {}
        self._loss_weights: Mapping[str, float] = {}
        self._by_source = SourceLosses(self.sources, self.world.device)
        self._finite = FiniteWatch(
            self.encoder, self.folder / "checkpoints", self.scaler.is_enabled()
        )

    def resume(self) -> int:
        """Take up the newest checkpoint, if there is one. Returns the step to go on from.

        Raises:
            CheckpointError: the checkpoints are damaged, or not the same to all ranks.
            OtherRunError: they are of a run with other settings or data.
        """
        folder = self.folder / "checkpoints"
        state = self._weights.load_checkpoint(folder, _STATE, self.optimizer)
        step = 0 if state is None else state["step"]
        if (last := self.world.largest(step)) != -self.world.largest(-step):
            raise CheckpointError(
                f"{folder}: this process has read the checkpoint of step {step} and another one "
                f"that of step {last} or before: see that all can read the newest, and start again"
            )
        if state is None:
            return 0
        refuse_other_run(self.folder, state["identity"], self.identity)
        load_learned_state(self.encoder, state["encoder"])
        if self.averages is not None:
            self.averages.load_state_dict(state["averages"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.best, self.start_step, self.mined = state["best"], state["step"], state["mined"]
        if self.fit is not None:
            self.fit.choice = state["micro_batch"]
        self._by_source.load_state(state["source_losses"])
        return self.start_step

    def run(self, batches: Iterable[Batch], loggers: Sequence[Logger]) -> None:
        """Train from ``start_step`` to the end of the plan.

        Args:
            batches: this rank's share of the batches of the steps still to do.
            loggers: of the run; only the main rank has any.

        Raises:
            NonFiniteLossError: with the first step that was not, and where good checkpoints are.
        """
        self.encoder.train()
        if self.best > float("-inf"):
            self._replace_missing_model()
        self.meter.restart()
        for step, (batch, waited) in enumerate(self._timed(batches), self.start_step):
            if self.fit is not None and step == self.start_step:
                self.fit(batch)
                self.meter.restart()
            output = self.step(batch, step, self.scaler.scale)
            rate_factor = self.schedule(step, self.settings.steps)
            norm = update(self.optimizer, self.scaler, rate_factor, self.settings.clip_norm)
            if self.averages is not None:
                self.averages.update(step + 1)
            self._finite.note(step + 1, output.loss, norm)
            self.meter.count(batch, waited)
            if output.sources is not None and output.by_query is not None:
                self._by_source.count(output.sources, output.by_query)
            self._finish_step(step + 1, output, norm, loggers)
            del output  # the representations of a global batch, while the next is encoded
        if self.settings.evaluate_every is None:
            self._finite.check(self.settings.steps, wait=True, saving=True)
            with self.averaged():
                self._save_model()
        self.world.barrier()  # all may read it now

    def _finish_step(
        self, completed: int, output: StepOutput, norm: Tensor, loggers: Sequence[Logger]
    ) -> None:
        settings = self.settings
        logs = settings.due(settings.log_every, completed) or completed == self.start_step + 1
        evaluates = settings.due(settings.evaluate_every, completed)
        keeps = settings.due(settings.checkpoint_every, completed)
        saves = evaluates or keeps
        self._finite.check(completed, wait=logs or saves, saving=saves)
        record = self._describe(completed, output, norm) if logs else {}
        if settings.due(settings.log_every, completed):  # not after the line that each start adds
            self._by_source.forget()
        if evaluates:
            record |= self._evaluate()
        for logger in loggers if record else ():
            logger.log(record, completed)
        if keeps:  # after its record is written
            self._checkpoint(completed)

    def _describe(self, completed: int, output: StepOutput, norm: Tensor) -> Record:
        record: Record = {"loss": output.loss.item()}
        record |= {f"loss_{name}": part.item() for name, part in output.parts.items()}
        record |= self._by_source.read()
        record |= output.weights
        rising = output.weights != self._loss_weights
        self._loss_weights = output.weights
        for side, reps in output.sides.items():
            figures = describe_representations(reps)
            record |= {f"{side}_{name}": value for name, value in figures.items()}
            warning = collapse_warning(side, reps, figures, self._figures.get(side), rising=rising)
            self._figures[side] = figures
            if warning and self.world.is_main:
                log.warning("step %d: %s", completed, warning)
        record |= {name: figure.item() for name, figure in self.encoder.figures().items()}
        record["gradient_norm"] = norm.item()
        record |= learning_rates(self.optimizer)
        if self.watch and self.world.is_main and output.positives is not None:
            seen = output.sides["query"], output.sides["document"], output.positives
            if warning := self.watch.look(completed, record, *seen, output.teacher_scores):
                log.warning("step %d: %s", completed, warning)
        return record | self.meter.read()

    def _replace_missing_model(self) -> None:
        """The model at a checkpoint takes the place of the best one, where that was deleted or is
        damaged."""
        model, best = self.folder / "model", self.best
        fault = fault_of(model) if self.world.is_main else None
        if not self.world.largest(int(fault is not None)):
            return
        self.best = float("-inf")
        self._evaluate()
        log.warning(
            "%s %s, and was the best model with %s=%.4f: that of the checkpoint after step %d "
            "takes its place with %.4f",
            *(model, fault or "is gone", SELECT_BY, best, self.start_step, self.best),
        )

    def _evaluate(self) -> Record:
        """Dev metrics, of all ranks together; the main one saves the model that is the best so
        far."""
        metrics: dict[str, float] = {}
        with self.averaged():
            if self.evaluate is not None:
                self.encoder.eval()
                with self._weights.gathered():
                    metrics = self.evaluate(self.encoder)
                self.encoder.train()
            if metrics and math.isnan(metrics[SELECT_BY]):
                log.warning("%s of the dev tasks is no number: no model is kept of it", SELECT_BY)
            if metrics and metrics[SELECT_BY] > self.best:
                self.best = metrics[SELECT_BY]
                self._save_model()
        self.world.barrier()
        self.meter.restart()
        return {f"dev_{name}": value for name, value in metrics.items()}

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the encoder has its averaged weights, if there are such."""
        return nullcontext() if self.averages is None else self.averages.applied()

    def _save_model(self) -> None:
        with self._weights.to_save() as encoder:
            if encoder is not None:
                self.save_model(encoder, self.folder / "model")

    def _checkpoint(self, completed: int) -> None:
        with self.meter.paused():
            state = {
                "encoder": learned_state(self.encoder),
                "averages": self.averages and self.averages.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "best": self.best,
                "micro_batch": self.fit and self.fit.choice,
                "mined": self.mined,
                "identity": dict(self.identity),
                "source_losses": self._by_source.state(),
            }
            self._weights.save_checkpoint(self.folder / "checkpoints", completed, state)
            self.world.barrier()

    def _timed(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
        """Each batch with the seconds spent waiting for it."""
        iterator = iter(batches)
        while True:
            start = self.meter.clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch, self.meter.clock() - start
