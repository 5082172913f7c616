"""A few steady steps of train.py's loop under the profiler, in a process of its own:
``python -m benchmarks.training.step_profile RUN WARM_UP STEPS OVERRIDE ...``.

Writes ``trace.json`` and ``steps.json`` into the folder RUN. The run must have a step more than
WARM_UP and STEPS: what it does at its end is no part of a step.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.profiler import ProfilerActivity, profile

from benchmarks.training.commands import ROOT
from sparton.cli import schema
from sparton.cli.assembly import build_loader, build_trainer
from sparton.cli.commands.train import set_environment
from sparton.training.distributed import join_world, leave_world
from sparton.training.loop import Trainer
from sparton.types import SIDES, TrainBatch


class ProfiledBatches:
    """The batches of a loop, with the profiler on for ``steps`` of them after ``warm_up``.

    The loop asks for a batch when it has launched all of the step before.
    """

    def __init__(self, batches: Iterable[TrainBatch], warm_up: int, steps: int) -> None:
        self.batches, self.first, self.end = batches, warm_up, warm_up + steps
        # The host's side of the device is enough, and costs the host less than its own operators.
        on_gpu = torch.cuda.is_available()
        self.synchronize = torch.cuda.synchronize if on_gpu else lambda: None
        kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        self.profiler = profile(activities=[kind])
        self.seen: list[TrainBatch] = []
        self.seconds = 0.0

    def __iter__(self) -> Iterator[TrainBatch]:
        for number, batch in enumerate(self.batches):
            if number == self.first:
                self.synchronize()
                self.profiler.start()
                begin = time.perf_counter()
            if number == self.end:
                self.synchronize()
                self.seconds = time.perf_counter() - begin
                self.profiler.stop()
            if self.first <= number < self.end:
                self.seen.append(batch)
            yield batch


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
    loader = build_loader(cfg, world, data, tokenizer, 0, trainer.step.objective.ranking)
    batches = ProfiledBatches(loader, int(warm_up), int(steps))
    trainer.run(batches, [])
    if world.is_main:
        batches.profiler.export_chrome_trace(str(folder / "trace.json"))
        (folder / "steps.json").write_text(json.dumps(described(batches, trainer)))
    leave_world()


def described(batches: ProfiledBatches, trainer: Trainer) -> dict[str, float]:
    """Steps, their seconds on the clock, and their model FLOPs on this rank."""
    flops = 0.0
    sides = zip(*((batch.queries, batch.documents) for batch in batches.seen), strict=True)
    for side, texts in zip(SIDES, sides, strict=True):
        tokens = sum(each.num_tokens for each in texts)
        length = tokens / sum(each.num_sequences for each in texts)
        flops += tokens * trainer.meter.flops_per_token(length, side)
    return {"steps": len(batches.seen), "seconds": batches.seconds, "model_flops": flops}


if __name__ == "__main__":
    main(sys.argv[1:])
