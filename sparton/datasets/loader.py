"""Training batches by step number, tokenized in worker processes ahead of the step.

Q queries of one rank, K explicit negatives of each, or of those that have some.
"""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from textwrap import shorten

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sparton.arguments import ArgumentError
from sparton.datasets.demands import check, without_negatives, without_scores
from sparton.datasets.lookup import Source
from sparton.datasets.mixture import Mixture
from sparton.datasets.parcels import pack
from sparton.datasets.workers import Batches, prepare_worker
from sparton.packing import ranges_of
from sparton.types import DocumentCounts, Example, TextForm, Tokenizer, TrainBatch

SUBSTITUTION_ATTEMPTS = 100
# Of a source, to count what it has different; one with more batches is taken to have enough.
_BATCHES_READ, _DRAWS_READ = 4, 4
_POSITIONS_AT_ONCE, _POSITIONS_CHECKED = 2**18, 2**21  # all of them in half a second
_LONGEST_SHOWN = 80  # characters of a query


@dataclass(eq=False)
class BatchStream(Dataset[TrainBatch]):
    """One rank's share of the batch of every step; ``stream[step]`` is a pure function.

    Batch ``step`` holds positions ``step * batch`` to ``(step + 1) * batch - 1`` of the mixture;
    rank r owns the r-th of ``world_size`` equal contiguous parts of it.

    Attributes:
        data: the stream of examples.
        tokenizer: cuts and packs the texts.
        batch: queries per step over all ranks.
        num_negatives: K, explicit negatives per query that has some.
        needs_negatives: refuse data of which some queries have no negatives.
        needs_teacher: refuse data without teacher scores, or of which some queries have no
            negatives.
        seed: of the order and of every draw.
        rank: number of this process.
        world_size: number of processes.
        unique_positives: replace an example whose query or positive text the global batch holds
            already by another of the same source. The example replaced is not seen in that epoch.

    Raises:
        ValueError: ``batch`` is smaller than ``world_size`` or no multiple of it; no source has
            negatives though some are asked for, or one has none, or no teacher scores, though they
            are needed; or a form of texts leaves no room for them.
    """

    data: Mixture
    tokenizer: Tokenizer
    batch: int
    _: KW_ONLY
    num_negatives: int = 0
    needs_negatives: bool = False
    needs_teacher: bool = False
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    unique_positives: bool = False

    def __post_init__(self) -> None:
        data, batch = self.data, self.batch
        _check_sizes(batch, self.num_negatives, self.rank, self.world_size)
        needs = {"needs_negatives": self.needs_negatives, "needs_teacher": self.needs_teacher}
        check(data, self.num_negatives, **needs)
        self.share = batch // self.world_size
        if self.unique_positives and batch > len(data):
            raise ArgumentError(
                "{batch} is more than the {} examples of the data, none of which comes twice in a "
                "batch with {unique_positives}: make it {} at most",
                *(len(data), len(data)),
                batch=batch,
                unique_positives=True,
            )
        # What every batch has is settled here, so that all ranks agree about it.
        self._uneven = bool(without_negatives(data, self.num_negatives))
        self._scored = not self._uneven and not without_scores(data)
        self._forms = [data.forms.get(name, TextForm()) for name in data.sources]
        _check_forms(data, self.tokenizer)

    def __getitem__(self, step: int) -> TrainBatch:
        examples = self.examples(step)
        queries = [each.query for each in examples]
        documents = [text for each in examples for text in (each.positive, *each.negatives)]
        counts = torch.tensor([1 + len(each.negatives) for each in examples])
        if not self._uneven and (counts != 1 + self.num_negatives).any():
            raise ValueError(
                f"an example of step {step} has {int(counts.min()) - 1} negatives and not "
                f"num_negatives={self.num_negatives}, though the first of its source has"
            )
        numbers = torch.from_numpy(self.data.numbers(self._own(step), self.seed, self.batch))
        per_query, per_document = None, None
        if self.data.forms:
            per_query = [self._forms[number] for number in numbers.tolist()]
            owners = torch.repeat_interleave(numbers, counts)
            per_document = [self._forms[number] for number in owners.tolist()]
        return TrainBatch(
            self.tokenizer.queries(queries, per_query),
            self.tokenizer.documents(documents, per_document),
            _stack_scores(examples) if self._scored else None,
            DocumentCounts(counts, 1 + self.num_negatives) if self._uneven else None,
            numbers if len(self.data.sources) > 1 else None,
        )

    def _own(self, step: int) -> range:
        """This rank's positions of the stream in the batch of ``step``."""
        start = step * self.batch + self.rank * self.share
        return range(start, start + self.share)

    def examples(self, step: int) -> list[Example]:
        """This rank's Q examples of the batch of ``step``, as texts."""
        if self.unique_positives:
            own = self.rank * self.share
            return self._unique_batch(step * self.batch)[own : own + self.share]
        return self._read(self._own(step))

    def _read(self, positions: Sequence[int]) -> list[Example]:
        return self.data.examples(
            positions, seed=self.seed, num_negatives=self.num_negatives, batch=self.batch
        )

    def _unique_batch(self, start: int) -> list[Example]:
        """The global batch from position ``start`` on, where an example whose query or positive
        came before is replaced."""
        examples = self._read(range(start, start + self.batch))
        taken: set[tuple[str, str]] = set()
        duplicates = []
        for row, example in enumerate(examples):
            if not taken.isdisjoint(_once(example)):
                duplicates.append(row)
            taken |= _once(example)
        for row in duplicates:
            examples[row] = self._substitute(start + row, taken)
            taken |= _once(examples[row])
        return examples

    def _substitute(self, position: int, taken: set[tuple[str, str]]) -> Example:
        for attempt in range(1, SUBSTITUTION_ATTEMPTS + 1):
            example = self.data.substitute(
                position,
                attempt,
                seed=self.seed,
                num_negatives=self.num_negatives,
                batch=self.batch,
            )
            if taken.isdisjoint(_once(example)):
                return example
        part, text = min(taken & _once(example))
        raise ArgumentError(
            "{unique_positives:name}: {} draws for position {} gave only queries or positives that "
            "the batch of {} already holds, at last the {} {!r}, and source {} has {} examples: "
            "make the batch smaller, or set {unique_positives}; or name the columns, where others "
            "are meant than the log says were taken",
            *(SUBSTITUTION_ATTEMPTS, position, self.batch),
            *(part, shorten(text, _LONGEST_SHOWN), *self._source_at(position)),
            unique_positives=False,
        )

    def _source_at(self, position: int) -> tuple[str, int]:
        """Name and size of the source that owns a position."""
        number = int(self.data.numbers([position], self.seed, self.batch)[0])
        name = list(self.data.sources)[number]
        return name, len(self.data.sources[name])

    def check_sources(self, start: int, stop: int) -> None:
        """Refuse sources of which a batch of these steps, or of the first ones of very many, takes
        more examples than they have different queries or positives.

        Raises:
            ValueError: names the source and the step.
        """
        if not self.unique_positives:
            return
        found = {
            number: _different(source)
            for number, source in enumerate(self.data.sources.values())
            if len(source) < _BATCHES_READ * self.batch
        }
        few = {number: different for number, different in found.items() if different < self.batch}
        number_of_steps = min(stop - start, _POSITIONS_CHECKED // self.batch)
        steps_at_once = max(_POSITIONS_AT_ONCE // self.batch, 1)
        for steps in ranges_of(number_of_steps, steps_at_once) if few else ():
            first = start + steps.start
            positions = range(first * self.batch, (start + steps.stop) * self.batch)
            numbers = self.data.numbers(positions, self.seed, self.batch).reshape(-1, self.batch)
            for number, different in few.items():
                taken = (numbers == number).sum(axis=1)
                if (taken > different).any():
                    step = int((taken > different).argmax())
                    self._refuse_source(number, different, first + step, int(taken[step]))

    def _refuse_source(self, number: int, different: int, step: int, taken: int) -> None:
        own = "{homogeneous} or " if self.data.homogeneous else ""
        raise ArgumentError(
            "source {} has {} different queries and positives, and the batch of step {} takes {} "
            "examples of it: leave the source out, give it more of them or less weight, make the "
            f"batch smaller, or set {own}{{unique_positives}}",
            *(list(self.data.sources)[number], different, step + 1, taken),
            unique_positives=False,
            **({"homogeneous": False} if own else {}),
        )


def _different(source: Source) -> int:
    """The fewer of the queries and positives of a source that are different texts."""
    size = len(source)
    examples = [source.example(draw % size, draw, 0) for draw in range(_DRAWS_READ * size)]
    return min(len({each.query for each in examples}), len({each.positive for each in examples}))


def _once(example: Example) -> set[tuple[str, str]]:
    """What no other example of a batch may have: it would be a negative although it is right."""
    return {("query", example.query), ("positive", example.positive)}


def train_loader(stream: BatchStream, start: int, stop: int, *, num_workers: int = 0) -> Batches:
    """The batches of steps ``start`` to ``stop - 1``, in order.

    They do not depend on ``num_workers`` nor on where the run was resumed, and those of all ranks
    together are the same for every ``world_size``. On a machine with CUDA they come in pinned
    memory.

    Args:
        stream: of this rank.
        start, stop: the first step, and that after the last.
        num_workers: processes that read and tokenize ahead, no more than there are cores; 0 does it
            in the step.

    Raises:
        ValueError: a batch cannot be made for lack of distinct positives, or the first one for lack
            of teacher scores.
    """
    num_workers = min(num_workers, len(os.sched_getaffinity(0)))
    if start < stop:  # what is wrong with the data appears here and not inside a worker
        stream.check_sources(start, stop)
        stream[start]
    return Batches(
        DataLoader(
            stream,
            batch_size=None,
            sampler=range(start, stop),
            num_workers=num_workers,
            collate_fn=pack,
            worker_init_fn=prepare_worker,
            prefetch_factor=4 if num_workers else None,
            pin_memory=torch.cuda.is_available(),
        )
    )


def _check_sizes(batch: int, num_negatives: int, rank: int, world_size: int) -> None:
    if num_negatives < 0:
        raise ValueError(f"num_negatives={num_negatives} must not be negative")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not one of world_size={world_size} processes")
    if batch < world_size:
        raise ValueError(
            f"batch={batch} is smaller than the number of processes, {world_size}: each needs at "
            "least one query, so raise batch or start fewer processes"
        )
    if batch % world_size:
        raise ValueError(
            f"batch={batch} does not divide among {world_size} processes: the nearest that do are "
            f"{batch - batch % world_size} and {batch - batch % world_size + world_size}"
        )


def _check_forms(data: Mixture, tokenizer: Tokenizer) -> None:
    """Refuse forms that the tokenizer cannot read texts in, before the first step."""
    for name, form in data.forms.items():
        try:
            tokenizer.queries([], form)
            tokenizer.documents([], form)
        except ValueError as error:
            raise ValueError(f"forms of source {name}: {error}") from error


def _stack_scores(examples: Sequence[Example]) -> Tensor:
    """fp32 ``[Q, 1 + K]``."""
    if bare := [example.query for example in examples if not example.teacher_scores]:
        raise ValueError(
            "a batch mixes examples with and without teacher scores "
            f"(none for the query {bare[0][:80]!r}): mix only sources that all have scores"
        )
    return torch.tensor([example.teacher_scores for example in examples], dtype=torch.float32)
