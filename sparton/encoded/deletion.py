"""Encoded texts that count as deleted; their representations stay in their files."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparton.reading import Fields, read_json
from sparton.writing import replacing

DELETED = "deleted.json"


def read_deleted(folder: Path, rows: int) -> NDArray[np.int64]:
    """The numbers of deleted texts, ascending.

    Args:
        rows: how many texts there are, these included.

    Raises:
        ValueError: the file holds something else.
    """
    path = folder / DELETED
    if not path.is_file():
        return np.zeros(0, np.int64)
    fields = Fields.of(read_json(path), str(path))
    found = fields.need("rows", list)
    ordered = all(type(row) is int and 0 <= row < rows for row in found)
    if not ordered or sorted(set(found)) != found:
        fields.refuse("rows", f"a list of different numbers below {rows}, in order")
    return np.array(found, np.int64)


def write_deleted(folder: Path, rows: Iterable[int]) -> None:
    """Note the numbers of all deleted texts; without any, there is no file."""
    ordered = sorted(set(rows))
    if not ordered:
        (folder / DELETED).unlink(missing_ok=True)
        return
    with replacing(folder / DELETED, shared=True) as fresh:
        fresh.write_text(json.dumps({"rows": ordered}) + "\n")
