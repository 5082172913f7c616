"""Folders of encoded texts: they are made, gone on with, added to, and given deleted texts back."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import ArgumentError
from sparton.datasets.texts import TextList, TextTable, hash_texts
from sparton.encoded.claims import changing
from sparton.encoded.collection import missing_shards, open_encoded
from sparton.encoded.deletion import read_deleted, write_deleted
from sparton.encoded.facts import Facts, Part, Settings, check_place, ids_file, read_facts
from sparton.encoded.ids import Ids, write_ids
from sparton.packing import ranges_of
from sparton.writing import failures_told

_IDS_AT_ONCE = 2**16
# What nobody sets for a folder.
_FROM_MODEL = {"sparse_width", "token_width", "dense_width", "prompt"}

Texts = TextTable | TextList


class Found(NamedTuple):
    """Texts that are a part of a folder already.

    Attributes:
        missing: how many of their shards are not written yet.
        deleted: rows of those that are deleted, counted through all parts; int64, ascending.
    """

    missing: int
    deleted: NDArray[np.int64]


def find_texts(output: Path, texts: Texts) -> Found | None:
    """What a folder has of texts that were added to it together; None where they were not.

    Raises:
        ArgumentError: it is no folder of encoded texts.
        ValueError: it is damaged.
    """
    if not check_place(output):
        return None
    facts = read_facts(output)
    sources = [part.source for part in facts.parts]
    if texts.digest not in sources:
        return None
    part = sources.index(texts.digest)
    first = sum(each.rows for each in facts.parts[:part])
    deleted = read_deleted(output, facts.rows)
    own = deleted[(deleted >= first) & (deleted < first + facts.parts[part].rows)]
    return Found(sum(shard.part == part for shard in missing_shards(output, facts)), own)


def begin_folder(
    output: Path, settings: Settings, texts: Texts, name: str, *, append: bool = False
) -> Facts:
    """Make a folder for encoded texts, or check that one that is there is of the same texts and
    settings; nothing is encoded yet. Several processes may do so at once.

    Args:
        output: the folder.
        settings: as :func:`plan_encoding` gives them.
        texts: with an identifier each.
        name: of the model, to be kept for those who search.
        append: add the texts to those that are there; where they are there already, bring back
            those of them that are deleted.

    Raises:
        ArgumentError: the folder holds something else, or texts that were encoded otherwise or are
            others; or identifiers that are there already.
        ValueError: no texts, the same identifier twice, or a damaged folder.
    """
    if not len(texts):
        raise ValueError("there are no texts to encode")
    if not check_place(output):
        _check_ids(texts, None)
        with failures_told(f"the folder {output}", output):
            output.mkdir(parents=True, exist_ok=True)
    with changing(output):
        return _begin(output, settings, texts, name, append=append)


def _begin(output: Path, settings: Settings, texts: Texts, name: str, *, append: bool) -> Facts:
    """What :func:`begin_folder` does while no other process changes the folder."""
    if not check_place(output):
        _write(output, Facts(settings, (), name), texts)
    facts = read_facts(output)
    _check_settings(output, facts, settings)
    found = find_texts(output, texts)
    if found is None:
        if not append:
            raise ArgumentError(
                "{} holds {} other texts: choose another {output:name}, or add these to them by "
                "{append}",
                output,
                f"{facts.rows - len(read_deleted(output, facts.rows)):,}",
                output=output,
                append=True,
            )
        _check_ids(texts, open_encoded(output).ids)
        _write(output, facts, texts)
    elif append and len(found.deleted):
        _restore(output, found.deleted)
    return read_facts(output)


def _check_settings(output: Path, facts: Facts, settings: Settings) -> None:
    """Refuse another model and other settings than those of a folder."""
    there, here = (_values(each) for each in (facts.settings, settings))
    unlike = facts.settings.unlike(settings)
    if unlike == ["model"]:
        raise ArgumentError(
            "{} was encoded by another model, {} as it was then: choose another {output:name}",
            output,
            facts.name,
            output=output,
        )
    if unlike:
        differ = ", ".join(f"{{{name}}} and not {{}}" for name in unlike)
        set_them = " and ".join(f"{{{name}}}" for name in unlike)
        go_on = "" if _FROM_MODEL.intersection(unlike) else f"set {set_them} to go on, or "
        raise ArgumentError(
            f"{{}} was encoded with {differ}: {go_on}choose another {{output:name}}",
            output,
            *(here[name] for name in unlike),
            output=output,
            **{name: there[name] for name in unlike},
        )


def _values(settings: Settings) -> dict[str, object]:
    """Settings as users write them."""
    return settings._asdict() | {"kinds": list(settings.kinds)}


def _restore(output: Path, deleted: NDArray[np.int64]) -> None:
    """Bring deleted texts back, which lie in their files still.

    Args:
        deleted: their rows; int64.
    """
    there = open_encoded(output)
    known, wanted = {*there.ids}, {*deleted.tolist()}
    for row, name in there.ids.stored():
        if row in wanted and name in known:
            raise ValueError(
                f"{output} has another text with the id {name!r}, added since that of these texts "
                "was deleted: delete the other one to bring these back"
            )
    write_deleted(output, np.setdiff1d(there.deleted, deleted).tolist())


def _write(output: Path, facts: Facts, texts: Texts) -> None:
    """Add texts to what a folder says of itself."""
    try:
        seal = write_ids(output / ids_file(len(facts.parts)), _ids(texts))
        part = Part(texts.digest, len(texts), seal)
        facts._replace(parts=(*facts.parts, part)).write(output)
    except OSError:
        if find_texts(output, texts) is None:  # else another has added them, and swept up
            raise


def _ids(texts: Texts) -> Iterator[str]:
    for rows in ranges_of(len(texts), _IDS_AT_ONCE):
        yield from texts.take(rows).ids


def _check_ids(texts: Texts, present: Ids | None) -> None:
    """Refuse identifiers that are not different, from one another and from those there are."""
    hashes = np.concatenate(
        [hash_texts(texts.take(rows).ids) for rows in ranges_of(len(texts), _IDS_AT_ONCE)]
    )
    different, counts = np.unique(hashes, return_counts=True)
    if len(different) < len(hashes):
        (twice, *_) = np.flatnonzero(hashes == different[counts.argmax()]).tolist()
        (name,) = texts.take([twice]).ids
        raise ValueError(f"the id {name!r} stands for several texts: ids must differ")
    if present is not None and np.isin(hash_texts(list(present)), different).any():
        known = {*present}
        name = next(each for each in _ids(texts) if each in known)
        raise ArgumentError(
            "the id {} is there already: delete that text first, or leave it out of what is added "
            "by {append}",
            repr(name),
            append=True,
        )
