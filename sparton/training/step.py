"""One training step whose gradient is exact on the global batch.

In-batch negatives and FLOPS do not add up over parts of a batch, so the objective is evaluated
once, on the representations of all ranks and micro-batches (Gao et al., arXiv 2101.06983):

1. encode the micro-batches, all but the last without a graph, and tell an encoder that counts what
   it used for the whole batch, on which some of its losses depend;
2. gather the representations, evaluate the objective, and differentiate it with respect to them;
3. push its slice of that gradient through the last micro-batch, whose graph is there, and then
   encode each of the others again with a graph and do the same; the fused head does not look for
   its maxima again;
4. add up the parameter gradients of all ranks, while the last of 3 still runs.

So the last micro-batch, which may be the whole local batch, is encoded once.

What is gathered are :class:`~sparton.representations.Representations`, of whatever kind. Sparse
halves that are large, or that have to leave the machine, are held, sent and scored without their
zeros. Others keep them, and so does a lone micro-batch of one rank: to find the active entries the
host waits for the device, which then waits for the host to launch the many small kernels of the
objective, longer than zeros take on their way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparton.arguments import refuse_below
from sparton.kernels.splade_head import HeadMemory
from sparton.losses.objective import Objective
from sparton.models.encoder import Encoder
from sparton.products import keeping_weights
from sparton.representations import Extent, Representations
from sparton.training.distributed import World
from sparton.training.gradient_sum import GradientSum
from sparton.training.precision import Precision
from sparton.types import SIDES, Side, TokenBatch, TrainBatch

# Of a side of the global batch, up to which it keeps its zeros on one machine: 256 MiB in fp32.
DENSE_ENTRIES = 2**26
_SEED_STRIDE = 1_000_003

Sides = tuple[Representations, Representations]  # of queries and of documents
Seen = tuple[Tensor, Tensor] | None  # what Encoder.finish must know of either; None: nothing
Share = tuple[int, int]  # queries of a rank in a step, and the most documents of one
Scale = Callable[[Tensor], Tensor]


class StepOutput(NamedTuple):
    """What a step leaves for the log, tensors on the device.

    Attributes:
        loss: of the global batch.
        parts: of the loss, by name.
        weights: of the parts that change with the step.
        sides: the detached representations of the global batch, where there are any.
        positives: int64 ``[Q]``, the number of each query's positive among its documents.
        teacher_scores: of the global batch, where the loss follows a teacher.
        sources: int64 ``[Q]``, number of each query's source; None where there is one.
        by_query: fp32 ``[Q]``, the ranking loss of each query, where there are several sources and
            the loss can tell.
    """

    loss: Tensor
    parts: Mapping[str, Tensor] = {}
    weights: Mapping[str, float] = {}
    sides: Mapping[Side, Representations] = {}
    positives: Tensor | None = None
    teacher_scores: Tensor | None = None
    sources: Tensor | None = None
    by_query: Tensor | None = None


class Step(Protocol):
    """What the loop asks of a step: that it adds the gradient of a batch to ``.grad``. ``scale``
    multiplies the loss before it is differentiated, for fp16."""

    @property
    def encoder(self) -> Encoder: ...

    @property
    def world(self) -> World: ...

    @property
    def precision(self) -> Precision: ...

    def __call__(self, batch: Any, step: int, scale: Scale) -> StepOutput: ...


class _MicroBatch(NamedTuple):
    queries: TokenBatch
    documents: TokenBatch
    seed: int


def unscaled(loss: Tensor) -> Tensor:
    """The scale of all precisions but fp16."""
    return loss


@dataclass
class ExactStep:
    """Accumulates into ``.grad`` the gradient of the objective on the global batch.

    Attributes:
        encoder: of queries and documents.
        micro_batch: queries encoded at once on each rank; None for the whole local batch.
        seed: dropout is a pure function of (seed, step, rank, micro-batch), so the second encoding
            repeats the first and a resumed run repeats an uninterrupted one.
    """

    encoder: Encoder
    objective: Objective
    world: World
    precision: Precision
    micro_batch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_below(1, micro_batch=self.micro_batch)
        learning = (p for p in self.encoder.parameters() if p.requires_grad)
        self._gradient_sum = GradientSum(self.world, learning)

    def __call__(self, batch: TrainBatch, step: int, scale: Scale = unscaled) -> StepOutput:
        """
        Args:
            batch: this rank's share, on the CPU; every rank's has the same number of queries.
            step: decides the regularizers' weights and the dropout.
            scale: multiplies the loss before it is differentiated, for fp16.
        """
        with keeping_weights(self.encoder):
            *others, last = self._split(batch, step)
            memory = HeadMemory()
            share = batch.queries.num_sequences, batch.most_documents
            parts = self._encode_without_graph(others, memory, share)
            kept, seen = self._encode_last(last, parts)
            held, extents = self._held(parts, kept, seen, share)
            del parts
            output, gradients = self._differentiate(held, batch, step, scale)
            del held
            slices = (side.split(sizes) for side, sizes in zip(gradients, extents, strict=True))
            *of_others, of_last = zip(*slices, strict=True)
            self._backward(kept, of_last, is_last=not others)
            memory.rewind()
            for number, (micro_batch, own) in enumerate(zip(others, of_others, strict=True), 1):
                encoded = self._finish(self._encode(micro_batch, memory), seen)
                self._backward(encoded, own, is_last=number == len(others))
            return output

    def rehearse(self, batch: TrainBatch, parts: int) -> None:
        """Take the memory that a step takes, without the time: of ``parts`` micro-batches on each
        rank only the last two are encoded, and the objective sees copies of one in the place of the
        others. No rank waits for another. What is left in ``.grad`` means nothing.

        Args:
            batch: a micro-batch, on the CPU, whose queries have equally many documents and one
                source.
            parts: micro-batches of a rank's step.
        """
        with keeping_weights(self.encoder):
            alone = replace(self, world=World(0, 1, self.world.device), micro_batch=None)
            memory = HeadMemory()
            (micro_batch,) = alone._split(batch, 0)
            share = parts * batch.queries.num_sequences, batch.most_documents
            if parts > 1:
                self._encode_without_graph([micro_batch], memory, share)
                memory.repeat(parts - 1)
            kept, seen = alone._encode_last(micro_batch, [])
            held = [side.detach() for side in self._hold(kept, share)]
            extents = [side.extent for side in held]
            copies = parts * self.world.size
            scores = batch.teacher_scores
            whole = batch._replace(
                teacher_scores=None if scores is None else scores.repeat(copies, 1)
            )
            of_all = [Representations.concatenate([side] * copies) for side in held]
            del held
            _output, gradients = alone._differentiate(of_all, whole, 0, unscaled)
            del of_all
            own = [
                side.split([extent] * copies)[0]
                for side, extent in zip(gradients, extents, strict=True)
            ]
            if parts > 1:
                del kept
                for parameter in self.encoder.parameters():  # have gradients of parts before
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
                memory.rewind()
                kept = alone._finish(alone._encode(micro_batch, memory), seen)
            alone._backward(kept, own, is_last=False)

    def _split(self, batch: TrainBatch, step: int) -> Iterator[_MicroBatch]:
        """Micro-batches on the device, each with the seed of its dropout."""
        total = batch.queries.num_sequences
        size = min(self.micro_batch or total, total)
        seed = (self.seed * _SEED_STRIDE + step) * _SEED_STRIDE + self.world.rank
        for start in range(0, total, size):
            part = batch.select(start, min(start + size, total)) if size < total else batch
            yield _MicroBatch(
                part.queries.to(self.world.device, non_blocking=True),
                part.documents.to(self.world.device, non_blocking=True),
                (seed * _SEED_STRIDE + start) % 2**63,
            )

    def _encode(self, micro_batch: _MicroBatch, memory: HeadMemory | None = None) -> Sides:
        torch.manual_seed(micro_batch.seed)
        with self.precision.autocast():
            return self.encoder.encode_both(micro_batch.queries, micro_batch.documents, memory)

    @torch.no_grad()
    def _encode_without_graph(
        self, micro_batches: Sequence[_MicroBatch], memory: HeadMemory, share: Share
    ) -> list[Sides]:
        """Both sides of each micro-batch, which the encoder has not finished."""
        return [self._hold(self._encode(each, memory), share) for each in micro_batches]

    def _encode_last(self, last: _MicroBatch, parts: Sequence[Sides]) -> tuple[Sides, Seen]:
        """Both sides of the last micro-batch, with their graph, and what the encoder has seen in
        all of them."""
        kept = self._encode(last)
        seen = self._observe([*parts, kept])
        return self._finish(kept, seen), seen

    @torch.no_grad()
    def _held(
        self, parts: list[Sides], kept: Sides, seen: Seen, share: Share
    ) -> tuple[list[Representations], list[list[Extent]]]:
        """Both sides of the local batch, without a graph, and how much of each comes from each
        micro-batch; ``parts`` are used up."""
        last = self._hold(kept, share)
        sides = [list(side) for side in zip(*[self._finish(part, seen) for part in parts], last)]
        parts.clear()
        extents = [[reps.extent for reps in side] for side in sides]
        held = []
        while sides:  # and the parts of one side are gone before those of the next are copied
            held.append(Representations.concatenate(sides.pop(0)))
        return held, extents

    def _observe(self, parts: Sequence[Sides]) -> Seen:
        """What the encoder makes of what the global batch used, given the parts of this rank's."""
        used = [side.used for part in parts for side in part if side.used is not None]
        if not used:
            return None
        by_part = torch.stack(used).unflatten(0, (len(parts), len(SIDES)))
        queries, documents = self.world.any(by_part.any(0))
        return self.encoder.observe(queries, documents)

    def _finish(self, sides: Sides, seen: Seen) -> Sides:
        if seen is None:
            return sides
        queries, documents = map(self.encoder.finish, sides, seen)
        return queries, documents

    def _hold(self, sides: Sides, share: Share) -> Sides:
        """Both sides of a micro-batch as a step holds them, with their zeros or without."""
        if not self.encoder.zeros_are_final or self._keep_zeros(sides, share):
            return sides
        queries, documents = sides
        return queries.compact(), documents.compact()

    def _keep_zeros(self, sides: Sides, share: Share) -> bool:
        """All micro-batches decide alike, and all ranks, also where they have different numbers of
        documents."""
        world, (num_queries, most_documents) = self.world, share
        if world.size == 1 and sides[0].num_texts == num_queries:
            return True
        widest = max(sides[0].width, most_documents * sides[1].width)
        return world.one_machine and world.size * num_queries * widest <= DENSE_ENTRIES

    def _differentiate(
        self,
        sides: Sequence[Representations],
        batch: TrainBatch,
        step: int,
        scale: Scale,
    ) -> tuple[StepOutput, list[Representations]]:
        """The objective on the global batch, and for both sides of this rank its gradient, in the
        form of the representations themselves."""
        world = self.world
        teacher_scores, sources = map(self._of_all, (batch.teacher_scores, batch.sources))
        counts = self._of_all(batch.counts and batch.counts.each)
        own = [side.with_leaves(_fresh(side)) for side in sides]
        gathered = world.gather(own, uneven=counts is not None)
        queries, documents = map(self.encoder.complete, gathered)
        value = self.objective(
            *(queries, documents, step, teacher_scores),
            counts=counts,
            by_query=sources is not None,
        )
        leaves = [leaf for side in own for leaf in side.leaves()]
        gradients = iter(torch.autograd.grad(scale(value.loss), leaves, materialize_grads=True))
        reps: dict[Side, Representations] = {
            "query": queries.detach(),
            "document": documents.detach(),
        }
        output = StepOutput(
            value.loss.detach(),
            value.parts,
            self.objective.weights_at(step),
            reps,
            value.positives,
            teacher_scores,
            sources,
            value.by_query,
        )
        return output, [side.with_leaves([next(gradients) for _ in side.leaves()]) for side in own]

    def _of_all(self, rows: Tensor | None) -> Tensor | None:
        """What each query of this rank has, of the queries of all ranks, on the device."""
        if rows is None:
            return None
        return self.world.gather_rows(rows.to(self.world.device, non_blocking=True))

    def _backward(
        self, sides: Sides, gradients: Sequence[Representations], *, is_last: bool
    ) -> None:
        """Push the gradients of all leaves through; frozen encoders have leaves without a graph.
        The last backward pass of a step completes the gradients of the parameters."""
        leaves = [leaf for side in sides for leaf in side.leaves()]
        flat = [leaf for side in gradients for leaf in side.expanded().leaves()]
        rows = [row for row, leaf in enumerate(leaves) if leaf.requires_grad]
        with self._gradient_sum.of_last_backward() if is_last else nullcontext():
            torch.autograd.backward([leaves[row] for row in rows], [flat[row] for row in rows])


def _fresh(reps: Representations) -> list[Tensor]:
    """The leaves cut off from their graph, at which a graph of the objective may begin."""
    return [leaf.detach().requires_grad_() for leaf in reps.leaves()]
