"""The largest micro-batch that fits into the memory of a device, found before the first step.

A step is rehearsed on texts of full length, while what training needs besides stays taken. Where it
does not fit, the device says so itself: nothing is assumed of models, limits or other processes.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.sharded import is_sharded
from sparton.training.optimization import Optimizer
from sparton.training.status import is_out_of_memory
from sparton.training.step import ExactStep
from sparton.types import TokenBatch, TokenRows, TrainBatch

log = logging.getLogger(__name__)

# Of the device's memory, what stays free for batches whose texts leave gaps between each other.
_RESERVE = 0.05
# Seconds after which a size that fits is taken, although a larger one might.
_PATIENCE = 10.0
# Adam and its kin keep two numbers for each parameter.
_STATES = 2


@dataclass
class MicroBatchSearch:
    """Sets the micro-batch of a step to the largest that fits; its gradient does not depend on it.

    It is the share of a rank, cut into as few equal parts as possible. All ranks take the same. On
    a CPU it is the whole share.

    Attributes:
        step: whose ``micro_batch`` is set.
        optimizer: whose states need memory, too.
        query_length, document_length: of the longest texts of a run, in tokens.
        choice: what was found, with what it depends on; a run that goes on with the same keeps it.

    Raises:
        ValueError: the weights are sharded.
    """

    step: ExactStep
    optimizer: Optimizer
    query_length: int
    document_length: int
    choice: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if any(map(is_sharded, self.step.encoder.parameters())):
            raise ValueError(
                "a micro-batch is found by running out of memory, as no rank may that others wait "
                "for: give a step with sharded weights one"
            )

    def __call__(self, batch: Any) -> None:
        """Search, unless it is known from before; weights, buffers and random state stay.

        Args:
            batch: this rank's share of any batch, on the CPU; a ``TrainBatch``.

        Raises:
            torch.OutOfMemoryError: not even one query fits with its documents.
        """
        share, world = batch.queries.num_sequences, self.step.world
        on_gpu = world.device.type == "cuda"
        name = torch.cuda.get_device_name(world.device) if on_gpu else "cpu"
        depends_on = {"share": share, "ranks": world.size, "device": name}
        known = self.choice is not None and self.choice["depends_on"] == depends_on
        if self.choice is None or world.largest(not known):  # on one rank, as all search together
            found = self.search(batch) if on_gpu else share
            self.choice = {"micro_batch": found, "depends_on": depends_on}
        self.step.micro_batch = found = self.choice["micro_batch"]
        if found < share and world.is_main:
            log.info(
                "a step's %d queries do not fit on a device at once: it encodes %d at a time, "
                "which changes no gradient",
                *(share, found),
            )

    def search(self, batch: TrainBatch) -> int:
        """The queries of the largest micro-batch that fits on every rank."""
        longest = self._longest(batch)
        share = longest.queries.num_sequences
        with _untouched(self.step), _taken(self._bytes_besides(), self.step.world.device):
            parts = fewest_parts(lambda parts: self._fits(longest, parts), share)
        return _size(share, self.step.world.largest(parts))

    def _fits(self, batch: TrainBatch, parts: int) -> bool:
        """Whether a step in so many parts does; a part of one query must."""
        size = _size(batch.queries.num_sequences, parts)
        try:
            self.step.rehearse(batch.select(0, size), parts)
            return True
        except Exception as error:
            if size == 1 or not is_out_of_memory(error):
                raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        # Behind the error's traceback, which held all that there was.
        _free(self.step.world.device)
        return False

    def _longest(self, batch: TrainBatch) -> TrainBatch:
        """The texts of a batch, each over and over until it has full length, and as many documents
        of every query as one may have."""
        query_length, document_length = self.query_length, self.document_length
        if self.step.encoder.text_rows is not None:  # of which each is one token
            query_length = document_length = 1
        share = batch.queries.num_sequences
        return TrainBatch(
            _stretched(batch.queries, share, query_length),
            _stretched(batch.documents, share * batch.most_documents, document_length),
            batch.teacher_scores,
        )

    def _bytes_besides(self) -> int:
        """What the optimizer's states that are still to come will take, and the reserve."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        present = _bytes([value for value in states if isinstance(value, Tensor)])
        device = self.step.world.device
        reserve = 0.0
        if device.type == "cuda":
            reserve = _RESERVE * torch.cuda.mem_get_info(device)[1]
        return max(_STATES * _bytes(parameters) - present, 0) + int(reserve)


def fewest_parts(fits: Callable[[int], bool], most: int) -> int:
    """The smallest number of parts that fit, from 1 to ``most``, which must; none are tried after
    the patience has run out, if some fit."""
    begin = time.perf_counter()
    too_few, parts = 0, 1
    while not fits(parts):
        too_few, parts = parts, min(2 * parts, most)
    while parts - too_few > 1 and time.perf_counter() - begin < _PATIENCE:
        middle = (too_few + parts) // 2
        too_few, parts = (too_few, middle) if fits(middle) else (middle, parts)
    return parts


def _size(share: int, parts: int) -> int:
    return -(-share // parts)


def _stretched(tokens: TokenBatch, number: int, length: int) -> TokenBatch:
    """``number`` sequences, those of ``tokens`` in turn, of ``length`` tokens each, or as many as
    the longest has if these are more."""
    length = max(length, tokens.max_seqlen)
    turns, last = torch.arange(number) % tokens.num_sequences, max(tokens.num_tokens - 1, 0)
    positions = torch.arange(length).repeat(number)
    starts, lengths = tokens.cu_seqlens[turns].long(), tokens.cu_seqlens.diff()[turns].long()
    places = positions % lengths.clamp_min(1).repeat_interleave(length)
    places = (places + starts.repeat_interleave(length)).clamp_max(last)
    bounds = cu_seqlens_of(torch.full((number,), length), torch.int32)
    all_rows = TokenRows(torch.arange(number * length), bounds, length)
    keys, pooled = (rows and all_rows for rows in (tokens.keys, tokens.pooled))
    return TokenBatch(tokens.input_ids[places], positions, bounds, length, keys, pooled)


@contextmanager
def _untouched(step: ExactStep) -> Iterator[None]:
    """What a rehearsal changes is afterwards as it was; its memory is free."""
    device = step.world.device
    buffers = {name: buffer.clone() for name, buffer in step.encoder.named_buffers()}
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in step.encoder.named_buffers():
                buffer.copy_(buffers[name])
        _free(device)


@contextmanager
def _taken(size: int, device: torch.device) -> Iterator[None]:
    """So many bytes cannot be had meanwhile."""
    taken = torch.empty(size, dtype=torch.uint8, device=device)
    yield
    del taken


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
