"""sentence-transformers' own trainer on a cell: ``python -m training_benchmark.rival SETTINGS``.

Writes ``metrics.jsonl`` as train.py does, a line per window of steps.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.multi_vector_encoder import (
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder import losses as multi_vector_losses
from sentence_transformers.sparse_encoder import (
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers.sparse_encoder import losses as sparse_losses
from torch import nn
from transformers import TrainerCallback

from training_benchmark.commands import (
    CLIP_NORM,
    LEARNING_RATE,
    REGULARIZER_WEIGHT,
    SEED,
    WARM_UP,
    WEIGHT_DECAY,
)
from training_benchmark.suites import SPLADE

Settings = dict[str, Any]


class WindowClock(TrainerCallback):
    """A line for every window: when the trainer logs, the device is waited for and read."""

    def __init__(self, path: Path, batch: int, log_every: int) -> None:
        self.file = path.open("w", buffering=1)
        self.batch, self.log_every = batch, log_every
        self.since = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.restart()

    def on_log(self, _: Any, state: Any, __: Any, logs: Settings, **___: Any) -> None:
        if "loss" not in logs:
            return
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.since
        record = {
            "step": state.global_step,
            "loss": logs["loss"],
            "examples_per_second": self.batch * self.log_every / seconds,
            "step_ms": 1e3 * seconds / self.log_every,
        }
        if on_gpu:
            record["memory_allocated_mib"] = torch.cuda.max_memory_allocated() / 2**20
            record["memory_reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
        self.file.write(json.dumps(record) + "\n")
        self.restart()

    def restart(self) -> None:
        self.since = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def splade(settings: Settings) -> tuple[nn.Module, nn.Module, type, type]:
    model = SparseEncoder(settings["model"])
    ranking = sparse_losses.SparseMultipleNegativesRankingLoss(model)
    weights = {
        "document_regularizer_weight": REGULARIZER_WEIGHT,
        "query_regularizer_weight": REGULARIZER_WEIGHT,
    }
    if size := settings["mini_batch"]:
        loss = sparse_losses.CachedSpladeLoss(model, ranking, mini_batch_size=size, **weights)
    else:
        loss = sparse_losses.SpladeLoss(model, ranking, **weights)
    return model, loss, SparseEncoderTrainer, SparseEncoderTrainingArguments


def colbert(settings: Settings) -> tuple[nn.Module, nn.Module, type, type]:
    model = MultiVectorEncoder(settings["model"])
    if size := settings["mini_batch"]:
        cached = multi_vector_losses.CachedMultiVectorMultipleNegativesRankingLoss
        loss = cached(model, mini_batch_size=size)
    else:
        loss = multi_vector_losses.MultiVectorMultipleNegativesRankingLoss(model)
    return model, loss, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments


def main(arguments: Sequence[str]) -> None:
    settings = json.loads(arguments[0])
    torch.manual_seed(SEED)
    build = splade if settings["kind"] == SPLADE else colbert
    model, loss, trainer_class, arguments_class = build(settings)
    run = Path(settings["run"])
    run.mkdir(parents=True, exist_ok=True)
    clock = WindowClock(run / "metrics.jsonl", settings["batch"], settings["log_every"])
    trainer = trainer_class(
        model=model,
        args=arguments_class(
            output_dir=str(run),
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["batch"],
            bf16=settings["bf16"],
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            warmup_steps=WARM_UP,
            max_grad_norm=CLIP_NORM,
            optim="adamw_torch_fused",
            torch_compile=settings["compiled"],
            logging_steps=settings["log_every"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=settings["num_workers"],
            dataloader_drop_last=True,
            seed=SEED,
        ),
        train_dataset=Dataset.from_json(settings["pairs"]),
        loss=loss,
        callbacks=[clock],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
