"""A few steady steps of train.py's loop under the profiler, in a process of its own:
``python -m training_benchmark.step_profile RUN WARM_UP STEPS OVERRIDE ...``.

Writes ``trace.json`` and ``steps.json`` into the folder RUN. The run must have a step more than
WARM_UP and STEPS: what it does at its end is no part of a step.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.profiler import ProfilerActivity, profile

from sparton.cli import schema
from sparton.cli.assembly import build_loader, build_trainer
from sparton.cli.commands.train import set_environment
from sparton.training.distributed import World, join_world, leave_world
from sparton.types import SIDES, Side, TrainBatch
from training_benchmark.commands import ROOT


class ProfiledBatches:
    """The batches of a loop, with the profiler on for ``steps`` of them after ``warm_up``.

    The loop asks for a batch when it has launched all of the step before.
    """

    def __init__(
        self, batches: Iterable[TrainBatch], warm_up: int, steps: int, world: World
    ) -> None:
        self.batches, self.world = batches, world
        self.first, self.end = warm_up, warm_up + steps
        # The host's side of the device is enough, and costs the host less than its own operators.
        on_gpu = world.device.type == "cuda"
        self.profiler = profile(
            activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
        )
        self.steps, self.seconds = 0, 0.0
        self.tokens: Counter[Side] = Counter()
        self.sequences: Counter[Side] = Counter()

    def __iter__(self) -> Iterator[TrainBatch]:
        for number, batch in enumerate(self.batches):
            if number == self.first:
                self._synchronize()
                self.profiler.start()
                begin = time.perf_counter()
            if number == self.end:
                self._synchronize()
                self.seconds = time.perf_counter() - begin
                self.profiler.stop()
            if self.first <= number < self.end:
                self._count(batch)
            yield batch

    def _count(self, batch: TrainBatch) -> None:
        self.steps += 1
        for side, texts in zip(SIDES, (batch.queries, batch.documents), strict=True):
            self.tokens[side] += texts.num_tokens
            self.sequences[side] += texts.num_sequences

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def main(arguments: Sequence[str]) -> None:
    run, warm_up, steps, *overrides = arguments
    set_environment()
    folder, world = Path(run), join_world()
    schema.register()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides)
    data = instantiate(cfg.data)
    trainer, tokenizer = build_trainer(cfg, world, folder, data, [])
    trainer.save_model = lambda *_: None
    needs_teacher = trainer.step.objective.ranking.needs_teacher
    loader = build_loader(cfg, world, data, tokenizer, 0, needs_teacher)
    batches = ProfiledBatches(loader, int(warm_up), int(steps), world)
    trainer.run(batches, [])
    if world.is_main:
        batches.profiler.export_chrome_trace(str(folder / "trace.json"))
        (folder / "steps.json").write_text(json.dumps(described(batches, trainer)))
    leave_world()


def described(batches: ProfiledBatches, trainer: Any) -> dict[str, float]:
    """Steps, their seconds on the clock, and their model FLOPs on this rank."""
    flops = sum(
        tokens * trainer.meter.flops_per_token(tokens / batches.sequences[side], side)
        for side, tokens in batches.tokens.items()
    )
    return {"steps": batches.steps, "seconds": batches.seconds, "model_flops": flops}


if __name__ == "__main__":
    main(sys.argv[1:])
