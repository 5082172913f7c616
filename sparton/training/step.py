"""One training step whose gradient is exact on the global batch.

In-batch negatives and FLOPS do not add up over parts of a batch, so the objective is evaluated
once, on the representations of all ranks and micro-batches (Gao et al., arXiv 2101.06983):

1. encode the micro-batches without a graph;
2. gather the representations, evaluate the objective, and differentiate it with respect to them;
3. encode each micro-batch again with a graph and push its slice of that gradient through; the
   fused head does not look for its maxima again;
4. add up the parameter gradients of all ranks, while the last of 3 still runs.

When one micro-batch is the whole local batch, the encoding of 1 keeps its graph and 3 disappears.

What is gathered are :class:`~sparton.representations.Representations`, of whatever kind. Where
there are several micro-batches or ranks, their sparse halves are held, sent and scored without
their zeros. One micro-batch of one rank keeps them dense, and so do a few ranks of one machine: to
find the active entries the host waits for the device, which then waits for the host to launch the
many small kernels of the objective, longer than it takes to send zeros between neighbours.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.splade_head import HeadMemory
from sparton.losses.objective import Objective
from sparton.models.encoder import Encoder
from sparton.representations import Extent, Representations
from sparton.training.distributed import World
from sparton.training.gradient_sum import GradientSum
from sparton.training.precision import Precision
from sparton.types import TokenBatch, TrainBatch

# Of a side of the global batch, up to which ranks of one machine keep all: 256 MiB in fp32.
DENSE_ENTRIES = 2**26
_SEED_STRIDE = 1_000_003


class StepOutput(NamedTuple):
    """What a step leaves for the log, on the device: the loss, its parts, and of the global batch
    the detached representations and the scores of a teacher."""

    loss: Tensor
    parts: dict[str, Tensor]
    queries: Representations
    documents: Representations
    teacher_scores: Tensor | None = None


class _MicroBatch(NamedTuple):
    queries: TokenBatch
    documents: TokenBatch
    seed: int


@dataclass
class ExactStep:
    """Accumulates into ``.grad`` the gradient of the objective on the global batch.

    Attributes:
        encoder: of queries and documents.
        micro_batch: queries encoded at once on each rank; None for the whole local batch.
        seed: dropout is a pure function of (seed, step, rank, micro-batch), so the second encoding
            repeats the first and a resumed run repeats an uninterrupted one.
        scale: multiplies the loss before it is differentiated, for fp16.
    """

    encoder: Encoder
    objective: Objective
    world: World
    precision: Precision
    micro_batch: int | None = None
    seed: int = 0
    scale: Callable[[Tensor], Tensor] = lambda loss: loss

    def __post_init__(self) -> None:
        learning = (p for p in self.encoder.parameters() if p.requires_grad)
        self._gradient_sum = GradientSum(self.world, learning)

    def __call__(self, batch: TrainBatch, step: int) -> StepOutput:
        """
        Args:
            batch: this rank's share, on the CPU; every rank's has the same number of queries.
            step: decides the regularizers' weights and the dropout.
        """
        micro_batches = list(self._split(batch, step))
        if len(micro_batches) == 1:
            encoded = self._encode(micro_batches[0])
            keep_all = self._keep_all(encoded)
            held = [side if keep_all else self._hold(side) for side in encoded]
            output, gradients = self._differentiate(held, batch.teacher_scores, step)
            with self._gradient_sum.of_last_backward():
                _backward(encoded, gradients)
        else:
            memory = HeadMemory()
            with memory.keeping():
                held, extents = self._encode_all(micro_batches)
            output, gradients = self._differentiate(held, batch.teacher_scores, step)
            del held
            with memory.repeating():
                self._replay(micro_batches, extents, gradients)
        self.encoder.observe(output.queries, output.documents)
        return output

    def _split(self, batch: TrainBatch, step: int) -> Iterator[_MicroBatch]:
        """Micro-batches on the device, each with the seed of its dropout."""
        total, per_query = batch.queries.num_sequences, batch.documents_per_query
        size = min(self.micro_batch or total, total)
        seed = (self.seed * _SEED_STRIDE + step) * _SEED_STRIDE + self.world.rank
        for start in range(0, total, size):
            queries, documents = batch.queries, batch.documents
            if size < total:
                stop = min(start + size, total)
                queries = queries.select(start, stop)
                documents = documents.select(start * per_query, stop * per_query)
            yield _MicroBatch(
                queries.to(self.world.device, non_blocking=True),
                documents.to(self.world.device, non_blocking=True),
                (seed * _SEED_STRIDE + start) % 2**63,
            )

    def _encode(self, micro_batch: _MicroBatch) -> tuple[Representations, Representations]:
        torch.manual_seed(micro_batch.seed)
        with self.precision.autocast():
            return self.encoder.encode_both(micro_batch.queries, micro_batch.documents)

    @torch.no_grad()
    def _encode_all(
        self, micro_batches: Sequence[_MicroBatch]
    ) -> tuple[list[Representations], list[list[Extent]]]:
        """Both sides of the local batch, and how much of each comes from each micro-batch."""
        sides: list[list[Representations]] = [[], []]
        for micro_batch in micro_batches:
            for side, reps in zip(sides, self._encode(micro_batch), strict=True):
                side.append(self._hold(reps))
        extents = [[reps.extent for reps in side] for side in sides]
        held = []
        while sides:  # and the parts of one side are gone before those of the next are copied
            held.append(Representations.concatenate(sides.pop(0)))
        return held, extents

    def _keep_all(self, sides: Sequence[Representations]) -> bool:
        """Whether the only micro-batch keeps its zeros; all ranks decide alike."""
        world = self.world
        entries = world.size * max(side.num_texts * side.width for side in sides)
        return world.size == 1 or (world.one_machine and entries <= DENSE_ENTRIES)

    def _hold(self, reps: Representations) -> Representations:
        return reps.compact() if self.encoder.zeros_are_final else reps

    def _differentiate(
        self, sides: Sequence[Representations], teacher_scores: Tensor | None, step: int
    ) -> tuple[StepOutput, list[Representations]]:
        """The objective on the global batch, and for both sides of this rank its gradient, in the
        form of the representations themselves."""
        world = self.world
        if teacher_scores is not None:
            teacher_scores = world.gather_rows(teacher_scores.to(world.device, non_blocking=True))
        own = [side.with_leaves(_fresh(side)) for side in sides]
        queries, documents = map(self.encoder.complete, world.gather(own))
        value = self.objective(queries, documents, step, teacher_scores)
        leaves = [leaf for side in own for leaf in side.leaves()]
        gradients = iter(
            torch.autograd.grad(self.scale(value.loss), leaves, materialize_grads=True)
        )
        sides = queries.detach(), documents.detach()
        output = StepOutput(value.loss.detach(), value.parts, *sides, teacher_scores)
        return output, [side.with_leaves([next(gradients) for _ in side.leaves()]) for side in own]

    def _replay(
        self,
        micro_batches: Sequence[_MicroBatch],
        extents: Sequence[Sequence[Extent]],
        gradients: Sequence[Representations],
    ) -> None:
        """Encode every micro-batch again, with a graph, and backpropagate its own gradients."""
        parts = (side.split(sizes) for side, sizes in zip(gradients, extents, strict=True))
        *others, last = zip(micro_batches, zip(*parts, strict=True), strict=True)
        for micro_batch, own in others:
            _backward(self._encode(micro_batch), own)
        micro_batch, own = last
        encoded = self._encode(micro_batch)
        with self._gradient_sum.of_last_backward():
            _backward(encoded, own)


def _fresh(reps: Representations) -> list[Tensor]:
    """The leaves cut off from their graph, at which a graph of the objective may begin."""
    return [leaf.detach().requires_grad_() for leaf in reps.leaves()]


def _backward(sides: Sequence[Representations], gradients: Sequence[Representations]) -> None:
    """Push the gradients of all leaves through; frozen encoders have leaves without a graph."""
    leaves = [leaf for side in sides for leaf in side.leaves()]
    flat = [leaf for side in gradients for leaf in side.dense().leaves()]
    rows = [row for row, leaf in enumerate(leaves) if leaf.requires_grad]
    torch.autograd.backward([leaves[row] for row in rows], [flat[row] for row in rows])
