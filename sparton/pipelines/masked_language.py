"""Masked-language modelling: its plan, its batches, and a step for the training loop.

T packed tokens, M hidden ones, N texts, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sparton.arguments import ArgumentError, refuse_below
from sparton.datasets.permutation import derive_key, permute
from sparton.packing import cu_seqlens_of, ranges_within
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.schedules import LinearSchedule
from sparton.training.step import Scale, StepOutput, unscaled
from sparton.types import Side, TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from sparton.models.backbone import Backbone
    from sparton.models.splade import SpladeEncoder

CHOSEN = 0.15  # of the tokens


@dataclass(frozen=True)
class Plan:
    """How a head is trained.

    Attributes:
        steps: optimizer steps.
        batch_tokens: bound of the tokens of a step, unless a single text has more.
        length: tokens at which texts are cut, at most those that the model supports.
        lr, head_lr: largest learning rates of AdamW, of the body and of the head.
        warmup: share of the steps in which they grow; then they fall to 0, both linearly.
        active_terms: of a held-out text, on average, when all is done.
        seed: of the order of the texts, of what is hidden, and of dropout.

    Raises:
        ArgumentError: a number out of range.
    """

    steps: int = 3000
    batch_tokens: int = 65_536
    length: int = 256
    lr: float = 2e-4
    head_lr: float = 1e-3
    warmup: float = 0.06
    active_terms: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "batch_tokens", "length", "active_terms")
        refuse_below(1, **{name: getattr(self, name) for name in counts})
        for name in ("lr", "head_lr"):
            if not getattr(self, name) > 0:
                value = getattr(self, name)
                raise ArgumentError(f"{{{name}}} must be positive", **{name: value})
        LinearSchedule(self.warmup)  # refuses what is no share


class TextBatch(NamedTuple):
    """Texts without queries."""

    tokens: TokenBatch

    @property
    def sides(self) -> Mapping[Side, TokenBatch]:
        return {"document": self.tokens}


class Masked(NamedTuple):
    """Tokens with some of them hidden: their places int64 ``[M]``, and what stood there, int64
    ``[M]``."""

    tokens: TokenBatch
    places: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "Masked":
        places, targets = (part.to(device, non_blocking=True) for part in self[1:])
        return Masked(self.tokens.to(device, non_blocking=True), places, targets)


@dataclass
class MaskedLanguageStep:
    """Accumulates into ``.grad`` the gradient of the mean cross-entropy of hidden tokens.

    Attributes:
        encoder: whose backbone learns.
        world: of one process.
        seed: what is hidden, and dropout, are functions of (seed, step): a resumed run repeats an
            uninterrupted one.
    """

    encoder: "SpladeEncoder"
    world: World
    precision: Precision
    seed: int = 0

    def __call__(self, batch: TextBatch, step: int, scale: Scale = unscaled) -> StepOutput:
        """
        Args:
            batch: on the CPU.
            step: decides what is hidden.
            scale: multiplies the loss before it is differentiated, for fp16.
        """
        seed = int(derive_key(self.seed, step)[0] >> np.uint64(1))
        torch.manual_seed(seed)
        backbone = self.encoder.backbone
        masked = hide(batch.tokens, backbone.tokenizer, torch.Generator().manual_seed(seed))
        masked = masked.to(self.world.device)
        with self.precision.autocast():
            logits = hidden_logits(backbone, masked)
        # A batch of which nothing was chosen has no loss, and no mean.
        total = F.cross_entropy(logits.float(), masked.targets, reduction="sum")
        loss = total / max(len(masked.targets), 1)
        scale(loss).backward()
        return StepOutput(loss.detach())


def hide(
    tokens: TokenBatch, tokenizer: "PreTrainedTokenizerFast", generator: torch.Generator
) -> Masked:
    """Choose 15 % of the tokens, special ones excepted; replace 80 % of these by the mask token
    and 10 % by a random one, and leave 10 % as they are (Devlin et al., 2019)."""
    ids = tokens.input_ids
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    chosen = (torch.rand(ids.shape, generator=generator) < CHOSEN) & ~special
    places = chosen.nonzero().squeeze(1)
    fate = torch.rand(places.shape, generator=generator)
    noise = torch.randint(len(tokenizer), places.shape, generator=generator)
    targets = ids[places]
    shown = torch.where(fate < 0.8, tokenizer.mask_token_id, noise)
    shown = torch.where(fate < 0.9, shown, targets)
    return Masked(tokens._replace(input_ids=ids.index_copy(0, places, shown)), places, targets)


def hidden_logits(backbone: "Backbone", masked: Masked) -> Tensor:
    """Logits ``[M, V]`` at the hidden places alone: 15 % of the decoder's work and memory."""
    return backbone.decoder(backbone(masked.tokens)[masked.places])


def shuffled_batches(
    lengths: NDArray[np.int64], batch_tokens: int, seed: int
) -> Iterator[NDArray[np.int64]]:
    """Rows of endless batches of at most ``batch_tokens`` tokens, or of a single longer text.

    Every epoch has an order of its own; a batch may begin in one and end in the next.

    Args:
        lengths: int64 ``[N]``, of the texts in tokens.
    """
    rows = np.zeros(0, np.int64)
    for epoch in count():
        order = permute(np.arange(len(lengths)), len(lengths), derive_key(seed, epoch))
        rows = np.concatenate([rows, order])
        cu_seqlens = cu_seqlens_of(torch.from_numpy(lengths[rows]))
        *whole, (last, _) = ranges_within(cu_seqlens, batch_tokens)
        for start, stop in whole:
            yield rows[start:stop]
        rows = rows[last:]
