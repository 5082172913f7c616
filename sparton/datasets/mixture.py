"""A weighted, shuffled, endless stream of training examples that can be entered anywhere.

P positions looked up at once. Position p of the stream is a pure function of (seed, p), so resuming
costs nothing and every rank and worker process sees the same stream without talking to the others.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import ArgumentError, Instance
from sparton.datasets.files import locate
from sparton.datasets.permutation import derive_key, permute
from sparton.datasets.preparation import Columns, OnError
from sparton.datasets.sources import Records, text_records
from sparton.types import Example

WEIGHTED_BLOCK = 1 << 16

# What a key is derived for; different purposes must never share one.
ORDER, SHUFFLE, DRAW, SUBSTITUTE = range(4)


class Source(Protocol):
    """Training examples that can be looked up by number."""

    def __len__(self) -> int: ...

    def example(self, index: int, draw: int, num_negatives: int) -> Example:
        """Example ``index`` with ``num_negatives`` negatives; ``draw``, a random integer of 63
        bits, chooses among several positives and negatives. A pure function of its arguments."""
        ...


class Rest:
    """A source without some of its examples.

    Args:
        source: the whole.
        without: numbers of the examples that are left out, ascending.
    """

    def __init__(self, source: Source, without: Sequence[int]) -> None:
        self.source = source
        # Of the examples before it that stay, how many there are.
        self._before = [row - place for place, row in enumerate(without)]

    def __len__(self) -> int:
        return len(self.source) - len(self._before)

    def example(self, index: int, draw: int, num_negatives: int) -> Example:
        """The ``index``-th of those that stay."""
        row = index + bisect_right(self._before, index)
        return self.source.example(row, draw, num_negatives)


class Share(NamedTuple):
    """One row of the table that describes a mixture."""

    source: str
    examples: int
    weight: float


class Mixture:
    """Several sources interleaved in fixed proportions.

    The stream is cut into blocks; every block holds each source's exact share, in an order shuffled
    anew. Without ``weights`` a block is one epoch of everything: each example occurs once in it.
    With ``weights`` it has 65,536 positions, shares rounded by largest remainder; each source is
    then walked in its own shuffled epochs, a short one more often than a long one.

    Args:
        sources: by name; their order is part of the stream's definition.
        weights: relative weights by name, or None for sizes.

    Raises:
        ValueError: no source, an empty source, names that do not match, a weight that is not
            positive or too small to get a single position of a block.
    """

    def __init__(
        self, sources: Mapping[str, Source], weights: Mapping[str, float] | None = None
    ) -> None:
        self.sources = dict(sources)
        self.weights = weights
        if not self.sources:
            raise ValueError("a mixture needs at least one source")
        self.sizes = np.array([len(source) for source in self.sources.values()], np.int64)
        for name, size in zip(self.sources, self.sizes):
            if size == 0:
                raise ValueError(f"source {name!r} of the mixture has no examples: leave it out")
        if weights is None:
            self.counts = self.sizes
        else:
            self.counts = _block_counts(self.sources, weights)
        self.boundaries = np.concatenate([[0], np.cumsum(self.counts)])

    def __len__(self) -> int:
        """Number of examples of all sources."""
        return int(self.sizes.sum())

    def describe(self) -> list[Share]:
        """Name, size and share of the stream of every source."""
        shares = self.counts / self.counts.sum()
        return [
            Share(name, int(size), float(share))
            for name, size, share in zip(self.sources, self.sizes, shares)
        ]

    def identity(self) -> dict[str, str]:
        """What the order of the examples depends on, beside settings: ``data.NAME.examples``."""
        sizes = zip(self.sources, self.sizes, strict=True)
        return {f"data.{name}.examples": str(size) for name, size in sizes}

    def check(self, num_negatives: int, needs_teacher: bool = False) -> None:
        """Refuse what would fail in the middle of training.

        Raises:
            ValueError: a source cannot give so many negatives (names the record without any), only
                some sources have teacher scores, or none though ``needs_teacher``.
        """
        for name, source in self.sources.items():
            whole = source.source if isinstance(source, Rest) else source
            if isinstance(whole, Records):
                whole.check(num_negatives)
            elif len(source.example(0, 0, num_negatives).negatives) != num_negatives:
                raise ValueError(f"source {name!r} does not give num_negatives={num_negatives}")
        scored = {
            name: bool(source.example(0, 0, num_negatives).teacher_scores)
            for name, source in self.sources.items()
        }
        if len(set(scored.values())) > 1:
            bare = ", ".join(name for name, has_scores in scored.items() if not has_scores)
            raise ValueError(
                f"some sources have teacher scores, but {bare} has none: mix only sources that "
                "agree in this"
            )
        if needs_teacher and not any(scored.values()):
            raise ArgumentError(
                "the loss follows a teacher, but {} gives no teacher scores: use data that has "
                "some, as for distillation, or {loss}",
                ", ".join(scored),
                loss=Instance("InfoNCE"),
            )

    def locate(
        self, positions: Sequence[int] | NDArray[np.int64], seed: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Source number, example number and draw of every position; int64 ``[P]`` each."""
        places = np.asarray(positions, np.int64)
        block_size = int(self.boundaries[-1])
        blocks, offsets = places // block_size, places % block_size
        slots = permute(offsets, block_size, derive_key(seed, ORDER, blocks))
        chosen = np.searchsorted(self.boundaries, slots, side="right") - 1
        turns = blocks * self.counts[chosen] + slots - self.boundaries[chosen]
        indices = np.empty_like(turns)
        for number in np.unique(chosen):
            own = chosen == number
            epochs, ranks = np.divmod(turns[own], self.sizes[number])
            keys = derive_key(seed, SHUFFLE, int(number), epochs)
            indices[own] = permute(ranks, int(self.sizes[number]), keys)
        draws = (derive_key(seed, DRAW, places) >> np.uint64(1)).astype(np.int64)
        return chosen, indices, draws

    def examples(
        self, positions: Sequence[int], *, seed: int, num_negatives: int = 0
    ) -> list[Example]:
        """The examples at ``positions`` of the stream that ``seed`` selects."""
        sources = list(self.sources.values())
        return [
            sources[number].example(index, draw, num_negatives)
            for number, index, draw in zip(*(x.tolist() for x in self.locate(positions, seed)))
        ]

    def substitute(
        self, position: int, attempt: int, *, seed: int, num_negatives: int = 0
    ) -> Example:
        """Another example of the source that owns ``position``; ``attempt`` = 1, 2 ... differ."""
        number = int(self.locate([position], seed)[0][0])
        index, draw = (
            int(derive_key(seed, SUBSTITUTE, position, attempt, part)[0]) >> 1 for part in (0, 1)
        )
        source = list(self.sources.values())[number]
        return source.example(index % int(self.sizes[number]), draw, num_negatives)


def text_mixture(
    files: str | Sequence[str] | Mapping[str, str | Sequence[str]],
    *,
    root: str | None = None,
    hub: str | None = None,
    columns: Columns | None = None,
    weights: Mapping[str, float] | None = None,
    on_error: OnError = "stop",
    limit: int | None = None,
    require_negatives: bool = False,
    cache_dir: str | None = None,
) -> Mixture:
    """A mixture of text files from one place, one source per entry of ``files``.

    Args:
        files: source name to file name, pattern, or list of them; or such a name or list alone,
            which makes one source.
        weights: as in :class:`Mixture`.
        root, hub, columns, on_error, limit, require_negatives, cache_dir: as in
            :func:`sparton.datasets.sources.text_records`; ``limit`` is per source.
    """
    if not isinstance(files, Mapping):
        files = {_source_name(files): files}
    for entry in files.values():  # a missing file stops the run before the others are prepared
        locate(entry, root=root, hub=hub)
    sources = {
        name: text_records(
            entry,
            root=root,
            hub=hub,
            columns=columns,
            on_error=on_error,
            limit=limit,
            require_negatives=require_negatives,
            name=name,
            cache_dir=cache_dir,
        )
        for name, entry in files.items()
    }
    return Mixture(sources, weights)


def _source_name(files: str | Sequence[str]) -> str:
    """What a source without a name is called: as its only file."""
    if not files:
        raise ValueError(f"files={files!r}: name a file, or several")
    names = [files] if isinstance(files, str) else list(files)
    stem = Path(names[0]).name.partition(".")[0]
    return stem if len(names) == 1 and re.fullmatch(r"[\w-]+", stem) else "files"


def build_mixture(
    sources: Mapping[str, Callable[..., Records]],
    *,
    weights: Mapping[str, float] | None = None,
    on_error: OnError = "stop",
) -> Mixture:
    """A mixture of prepared sources that all treat a malformed record alike.

    Args:
        sources: by name, what prepares the source when called with ``on_error``.
        weights: as in :class:`Mixture`.
        on_error: stop at a malformed record, or skip and count it.
    """
    return Mixture({name: make(on_error=on_error) for name, make in sources.items()}, weights)


def _block_counts(sources: Mapping[str, Source], weights: Mapping[str, float]) -> NDArray[np.int64]:
    if set(weights) != set(sources):
        raise ValueError(
            f"weights are given for {sorted(weights)} but the sources are {sorted(sources)}"
        )
    values = np.array([float(weights[name]) for name in sources])
    for name, value in zip(sources, values):
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"the weight of source {name!r} is {value}, it must be positive")
    exact = values / values.sum() * WEIGHTED_BLOCK
    counts = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(counts - exact, kind="stable")
    counts[largest_remainders[: WEIGHTED_BLOCK - counts.sum()]] += 1
    for name, count in zip(sources, counts):
        if count == 0:
            raise ValueError(
                f"the weight of source {name!r} is below 1 in {WEIGHTED_BLOCK}: "
                "raise it or leave the source out"
            )
    return counts
