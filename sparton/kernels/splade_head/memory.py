"""What heads found in a pass without a graph, for the pass with one that encodes the same texts.

A step with micro-batches encodes every text twice (Gao et al., arXiv 2101.06983). The backward of a
maximum needs its value and its winner alone, so the second pass need not look for them again.
N sequences, V vocabulary.
"""

from collections import deque
from typing import NamedTuple

from torch import Tensor

from sparton.kernels.sparse_vectors import SparseVectors

# Nothing is kept of representations of which a larger share is active.
MOST_ACTIVE = 1 / 8


class _Found(NamedTuple):
    """Representations of N sequences, and the token that won each active entry, int32 ``[P]``."""

    reps: SparseVectors
    winners: Tensor


class HeadMemory:
    """Results of :func:`~sparton.kernels.splade_head.splade_head` with max pooling, in the order of
    its calls: 12 bytes for each active entry.

    Calls that are given a new memory fill it. After :meth:`rewind`, calls give what they gave, with
    a graph. They must be made as they were: as often, in the same order, on the same texts; nothing
    but the shapes is checked.

    Attributes:
        repeats: whether calls read it, or fill it.
    """

    def __init__(self) -> None:
        self.repeats = False
        self._found: deque[_Found | None] = deque()

    def rewind(self) -> None:
        """From now on calls repeat what was kept."""
        self.repeats = True

    def repeat(self, times: int) -> None:
        """Hold what it holds so many times, each with memory of its own."""
        for found in list(self._found) * (times - 1):
            if found is not None:
                reps, winners = found
                reps = reps._replace(values=reps.values.clone(), terms=reps.terms.clone())
                found = _Found(reps, winners.clone())
            self._found.append(found)

    def keep(self, reps: Tensor, argmax: Tensor) -> None:
        """``[N, V]`` each. The host waits for the number of active entries."""
        if int(reps.count_nonzero()) > MOST_ACTIVE * reps.numel():
            self._found.append(None)
            return
        vectors = SparseVectors.from_dense(reps)
        self._found.append(_Found(vectors, argmax.flatten()[vectors.places]))

    def next(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
        """What was kept of the next call, ``shape = [N, V]`` each, and forget it; None if nothing
        was.

        Raises:
            RuntimeError: a call that was not made the first time, or another one.
        """
        if not self._found:
            raise RuntimeError("a head is repeated more often than it was called")
        found = self._found.popleft()
        if found is None:
            return None
        reps, winners = found
        if (reps.num_vectors, reps.width) != shape:
            raise RuntimeError(
                f"heads are repeated in another order: representations {list(shape)} where "
                f"[{reps.num_vectors}, {reps.width}] were kept"
            )
        argmax = winners.new_zeros(shape).flatten().index_copy(0, reps.places, winners)
        return reps.dense(), argmax.view(shape)
