"""Models, texts and short trainings of sentence-transformers, for tests with and without ours."""

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder import (
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder import (
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor, nn
from transformers import TrainerCallback

TEXTS = ["w5 w6 w7", "w8", "w9 w10 w11 w12 w13 w14 w20 w30", "", "w40 w41 w5 w9 w50"]
STEPS, BATCH = 2, 6


def splade(folder: str, pooling: str = "max", activation: str = "relu") -> SparseEncoder:
    """A masked-language model and SpladePooling."""
    transformer = Transformer(folder, transformer_task="fill-mask")
    modules = [transformer, SpladePooling(pooling, activation)]
    return SparseEncoder(modules=modules, device="cpu")


def colbert(folder: str, **settings: Any) -> MultiVectorEncoder:
    """An encoder, a projection, normalisation and the mask, which skips a word of documents."""
    torch.manual_seed(0)
    modules = [
        Transformer(folder, **settings),
        Dense(32, 16, bias=False, activation_function=nn.Identity(), module_input_name=TOKENS,
              module_output_name=TOKENS),
        MultiVectorMask(skiplist_words=["w6"]),
        Normalize(module_input_name=TOKENS),
    ]  # fmt: skip
    return MultiVectorEncoder(modules=modules, device="cpu")


TOKENS = "token_embeddings"


def examples(columns: int = 2, labels: int = 0, seed: int = 0) -> Dataset:
    """Random texts of unequal length: queries, positives and negatives; scores of a teacher."""
    chance = random.Random(seed)

    def text(longest: int) -> str:
        return " ".join(f"w{chance.randint(5, 59)}" for _ in range(chance.randint(1, longest)))

    names = ["query", "positive", "negative_1", "negative_2"][:columns]
    rows = [
        {name: text(6 if name == "query" else 20) for name in names} for _ in range(STEPS * BATCH)
    ]
    if labels:
        for row in rows:
            row["label"] = [chance.gauss(0, 2) for _ in range(labels)]
    return Dataset.from_list(rows)


class Losses(TrainerCallback):
    """What the trainer logs of every step."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            names = [name for name in logs if "loss" in name or name == "grad_norm"]
            self.values.append({name: logs[name] for name in names})


def train(model: Any, loss: nn.Module, data: Dataset, folder: Path, **settings: Any) -> Tensor:
    """A few steps of their trainer; losses and gradient norms ``[STEPS, ...]``."""
    sparse = isinstance(model, SparseEncoder)
    trainer_class = SparseEncoderTrainer if sparse else MultiVectorEncoderTrainer
    arguments = SparseEncoderTrainingArguments if sparse else MultiVectorEncoderTrainingArguments
    losses = Losses()
    trainer = trainer_class(
        model=model,
        args=arguments(
            output_dir=str(folder), per_device_train_batch_size=BATCH, num_train_epochs=1,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=True, seed=0, **{"learning_rate": 1e-2, **settings},
        ),
        train_dataset=data,
        loss=loss,
        callbacks=[losses],
    )  # fmt: skip
    trainer.train()
    assert len(losses.values) == STEPS
    return torch.tensor([list(values.values()) for values in losses.values])


def gradients(model: nn.Module, batches: list[dict[str, Any]], output: str) -> dict[str, Tensor]:
    """Those of the parameters, of a random function of the model's outputs for some batches."""
    torch.manual_seed(1)
    total = torch.zeros(())
    for features in batches:
        result = model(dict(features), task=features.get("task"))
        values = result[output]
        if output == TOKENS:
            values = values[result["attention_mask"].bool()]
        total = total + (values * torch.randn_like(values)).sum()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}


def files(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a folder."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
