"""How much sentence-transformers' own training gains from the drop-ins of sparton.integrations.

    python scripts/benchmark_integrations.py --output integrations.jsonl

Their trainers and losses train BERT-base with random weights on generated pairs, in bf16 autocast,
as the training benchmark does it: plain, with late interaction's scores fused, with all fused, with
all fused and scores in 16 bits. Every variant has a process of its own and a line of the output:
pairs per second of the median window after the warm-up, the largest memory, and the loss, which is
the same for all variants of a model up to dropout.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.records import record_environment
from sparton.models.backbones import random_bert, start_near_identity

# Tokens of a query and of a document, special ones included, uniform between.
LENGTHS = {"splade": ((6, 64), (62, 256)), "colbert": ((4, 32), (40, 180))}
VARIANTS = [f"splade {how}" for how in ("plain", "fused")]
VARIANTS += [f"colbert {how}" for how in ("plain", "scores", "fused", "bf16")]
VOCABULARY, SPECIAL, AROUND = 30_522, 5, 2
BIAS = -2.3  # of all logits: leaves about 40 terms of a query active, and 150 of a document
WARM_UP_WINDOWS, WINDOW_PAIRS = 2, 4096


class Clock(TrainerCallback):
    """Seconds and loss of each window of steps."""

    def __init__(self) -> None:
        self.windows: list[tuple[float, float]] = []
        self.since = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start()

    def on_log(self, *_: Any, **given: Any) -> None:
        logs: dict[str, float] = given["logs"]
        if "loss" in logs:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.windows.append((time.perf_counter() - self.since, logs["loss"]))
            self._start()

    def _start(self) -> None:
        self.since = time.perf_counter()
        # What the first steps allocate for good, the optimizer's state, stays and counts.
        if torch.cuda.is_available() and len(self.windows) <= WARM_UP_WINDOWS:
            torch.cuda.reset_peak_memory_stats()


def write_model(folder: Path, small: bool) -> None:
    sizes = (400, 32, 2, 2) if small else (VOCABULARY, 768, 12, 12)
    backbone = random_bert(*sizes)
    start_near_identity(backbone, bias=-0.2 if small else BIAS)
    with backbone.decoder_in_place() as model:
        model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)


def pairs(kind: str, count: int, vocabulary: int) -> Dataset:
    """Texts of words as frequent as those of a language; half of a query's are its document's."""
    chance = np.random.default_rng(0)
    weights = np.cumsum(1.0 / (np.arange(vocabulary - SPECIAL) + 2.7))

    def draw(low: int, high: int) -> np.ndarray:
        size = int(chance.integers(low, high + 1)) - AROUND
        return SPECIAL + np.searchsorted(weights, chance.random(size) * weights[-1])

    rows = []
    for _ in range(count):
        query, document = (draw(*bounds) for bounds in LENGTHS[kind])
        shared = chance.random(len(query)) < 0.5
        query[shared] = chance.choice(document, shared.sum())
        texts = (" ".join(f"w{number}" for number in side) for side in (query, document))
        rows.append(dict(zip(("query", "positive"), texts, strict=True)))
    return Dataset.from_list(rows)


def build(variant: str, folder: Path) -> tuple[Any, Any, type, type]:
    """Model, loss, trainer and its arguments."""
    from sentence_transformers import MultiVectorEncoder, SparseEncoder
    from sentence_transformers import multi_vector_encoder as multi_vector
    from sentence_transformers import sparse_encoder as sparse
    from sentence_transformers.multi_vector_encoder import losses as multi_vector_losses
    from sentence_transformers.sparse_encoder import losses as sparse_losses

    from sparton.integrations.sentence_transformers import fuse, fuse_scores

    kind, change = variant.split()
    model: Any
    loss: Any
    classes: tuple[type, type]
    if kind == "splade":
        model = SparseEncoder(str(folder))
        ranking = sparse_losses.SparseMultipleNegativesRankingLoss(model)
        loss = sparse_losses.SpladeLoss(model, ranking, 1e-4, query_regularizer_weight=1e-4)
        classes = sparse.SparseEncoderTrainer, sparse.SparseEncoderTrainingArguments
    else:
        model = MultiVectorEncoder(str(folder))
        loss = multi_vector_losses.MultiVectorMultipleNegativesRankingLoss(model)
        arguments = multi_vector.MultiVectorEncoderTrainingArguments
        classes = multi_vector.MultiVectorEncoderTrainer, arguments
    if change in ("fused", "bf16"):
        fuse(model)
    if kind == "colbert" and change != "plain":
        fuse_scores(loss, dtype=torch.bfloat16 if change == "bf16" else None)
    return model, loss, *classes


def measure(variant: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    log_every = max(WINDOW_PAIRS // options.batch, 1) if on_gpu else 1
    steps = log_every * (WARM_UP_WINDOWS + options.windows)
    words = 400 if options.small else VOCABULARY
    data = pairs(variant.split()[0], steps * options.batch, words)
    torch.manual_seed(0)
    model, loss, trainer_class, arguments = build(variant, folder)
    clock = Clock()
    with tempfile.TemporaryDirectory() as run:
        trainer_class(
            model=model,
            args=arguments(
                output_dir=run, max_steps=steps, per_device_train_batch_size=options.batch,
                bf16=on_gpu, use_cpu=not on_gpu, learning_rate=2e-5, weight_decay=0.01,
                warmup_steps=0.06, max_grad_norm=1.0, optim="adamw_torch_fused",
                logging_steps=log_every, save_strategy="no", report_to="none", disable_tqdm=True,
                dataloader_num_workers=min(8, (os.cpu_count() or 1) - 1) if on_gpu else 0,
                dataloader_drop_last=True, seed=0,
            ),
            train_dataset=data,
            loss=loss,
            callbacks=[clock],
        ).train()  # fmt: skip
    measured = clock.windows[WARM_UP_WINDOWS:]
    rates = [options.batch * log_every / seconds for seconds, _ in measured]
    return {
        "variant": variant,
        "batch": options.batch,
        "pairs_per_second": statistics.median(rates),
        "slowest_and_fastest": [min(rates), max(rates)],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "loss": statistics.mean(loss for _, loss in measured),
    }


def environment(run: str) -> dict[str, Any]:
    import sentence_transformers

    return {
        **record_environment(torch.cuda.is_available()),
        "run": run,
        "cpus": os.cpu_count(),
        "versions": {
            "transformers": transformers.__version__,
            "sentence-transformers": sentence_transformers.__version__,
        },
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default="integrations.jsonl")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--batch", type=int, default=384, help="pairs of a step")
    parser.add_argument("--windows", type=int, default=4, help="of 4,096 pairs, measured")
    parser.add_argument("--small", action="store_true", help="a miniature model, to try the script")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", default=now(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:  # the process of one variant
        record = {
            **measure(options.variants[0], options.model, options),
            **environment(options.run),
        }
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "bert", options.small)
        for variant in options.variants:
            settings = [f"--batch={options.batch}", f"--windows={options.windows}"]
            settings += ["--small"] if options.small else []
            command = [sys.executable, __file__, "--variants", variant, *settings]
            command += ["--model", f"{folder}/bert", "--output", str(options.output)]
            command += ["--run", options.run]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
