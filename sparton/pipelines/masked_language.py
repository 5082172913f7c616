"""Language modelling on texts: its plan, its batches, and a step for the training loop.

T packed tokens, M predicted ones, N texts, D hidden width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.arguments import ArgumentError, refuse_below, refuse_other
from sparton.datasets.permutation import derive_key, permute
from sparton.kernels.boundaries import cu_seqlens_of, ranges_within
from sparton.pipelines.language_loss import language_loss
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.schedules import LinearSchedule
from sparton.training.step import Scale, StepOutput, unscaled
from sparton.types import Side, TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from sparton.models.splade import SpladeEncoder

Objective = Literal["mlm", "mntp", "clm"]
# Of the tokens, so many are predicted.
CHOSEN: dict[Objective, float] = {"mlm": 0.15, "mntp": 0.2, "clm": 1.0}
BLANK = "_"  # hides tokens where a tokenizer has no mask token, as in LLM2Vec


@dataclass(frozen=True)
class Plan:
    """How a language model is trained.

    Attributes:
        objective: "mlm", hidden tokens are predicted where they stand (Devlin et al., 2019);
            "mntp", where the token before them stands, as causal language models predict, by one
            that is made bidirectional (BehnamGhader et al., LLM2Vec, arXiv 2404.05961); or "clm",
            every token is predicted from those before it.
        steps: optimizer steps.
        batch_tokens: bound of the tokens of a step, unless a single text has more.
        length: tokens at which texts are cut, at most those that the model supports.
        lr, head_lr: largest learning rates of AdamW, of the body and of the head; of a causal
            language model, whose head is its decoder alone, ``lr`` is that of all.
        frozen: whether the body stays as it is, and the head of a masked language model alone
            learns; without a backward pass through the body.
        relu_weight: see :func:`~sparton.pipelines.language_loss.language_loss`; 1 in CSPLADE.
        warmup: share of the steps in which they grow; then they fall to 0, both linearly.
        active_terms: of a held-out text, on average, when all is done.
        seed: of the order of the texts, of what is hidden, and of dropout.

    Raises:
        ArgumentError: a number out of range, an objective that does not exist, or a frozen body
            where there is no head beside it.
    """

    objective: Objective = "mlm"
    steps: int = 3000
    batch_tokens: int = 65_536
    length: int = 256
    lr: float = 2e-4
    head_lr: float = 1e-3
    frozen: bool = False
    relu_weight: float = 0.0
    warmup: float = 0.06
    active_terms: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "batch_tokens", "length", "active_terms")
        refuse_below(1, **{name: getattr(self, name) for name in counts})
        refuse_below(0, relu_weight=self.relu_weight)
        refuse_other(get_args(Objective), objective=self.objective)
        if self.frozen and self.objective != "mlm":
            raise ArgumentError(
                "{frozen} lets a masked language model's head learn alone, and with {objective} "
                "the body is what learns: leave one of them out",
                frozen=True,
                objective=self.objective,
            )
        for name in ("lr", "head_lr"):
            if not getattr(self, name) > 0:
                value = getattr(self, name)
                raise ArgumentError(f"{{{name}}} must be positive", **{name: value})
        LinearSchedule(self.warmup)  # refuses what is no share


class Masked(NamedTuple):
    """Texts without queries.

    Attributes:
        tokens: some of them perhaps hidden.
        places: of the states from which others are predicted, int64 ``[M]``.
        targets: what is predicted, int64 ``[M]``.
    """

    tokens: TokenBatch
    places: Tensor
    targets: Tensor

    @property
    def sides(self) -> Mapping[Side, TokenBatch]:
        return {"document": self.tokens}

    def pin_memory(self) -> "Masked":
        """The same in memory of the host from which a GPU copies by itself."""
        places, targets = (part.pin_memory() for part in self[1:])
        return Masked(self.tokens.pin_memory(), places, targets)

    def to(self, device: torch.device) -> "Masked":
        places, targets = (part.to(device, non_blocking=True) for part in self[1:])
        return Masked(self.tokens.to(device, non_blocking=True), places, targets)


@dataclass
class MaskedLanguageStep:
    """Accumulates into ``.grad`` the gradient of the mean cross-entropy of predicted tokens.

    Attributes:
        encoder: whose backbone learns.
        plan: of whose seed, and of the step, dropout is a function: a resumed run repeats an
            uninterrupted one.
        world: of one process.
    """

    encoder: "SpladeEncoder"
    plan: Plan
    world: World
    precision: Precision

    def __call__(self, batch: Masked, step: int, scale: Scale = unscaled) -> StepOutput:
        """
        Args:
            batch: on the CPU.
            step: its number.
            scale: multiplies the loss before it is differentiated, for fp16.
        """
        torch.manual_seed(_seed_of(self.plan, step))
        backbone, masked = self.encoder.backbone, batch.to(self.world.device)
        with self.precision.autocast():
            states = backbone(masked.tokens)[masked.places]
            total = language_loss(backbone.decoder, states, masked.targets, self.plan.relu_weight)
        # A batch of which nothing was chosen has no loss, and no mean.
        loss = total / max(len(masked.targets), 1)
        scale(loss).backward()
        return StepOutput(loss.detach())


class Masking:
    """Chooses what is predicted of texts, and from where.

    Of the tokens, special ones excepted, 15 % are chosen for "mlm" and 20 % for "mntp". Of these,
    80 % are replaced by the mask token and 10 % by a random one, and 10 % stay (Devlin et al.,
    2019). For "clm" all are chosen, and nothing is replaced. What is predicted from the token
    before it is never the first of a text.

    Args:
        objective: which of them.
        tokenizer: of the texts. It is asked once: to list a vocabulary takes as long as a step.

    Raises:
        ValueError: tokens are to be hidden, and there is nothing to hide them with.
    """

    def __init__(self, objective: Objective, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._objective, self._size = objective, len(tokenizer)
        self._special = np.array(tokenizer.all_special_ids, np.int64)
        self._blank = -1 if objective == "clm" else mask_token(tokenizer)

    def __call__(self, tokens: TokenBatch, generator: torch.Generator) -> Masked:
        """In NumPy, lest every step wake all of torch's threads for a few arrays of integers."""
        ids, objective = tokens.input_ids.numpy(), self._objective
        drawn = torch.rand(len(ids), generator=generator).numpy()
        chosen = (drawn < CHOSEN[objective]) & ~np.isin(ids, self._special)
        if objective != "mlm":
            chosen &= tokens.position_ids.numpy() > 0
        places = np.flatnonzero(chosen)
        targets = ids[places]
        if objective != "clm":
            fate = torch.rand(len(places), generator=generator).numpy()
            noise = torch.randint(self._size, (len(places),), generator=generator).numpy()
            hidden = ids.copy()
            hidden[places] = np.where(fate < 0.8, self._blank, np.where(fate < 0.9, noise, targets))
            tokens = tokens._replace(input_ids=torch.from_numpy(hidden))
        seen_from = places if objective == "mlm" else places - 1
        return Masked(tokens, torch.from_numpy(seen_from), torch.from_numpy(targets))


def masked_batches(
    tokens: TokenBatch, masking: Masking, plan: Plan, start: int
) -> Iterator[Masked]:
    """The batches of the steps of a plan, from step ``start`` on: functions of its seed and of the
    step's number."""
    lengths = tokens.cu_seqlens.diff().numpy().astype(np.int64)
    rows = islice(shuffled_batches(lengths, plan.batch_tokens, plan.seed), start, plan.steps)
    for step, own in enumerate(rows, start):
        generator = torch.Generator().manual_seed(_seed_of(plan, step))
        yield masking(tokens.take(torch.from_numpy(own)), generator)


def _seed_of(plan: Plan, step: int) -> int:
    return int(derive_key(plan.seed, step)[0] >> np.uint64(1))


def mask_token(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Id of the token that hides others: the mask token, or an underscore where there is none.

    Raises:
        ValueError: there is neither.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if BLANK not in (vocabulary := tokenizer.get_vocab()):
        raise ValueError(
            f"the tokenizer has neither a mask token nor the token {BLANK!r} to hide others with: "
            "give it one (tokenizer.mask_token)"
        )
    return vocabulary[BLANK]


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
