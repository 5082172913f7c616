"""How runs end: which errors are a lack of memory, and that the first to speak is heard."""

import subprocess
import sys

import pytest
import torch

from sparton.training.status import (
    Status,
    begin_run,
    end_run,
    is_out_of_memory,
    only_writer,
    read_status,
)


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
        begin_run(tmp_path)
        assert read_status(tmp_path) == Status("running")
        assert end_run(tmp_path, Status(state, "here"))
        assert not end_run(tmp_path, Status("failed", "the other processes are gone"))
        assert read_status(tmp_path) == Status(state, "here")


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
        with pytest.raises(BlockingIOError, match=f"{tmp_path}: another process trains"):
            only_writer(tmp_path).__enter__()
        with only_writer(tmp_path / "elsewhere"):
            pass
        other.kill()
        other.stdout.close()
        other.wait()
        with only_writer(tmp_path):
            pass
