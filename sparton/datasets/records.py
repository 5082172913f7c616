"""One training record, in any of the accepted shapes, to one canonical row.

Texts may come as the five shapes of the sentence-transformers embedding-training-data collection:
a pair ``[a, b]``, a list with negatives ``[a, p, n, ...]``, ``{"set": [...]}``,
``{"query", "pos"}`` and ``{"query", "pos", "neg"}``; or as objects and columns under the names in
:data:`TEXTS`. Records of ids have the same shapes under the names in :data:`IDS`.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

from sparton.datasets.files import RecordError
from sparton.datasets.teachers import EQUAL_TEACHERS, Teachers, share_of
from sparton.datasets.values import parse_json, parse_number, shown

NUMBERED_NEGATIVE = re.compile(r"negative_[0-9]{1,9}")
POSITIVE_SCORES = ("pos_scores", "pos_score", "positive_scores", "positive_score")
TEXT_IDS = ("_id", "id", "document_id", "query_id")
NEGATIVE_SCORES = ("neg_scores", "neg_score", "negative_scores", "negative_score")


class Kind(NamedTuple):
    """The names under which a record may hold its parts."""

    name: str
    query: tuple[str, ...]
    positives: tuple[str, ...]
    negatives: tuple[str, ...]
    documents: tuple[str, ...]


TEXTS = Kind(
    "text",
    query=("query", "anchor"),
    positives=("positive", "positives", "pos"),
    negatives=("negative", "negatives", "neg"),
    documents=("documents",),
)
IDS = Kind(
    "id",
    query=("query_id", "qid"),
    positives=("positive_id", "positive_ids", "pid"),
    negatives=("negative_id", "negative_ids", "nid"),
    documents=("document_ids",),
)


class Row(NamedTuple):
    """A canonical training record.

    Attributes:
        query: text or id; empty for a set, of which any two members are a query and a positive.
        positives: at least one.
        negatives: any number.
        scores: empty, or one teacher score per positive, then one per negative.
        teachers: how many teachers' scores each of ``scores`` combines.
        repeated: how many negatives were left out because they are positives of the record, too.
    """

    query: str
    positives: list[str]
    negatives: list[str]
    scores: list[float]
    teachers: int = 1
    repeated: int = 0


def parse_text(record: Any) -> tuple[str, str]:
    """Id and text (title, a space, body) of a record of a collection or of a set of queries."""
    keys = list(record) if isinstance(record, dict) else []
    name = next((key for key in TEXT_IDS if key in keys), None)
    if name is None or "text" not in record:
        raise RecordError(
            f"an object with an id ({' or '.join(TEXT_IDS)}) and a text is expected, "
            f"found {keys or repr(record)[:80]}"
        )
    title, text = record.get("title"), record["text"]
    if not isinstance(title, str | None) or not isinstance(text, str | None):
        raise RecordError("'title' and 'text' must hold text, or nothing")
    return _cell(record[name], IDS, name), f"{title or ''} {text or ''}".strip()


def parse_text_or_fields(record: Any) -> tuple[str, str]:
    """As :func:`parse_text`; a record may also be the fields of a line, an id and a text."""
    if not isinstance(record, list):
        return parse_text(record)
    if len(record) != 2:
        raise RecordError(
            f"an id and a text are expected, not {len(record)} of such fields: name them through "
            "columns"
        )
    return parse_text({"_id": record[0], "text": record[1]})


class Layout(NamedTuple):
    """Which keys of a record hold what."""

    query: str
    positives: str | None
    negatives: tuple[str, ...]
    documents: str | None
    scores: str | None
    positive_scores: str | None
    negative_scores: str | None


def parse_record(record: Any, kind: Kind, teachers: Teachers = EQUAL_TEACHERS) -> Row:
    """Bring one record into canonical form. Negatives that are its positives, too, are left out.

    Args:
        record: a list ``[query, positive, negatives ...]`` or a mapping.
        kind: :data:`TEXTS` or :data:`IDS`.
        teachers: how scores of several teachers are combined, and which negatives they leave.

    Raises:
        RecordError: says what is missing, empty, of the wrong type or of unequal length.
    """
    row = _parse(record, kind, teachers)
    others = [negative not in row.positives for negative in row.negatives]
    if not all(others):
        row = _with_negatives(row, others)._replace(repeated=others.count(False))
    return row if teachers.share is None else _without_near(row, teachers.share)


def _without_near(row: Row, share: float) -> Row:
    """A record without the negatives that do not score below a share of its positives."""
    if row.negatives and not row.scores:
        raise RecordError("no teacher scores, by which teachers.share leaves negatives out")
    count = len(row.positives)
    most = share_of(min(row.scores[:count]), share) if row.negatives else 0.0
    return _with_negatives(row, [score < most for score in row.scores[count:]])


def _with_negatives(row: Row, kept: list[bool]) -> Row:
    """A record with some of its negatives alone, and their scores."""
    count = len(row.positives)
    return row._replace(
        negatives=list(compress(row.negatives, kept)),
        scores=row.scores[:count] + list(compress(row.scores[count:], kept)),
    )


def _parse(record: Any, kind: Kind, teachers: Teachers) -> Row:
    if isinstance(record, list):
        if len(record) < 2:
            raise RecordError(
                f"a list of {len(record)} where [query, positive, negatives ...] is expected"
            )
        parts = ["query", "positive", *["negative"] * (len(record) - 2)]
        cells = [_cell(value, kind, part) for value, part in zip(record, parts)]
        return Row(cells[0], cells[1:2], cells[2:], [])
    if not isinstance(record, dict):
        raise RecordError(f"a {type(record).__name__} where a JSON list or object is expected")
    if "set" in record and kind is TEXTS:
        return _parse_set(record["set"])
    if "label" in record:
        _check_label(record["label"])
    return _parse_mapping(record, kind, _layout(tuple(record), kind), teachers)


def _check_label(label: Any) -> None:
    """Refuse a pair that is labelled as not relevant; labels that are no numbers say something
    else."""
    try:
        irrelevant = (label if isinstance(label, int) else float(label)) <= 0
    except (TypeError, ValueError):
        return
    if irrelevant:
        said = label if isinstance(label, str) else shown(label)
        raise RecordError(
            f"its label is {said}, which says that the two do not belong together: a record is a "
            "query and its positive, with others as negatives of the same record"
        )


def _parse_set(value: Any) -> Row:
    members = list(dict.fromkeys(_cells(value, TEXTS, "set")))
    if len(members) < 2:
        raise RecordError(f"a set needs two different texts, this one has {len(members)}")
    return Row("", members, [], [])


def _parse_mapping(
    record: Mapping[str, Any], kind: Kind, layout: Layout, teachers: Teachers
) -> Row:
    query = _cell(record[layout.query], kind, "query")
    if layout.documents:
        documents = _cells(record[layout.documents], kind, layout.documents)
        return _rank(
            query, documents, *teachers.combine(_scores(record, layout.scores, len(documents)))
        )
    assert layout.positives
    positives = _cells(record[layout.positives], kind, layout.positives)
    if not positives:
        raise RecordError(f"{layout.positives!r} is empty")
    negatives = [cell for name in layout.negatives for cell in _cells(record[name], kind, name)]
    if layout.scores:
        scores = _scores(record, layout.scores, len(positives) + len(negatives))
    elif layout.positive_scores:
        scores = _scores(record, layout.positive_scores, len(positives))
        if negatives:
            scores += _scores(record, layout.negative_scores, len(negatives))
    else:
        scores = []
    return Row(query, positives, negatives, *teachers.combine(scores))


def _rank(query: str, documents: list[str], scores: list[float], teachers: int) -> Row:
    """The document that the teacher scores highest is the positive, the first one of equals."""
    if not documents:
        raise RecordError("no documents")
    best = scores.index(max(scores))
    order = [best, *(place for place in range(len(documents)) if place != best)]
    return Row(
        query,
        [documents[best]],
        [documents[place] for place in order[1:]],
        [scores[place] for place in order],
        teachers,
    )


@lru_cache(maxsize=4096)
def _layout(keys: tuple[str, ...], kind: Kind) -> Layout:
    def only(names: tuple[str, ...]) -> str | None:
        found = [name for name in names if name in keys]
        if len(found) > 1:
            raise RecordError(
                f"{found[0]!r} and {found[1]!r} are names of the same part of a record: leave one "
                "of them out, or rename it through columns"
            )
        return found[0] if found else None

    negatives = tuple(key for key in keys if key in kind.negatives)
    numbered = sorted(
        (key for key in keys if NUMBERED_NEGATIVE.fullmatch(key)),
        key=lambda key: int(key.removeprefix("negative_")),
    )
    query = only(kind.query)
    relevant = only((*kind.positives, *kind.documents))
    documents = relevant if relevant in kind.documents else None
    if documents and (negatives or numbered):
        raise RecordError(
            f"{documents!r}, of which the highest scored is the positive, and "
            f"{(*negatives, *numbered)[0]!r}: leave one of them out"
        )
    scores, positive_scores = only(("scores", *NEGATIVE_SCORES)), only(("scores", *POSITIVE_SCORES))
    layout = Layout(
        query or "",
        None if documents else relevant,
        (*negatives, *numbered),
        documents,
        *(("scores", None, None) if scores == "scores" else (None, positive_scores, scores)),
    )
    if query is None or relevant is None:
        raise RecordError(
            f"the keys {list(keys)} lack a query ({' or '.join(kind.query)}) or its positive "
            f"({' or '.join(kind.positives)}, or {' or '.join(kind.documents)} with scores): "
            "name them through columns (what others hold is told by the first records of a file)"
        )
    return layout


def _cell(value: Any, kind: Kind, part: str) -> str:
    if kind is IDS and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RecordError(f"{part!r} holds a {type(value).__name__} where {kind.name} is expected")
    if not value or value.isspace():
        raise RecordError(f"{part!r} holds an empty {kind.name}")
    return value


def _cells(value: Any, kind: Kind, part: str) -> list[str]:
    """A text or id, a list of them, a list of ids written as JSON, or null for none."""
    if kind is IDS and isinstance(value, str) and value.startswith("["):
        value = _json_list(value, part)
    if isinstance(value, list):
        return [_cell(each, kind, part) for each in value]
    return [] if value is None else [_cell(value, kind, part)]


def _scores(record: Mapping[str, Any], name: str | None, expected: int) -> list[list[float]]:
    """For each document one score per teacher: a number, or a list of them."""
    if name is None:
        raise RecordError("some of the documents have teacher scores and others have none")
    value = record[name]
    if isinstance(value, str) and value.startswith("["):
        value = _json_list(value, name)
    values = value if isinstance(value, list) else [value]
    try:
        scores = [
            [parse_number(score) for score in (each if isinstance(each, list) else [each])]
            for each in values
        ]
    except RecordError as error:
        raise RecordError(f"{name!r} holds scores of which {error}") from error
    if len(scores) != expected:
        raise RecordError(
            f"{name!r} holds {len(scores)} scores for {expected} documents, each of which has one"
        )
    if not all(scores):
        raise RecordError(f"{name!r} holds an empty list of teacher scores")
    return scores


def _json_list(text: str, part: str) -> Any:
    try:
        return parse_json(text)
    except RecordError as error:
        raise RecordError(f"{part!r} starts like a list: {error}") from error
