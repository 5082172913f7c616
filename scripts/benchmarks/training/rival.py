"""sentence-transformers' own trainer on a cell: ``python -m benchmarks.training.rival CELL``, as it
is or with the drop-ins of sparton.integrations.

Writes ``metrics.jsonl`` as train.py does, a line per window of steps.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import multi_vector_encoder as vectors
from sentence_transformers import sparse_encoder as sparse
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.multi_vector_encoder import losses as vector_losses
from sentence_transformers.sparse_encoder import losses as sparse_losses
from sentence_transformers.sparse_encoder.models import SpladePooling
from transformers import TrainerCallback

from benchmarks.training import commands
from benchmarks.training.commands import Place, num_workers
from benchmarks.training.decoders import DECODERS
from benchmarks.training.suites import COLBERT, FUSED, IN_16_BIT, SPLADE, THEIRS, Cell, Plan
from sparton.integrations.sentence_transformers import fuse, fuse_scores


class WindowClock(TrainerCallback):
    """A line for every window: when the trainer logs, the device is waited for and read."""

    def __init__(self, path: Path, batch: int, log_every: int) -> None:
        self.file = path.open("w", buffering=1)
        self.batch, self.log_every = batch, log_every
        self.since = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.restart()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "loss" not in kwargs["logs"]:
            return
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.since
        record = {
            "step": state.global_step,
            "loss": kwargs["logs"]["loss"],
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


def decoder(cell: Cell, name: str) -> sparse.SparseEncoder:
    """A causal language model whose logits are pooled, as versions from 6.2 on put it together;
    with adapters its own weights are frozen, in bfloat16."""
    transformer = Transformer(
        name,
        transformer_task="text-generation",
        modality_config={"text": {"method": "forward", "method_output_name": "logits"}},
        module_output_name="token_embeddings",
        processing_kwargs={"text": {"logits_to_keep": 0}},
        model_kwargs={"dtype": torch.bfloat16 if cell.lora else torch.float32},
    )
    if cell.lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=cell.lora, lora_alpha=2 * cell.lora, target_modules="all-linear")
        transformer.model.add_adapter(adapters)
    return sparse.SparseEncoder(modules=[transformer, SpladePooling()])


def splade(cell: Cell, name: str, cached: dict[str, int]) -> tuple[Any, Any, Any, Any]:
    """Model, loss, and the classes of the trainer and its arguments."""
    attention = commands.attention(cell)
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    is_decoder = cell.backbone in DECODERS
    model = decoder(cell, name) if is_decoder else sparse.SparseEncoder(name, model_kwargs=options)
    losses: Any = sparse_losses
    loss = (losses.CachedSpladeLoss if cached else losses.SpladeLoss)(
        model,
        losses.SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=commands.REGULARIZER_WEIGHT,
        query_regularizer_weight=commands.REGULARIZER_WEIGHT,
        **cached,
    )
    return model, loss, sparse.SparseEncoderTrainer, sparse.SparseEncoderTrainingArguments


def colbert(cell: Cell, name: str, cached: dict[str, int]) -> tuple[Any, Any, Any, Any]:
    model = vectors.MultiVectorEncoder(name)
    losses: Any = vector_losses
    plain = losses.MultiVectorMultipleNegativesRankingLoss
    in_parts = losses.CachedMultiVectorMultipleNegativesRankingLoss
    loss = (in_parts if cached else plain)(model, **cached)
    trainer = vectors.MultiVectorEncoderTrainer
    return model, loss, trainer, vectors.MultiVectorEncoderTrainingArguments


def build(cell: Cell, name: str, micro_batch: int) -> tuple[Any, Any, Any, Any]:
    """Model, loss, and the classes of the trainer and its arguments, with the cell's drop-ins."""
    cached = {"mini_batch_size": micro_batch} if micro_batch else {}
    model, loss, *classes = (splade if cell.model == SPLADE else colbert)(cell, name, cached)
    if cell.system in (FUSED, IN_16_BIT):
        fuse(model)
    if cell.system != THEIRS and cell.model == COLBERT:
        fuse_scores(loss, dtype=torch.bfloat16 if cell.system == IN_16_BIT else None)
    return model, loss, *classes


def main(cell: Cell, plan: Plan, place: Place, miniature: bool) -> None:
    torch.manual_seed(commands.SEED)
    model, loss, trainer_class, arguments_class = build(cell, place.model, plan.micro_batch)
    trainer = trainer_class(
        model=model,
        args=arguments_class(
            output_dir=place.run,
            max_steps=plan.steps,
            per_device_train_batch_size=plan.batch,
            bf16=not miniature,
            learning_rate=commands.LEARNING_RATE,
            weight_decay=commands.WEIGHT_DECAY,
            warmup_steps=commands.WARM_UP,
            max_grad_norm=commands.CLIP_NORM,
            optim="adamw_torch_fused",
            torch_compile=cell.compiled,
            logging_steps=plan.log_every,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=num_workers(cell, miniature),
            dataloader_drop_last=True,
            seed=commands.SEED,
        ),
        train_dataset=Dataset.from_json(place.pairs),
        loss=loss,
        callbacks=[WindowClock(Path(place.run) / "metrics.jsonl", plan.batch, plan.log_every)],
    )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"{trainer.args.n_gpu} GPUs would share a step, each with a batch of {plan.batch}: let "
            "CUDA_VISIBLE_DEVICES show this process one"
        )
    trainer.train()


if __name__ == "__main__":
    *parts, miniature = json.loads(sys.argv[1])
    cell, plan, place = (kind(*part) for kind, part in zip((Cell, Plan, Place), parts))
    main(cell, plan, place, miniature)
