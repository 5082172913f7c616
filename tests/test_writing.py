"""Files that are there whole or not at all, with the permissions of any new file."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sparton.writing import replacing, replacing_folder


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask_whoever_writes(tmp_path, mask):
    before = os.umask(mask)
    try:
        with replacing(tmp_path / "one") as fresh:
            save_file({"x": torch.ones(1)}, fresh)
            assert mode(fresh) == 0o600, "safetensors' own, which another mode replaces"
        with replacing_folder(tmp_path / "folder") as fresh:
            save_file({"x": torch.ones(1)}, fresh / "two")
    finally:
        os.umask(before)
    assert {mode(tmp_path / "one"), mode(tmp_path / "folder" / "two")} == {0o666 & ~mask}


def test_what_a_dead_writer_left_does_not_stay_in_what_is_written(tmp_path):
    left = tmp_path / "one.tmp"
    left.write_text("half of something long")
    left.chmod(0o600)
    with replacing(tmp_path / "one") as fresh:
        assert fresh == left
        with fresh.open("r+") as file:
            file.write("new")
    assert (tmp_path / "one").read_text() == "new" and mode(tmp_path / "one") & 0o044


@pytest.mark.parametrize("writer", [replacing, replacing_folder])
def test_what_is_wrong_with_the_disk_is_said(tmp_path, monkeypatch, writer):
    for writable, said in (
        (True, r"one could not be written; [\d.,]+ MiB are free in .*\. Make room and run.*cause"),
        (False, rf"{tmp_path} is read-only here\. Make it writable and run"),
    ):
        monkeypatch.setattr(os, "access", lambda path, mode, answer=writable: answer)
        with pytest.raises(OSError, match=said), writer(tmp_path / "one"):
            raise OSError("cause")
    with pytest.raises(RuntimeError, match="another cause"), writer(tmp_path / "one"):
        raise RuntimeError("another cause")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0))
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    said = rf"{tmp_path} keeps no files\. Name another place"
    with pytest.raises(OSError, match=said), writer(tmp_path / "one"):
        raise OSError("cause")
    assert not [*tmp_path.iterdir()]


def test_a_link_to_a_folder_stays_one(tmp_path):
    place = tmp_path / "disk" / "model"
    place.mkdir(parents=True)
    (place / "old").write_text("")
    (tmp_path / "link").symlink_to(place)
    with replacing_folder(tmp_path / "link") as fresh:
        (fresh / "new").write_text("")
    assert (tmp_path / "link").is_symlink() and [x.name for x in place.iterdir()] == ["new"]
    assert [x.name for x in place.parent.iterdir()] == ["model"]
