"""Processes that encode texts together, for the first of them.

N texts.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from sparton.representations import Representations

T = TypeVar("T")


class Crew(Protocol):
    """This process, of number ``rank``, among ``size`` that do the same at the same time."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def collect(self, own: Any) -> list[Any] | None:
        """What every process has, in their order, on process 0; None on the others."""
        ...

    def share(self, value: T) -> T:
        """What process 0 has."""
        ...


class Alone:
    """A crew of one."""

    rank, size = 0, 1

    def collect(self, own: Any) -> list[Any]:
        return [own]

    def share(self, value: T) -> T:
        return value


ALONE = Alone()


class Gathering:
    """Brings the representations of groups of texts to process 0 of a crew while others are being
    encoded.

    Group g is that of process ``g % size``. All processes make one of these and leave it as a
    context; what they have encoded is gathered in rounds, a group of each in every round, so that
    no more than a round is on its way at a time.

    Args:
        crew: of which this process is one.
        num_groups: of all processes together.
        advance: told how many texts have come in from other processes.
    """

    def __init__(self, crew: Crew, num_groups: int, advance: Callable[[int], None]) -> None:
        self._crew, self._advance = crew, advance
        self._rounds = -(-num_groups // crew.size)
        self._coming: list[Future[list[Representations]]] = []
        self._own: list[Representations] = []
        # One thread: rounds must follow each other in the same order on every process.
        self._thread = ThreadPoolExecutor(1) if crew.size > 1 else None

    def __enter__(self) -> "Gathering":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def add(self, parts: Sequence[Representations]) -> None:
        """The representations of this process's next group, in several parts."""
        if self._thread is None:
            self._own += parts
        else:
            self._coming.append(self._thread.submit(self._gather, list(parts)))

    def all(self) -> list[Representations]:
        """Give those of all groups, group after group, on process 0; none on the others. Nothing is
        kept here, so that whoever takes them may give them up one by one."""
        if self._thread is not None:
            while len(self._coming) < self._rounds:
                self.add([])
        found, self._own = self._own, []
        while self._coming:
            found += self._coming.pop(0).result()
        return found

    def _gather(self, parts: list[Representations]) -> list[Representations]:
        found = self._crew.collect(parts)
        if found is None:
            return []
        self._advance(sum(part.num_texts for others in found[1:] for part in others))
        return [part for parts in found for part in parts]
