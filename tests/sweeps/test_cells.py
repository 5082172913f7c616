"""A cell runs in a process of its own; what it left decides whether it runs again."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparton.sweeps.cells import find_cells, run_cell
from sparton.sweeps.jobs import join_job
from sparton.training import status
from sparton.training.status import RUN, Status, begin_run, end_run, read_status

pytestmark = pytest.mark.slow

SETTINGS = {"head": "eager", "batch": 8, "gpus": 1, "seed": 0, "overrides": ["batch=8"]}


def script(folder: Path, code: str) -> list[str]:
    """A command that counts its runs in the folder, and then does something."""
    count = f"open({str(folder / 'runs')!r}, 'a').write('.')"
    return [sys.executable, "-c", f"import os\n{count}\n{code}"]


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text())


def leaves(folder: Path, state: str) -> str:
    say = "from sparton.training.status import Status, end_run; from pathlib import Path\n"
    run = "os.environ['SPARTON_RUN']"
    return f"{say}end_run(Path({str(folder)!r}), {run}, Status({state!r}, 'as it said'))"


@pytest.mark.parametrize(("state", "again"), [("ok", 1), ("oom", 1), ("failed", 2)])
def test_results_are_kept_and_failures_tried_again(tmp_path, state, again):
    command = script(tmp_path, leaves(tmp_path, state))
    for _ in range(2):
        assert run_cell(command, tmp_path, SETTINGS) == Status(state, "as it said")
    assert runs(tmp_path) == again


def test_other_settings_in_the_same_folder_are_another_cell(tmp_path):
    command = script(tmp_path, leaves(tmp_path, "ok"))
    run_cell(command, tmp_path, SETTINGS)
    run_cell(command, tmp_path, SETTINGS | {"seed": 1})
    assert runs(tmp_path) == 2


@pytest.mark.parametrize(
    ("code", "state", "message"),
    [
        ("os.kill(os.getpid(), 9)", "killed", "the process was ended by SIGKILL"),
        ("os.abort()", "killed", "the process was ended by SIGABRT"),
        ("os._exit(3)", "failed", "the process ended with exit status 3"),
        ("pass", "failed", "the process ended with exit status 0"),
    ],
)
def test_a_process_that_ends_without_a_word_has_a_status_too(tmp_path, code, state, message):
    end_run(tmp_path, "earlier", Status("failed", "of an earlier try"))
    ended = run_cell(script(tmp_path, code), tmp_path, SETTINGS)
    assert ended.state == state and ended.message.startswith(message)
    assert find_cells(tmp_path) == [(tmp_path, SETTINGS, ended)]


def test_a_second_sweep_leaves_the_running_cells_of_the_first_alone(tmp_path):
    """Which end well, and are not run twice."""
    code = script(tmp_path, f"import time; time.sleep(1)\n{leaves(tmp_path, 'ok')}")
    sweep = "from pathlib import Path; from sparton.sweeps.cells import run_cell\n"
    sweep += f"run_cell({code!r}, Path({str(tmp_path)!r}), {SETTINGS!r})"
    with subprocess.Popen([sys.executable, "-c", sweep]):
        _wait_for(lambda: (tmp_path / "runs").exists())
        refused = run_cell(code, tmp_path, SETTINGS | {"seed": 1})
        assert refused == Status("failed", f"{tmp_path}: another process works in this folder")
        assert read_status(tmp_path) == Status("running")
    assert find_cells(tmp_path) == [(tmp_path, SETTINGS, Status("ok", "as it said"))]
    assert runs(tmp_path) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_cell_does_not_outlive_its_sweep(tmp_path, how):
    """Killed, the sweep cannot tell its cell, but the system does."""
    wait = script(tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))")
    wait[-1] += "\nimport time; time.sleep(60)"
    sweep = "from pathlib import Path; from sparton.sweeps.cells import run_cell\n"
    sweep += f"run_cell({wait!r}, Path({str(tmp_path)!r}), {SETTINGS!r})"
    with subprocess.Popen([sys.executable, "-c", sweep]) as process:
        _wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        process.send_signal(how)
    cell = Path("/proc", (tmp_path / "pid").read_text())
    _wait_for(lambda: not cell.exists() or "(zombie)" in (cell / "status").read_text())
    ended = {
        signal.SIGKILL: Status("running"),
        signal.SIGTERM: Status("killed", "ended by SIGTERM"),
    }
    assert read_status(tmp_path) == ended.get(how, Status("killed", "ended by SIGINT"))


def _wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_cannot_be_read_is_no_result(tmp_path):
    command = script(tmp_path, leaves(tmp_path, "ok"))
    run_cell(command, tmp_path, SETTINGS)
    (tmp_path / "status.json").write_text('{"sta')
    assert read_status(tmp_path) is None
    run_cell(command, tmp_path, SETTINGS)
    assert runs(tmp_path) == 2


def test_a_rank_beside_the_first_leaves_the_telling_to_it(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN, "shared")
    begin_run(tmp_path, "shared")
    assert run_cell(script(tmp_path, "pass"), tmp_path, SETTINGS, rank=1) is None
    assert read_status(tmp_path) == Status("running")
    ended = run_cell(script(tmp_path, "os._exit(3)"), tmp_path, SETTINGS, rank=1)
    assert ended == Status("failed", "the process ended with exit status 3")
    assert not (tmp_path / "cell.json").exists()


def test_a_rank_ends_when_another_has_failed_but_not_for_an_earlier_try(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "_GRACE", 0.5)
    end_run(tmp_path, "earlier", Status("failed", "of an earlier try"))
    monkeypatch.setenv(RUN, "shared")
    wait = script(tmp_path, "import time; time.sleep(60)")

    def first_rank() -> None:
        time.sleep(2.0)
        begin_run(tmp_path, "shared")
        end_run(tmp_path, "shared", Status("oom", "on rank 0"))

    with ThreadPoolExecutor() as pool:
        other = pool.submit(first_rank)
        began = time.monotonic()
        ended = run_cell(wait, tmp_path, SETTINGS, rank=1)
        other.result()
    assert ended == Status("oom", "on rank 0")
    assert 2.0 < time.monotonic() - began < 30


def test_tasks_of_a_job_are_described_as_torchrun_does(monkeypatch):
    assert join_job() is None
    names = ("NTASKS", "GLOBALID", "LOCALID", "JOB_ID", "NODEID", "JOB_NUM_NODES")
    for name, value in zip(names, ("2", "1", "1", "7", "0", "1"), strict=True):
        monkeypatch.setenv(f"SUBMITIT_LOCAL_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "wrong")
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "wrong")
    assert join_job() == 1
    found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    assert found == ["1", "2", "1"] and int(os.environ["MASTER_PORT"]) > 1023
    monkeypatch.setenv("SUBMITIT_LOCAL_NTASKS", "1")
    assert join_job() is None
