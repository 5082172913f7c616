"""What a run leaves and says when it ends, and that ranks do not wait for one that is gone."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sparton.errors import DeviceMemoryError, OtherRunError, RunError
from sparton.training import status
from sparton.training.outcome import GOES_ON, run_here, run_on_gpus
from sparton.training.status import Status, read_status

pytestmark = pytest.mark.slow


def fail_with(error: Exception):
    def work() -> None:
        raise error

    return work


def test_a_run_that_ends_well_gives_what_it_made(tmp_path):
    assert run_here(lambda: "a model", tmp_path, ()) == "a model"
    assert read_status(tmp_path) == Status("ok")


def test_an_error_is_raised_and_its_explanation_stays(tmp_path):
    with pytest.raises(ValueError, match="batch=0"):
        run_here(fail_with(ValueError("batch=0")), tmp_path, (), lambda error: f"set {error}")
    assert read_status(tmp_path) == Status("failed", "set batch=0")


def test_a_run_that_ended_well_stays_so_when_another_is_refused(tmp_path):
    refused = fail_with(OtherRunError("steps=8 here, 4 there"))
    for ended in ("ok", "failed"):
        work = (lambda: None) if ended == "ok" else fail_with(ValueError("batch=0"))
        with contextlib.suppress(ValueError):
            run_here(work, tmp_path, ())
        with pytest.raises(OtherRunError, match="steps=8"):
            run_here(refused, tmp_path, ())
        said = read_status(tmp_path)
        assert said is not None and said.state == ended


def test_a_lack_of_memory_has_a_type_of_its_own(tmp_path):
    work = fail_with(torch.OutOfMemoryError("9 GiB more"))
    with pytest.raises(DeviceMemoryError, match="9 GiB more"):
        run_here(work, tmp_path, ())
    assert read_status(tmp_path) == Status("oom", "9 GiB more")


def test_a_run_that_is_asked_to_end_leaves_that_word(tmp_path):
    """But not for the end of a process that it has started."""
    code = f"""if True:
        import multiprocessing, os, signal, time
        from pathlib import Path
        from sparton.training.outcome import run_here

        def work():
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            time.sleep(0.5)
            child.terminate()
            child.join()
            print(child.exitcode, Path({str(tmp_path)!r}, "status.json").read_text(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

        run_here(work, Path({str(tmp_path)!r}), ())
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.startswith("-15 ") and '"running"' in ended.stdout
    assert ended.returncode == -signal.SIGTERM
    assert read_status(tmp_path) == Status("killed", "ended by SIGTERM")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
def test_a_user_who_ends_a_run_leaves_that_word_too(tmp_path, how):
    """But a hangup that nohup has told it to ignore does not end it."""
    code = f"""if True:
        import os, signal, time
        from pathlib import Path
        from sparton.training.outcome import run_here

        def work():
            os.kill(os.getpid(), {int(how)})
            time.sleep(0.2)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        run_here(work, Path({str(tmp_path)!r}), ())
    """
    program = [sys.executable, "-c", code]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == -how
    assert read_status(tmp_path) == Status("killed", f"ended by {how.name}")
    if how == signal.SIGHUP:
        subprocess.run(["nohup", *program], capture_output=True, check=True)
        assert read_status(tmp_path) == Status("ok")


def test_a_rank_of_torchrun_notes_its_end(tmp_path):
    """torchrun ends the others of a rank that is gone, and that one could not say it."""
    code = f"""if True:
        import os, signal, time
        from pathlib import Path
        from sparton.training.outcome import run_here
        from sparton.training.status import begin_run, run_name

        begin_run(Path({str(tmp_path)!r}), run_name())
        run_here(lambda: os.kill(os.getpid(), signal.SIGTERM), Path({str(tmp_path)!r}), ())
    """
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for launcher, state in (({}, "running"), ({"TORCHELASTIC_RUN_ID": "x"}, "killed")):
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, env=os.environ | ranks | launcher
        )
        assert ended.returncode == -signal.SIGTERM
        assert read_status(tmp_path).state == state


@pytest.mark.parametrize(
    ("work", "delay"),
    [
        ("hashlib.pbkdf2_hmac('sha256', b'', b'', 10**8)", 0.0),
        ("(_ for _ in ()).throw(RuntimeError('Connection closed by peer'))", 0.5),
    ],
    ids=["waits for its GPU", "has heard the echo"],
)
def test_a_rank_of_torchrun_that_does_not_come_to_its_handler_notes_its_end(tmp_path, work, delay):
    """As it waits, out of reach of Python, for one that is gone, or has heard that it is."""
    code = f"""if True:
        import hashlib, os
        from pathlib import Path
        from sparton.training.outcome import run_here
        from sparton.training.status import begin_run, run_name

        def work():
            print("here", flush=True)
            {work}

        begin_run(Path({str(tmp_path)!r}), run_name())
        run_here(work, Path({str(tmp_path)!r}), ())
    """
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | variables | {"TORCHELASTIC_RUN_ID": "x"},
    ) as process:
        process.stdout.readline()
        time.sleep(delay)
        began = time.monotonic()
        process.terminate()
        said = process.stderr.readline().decode()  # and what it says it has written down before
        assert time.monotonic() - began < 20, "it came to its handler"
        process.kill()
    message = "ended by SIGTERM, which torchrun sends when it or another rank is ended"
    assert read_status(tmp_path) == Status("killed", message)
    assert said == f"{message}; {GOES_ON}\n"


def test_work_without_a_run_tells_once_of_its_end_by_torchrun():
    code = """if True:
        import os, signal
        from sparton.training.outcome import termination_told

        with termination_told("evaluate anew"):
            os.kill(os.getpid(), signal.SIGTERM)
    """
    message = "ended by SIGTERM, which torchrun sends when it or another rank is ended"
    for launcher, said in (
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "x"}, f"{message}; evaluate anew\n"),
    ):
        program, environment = [sys.executable, "-c", code], os.environ | launcher
        ended = subprocess.run(program, capture_output=True, text=True, env=environment)
        assert ended.returncode == -signal.SIGTERM and ended.stderr == said


def ranks(folder: Path, code: str) -> list[str]:
    """A command that leaves its environment in the folder, and then does something."""
    names = "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'OMP_NUM_THREADS')"
    note = f"rank = os.environ['RANK']; texts = [os.environ[name] for name in {names}]\n"
    note += f"open({str(folder)!r} + '/rank-' + rank, 'w').write(' '.join(texts))\n"
    return [sys.executable, "-c", f"import os, signal, time\n{note}{code}"]


def test_every_rank_knows_who_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run_on_gpus(ranks(tmp_path, "time.sleep(0.3)"), 2, tmp_path)
    assert [(tmp_path / f"rank-{n}").read_text() for n in (0, 1)] == ["0 2 0 3", "1 2 1 3"]


def test_the_others_end_with_a_rank_that_is_killed(tmp_path):
    code = "if rank == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^rank 1 was ended by SIGKILL.*the same command") as caught:
        run_on_gpus(ranks(tmp_path, code), 2, tmp_path)
    assert time.monotonic() - began < 30
    assert not caught.value.told
    assert read_status(tmp_path).state == "killed"


def test_a_rank_that_has_failed_and_cannot_leave_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "_GRACE", 0.5)
    say = "from pathlib import Path; from sparton.training.status import Status, end_run\n"
    end = f"end_run(Path({str(tmp_path)!r}), os.environ['SPARTON_RUN'], Status('oom', 'on rank 1'))"
    say += f"if rank == '1': {end}\n"
    with pytest.raises(RunError, match=r"^on rank 1$") as caught:
        run_on_gpus(ranks(tmp_path, f"{say}time.sleep(60)"), 2, tmp_path)
    assert caught.value.told
    assert read_status(tmp_path) == Status("oom", "on rank 1")
    assert "RANK" not in os.environ
