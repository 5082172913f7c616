"""How runs end: which errors are a lack of memory, and that the first to speak is heard."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from sparton.training import status
from sparton.training.status import (
    RUN,
    Status,
    begin_run,
    end_run,
    is_out_of_memory,
    only_writer,
    read_status,
)
from tests.models.test_splade_folder import largest_file


def wrapped(how: str) -> Exception:
    """An error of memory as different libraries pass it on."""
    memory = torch.OutOfMemoryError("CUDA out of memory")
    try:
        try:
            raise memory
        except torch.OutOfMemoryError as error:
            if how == "cause":
                raise ValueError("a layer above") from error
            raise ValueError("a layer above") from None
    except ValueError as error:
        if how == "inner_exception":
            error.__context__ = None
            error.inner_exception = memory
        return error


@pytest.mark.parametrize("how", ["cause", "context", "inner_exception"])
def test_memory_that_ran_out_is_found_behind_other_errors(how):
    assert is_out_of_memory(wrapped(how))


def test_as_torch_compile_wraps_it():
    def backend(graph, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with pytest.raises(Exception) as caught:
        compiled(torch.ones(2))
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("out of memory")])
def test_words_do_not_make_it_one(error):
    assert not is_out_of_memory(error)


def test_the_first_to_say_how_a_run_ended_is_heard(tmp_path):
    for state in ("oom", "ok"):
        begin_run(tmp_path, "a")
        assert read_status(tmp_path) == Status("running")
        assert not end_run(tmp_path, "b", Status("failed", "refused by the lock"))
        assert read_status(tmp_path) == Status("running")
        assert end_run(tmp_path, "a", Status(state, "here"))
        assert not end_run(tmp_path, "a", Status("failed", "the other processes are gone"))
        assert read_status(tmp_path) == Status(state, "here")


@pytest.mark.parametrize(
    "text", ['{"sta', "[]", '{"state": 1, "message": "", "run": ""}', "[" * 9999]
)
def test_a_status_that_cannot_be_read_is_none_and_the_end_is_written(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None
    assert end_run(tmp_path, "a", Status("killed"))
    assert read_status(tmp_path) == Status("killed")


def test_a_disk_that_takes_no_file_takes_the_end_of_a_run(tmp_path, monkeypatch):
    begin_run(tmp_path, "a")
    write = Path.write_text

    def full(path, text):
        write(path, text[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert end_run(tmp_path, "a", Status("failed", "the first cause"))
    assert read_status(tmp_path) == Status("failed", "the first cause")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_an_end_that_cannot_be_written_at_all_is_no_error(tmp_path, caplog):
    begin_run(tmp_path, "a")
    with largest_file(10):
        assert end_run(tmp_path, "a", Status("failed", "the first cause"))
    assert "does not say how this run ended" in caplog.text


def test_the_end_of_a_run_whose_folder_is_gone_is_no_error(tmp_path):
    folder = tmp_path / "run"
    begin_run(folder, "a")
    shutil.rmtree(folder)
    assert end_run(folder, "a", Status("failed", "the first cause"))
    assert read_status(folder) == Status("failed", "the first cause")


def test_the_next_owner_sweeps_what_dead_ones_have_left_and_a_member_does_not(
    tmp_path, monkeypatch
):
    gone = ["model.tmp/x", "checkpoints/step-00000002.tmp", ".model.0123abcd.tmp/x"]
    gone += ["status.json.tmp", ".model.4567cdef.old/older"]
    kept = ["checkpoints/step-00000001.pt", "model.safetensors", "results.tmpl"]
    for name in (*gone, *kept, ".model.89ab0123.old/best"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    os.utime(tmp_path / ".model.4567cdef.old", (1, 1))
    monkeypatch.setenv(RUN, "a")
    with only_writer(tmp_path):
        assert all((tmp_path / name).exists() for name in gone)
    monkeypatch.delenv(RUN)
    with only_writer(tmp_path):
        files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {*kept, ".lock", "model/best"}


def test_an_owner_waits_for_the_members_of_a_dead_one(tmp_path, monkeypatch):
    code = f"""if True:
        import os, time
        from pathlib import Path
        from sparton.training.status import RUN, only_writer
        os.environ[RUN] = "a"
        with only_writer(Path({str(tmp_path)!r})):
            print("began", flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as member:
        assert member.stdout.readline() == b"began\n"
        monkeypatch.setattr(status, "_GRACE", 0.2)
        with pytest.raises(BlockingIOError, match="another process works"):
            only_writer(tmp_path).__enter__()
        monkeypatch.setattr(status, "_GRACE", 60.0)
        threading.Timer(0.5, member.kill).start()
        with only_writer(tmp_path):
            assert member.poll() is not None
        member.stdout.close()


def test_a_folder_takes_one_run_at_a_time(tmp_path):
    """As long as that lives, and not for processes that it has started."""
    code = f"""if True:
        import os, time
        from pathlib import Path
        from sparton.training.status import only_writer
        with only_writer(Path({str(tmp_path)!r})):
            if os.fork() == 0:
                time.sleep(5)
                os._exit(0)
            print("began", flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"began\n"
        with pytest.raises(BlockingIOError, match=f"{tmp_path}: another process works"):
            only_writer(tmp_path).__enter__()
        with only_writer(tmp_path / "elsewhere"):
            pass
        other.kill()
        other.stdout.close()
        other.wait()
        with only_writer(tmp_path):
            pass
