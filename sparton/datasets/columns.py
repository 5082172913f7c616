"""What the columns of a file hold: told by their names, else by their order, as
sentence-transformers takes them."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from sparton.datasets.records import (
    IDS,
    NEGATIVE_SCORES,
    NUMBERED_NEGATIVE,
    POSITIVE_SCORES,
    TEXT_IDS,
    TEXTS,
    Kind,
)

_NAME = re.compile(r"[^\W\d][\w .:/()#-]{0,39}")
_MOST_WORDS = 3  # of a column's name
_NUMBER = re.compile(r"\s*[-+]?\d+([.,]\d+)*(e[-+]?\d+)?\s*", re.IGNORECASE)
_ADDRESS = re.compile(r"\s*(https?://|www\.)\S+\s*", re.IGNORECASE)
_NEGATIVE = re.compile(
    r"(hard_)?neg(ative)?s?(_(passage|document|doc|text|answer|(?P<id>id))s?)?_?\d*"
)
_SET = "set"  # of texts, any two of which are a query and its positive
# Columns that number rows or texts, or say where they are from. The first three are names that
# pandas gives the index that it writes.
_ABOUT = re.compile(
    r"|unnamed:_0|__index_level_\d+__|idx|index|row|nr|split|"
    r"(.*_)?([cdpqu]?ids?|doc_?(id|no)|uuid|guid|hash|ur[il])"
)


class Role(NamedTuple):
    """Something that a record has, and the columns that may hold it.

    Attributes:
        names: what a record calls it; columns of these names are taken as they are.
        aliases: other names, the likeliest first, in lower case with underscores.
    """

    names: tuple[str, ...]
    aliases: tuple[str, ...] = ()


class Schema(NamedTuple):
    """What the columns of a kind of records may be.

    Attributes:
        first, second: what every record has. Where no name tells, the first columns that can hold
            it are taken, in this order.
        others: what a record may have.
        negatives: names of columns that are negatives, of which there may be any number, by the
            name that a record gives them.
        kept: names that a record knows and that stand for no role of the table.
        instead: names of which one makes ``second`` needless.
        ids: whether the cells are ids, which may be numbers.
        keyed: whether ``first`` is an id, for which no other column is taken where ``second`` has a
            name.
    """

    first: Role
    second: Role
    others: tuple[Role, ...] = ()
    negatives: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    ids: bool = False
    keyed: bool = False


class Assignment(NamedTuple):
    """What the columns of a file were taken as.

    Attributes:
        renames: names in the file to names that records use, where they differ.
        optional: names in the file of columns whose cells may be empty.
        description: for the log.
    """

    renames: dict[str, str]
    optional: frozenset[str]
    description: str


def _examples(kind: Kind, query: tuple[str, ...], positive: tuple[str, ...]) -> Schema:
    return Schema(
        first=Role(kind.query, query),
        second=Role(kind.positives, positive),
        others=(Role(("scores",), ("score", "teacher_score", "teacher_scores", "similarity")),),
        negatives=kind.negatives,
        kept=(_SET, "label", *POSITIVE_SCORES, *NEGATIVE_SCORES),
        instead=kind.documents,
        ids=kind is IDS,
    )


TEXT_EXAMPLES = _examples(
    TEXTS,
    ("question", "query_text", "search_query", "prompt", "sentence1", "sentence_1"),
    (
        "passage", "positive_passage", "passage_text", "document", "document_text", "doc",
        "context", "text", "answer", "response", "body", "content", "contents", "abstract",
        "sentence2", "sentence_2",
    ),
)  # fmt: skip
ID_EXAMPLES = _examples(IDS, ("query-id",), ("corpus-id", "document_id", "doc_id", "docid"))
COLLECTION = Schema(
    first=Role(
        TEXT_IDS, ("docid", "doc_id", "docno", "pid", "passage_id", "corpus_id", "qid", "topic_id")
    ),
    second=Role(
        ("text",), ("contents", "content", "body", "passage", "document", "query", "question")
    ),
    others=(Role(("title",), ("headline",)),),
    keyed=True,
)


def assign(names: Sequence[str], texts: Collection[str], schema: Schema) -> Assignment:
    """Say which column of a file holds what.

    Names that records use themselves go before aliases, and both before order. Where neither of the
    two required parts is named, the columns are taken in order: the first, the second, and
    negatives. Else a part that no name tells, but for an id, is the first column left that holds
    texts, and columns of other names are not used.

    Args:
        names: of the file's columns, in order.
        texts: those of them that can be taken by their order alone.
        schema: what is looked for.
    """
    found: dict[str, str] = {}  # a column to what records call it
    named = [_find(role, names, found) for role in (schema.first, schema.second)]
    for role in schema.others:
        _find(role, names, found)
    negatives = [name for name in names if name not in found and _is_negative(name, schema)]
    free = [
        name
        for name in names
        if name not in (*found, *negatives, *schema.kept, *schema.instead)
        and name in texts
        and not _ABOUT.fullmatch(_plain(name))
    ]
    needed = [schema.first, schema.second]
    for place, role in enumerate(needed):
        whole = place == 1 and any(name in names for name in schema.instead)
        whole |= place == 0 and schema.keyed and named[1]
        if not named[place] and free and not whole:
            found[free.pop(0)] = role.names[0]
    if schema.negatives and not any(named) and not negatives:
        negatives = free
    return _assignment(names, found, negatives, schema)


def _find(role: Role, names: Sequence[str], found: dict[str, str]) -> bool:
    """Whether a name tells the column of a role, which is added to ``found``."""
    for name in role.names:
        if name in names:
            found[name] = name
            return True
    plain = {_plain(name): name for name in reversed(names) if name not in found}
    for alias in (*role.names, *role.aliases):
        if _plain(alias) in plain:
            found[plain[_plain(alias)]] = role.names[0]
            return True
    return False


def _assignment(
    names: Sequence[str], found: Mapping[str, str], negatives: Sequence[str], schema: Schema
) -> Assignment:
    renames = {name: part for name, part in found.items() if name != part}
    known = (*schema.negatives, *filter(NUMBERED_NEGATIVE.fullmatch, negatives))
    own = {name for name in negatives if name in known}
    numbers = (f"negative_{number}" for number in count(1))
    fresh = (name for name in numbers if name not in own)
    renames |= {name: next(fresh) for name in negatives if name not in own}
    kept = [name for name in names if name in (*schema.kept, *schema.instead)]
    said = [name if name == part else f"{name} as {part}" for name, part in found.items()]
    if negatives:
        said.append(f"{', '.join(negatives)} as negatives")
    unused = [repr(name) for name in names if name not in (*found, *negatives, *kept)]
    description = ", ".join(said + kept)
    if unused:
        description += f"; not used: {', '.join(unused)}"
    return Assignment(renames, frozenset(negatives), description)


def _is_negative(name: str, schema: Schema) -> bool:
    if name in schema.negatives:
        return True
    told = _NEGATIVE.fullmatch(_plain(name)) if schema.negatives else None
    return told is not None and (schema.ids or told["id"] is None)  # ids are no texts


def is_whole(names: Collection[object], schema: Schema) -> bool:
    """Whether parts of these names are all that a record must have. A set stands for all."""
    if _SET in names and _SET in schema.kept:
        return True
    first, second = schema.first.names, (*schema.second.names, *schema.instead)
    return any(name in names for name in first) and any(name in names for name in second)


def check_renames(
    place: str, given: Mapping[str, str], names: Collection[str], schema: Schema
) -> None:
    """Refuse to rename columns that there are not, or to what no record knows.

    Args:
        place: where the names are, for the message.
        given: names in the file to those that records use.
        names: of the file's columns.
        schema: what records may have.

    Raises:
        ValueError: names the column or the part.
    """
    there = ", ".join(map(repr, names))
    for name, part in given.items():
        if name not in names:
            raise ValueError(
                f"{place}: columns renames {name!r}, which is none of the columns {there}"
            )
        if not _is_known(part, schema):
            roles = (schema.first, schema.second, *schema.others)
            parts = [*(each for role in roles for each in role.names), *schema.negatives]
            raise ValueError(
                f"{place}: columns takes {name!r} as {part!r}, which no record has: parts are "
                f"{', '.join(parts)}"
            )


def is_header(
    fields: Sequence[str], following: Iterable[Sequence[str]], schema: Schema, *, assumed: bool
) -> bool:
    """Whether the first line of a file names its columns.

    It does if all its fields are known names, some of which may be empty, as spreadsheets leave
    those of columns without content. Unknown ones are names if they differ and are short words
    while most of the next lines have something longer; where those look alike, nobody can tell. Nor
    where a line is an id and a text, which may be short, and none of its fields is a known name.

    Args:
        fields: of the first line.
        following: the fields of some lines below it.
        schema: the columns that are known.
        assumed: the answer where nobody can tell.
    """
    if not all(map(_like_a_name, fields)):
        return False
    if all(_is_known(field, schema) for field in fields):
        return True
    plain = [_plain(field) for field in fields if field.strip()]
    if schema.ids or len(set(plain)) < len(plain):
        return False
    if schema.keyed and not any(_is_known(field, schema) for field in fields if field.strip()):
        return assumed
    longer = [not all(map(_like_a_name, line)) for line in following]
    return sum(longer) > len(longer) / 2 or assumed


def _is_known(name: str, schema: Schema) -> bool:
    roles = (schema.first, schema.second, *schema.others)
    names = {_plain(each) for role in roles for each in (*role.names, *role.aliases)}
    plain = _plain(name)
    return (
        plain in names
        or name in (*schema.kept, *schema.instead)
        or _is_negative(name, schema)
        or (not schema.ids and _ABOUT.fullmatch(plain) is not None)
    )


def holds_text(values: Iterable[Any], schema: Schema) -> bool:
    """Whether some of a column's values are texts, or lists of texts, and none is anything else.
    Addresses of the web may stand among them and are none themselves, unless they may be ids."""
    kinds = {_kind(value) for value in values} - {"nothing"}
    if schema.keyed:
        return bool(kinds) and kinds <= {"text", "address"}
    return kinds - {"address"} == {"text"}


def _kind(value: Any) -> str:
    if value is None or value == "" or value == []:
        return "nothing"
    if isinstance(value, list):
        kinds = {_kind(each) for each in value}
        if not kinds <= {"text", "address"}:
            return "other"
        return "text" if "text" in kinds else "address"
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return "other"
    return "address" if _ADDRESS.fullmatch(value) else "text"


def _like_a_name(field: str) -> bool:
    field = field.strip()
    if not field:
        return True
    short = len(field.split()) <= _MOST_WORDS
    return short and _NAME.fullmatch(field) is not None and field[-1] not in ".:"


def _plain(name: str) -> str:
    """A name as aliases are written: ``questionText`` and ``Question text`` are question_text."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s\-.]+", "_", parted).lower()
