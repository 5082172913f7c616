"""Changes that hold while anybody needs them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class Overlapping:
    """Blocks that overlap, in one thread or in several: what the first changes of an owner is
    undone when the last of them has ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        # By owner: how many blocks are inside, and what undoes the change.
        self._inside: dict[int, tuple[int, Callable[[], None]]] = {}

    @contextmanager
    def within(self, owner: object, change: Callable[[], Callable[[], None]]) -> Iterator[None]:
        """
        Args:
            change: makes the change where no block is inside, and gives what undoes it.
        """
        key = id(owner)
        with self._lock:
            blocks, undo = self._inside[key] if key in self._inside else (0, change())
            self._inside[key] = blocks + 1, undo
        try:
            yield
        finally:
            with self._lock:
                blocks, undo = self._inside.pop(key)
                if blocks > 1:
                    self._inside[key] = blocks - 1, undo
                else:
                    undo()
