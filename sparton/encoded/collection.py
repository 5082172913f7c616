"""Encoded texts on disk, to be searched or encoded further; nothing of them is kept in memory.

N texts.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.digests import Seal, texts_digest
from sparton.encoded.claims import changing
from sparton.encoded.deletion import DELETED, read_deleted, write_deleted
from sparton.encoded.facts import FACTS, Facts, Shard, ids_file, read_facts
from sparton.encoded.identity import encoder_digest
from sparton.encoded.ids import Ids
from sparton.encoded.indexes import kept_arrays
from sparton.encoded.shards import Stored, inspect_shard, map_shard, shard_path
from sparton.representations import Representations
from sparton.retrieval.indexes.documents import Documents

if TYPE_CHECKING:
    from sparton.models.encoder import Encoder


class EncodedTexts:
    """A complete folder of encoded texts, as :func:`open_encoded` gives it.

    Attributes:
        folder: where it is.
        facts: how texts were encoded, and which.
        ids: N identifiers by row; deleted texts have none, and no row.
        deleted: rows of deleted texts, counted with them; int64, ascending.
        nbytes: of all representations on disk.
        digest: of what was in the folder when it was opened. It changes when texts are added or
            deleted, and tells whether what was made of them is of them still.
    """

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        shards: Sequence[Stored],
        deleted: NDArray[np.int64],
        digest: str,
    ) -> None:
        self.folder, self.facts, self.digest = folder, facts, digest
        self._shards, self.deleted = shards, deleted
        self._verified: set[Path] = set()
        files = [folder / ids_file(number) for number in range(len(facts.parts))]
        self.ids = Ids(files, deleted)
        self.nbytes = sum(stored.nbytes for stored in shards)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def entries(self) -> int:
        """Active entries of all sparse vectors, of deleted texts, too."""
        return sum(stored.entries for stored in self._shards)

    @property
    def tokens(self) -> int:
        """Token vectors of all texts, of deleted ones, too."""
        return sum(stored.tokens for stored in self._shards)

    def shards(self) -> Iterator[Representations]:
        """The representations of all texts, in parts that lie in files: a part is read where and
        when it is used. Only of a part with deleted texts there is a copy in memory.

        The content of every file is verified the first time.

        Raises:
            ValueError: names the file whose content is not what was written.
        """
        for rows, encoded in self._mapped():
            kept = np.setdiff1d(np.arange(rows.start, rows.stop), self.deleted)
            if len(kept) == len(rows):
                yield encoded
            elif len(kept):
                yield encoded.take(torch.from_numpy(kept - rows.start))

    def _mapped(self) -> Iterator[tuple[range, Representations]]:
        """Each shard, deleted texts included, with the rows of its texts."""
        for shard, stored in zip(self.facts.shards(), self._shards, strict=True):
            verify = stored.path not in self._verified
            encoded = map_shard(stored, self.facts.settings, verify=verify)
            self._verified.add(stored.path)
            yield shard.rows, encoded

    def representations(self) -> Representations:
        """The representations of all texts in memory, or in their file where there is one alone."""
        return Representations.concatenate(list(self.shards()))

    def documents(self) -> Documents:
        """All texts, to be indexed: they lie in their files and are read where an index reads them.
        What it makes of them is kept in the folder, and made again where texts were added or
        deleted since.

        Whoever reads them gets the errors of :meth:`shards`, and of
        :func:`~sparton.encoded.indexes.kept_arrays`.
        """
        kinds = frozenset(self.facts.settings.kinds)
        return Documents(kinds, self._runs, partial(kept_arrays, self.folder, self.digest))

    def _runs(self) -> list[Representations]:
        """All texts but deleted ones, in as few parts as need no copy."""
        found = []
        for rows, encoded in self._mapped():
            own = self.deleted[(self.deleted >= rows.start) & (self.deleted < rows.stop)]
            ends = [-1, *(own - rows.start).tolist(), len(rows)]
            found += [
                encoded.slice(before + 1, after)
                for before, after in pairwise(ends)
                if after > before + 1
            ]
        return found

    def check_model(self, encoder: "Encoder") -> None:
        """Refuse a model that has not encoded these texts.

        Raises:
            ValueError: names the folder and the model that has.
        """
        if encoder_digest(encoder) != self.facts.settings.model:
            raise ValueError(
                f"{self.folder} was encoded by another model, {self.facts.name} as it was then, in "
                "the width that it had: search it with that one, or encode again"
            )


def open_encoded(folder: str | Path) -> EncodedTexts:
    """A folder that ``sparton encode`` has completed.

    The sizes of all files are verified here, and that they belong together; the content of
    representations when they are read.

    Raises:
        FileNotFoundError: there is no such folder, or shards are missing.
        ValueError: names the file that is damaged or of something else.
    """
    folder = Path(folder)
    digest, opened = _digest(folder), None
    while opened is None or opened.digest != digest:  # another process has changed it meanwhile
        opened, digest = _open(folder, digest), _digest(folder)
    return opened


def _digest(folder: Path) -> str:
    """The digest of what a folder says of itself."""
    told = (path for path in (folder / FACTS, folder / DELETED) if path.is_file())
    return texts_digest(Seal.of(path).digest for path in told)


def _open(folder: Path, digest: str) -> EncodedTexts:
    facts = read_facts(folder)
    for number, part in enumerate(facts.parts):
        if fault := part.ids.fault(folder / ids_file(number)):
            raise ValueError(f"{folder} is damaged ({fault}): delete it and encode again")
    if missing := missing_shards(folder, facts):
        raise FileNotFoundError(
            f"{folder} is not complete: {len(missing)} of {len(facts.shards())} shards are "
            "missing; the sparton encode that began it goes on where it was"
        )
    shards = [inspect_shard(folder, shard, facts.settings) for shard in facts.shards()]
    return EncodedTexts(folder, facts, shards, read_deleted(folder, facts.rows), digest)


def delete_texts(folder: str | Path, ids: Collection[str]) -> EncodedTexts:
    """Delete texts of a complete folder. A small file notes which; their representations stay where
    they are, and whoever opens the folder from now on passes over them.

    Args:
        folder: of encoded texts.
        ids: of the texts; those of deleted ones change nothing.

    Raises:
        ValueError: no identifiers, one that no text has or had, or all texts; or a damaged folder.
        FileNotFoundError: from :func:`open_encoded`.
    """
    wanted = set(ids)
    if not wanted:
        raise ValueError(f"there are no ids of texts to delete from {folder}")
    place = Path(folder)
    read_facts(place)  # refuses what is no such folder
    with changing(place):
        found = open_encoded(place)
        named = {row: name for row, name in found.ids.stored() if name in wanted}
        if unknown := wanted.difference(named.values()):
            raise ValueError(
                f"{folder} has no text with the id {min(unknown)!r}: nothing was deleted"
            )
        deleted = found.deleted.tolist()
        rows = named.keys() - deleted
        if len(rows) == len(found):
            raise ValueError(f"no text of {folder} would be left: delete the folder itself")
        if rows:
            write_deleted(place, [*deleted, *rows])
        return open_encoded(place)


def missing_shards(folder: Path, facts: Facts) -> list[Shard]:
    """The shards that are not written yet."""
    return [shard for shard in facts.shards() if not shard_path(folder, shard).is_file()]
