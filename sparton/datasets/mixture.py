"""A weighted, shuffled, endless stream of training examples that can be entered anywhere.

P positions looked up at once. Position p of the stream is a pure function of (seed, p), so resuming
costs nothing and every rank and worker process sees the same stream without talking to the others.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import ArgumentError
from sparton.datasets.files import locate
from sparton.datasets.lookup import Records, Source, whole_of
from sparton.datasets.permutation import DRAW, ORDER, SHUFFLE, SUBSTITUTE, derive_key, permute
from sparton.datasets.preparation import OnError
from sparton.datasets.proportions import (
    HOMOGENEOUS_BLOCK,
    WEIGHTED_BLOCK,
    check_proportions,
    counts_in_block,
)
from sparton.datasets.sources import SourceOptions, text_records
from sparton.datasets.teachers import EQUAL_TEACHERS, Teachers
from sparton.types import Example, TextForm

HOMOGENEOUS_ALPHA = 0.5
_OF_A_SOURCE = ("files", *SourceOptions.__annotations__)

Ints = NDArray[np.int64]


class Share(NamedTuple):
    """One row of the table that describes a mixture."""

    source: str
    examples: int
    weight: float


class Mixture:
    """Several sources interleaved in fixed proportions.

    The stream is cut into blocks; every block holds each source's exact share, in an order shuffled
    anew. By size, a block is one epoch of everything: each example occurs once in it. With
    ``weights`` or ``alpha`` it has 65,536 positions, shares rounded by largest remainder; each
    source is then walked in its own shuffled epochs, a short one more often than a long one.

    In a homogeneous mixture a block has 1,024 positions, and a position is a batch: all examples of
    a batch are of one source.

    Args:
        sources: by name; their order is part of the stream's definition.
        weights: relative weights by name, or None for those that sizes make.
        alpha: a source's weight is its size to this power: 1 for sizes, 0 for equal shares. None
            for epochs of everything, or 0.5 if ``homogeneous``.
        homogeneous: whether batches are of one source each.
        forms: by name, how the texts of a source are read where it is not the model's own way: a
            :class:`~sparton.types.TextForm` or its fields.

    Raises:
        ValueError: no source, an empty source, one whose first example is none, names that do not
            match, a weight that is not positive or too small to get a single position of a block,
            or ``alpha`` beside ``weights``.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, float] | None = None,
        *,
        alpha: float | None = None,
        homogeneous: bool = False,
        forms: Mapping[str, TextForm | Mapping[str, Any]] | None = None,
    ) -> None:
        self.sources = dict(sources)
        self.weights = weights
        self.alpha = alpha
        self.homogeneous = homogeneous
        if not self.sources:
            raise ValueError("a mixture needs at least one source")
        self.sizes = np.array([len(source) for source in self.sources.values()], np.int64)
        for name, size in zip(self.sources, self.sizes):
            if size == 0:
                raise ValueError(f"source {name!r} of the mixture has no examples: leave it out")
        for name, source in self.sources.items():
            _check_first(name, source)
        self.forms = _checked_forms(self.sources, forms or {})
        if alpha is None and homogeneous and weights is None:
            alpha = HOMOGENEOUS_ALPHA
        sizes = dict(zip(self.sources, self.sizes.tolist()))
        self._by_size = weights is None and alpha is None
        block = HOMOGENEOUS_BLOCK if homogeneous else WEIGHTED_BLOCK
        self.counts = counts_in_block(sizes, weights, alpha, block)
        self.boundaries = np.concatenate([[0], np.cumsum(self.counts)])

    def __len__(self) -> int:
        """Number of examples of all sources."""
        return int(self.sizes.sum())

    def of(self, sources: Mapping[str, Source]) -> "Mixture":
        """The mixture of other sources, some or all of these names, under the same settings."""
        weights = self.weights and {name: self.weights[name] for name in sources}
        forms = {name: form for name, form in self.forms.items() if name in sources}
        return Mixture(
            sources, weights, alpha=self.alpha, homogeneous=self.homogeneous, forms=forms
        )

    def describe(self) -> list[Share]:
        """Name, size and share of the stream of every source."""
        shares = self.counts / self.counts.sum()
        return [
            Share(name, int(size), float(share))
            for name, size, share in zip(self.sources, self.sizes, shares)
        ]

    def identity(self) -> dict[str, str]:
        """What the stream depends on, beside settings: ``data.NAME.examples``, how many there are,
        and ``data.NAME.content``, the digest of those sources that have one."""
        found = {}
        for (name, source), size in zip(self.sources.items(), self.sizes, strict=True):
            found[f"data.{name}.examples"] = str(size)
            if content := getattr(source, "content", None):
                found[f"data.{name}.content"] = content
        return found

    def locate(
        self, positions: Sequence[int] | Ints, seed: int, batch: int = 1
    ) -> tuple[Ints, Ints, Ints]:
        """Source number, example number and draw of every position; int64 ``[P]`` each.

        Args:
            positions: of the stream.
            seed: of its order and draws.
            batch: positions of a batch, which counts if the mixture is homogeneous.
        """
        places = np.asarray(positions, np.int64)
        chosen, turns = self._turns(places, seed, batch)
        indices = np.empty_like(turns)
        for number in np.unique(chosen):
            own = chosen == number
            epochs, ranks = np.divmod(turns[own], self.sizes[number])
            keys = derive_key(seed, SHUFFLE, int(number), epochs)
            indices[own] = permute(ranks, int(self.sizes[number]), keys)
        draws = (derive_key(seed, DRAW, places) >> np.uint64(1)).astype(np.int64)
        return chosen, indices, draws

    def numbers(self, positions: Sequence[int] | Ints, seed: int, batch: int = 1) -> Ints:
        """Source number of every position, int64 ``[P]``; the arguments are those of
        :meth:`locate`."""
        return self._turns(np.asarray(positions, np.int64), seed, batch)[0]

    def _turns(self, places: Ints, seed: int, batch: int) -> tuple[Ints, Ints]:
        """The source of every position, and how many positions before it are of this source."""
        together = batch if self.homogeneous else 1
        groups, within = places // together, places % together
        block_size = int(self.boundaries[-1])
        blocks, offsets = groups // block_size, groups % block_size
        slots, chosen = _slots(self.boundaries, offsets, derive_key(seed, ORDER, blocks))
        ranks = slots - self.boundaries[chosen]
        if not self._by_size:  # else a block is an epoch, in which any order of a source will do
            for block in np.unique(blocks).tolist():
                own = blocks == block
                in_order = _ranks_in_order(tuple(self.boundaries.tolist()), seed, block)
                ranks[own] = in_order[offsets[own]]
        return chosen, (blocks * self.counts[chosen] + ranks) * together + within

    def examples(
        self, positions: Sequence[int], *, seed: int, num_negatives: int = 0, batch: int = 1
    ) -> list[Example]:
        """The examples at ``positions`` of the stream that ``seed`` selects; ``batch`` as in
        :meth:`locate`."""
        sources = list(self.sources.values())
        located = self.locate(positions, seed, batch)
        return [
            sources[number].example(index, draw, num_negatives)
            for number, index, draw in zip(*(each.tolist() for each in located))
        ]

    def substitute(
        self, position: int, attempt: int, *, seed: int, num_negatives: int = 0, batch: int = 1
    ) -> Example:
        """Another example of the source that owns ``position``; ``attempt`` = 1, 2 ... differ."""
        number = int(self.numbers([position], seed, batch)[0])
        index, draw = (
            int(derive_key(seed, SUBSTITUTE, position, attempt, part)[0]) >> 1 for part in (0, 1)
        )
        source = list(self.sources.values())[number]
        return source.example(index % int(self.sizes[number]), draw, num_negatives)


def _slots(boundaries: Ints, offsets: Ints, keys: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """The slots of the positions at these offsets of a block, and the sources that own them."""
    slots = permute(offsets, int(boundaries[-1]), keys)
    return slots, np.searchsorted(boundaries, slots, side="right") - 1


@lru_cache(maxsize=4)
def _ranks_in_order(boundaries: tuple[int, ...], seed: int, block: int) -> Ints:
    """How many positions of a block before each one are of its source; int64 ``[B]``."""
    starts, places = np.array(boundaries), np.arange(boundaries[-1])
    _, chosen = _slots(starts, places, derive_key(seed, ORDER, block))
    by_source = np.argsort(chosen, kind="stable")
    ranks = np.empty_like(places)
    ranks[by_source] = places - starts[chosen[by_source]]
    return ranks


def _check_first(name: str, source: Source) -> None:
    """Refuse a source of a user whose first example is not one, or is not of texts."""
    if isinstance(whole_of(source), Records):
        return
    example: object = source.example(0, 0, 0)
    if not isinstance(example, Example):
        raise ValueError(
            f"source {name!r} gives {type(example).__name__} and not sparton.types.Example: let "
            "its method example return Example(query, positive, negatives)"
        )
    texts: list[object] = [example.query, example.positive, *example.negatives]
    if other := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(
            f"source {name!r} gives {other[0]!r} in the place of a text: make it a str"
        )


def _checked_forms(
    sources: Collection[str], forms: Mapping[str, TextForm | Mapping[str, Any]]
) -> dict[str, TextForm]:
    checked = {}
    for name, form in forms.items():
        if name not in sources:
            raise ArgumentError(
                "{forms:name} are given for {!r} but the sources are {}",
                *(name, ", ".join(sources)),
                forms=forms,
            )
        fields = form._asdict() if isinstance(form, TextForm) else dict(form)
        if unknown := [key for key in fields if key not in TextForm._fields]:
            raise ValueError(
                f"forms of source {name!r}: there is no {unknown[0]}, but "
                f"{', '.join(TextForm._fields)}"
            )
        checked[name] = TextForm(**fields)
    return checked


def text_mixture(
    files: str | Sequence[str] | Mapping[str, str | Sequence[str] | Mapping[str, Any]],
    *,
    weights: Mapping[str, float] | None = None,
    alpha: float | None = None,
    homogeneous: bool = False,
    forms: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Unpack[SourceOptions],
) -> Mixture:
    """A mixture of text files from one place, one source per entry of ``files``.

    Args:
        files: source name to file name, pattern, or list of them; or to a mapping of ``files`` and
            other arguments of :func:`sparton.datasets.sources.text_records`, which hold for this
            source. Or a name or list alone, which makes one source.
        weights, alpha, homogeneous, forms: as in :class:`Mixture`.
        options: of all sources, see :func:`sparton.datasets.sources.text_records`; ``limit`` is
            per source.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with file and line, or the source.
    """
    if not isinstance(files, Mapping):
        files = {_source_name(files): files}
    own = {name: _own_settings(name, entry) for name, entry in files.items()}
    settings: dict[str, dict[str, Any]] = {name: {**options, **each} for name, each in own.items()}
    # All that can be refused before files are read.
    Teachers.of(options.get("teachers", EQUAL_TEACHERS))
    check_proportions(files, weights, alpha)
    _checked_forms(files, forms or {})
    for each in settings.values():  # a missing file stops the run before the others are prepared
        locate(each["files"], root=each.get("root"), hub=each.get("hub"))
    sources = {}
    for name, each in settings.items():
        try:
            sources[name] = text_records(name=name, **each)
        except ArgumentError as error:  # of one source alone where the entry says so
            raise error.renamed(**{key: f"files.{name}.{key}" for key in own[name]}) from error
    return Mixture(sources, weights, alpha=alpha, homogeneous=homogeneous, forms=forms)


def _own_settings(source: str, entry: str | Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """What an entry of ``files`` says, by argument of ``text_records``."""
    if not isinstance(entry, Mapping):
        return {"files": entry}
    if unknown := [key for key in entry if key not in _OF_A_SOURCE]:
        raise ValueError(
            f"source {source!r}: there is no setting {unknown[0]}, but {', '.join(_OF_A_SOURCE)}"
        )
    if not entry.get("files"):
        raise ValueError(f"source {source!r}: its settings name no files: add files")
    return dict(entry)


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
    alpha: float | None = None,
    homogeneous: bool = False,
    forms: Mapping[str, Mapping[str, Any]] | None = None,
    on_error: OnError = "stop",
) -> Mixture:
    """A mixture of prepared sources that all treat a malformed record alike.

    Args:
        sources: by name, what prepares the source when called with ``on_error``.
        weights, alpha, homogeneous, forms: as in :class:`Mixture`.
        on_error: stop at a malformed record, or skip and count it.

    Raises:
        ValueError: a source is prepared already, or what :class:`Mixture` refuses.
    """
    check_proportions(sources, weights, alpha)
    _checked_forms(sources, forms or {})
    for name, make in sources.items():
        if not callable(make):
            raise ValueError(
                f"sources.{name} is {type(make).__name__}, and not what prepares a source: "
                "sparton.datasets.mixture.Mixture mixes sources that are ready"
            )
    made = {name: make(on_error=on_error) for name, make in sources.items()}
    return Mixture(made, weights, alpha=alpha, homogeneous=homogeneous, forms=forms)
