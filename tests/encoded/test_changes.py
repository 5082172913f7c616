"""Texts that are added to encoded collections, and deleted."""

import fcntl
import json
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparton.cli.commands.delete import main as delete
from sparton.datasets.texts import TextList
from sparton.digests import Seal
from sparton.encoded import EncodedTexts, delete_texts, encode_collection, open_encoded
from sparton.encoded.deletion import write_deleted
from sparton.encoded.facts import check_place
from sparton.encoded.ids import write_ids
from sparton.encoded.shards import inspect_shard
from sparton.evaluation import load_retriever
from sparton.representations import Representations
from sparton.retriever import load
from tests.encoded.problems import files, make_texts

FIRST, SECOND = make_texts(20), make_texts(7, seed=1)


def encoded(model: Path, output: Path, texts: TextList, **settings: object) -> EncodedTexts:
    settings = {"rows_per_shard": 8, "progress": False} | settings
    return encode_collection(*load_retriever(model), texts, output, **settings)


def rows(encoded: Representations) -> list[list[float]]:
    """Dense rows, of sparse vectors and the sums of token vectors."""
    sums = [
        encoded.tokens.slice(row, row + 1).values.float().sum(0) for row in range(encoded.num_texts)
    ]
    return torch.cat([encoded.sparse.dense(), torch.stack(sums)], dim=1).tolist()


def test_added_texts_come_after_the_others_in_shards_of_their_own(model, tmp_path):
    first = rows(encoded(model, tmp_path / "docs", FIRST).representations())
    before = files(tmp_path / "docs")
    second = rows(encoded(model, tmp_path / "second", SECOND).representations())
    both = encoded(model, tmp_path / "docs", SECOND, append=True)
    assert rows(both.representations()) == first + second
    assert [*both.ids] == [*FIRST.take(range(20)).ids, *SECOND.take(range(7)).ids]
    assert [part.num_texts for part in both.shards()] == [8, 8, 4, 7]
    after = files(tmp_path / "docs")
    assert {name: after[name] for name in before if name != "encoding.json"} == {
        name: content for name, content in before.items() if name != "encoding.json"
    }
    # The same commands again change nothing.
    encoded(model, tmp_path / "docs", SECOND, append=True)
    encoded(model, tmp_path / "docs", FIRST)
    assert files(tmp_path / "docs") == after


def test_what_cannot_be_added_is_refused(model, tmp_path):
    encoded(model, tmp_path / "docs", FIRST)
    before = files(tmp_path / "docs")
    with pytest.raises(ValueError, match=r"holds 20 other texts: .* or add these to them by a"):
        encoded(model, tmp_path / "docs", SECOND)
    with pytest.raises(ValueError, match="the id '0-3' is there already: delete that text first"):
        encoded(model, tmp_path / "docs", TextList(["a", "b"], ["x", "0-3"]), append=True)
    with pytest.raises(ValueError, match="rows_per_shard=8 and not 4: set rows_per_shard=8 to go"):
        encoded(model, tmp_path / "docs", SECOND, append=True, rows_per_shard=4)
    with pytest.raises(ValueError, match=r"kinds=.'sparse', 'tokens'. and not .'sparse'.: set ki"):
        encoded(model, tmp_path / "docs", SECOND, append=True, kinds=["sparse"])
    assert files(tmp_path / "docs") == before
    (tmp_path / "docs" / "shards" / "00001.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="is not complete: 1 of 3 shards are missing"):
        encoded(model, tmp_path / "docs", SECOND, append=True)


def test_deleted_texts_are_passed_over_and_may_come_again(model, tmp_path, capsys):
    whole = encoded(model, tmp_path / "docs", FIRST)
    dense, names = rows(whole.representations()), [*whole.ids]
    assert len(delete_texts(tmp_path / "docs", ["0-0", "0-9", "0-8"])) == 17
    delete([str(tmp_path / "docs"), "--ids", *(f"0-{row}" for row in range(10, 16))])
    assert f"6 texts deleted, 11 are left in {tmp_path / 'docs'}" in capsys.readouterr().out
    found = open_encoded(tmp_path / "docs")
    kept = [*range(1, 8), *range(16, 20)]  # nothing of the second shard
    assert [*found.ids] == [names[row] for row in kept]
    assert [found.ids[row] for row in range(11)] == [*found.ids]
    assert rows(found.representations()) == [dense[row] for row in kept]
    assert [part.num_texts for part in found.shards()] == [7, 4]
    assert found.digest != whole.digest
    index = load(model, device="cpu").index(tmp_path / "docs")
    hits = index.search(FIRST.take([9]).texts, 20)[0]
    assert {hit.id for hit in hits} <= {*found.ids}
    again = encoded(model, tmp_path / "docs", TextList(["w1 w2"], ["0-9"]), append=True)
    assert again.ids[-1] == "0-9" and len(again) == 12
    (tmp_path / "gone.txt").write_bytes("\ufeff0-9\r\n0-1\n".encode())  # as Windows writes it
    delete([str(tmp_path / "docs"), "--file", str(tmp_path / "gone.txt")])
    assert "0-9" not in open_encoded(tmp_path / "docs").ids


def test_deleted_texts_are_brought_back_by_adding_theirs_again(model, tmp_path):
    docs = tmp_path / "docs"
    encoded(model, docs, FIRST)
    whole = encoded(model, docs, SECOND, append=True)
    before, dense = files(docs), rows(whole.representations())
    delete_texts(docs, ["0-3", "1-0", "1-6"])
    left = [row for row in range(27) if row not in (3, 20, 26)]
    assert rows(encoded(model, docs, SECOND).representations()) == [dense[row] for row in left]

    back = encoded(model, docs, SECOND, append=True)
    assert [*back.deleted] == [3] and {"1-0", "1-6"} < {*back.ids} and "0-3" not in back.ids
    assert rows(back.representations()) == dense[:3] + dense[4:]
    assert encoded(model, docs, FIRST, append=True).digest == whole.digest
    assert files(docs) == before

    delete_texts(docs, ["1-0", "1-6"])
    encoded(model, docs, TextList(["w1"], ["1-6"]), append=True)
    before = files(docs)
    with pytest.raises(ValueError, match="has another text with the id '1-6', added since that of"):
        encoded(model, docs, SECOND, append=True)
    assert files(docs) == before
    with pytest.raises(ValueError, match="docs holds 26 other texts: choose"):
        encoded(model, docs, TextList(["w1"], ["x"]))
    delete_texts(docs, ["1-6"])
    back = encoded(model, docs, SECOND, append=True)
    assert len(back) == 27 and [*back.deleted] == [27]


def test_texts_are_added_in_shards_as_large_as_those_there(model, tmp_path):
    encoded(model, tmp_path / "docs", FIRST)
    (tmp_path / "docs" / "shards" / "00001.safetensors").unlink()
    again = encoded(model, tmp_path / "docs", FIRST, rows_per_shard=None)
    assert [part.num_texts for part in again.shards()] == [8, 8, 4]
    both = encoded(model, tmp_path / "docs", make_texts(9, 1), append=True, rows_per_shard=None)
    assert [part.num_texts for part in both.shards()] == [8, 8, 4, 8, 1]


def test_what_a_process_that_died_has_left_is_swept(model, tmp_path):
    encoded(model, tmp_path / "docs", FIRST)
    before = files(tmp_path / "docs")
    shards = tmp_path / "docs" / "shards"
    (shards / "00001.safetensors").rename(shards / ".tmpAb12cd")  # as safetensors names its own
    old, fresh = (tmp_path / "docs" / f"ids.arrow.{name}.tmp" for name in ("0a1b2c3d", "4e5f6a7b"))
    for each in (old, fresh):
        each.write_text("")
    os.utime(old, (0, 0))
    encoded(model, tmp_path / "docs", FIRST)
    assert fresh.exists(), "another process may be writing it"
    fresh.unlink()
    assert files(tmp_path / "docs") == before


def test_a_folder_that_is_just_being_begun_is_no_other(tmp_path):
    (tmp_path / "ids.arrow").write_text("")
    (tmp_path / "encoding.json.0a1b2c3d.tmp").write_text("")
    assert not check_place(tmp_path)
    (tmp_path / "notes").write_text("")
    with pytest.raises(ValueError, match="holds no encoded texts"):
        check_place(tmp_path)


def test_a_folder_that_changes_while_it_is_opened_is_opened_as_it_is_then(
    model, tmp_path, monkeypatch
):
    gone = list(encoded(model, tmp_path / "docs", FIRST).ids)[3]

    def meanwhile(*arguments: object) -> object:
        monkeypatch.undo()
        found = inspect_shard(*arguments)
        delete_texts(tmp_path / "docs", [gone])
        return found

    monkeypatch.setattr("sparton.encoded.collection.inspect_shard", meanwhile)
    opened = open_encoded(tmp_path / "docs")
    assert len(opened) == len(FIRST) - 1 and gone not in list(opened.ids)
    assert opened.digest == open_encoded(tmp_path / "docs").digest


def test_without_locks_a_process_that_another_has_overtaken_goes_on(model, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("swept up")

    def overtaken(*_: object) -> None:
        monkeypatch.undo()
        encoded(model, tmp_path / "docs", FIRST)
        fail()

    no_locks = SimpleNamespace(LOCK_EX=fcntl.LOCK_EX, flock=fail)
    monkeypatch.setattr("sparton.encoded.claims.fcntl", no_locks)
    monkeypatch.setattr("sparton.encoded.folders.write_ids", fail)
    with pytest.raises(OSError, match="swept up"):
        encoded(model, tmp_path / "docs", FIRST)
    monkeypatch.setattr("sparton.encoded.folders.write_ids", overtaken)
    assert len(encoded(model, tmp_path / "docs", FIRST)) == 20


def test_an_id_that_was_deleted_counts_as_deleted_already(model, tmp_path, capsys):
    docs = tmp_path / "docs"
    encoded(model, docs, make_texts(3))
    delete([str(docs), "--ids", "0-1"])
    assert capsys.readouterr().out == f"1 text deleted, 2 are left in {docs}\n"
    delete([str(docs), "--ids", "0-1", "0-2"])
    assert capsys.readouterr().out == f"1 text deleted, 1 was already, 1 is left in {docs}\n"
    before = files(docs)
    delete([str(docs), "--ids", "0-2", "0-1", "0-1"])
    assert capsys.readouterr().out == f"0 texts deleted, 2 were already, 1 is left in {docs}\n"
    assert files(docs) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--file .*gone.txt: no such file"),
        (b"", "--file .*gone.txt holds no ids: write an id per line"),
        (b"\n\n", "--file .*gone.txt holds no ids: write an id per line"),
        (b"\xff\n", "--file .*gone.txt is not UTF-8 text: write an id per line"),
    ],
)
def test_a_file_without_ids_is_refused(content, message, tmp_path):
    if content is not None:
        (tmp_path / "gone.txt").write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=f"^{message}$"):
        delete([str(tmp_path / "docs"), "--file", str(tmp_path / "gone.txt")])


def test_what_cannot_be_deleted_is_refused(model, tmp_path):
    encoded(model, tmp_path / "docs", FIRST)
    before = files(tmp_path / "docs")
    with pytest.raises(ValueError, match=r"has no text with the id 'x': nothing was deleted$"):
        delete_texts(tmp_path / "docs", ["0-1", "x"])
    with pytest.raises(ValueError, match="there are no ids of texts to delete from"):
        delete_texts(tmp_path / "docs", [])
    with pytest.raises(ValueError, match=r"no text of .* would be left: delete the folder"):
        delete_texts(tmp_path / "docs", FIRST.take(range(20)).ids)
    assert files(tmp_path / "docs") == before
    for wrong in ([3, 1], [0, 0], [20], [-1], ["a"], "x"):
        (tmp_path / "docs" / "deleted.json").write_text(json.dumps({"rows": wrong}))
        with pytest.raises(ValueError, match=r"rows is .*, and must be a list"):
            open_encoded(tmp_path / "docs")


def test_changes_at_the_same_time_lose_none_of_them(model, tmp_path, monkeypatch):
    """Between what one has read and what it writes, the other has time to change the folder."""
    docs = tmp_path / "docs"
    names = [*encoded(model, docs, FIRST).ids]
    reading = threading.Barrier(2)

    def slowly(folder: Path, rows: object) -> None:
        with suppress(threading.BrokenBarrierError):
            reading.wait(0.5)  # until both have read, if they may
        write_deleted(folder, rows)

    monkeypatch.setattr("sparton.encoded.collection.write_deleted", slowly)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(delete_texts, docs, [name]) for name in names[:2]]:
            done.result()
    assert [*open_encoded(docs).ids] == names[2:]


def test_of_two_that_add_texts_at_the_same_time_one_is_refused_or_waits(
    model, tmp_path, monkeypatch
):
    docs, third = tmp_path / "docs", make_texts(7, seed=2)
    encoded(model, docs, FIRST)
    writing = threading.Barrier(2)
    retrievers = [load_retriever(model) for _ in range(2)]
    settings = {"rows_per_shard": 8, "progress": False, "append": True}

    def slowly(path: Path, ids: Iterable[str]) -> Seal:
        seal = write_ids(path, ids)
        with suppress(threading.BrokenBarrierError):
            writing.wait(0.5)
        return seal

    monkeypatch.setattr("sparton.encoded.folders.write_ids", slowly)
    with ThreadPoolExecutor(2) as threads:
        both = [
            threads.submit(encode_collection, *retriever, texts, docs, **settings)
            for retriever, texts in zip(retrievers, (SECOND, third), strict=True)
        ]
        errors = [str(each.exception()) for each in both if each.exception() is not None]
    assert all("is not complete" in error for error in errors), errors
    assert len(errors) < 2
    for texts in (SECOND, third):
        encoded(model, docs, texts, append=True)
    assert len(open_encoded(docs)) == 34
