"""Folders of embeddings in which something is wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparton.embedding_files import CacheFacts, note_progress, open_cache, seal_cache
from sparton.embeddings import EmbeddingTable, TextRows, text_keys

FACTS = CacheFacts(2, 8, 12, "mean", True, "", "", "digest")
VALUES = np.arange(10, dtype=np.float32).reshape(5, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "embeddings.npy", VALUES)
    np.save(tmp_path / "keys.npy", text_keys(["a", "b", "c", "d", "e"]))
    (tmp_path / "cache.json").write_text(json.dumps(FACTS._asdict()))
    note_progress(tmp_path, 5)
    seal_cache(tmp_path)
    return tmp_path


def flip(path: Path) -> None:
    """Change the lowest bit of the last number; the size stays."""
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def array(values: object) -> Callable[[Path], object]:
    return lambda path: np.save(path, values)


def facts(**changed: object) -> Callable[[Path], object]:
    return text(json.dumps(FACTS._asdict() | changed))


def pickled(path: Path) -> None:
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


def several(path: Path) -> None:
    np.savez(path.with_suffix(".npz"), VALUES)
    path.with_suffix(".npz").rename(path)


DEEP = "[" * 100_000
DAMAGE = {
    "one bit": ("embeddings.npy", flip),
    "NaN": ("embeddings.npy", array(np.full_like(VALUES, np.nan))),
    "cut": ("embeddings.npy", lambda path: os.truncate(path, 140)),
    "cut in the head": ("embeddings.npy", lambda path: os.truncate(path, 20)),
    "nothing": ("embeddings.npy", text("")),
    "no array": ("embeddings.npy", text("something else")),
    "no file": ("embeddings.npy", Path.unlink),
    "a folder": ("embeddings.npy", lambda path: (path.unlink(), path.mkdir())),
    "one dimension": ("embeddings.npy", array(VALUES.ravel())),
    "integers": ("embeddings.npy", array(VALUES.astype(int))),
    "fewer rows": ("embeddings.npy", array(VALUES[:4])),
    "objects": ("embeddings.npy", pickled),
    "several arrays": ("embeddings.npy", several),
    "a bit of a key": ("keys.npy", flip),
    "no keys": ("keys.npy", Path.unlink),
    "keys of another type": ("keys.npy", array(np.arange(5))),
    "fewer keys": ("keys.npy", array(text_keys(["a"]))),
    "a number for keys": ("keys.npy", array(np.uint64(3))),
    "facts of no JSON": ("cache.json", text("{")),
    "facts nested deeply": ("cache.json", text(DEEP)),
    "a list of facts": ("cache.json", text("[]")),
    "facts missing": ("cache.json", text("{}")),
    "more facts": ("cache.json", facts(color="red")),
    "another pooling": ("cache.json", facts(pooling="max")),
    "a text for a number": ("cache.json", facts(queries="2")),
    "a flag for a number": ("cache.json", facts(queries=True)),
    "a negative number": ("cache.json", facts(queries=-1)),
    "more queries than rows": ("cache.json", facts(queries=6)),
    "a list for a text": ("cache.json", facts(query_prompt=[])),
    "no progress": ("progress.json", Path.unlink),
    "progress of no JSON": ("progress.json", text("\x00")),
    "a list of progress": ("progress.json", text("[]")),
    "progress without rows": ("progress.json", text("{}")),
    "more rows than there are": ("progress.json", text('{"rows": 9}')),
    "a text for rows": ("progress.json", text('{"rows": "5"}')),
    "seals of another form": ("progress.json", text('{"rows": 5, "files": [3]}')),
    "seals of other files": ("progress.json", text('{"rows": 5, "files": {"a": [1, ""]}}')),
    "short seals": ("progress.json", text('{"rows": 5, "files": {"keys.npy": [1]}}')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_refused_by_name(folder: Path, damage: str) -> None:
    TextRows(folder), EmbeddingTable(folder)  # which can be read
    name, harm = DAMAGE[damage]
    harm(folder / name)
    with pytest.raises(ValueError, match=r"with sparton embed \(in Python, ") as caught:
        TextRows(folder), EmbeddingTable(folder)
    said = str(caught.value)
    assert str(folder) in said and "\n" not in said and len(said) < 600


def test_what_is_not_finite_is_not_sealed(folder: Path) -> None:
    values = VALUES.copy()
    values[3, 1] = np.inf
    np.save(folder / "embeddings.npy", values)
    note_progress(folder, 5)
    with pytest.raises(ValueError, match=r"row 3 of .*embeddings\.npy is not finite"):
        seal_cache(folder)
    assert open_cache(folder).seals is None
