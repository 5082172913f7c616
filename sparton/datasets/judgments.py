"""The judgments of a task: files of BEIR and of TREC, line by line."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sparton.datasets.files import DataFile, RecordError, decode_text, read_lines
from sparton.datasets.values import shown

# What the columns of a qrels file may be called in its first line, case, hyphens and so on aside.
HEADER = (
    {"queryid", "qid", "query", "topicid", "topic"},
    {"corpusid", "documentid", "docid", "did", "docno", "passageid", "pid", "corpus", "document"},
    {"score", "grade", "relevance", "rel", "label", "judgment"},
)
_GRADE = re.compile(r"\s*[-+]?[0-9]{1,9}\s*")
_LARGEST = 999_999_999


class Judgment(NamedTuple):
    """One line of a qrels file; ``number`` is that of the line, from 1."""

    query_id: str
    document_id: str
    grade: int
    number: int


def stop(place: str, fault: Exception | str) -> None:
    """Raise ValueError for what is wrong with the line at ``place``."""
    raise ValueError(f"{place}: {fault}")


def read_judgments(
    file: DataFile, reject: Callable[[str, Exception], None] = stop
) -> Iterator[Judgment]:
    """The lines of a qrels file, with a second column as TREC has it, or all without; ``reject`` is
    given the place of each that is malformed, and what is wrong with it."""
    columns = 0
    for place, (number, line) in enumerate(read_lines(file)):
        try:
            fields = decode_text(line).split("\t" if b"\t" in line else None)
            given = len(fields)
            if given not in (3, 4):
                raise RecordError(f"query id, document id and grade are expected, not {fields}")
            if columns not in (0, given):
                raise RecordError(f"the lines before have {columns} columns, and this has {fields}")
            if given == 4:
                del fields[1]
            if place == 0 and _is_header(fields):
                continue
            columns = given
            yield Judgment(fields[0], fields[1], parse_grade(fields[2]), number)
        except RecordError as error:
            reject(file.place(number), error)


def parse_grade(value: object) -> int:
    """A grade: an integer of at most nine digits, or a text that is one.

    Raises:
        RecordError: anything else, true and false among it.
    """
    number = int(value) if isinstance(value, str) and _GRADE.fullmatch(value) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or abs(number) > _LARGEST:
        raise RecordError(
            f"the grade {shown(value)} is not an integer of at most nine digits: "
            "correct the line, or name the columns query-id, corpus-id, score if it is a header"
        )
    return number


def _is_header(fields: list[str]) -> bool:
    names = (re.sub(r"[\W_]+", "", field).lower() for field in fields)
    return all(name in known for name, known in zip(names, HEADER, strict=True))
