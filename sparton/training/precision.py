"""Number formats of a training run."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from sparton.arguments import refuse_other
from sparton.models.encoder import Encoder
from sparton.models.fp8 import check_fp8, multiply_in_fp8
from sparton.training.settings import PRECISIONS


@dataclass(frozen=True)
class Precision:
    """How a run computes.

    ``fp32``: everywhere. ``bf16``, ``fp16``: autocast over fp32 parameters, fp16 with loss scaling.
    ``fp8``: as bf16, and the layers of an encoder of the families of BERT and RoBERTa multiply in
    FP8, see :func:`~sparton.models.fp8.multiply_in_fp8`.
    ``bf16_pure``: parameters, gradients and optimizer state in bf16 too.
    """

    name: str
    device: torch.device

    def __post_init__(self) -> None:
        refuse_other(PRECISIONS, precision=self.name)
        if self.name == "fp16" and self.device.type != "cuda":
            raise ValueError("precision=fp16 needs a CUDA GPU; use bf16 or fp32 on a CPU")
        if self.name == "fp8":
            check_fp8(self.device)

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """What all parameters are brought to; None leaves them as models have them, in fp32 but for
        frozen weights."""
        return torch.bfloat16 if self.name == "bf16_pure" else None

    @property
    def compute_dtype(self) -> torch.dtype:
        if self.name == "fp16":
            return torch.float16
        return torch.float32 if self.name == "fp32" else torch.bfloat16

    @property
    def autocast_name(self) -> str:
        """fp32, bf16 or fp16: what a model of this run is evaluated in."""
        return "bf16" if self.name in ("fp8", "bf16_pure") else self.name

    def prepare(self, encoder: Encoder) -> None:
        """Bring an encoder that will train to this, in place.

        Raises:
            ValueError: see :func:`~sparton.models.fp8.multiply_in_fp8`.
        """
        encoder.to(dtype=self.parameter_dtype)
        if self.name == "fp8":
            multiply_in_fp8(encoder)

    def autocast(self) -> AbstractContextManager:
        if self.name in ("fp32", "bf16_pure"):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """A scaler that does nothing unless the precision is fp16."""
        return torch.amp.GradScaler(self.device.type, enabled=self.name == "fp16")
