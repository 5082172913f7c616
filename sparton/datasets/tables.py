"""The records of a file in any format, with the number of their line and the names of their parts.

A file in which lines have no names gives lists, any other one mappings.
"""

import csv
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from textwrap import shorten
from typing import Any, NamedTuple

from sparton.arguments import ArgumentError
from sparton.datasets.column_files import COLUMN_FORMATS, count_rows, read_rows
from sparton.datasets.columns import (
    Schema,
    assign,
    check_renames,
    holds_text,
    is_header,
    is_whole,
)
from sparton.datasets.files import (
    Advance,
    DataFile,
    RecordError,
    decode_text,
    read_all_lines,
    read_lines,
)
from sparton.datasets.values import decode_json

Columns = Sequence[str] | Mapping[str, str]
Numbered = Iterator[tuple[int, Any]]

_SAMPLE = 20  # records that are looked at before the first is given
_LONGEST_SHOWN = 100  # characters of a record
_DELIMITERS = ",;\t"

logger = logging.getLogger(__name__)


class Table(NamedTuple):
    """The records of one file.

    Attributes:
        records: the number of each and its raw form.
        decode: raw form to record; raises RecordError for what cannot be read.
        description: what the columns were taken as.
        notice: what a user may want to correct; empty for nothing.
    """

    records: Numbered
    decode: Callable[[Any], Any]
    description: str
    notice: str = ""


def open_table(
    file: DataFile, form: str, columns: Columns | None, schema: Schema, advance: Advance
) -> Table:
    """Begin to read a file.

    Args:
        file: where the records are.
        form: jsonl, tsv, csv, parquet or arrow.
        columns: names in the file to those that records use; for a file without a header, the names
            of its columns in order.
        schema: what columns may hold.
        advance: is told the bytes read from disk.

    Raises:
        ValueError: a damaged file, or ``columns`` that it does not have.
    """
    table = _open(file, form, columns, schema, advance)
    if table.notice:
        logger.info("%s: %s", file.name, table.notice)
    return table


def count_records(
    file: DataFile, form: str, columns: Columns | None, schema: Schema, advance: Advance
) -> int:
    """How many records :func:`open_table` would give, well-formed or not. The file is read for it,
    but for Parquet and Arrow, which say it."""
    if form in COLUMN_FORMATS:
        return count_rows(file, form)
    return sum(1 for _ in _open(file, form, columns, schema, advance).records)


def _open(
    file: DataFile, form: str, columns: Columns | None, schema: Schema, advance: Advance
) -> Table:
    if form in ("tsv", "csv"):
        return _delimited(file, form, columns, schema, advance)
    given = dict(columns) if isinstance(columns, Mapping) else {}
    if form in COLUMN_FORMATS:
        return _objects(file, read_rows(file, form, advance), lambda row: row, given, schema)
    lines = read_lines(file, advance)
    sample = list(islice(lines, 2))
    lines = chain(sample, lines)
    if sample and file.name.lower().removesuffix(".gz").endswith(".json") and _begins_array(sample):
        return _objects(file, _array(file, advance), decode_json, given, schema)
    return _objects(file, lines, decode_json, given, schema)


def _objects(
    file: DataFile,
    records: Numbered,
    decode: Callable[[Any], Any],
    given: Mapping[str, str],
    schema: Schema,
) -> Table:
    """Records that name their parts themselves: some of the first tell how. Of keys that only later
    ones have, the names alone tell."""
    sample = list(islice(records, _SAMPLE))
    seen = []
    for _, raw in sample:
        try:
            record = decode(raw)
        except RecordError:
            continue  # which is reported in its turn
        if isinstance(record, dict):
            seen.append(record)
    keys = dict.fromkeys(key for record in seen for key in record).keys()
    if seen:
        check_renames(file.name, given, keys, schema)
    known = [{given.get(key, key): value for key, value in record.items()} for record in seen]
    names = list(dict.fromkeys(key for record in known for key in record))
    texts = [
        name
        for name in names
        if schema.ids or holds_text((record.get(name) for record in known), schema)
    ]
    assigned = assign(names, texts, schema)

    @lru_cache(maxsize=64)
    def renames_with(others: tuple[str, ...]) -> dict[str, str]:
        later = assign([*names, *others], texts, schema).renames
        found = assigned.renames | {name: later[name] for name in others if name in later}
        return found | {name: found.get(called, called) for name, called in given.items()}

    usual = renames_with(())

    def read(raw: Any) -> Any:
        record = decode(raw)
        if not isinstance(record, dict):
            return record
        whole = record.keys() <= keys
        renames = usual if whole else renames_with(tuple(key for key in record if key not in keys))
        if not renames:
            return record
        renamed = {renames.get(key, key): value for key, value in record.items()}
        if len(renamed) < len(record):
            parts = [renames.get(key, key) for key in record]
            twice = [key for key, part in zip(record, parts) if parts.count(part) > 1]
            raise RecordError(f"{twice} are taken as the same part: leave all but one out")
        if not is_whole(renamed, schema) and not is_whole(record, schema):
            return record  # which is refused, by the names that its user knows
        return renamed

    return Table(chain(sample, records), read, assigned.description)


def _delimited(
    file: DataFile, form: str, columns: Columns | None, schema: Schema, advance: Advance
) -> Table:
    """Lines of fields, below a header or without one."""
    if form == "tsv":
        records: Numbered = read_lines(file, advance)
        fields_of: Callable[[Any], list[str]] = _tabbed
    else:
        records, fields_of = _csv(file, advance), _checked
    sample = list(islice(records, _SAMPLE + 1))
    records = chain(sample, records)
    rows = [_shown(fields_of, raw) for _, raw in sample]
    if form == "tsv" and rows and all(len(row) == 1 and {*",;"} & {*row[0]} for row in rows):
        raise ArgumentError(
            "{} has no tab in its first lines, by which .tsv and .txt are read: {format} if commas "
            "or semicolons part them",
            file.name,
            format="csv",
        )
    given = dict(columns) if isinstance(columns, Mapping) else {}
    names = list(columns) if columns and not given else None
    first = [field.strip() for field in rows[0]] if rows else []
    if rows and given and not any(field in given for field in first):
        raise ValueError(
            f"{file.place(sample[0][0])}: none of {list(given)}, which columns renames, is in the "
            f"header {first}; without a header: columns=[query,positive,...], a list of all"
        )
    if rows and names is None:
        csv_has_one = form == "csv"
        if given or is_header(first, rows[1:], schema, assumed=csv_has_one):
            names = first
    notice = ""
    if rows and first == names:
        next(records)
        rows = rows[1:]
    elif rows:
        shown = shorten(" | ".join(rows[0]), _LONGEST_SHOWN)
        notice = f"no header, its first record is: {shown}"
    if names is None:
        return Table(records, fields_of, _in_order(schema, rows), notice)
    check_renames(file.name, given, names, schema)
    names = [given.get(name, name) for name in names]
    called = [name for name in names if name]
    if len(set(called)) < len(called):
        raise ValueError(f"{file.name}: a column of {names} occurs twice: give each a name")
    return _named(records, fields_of, rows, names, schema)._replace(notice=notice)


def _in_order(schema: Schema, rows: Sequence[Sequence[str]]) -> str:
    """What is said of fields without names."""
    parts = [schema.first.names[0], schema.second.names[0]]
    if schema.negatives and any(len(row) > 2 for row in rows):
        parts.append("negatives")
    return f"in order: {', '.join(parts)}"


def _named(
    records: Numbered,
    fields_of: Callable[[Any], list[str]],
    rows: Sequence[Sequence[str]],
    names: Sequence[str],
    schema: Schema,
) -> Table:
    """Lines whose fields have names; ``rows`` are some of them."""
    texts = [
        name
        for place, name in enumerate(names)
        if schema.ids or holds_text((row[place] for row in rows if place < len(row)), schema)
    ]
    assigned = assign(names, texts, schema)
    parts = [assigned.renames.get(name, name) for name in names]
    if not is_whole(parts, schema) and not is_whole(names, schema):
        parts = list(names)  # of records that are refused, by the names that their user knows
    optional = [name in assigned.optional for name in names]

    def read(raw: Any) -> dict[str, str | None]:
        fields = fields_of(raw)
        if len(fields) != len(names):
            unit = "tab-separated fields" if isinstance(raw, bytes) else "fields"
            most = "; a text of TSV has no tab, as one of CSV, JSON or Parquet may" * (
                isinstance(raw, bytes) and len(fields) > len(names)
            )
            raise RecordError(
                f"{len(names)} {unit} expected, not {len(fields)}: {list(names)}{most}"
            )
        return {
            part: None if may_lack and not field else field
            for part, field, may_lack in zip(parts, fields, optional)
        }

    return Table(records, read, assigned.description)


def _shown(fields_of: Callable[[Any], list[str]], raw: Any) -> list[str]:
    """Fields of a record to look at, whatever is wrong with it."""
    try:
        return fields_of(raw)
    except RecordError:
        return [repr(raw)]


def _tabbed(line: bytes) -> list[str]:
    return decode_text(line).split("\t")


def _checked(fields: list[str] | csv.Error) -> list[str]:
    """The fields of a line of CSV that could be read."""
    if isinstance(fields, csv.Error):
        told = "a quote within quotes is written twice"
        if "new-line" in str(fields):
            told = "lines end in a line feed, and texts with a carriage return stand in quotes"
        raise RecordError(f"not CSV: {fields} ({told})")
    if not "".join(fields).isascii():
        decode_text("\n".join(fields).encode(errors="surrogateescape"))
    return fields


def _csv(file: DataFile, advance: Advance) -> Iterator[tuple[int, list[str] | csv.Error]]:
    """The number of each record's first line and its fields, which may hold line breaks."""
    csv.field_size_limit(sys.maxsize)  # of all of Python, and no text is too long
    lines = (
        line.decode(errors="surrogateescape") + "\n" for _, line in read_all_lines(file, advance)
    )
    first = next(lines, "")
    blank = 0  # lines before the first with content, which tells the delimiter
    while first.isspace() and (line := next(lines, "")):
        first, blank = line, blank + 1
    delimiter, spaced = _dialect(first)
    reader = csv.reader(
        chain(["\n"] * blank, [first], lines),
        delimiter=delimiter,
        skipinitialspace=spaced,
        strict=True,
    )
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, error
            continue
        written = "".join(fields)
        if written and not written.isspace():
            yield number, fields


def _dialect(line: str) -> tuple[str, bool]:
    """The first of the delimiters that parts a line, as spreadsheets of other countries write
    semicolons, and whether a space follows each, which then belongs to it and not to a text."""
    for delimiter in _DELIMITERS:
        try:
            others = next(csv.reader([line], delimiter=delimiter))[1:]
        except csv.Error:
            continue
        if others:
            return delimiter, all(field.startswith(" ") for field in others)
    return _DELIMITERS[0], False


def _begins_array(sample: Sequence[tuple[int, bytes]]) -> bool:
    """Whether a file is one JSON list of records, not a record on each line."""
    first = sample[0][1].lstrip()
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return first.startswith(b"[")
    return isinstance(value, list) and bool(value) and isinstance(value[0], list | dict)


def _array(file: DataFile, advance: Advance) -> Iterator[tuple[int, bytes]]:
    """The elements of the list that is the whole file, with the number of the line each begins in.

    Raises:
        ValueError: what is not JSON, or not UTF-8, with its line.
    """
    lines = []
    for number, content in read_all_lines(file, advance):
        try:
            lines.append(decode_text(content))
        except RecordError as error:
            raise ValueError(f"{file.place(number)}: {error}") from error
    text = "\n".join(lines)
    decoder = json.JSONDecoder()
    place, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("["))
    expected = ""  # between elements, after the first
    while True:
        start = _past(" \t\r\n", text, place)
        if text[start : start + 1] == "]":
            end = _past(" \t\r\n", text, start + 1)
            if end < len(text):
                line += text.count("\n", place, end)
                raise ValueError(f"{file.place(line)}: something stands after the list: put it in")
            return
        if not text.startswith(expected, start):
            line += text.count("\n", place, start)
            raise ValueError(f"{file.place(line)}: the list is not JSON: a comma or ] is expected")
        start = _past(" \t\r\n", text, start + len(expected))
        line += text.count("\n", place, start)
        try:
            _, place = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file.place(line)}: the list is not JSON: {error}") from error
        yield line, text[start:place].encode()
        line += text.count("\n", start, place)
        expected = ","


def _past(characters: str, text: str, place: int) -> int:
    """The first place from ``place`` on where none of the characters stands."""
    while place < len(text) and text[place] in characters:
        place += 1
    return place
