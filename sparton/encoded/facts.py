"""What a folder of encoded texts says of itself, in ``encoding.json``.

N texts, V terms, E width of a token's vector, D of a text's.
"""

import json
from pathlib import Path
from typing import NamedTuple, cast

from sparton.arguments import ArgumentError
from sparton.digests import Seal, texts_digest
from sparton.models.places import ENCODED
from sparton.packing import ranges_of
from sparton.reading import Fields, read_json
from sparton.representations import KINDS
from sparton.retrieval.encoding import AUTOCAST
from sparton.retrieval.storing import VECTOR_DTYPES, VectorDtype
from sparton.types import SIDES, Kind, Side
from sparton.writing import replacing

FACTS, SHARDS = ENCODED, "shards"
_REMEDY = "delete the folder and encode again"
_FIRST = ("model", "side", "kinds")  # from which other settings follow


class Settings(NamedTuple):
    """How texts were encoded.

    Attributes:
        side: as queries or as documents.
        kinds: the halves of representations that are stored.
        sparse_width: V; 0 without sparse vectors.
        token_width: E; 0 without token vectors.
        dense_width: D; 0 without dense vectors.
        max_terms: of how many terms a text keeps the weights, the largest; None for all.
        vector_dtype: in which token vectors and dense vectors are stored.
        pool_factor: of so many tokens of a document one vector is stored; 1 for all.
        length: tokens at which texts were cut.
        prompt: put before the texts.
        precision: in which the model ran.
        model: digest of the model, see :func:`~sparton.encoded.identity.encoder_digest`.
        rows_per_shard: texts of a shard; the last one of each part may have fewer.
    """

    side: Side
    kinds: tuple[Kind, ...]
    sparse_width: int
    token_width: int
    dense_width: int
    max_terms: int | None
    vector_dtype: VectorDtype
    pool_factor: float
    length: int
    prompt: str
    precision: str
    model: str
    rows_per_shard: int

    def unlike(self, other: "Settings") -> list[str]:
        """Names of the settings that differ; of the model, the side or the kinds alone where one of
        these does, as others follow from it."""
        found = [name for name in self._fields if getattr(self, name) != getattr(other, name)]
        return next(([name] for name in _FIRST if name in found), found)


class Part(NamedTuple):
    """Texts that were added together.

    Attributes:
        source: digest of their ids and texts, see :func:`~sparton.digests.records_digest`.
        rows: how many there are.
        ids: the seal of the file of their ids.
    """

    source: str
    rows: int
    ids: Seal


class Shard(NamedTuple):
    """Some consecutive texts, whose representations are one file.

    Attributes:
        number: of the shard, from 0.
        part: number of the part.
        rows: of the texts, counted through all parts.
        start: the first of them, counted within its part.
        content: digest of what it must hold: settings, the part's texts, and which of them.
    """

    number: int
    part: int
    rows: range
    start: int
    content: str

    @property
    def name(self) -> str:
        return f"{self.number:05d}.safetensors"


class Facts(NamedTuple):
    """All that ``encoding.json`` says.

    Attributes:
        settings: how texts were encoded.
        parts: the texts in their order, at least one part.
        name: of the model when it was read; it may have moved since.
    """

    settings: Settings
    parts: tuple[Part, ...]
    name: str

    @property
    def rows(self) -> int:
        """N, deleted texts included."""
        return sum(part.rows for part in self.parts)

    def shards(self) -> list[Shard]:
        """All shards in their order, written or not."""
        found: list[Shard] = []
        first = 0
        for number, part in enumerate(self.parts):
            for rows in ranges_of(part.rows, self.settings.rows_per_shard):
                span = range(first + rows.start, first + rows.stop)
                said = [json.dumps(self.settings), part.source, str(rows), str(span)]
                found.append(Shard(len(found), number, span, rows.start, texts_digest(said)))
            first += part.rows
        return found

    def write(self, folder: Path) -> None:
        """Write them, all at once."""
        content = {
            **self.settings._asdict(),
            "rows": self.rows,
            "parts": [part._asdict() | {"ids": list(part.ids)} for part in self.parts],
            "name": self.name,
        }
        with replacing(folder / FACTS, shared=True) as fresh:
            fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def ids_file(number: int) -> str:
    """The file with the ids of a part, in Arrow's format."""
    return f"ids-{number}.arrow" if number else "ids.arrow"


def read_facts(folder: Path) -> Facts:
    """What a folder says of itself.

    Raises:
        FileNotFoundError: it holds no encoded texts.
        ValueError: names the file and what is wrong in it.
    """
    path = folder / FACTS
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no encoded texts ({FACTS} is missing): write them with sparton encode"
        )
    fields = Fields.of(read_json(path), str(path))
    settings = Settings(
        side=cast(Side, _one_of(fields, "side", SIDES)),
        kinds=tuple(cast(list[Kind], fields.strings("kinds") or [])),
        sparse_width=fields.need("sparse_width", int),
        token_width=fields.need("token_width", int),
        dense_width=fields.need("dense_width", int),
        max_terms=fields.count("max_terms"),
        vector_dtype=cast(VectorDtype, _one_of(fields, "vector_dtype", VECTOR_DTYPES)),
        pool_factor=fields.need("pool_factor", float),
        length=fields.need("length", int),
        prompt=fields.need("prompt", str),
        precision=_one_of(fields, "precision", tuple(AUTOCAST)),
        model=fields.need("model", str),
        rows_per_shard=fields.count("rows_per_shard") or fields.refuse("rows_per_shard", "a count"),
    )
    widths = settings.sparse_width, settings.token_width, settings.dense_width
    if {*settings.kinds} != {kind for kind, width in zip(KINDS, widths) if width > 0}:
        fields.refuse("kinds", f"a list of those of {' and '.join(KINDS)} that have a width")
    parts = tuple(_part(each, str(path)) for each in fields.need("parts", list))
    facts = Facts(settings, parts, fields.need("name", str))
    if not parts or facts.rows != fields.need("rows", int):
        fields.refuse("rows", "the sum of the rows of the parts")
    return facts


def _one_of(fields: Fields, key: str, values: tuple[str, ...]) -> str:
    value = fields.need(key, str)
    if value not in values:
        fields.refuse(key, " or ".join(values))
    return value


def _part(content: object, place: str) -> Part:
    fields = Fields.of(content, f"{place}: parts")
    rows, seal = fields.count("rows"), fields.need("ids", list)
    if rows is None or [type(each) for each in seal] != [int, str]:
        fields.refuse("ids", "the size and the digest of a file, beside rows from 1 on")
    return Part(fields.need("source", str), rows, Seal(*seal))


def check_place(output: Path) -> bool:
    """Whether a folder holds encoded texts; False where there is none, or an empty one.

    Raises:
        ArgumentError: it holds something else.
    """
    if (output / FACTS).is_file():
        return True
    held = sorted(each.name for each in output.iterdir()) if output.is_dir() else []
    if FACTS in held:  # since then
        return True
    # A worker that was killed, or another that is about to, has written ids, and facts in part.
    others = [name for name in held if not name.startswith((ids_file(0), f"{FACTS}."))]
    if others or (output.exists() and not output.is_dir()):
        raise ArgumentError(
            "{} is there and holds no encoded texts: choose another {output:name}",
            output,
            output=output,
        )
    return False
