"""The judgments of a task: files of BEIR and of TREC, line by line."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from sparton.datasets.files import DataFile, RecordError, decode_text, read_lines

# What the columns of a qrels file may be called in its first line, case, hyphens and so on aside.
HEADER = (
    {"queryid", "qid", "query", "topicid", "topic"},
    {"corpusid", "documentid", "docid", "did", "docno", "passageid", "pid", "corpus", "document"},
    {"score", "grade", "relevance", "rel", "label", "judgment"},
)


class Judgment(NamedTuple):
    """One line of a qrels file; ``number`` is that of the line, from 1."""

    query_id: str
    document_id: str
    grade: int
    number: int


def read_judgments(file: DataFile) -> Iterator[Judgment]:
    """The lines of a qrels file."""
    for number, line in read_lines(file):
        place = file.place(number)
        try:
            fields = decode_text(line).split("\t" if b"\t" in line else None)
        except RecordError as error:
            raise ValueError(f"{place}: {error}") from error
        if len(fields) == 4:
            del fields[1]
        if len(fields) != 3:
            raise ValueError(f"{place}: query id, document id and grade are expected, not {fields}")
        query_id, document_id, grade = fields
        try:
            yield Judgment(query_id, document_id, int(grade), number)
        except ValueError as error:
            if number == 1 and _is_header(fields):
                continue
            raise ValueError(
                f"{place}: the grade {grade!r} is not an integer: correct the line, or name the "
                "columns query-id, corpus-id, score if it is a header"
            ) from error


def _is_header(fields: list[str]) -> bool:
    names = (re.sub(r"[\W_]+", "", field).lower() for field in fields)
    return all(name in known for name, known in zip(names, HEADER, strict=True))
