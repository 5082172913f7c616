"""A cell runs in a process of its own; what it left decides whether it runs again."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparton.sweeps.cells import find_cells, run_cell
from sparton.training.status import Status, end_run, read_status

SETTINGS = {"head": "eager", "batch": 8, "gpus": 1, "seed": 0, "overrides": ["batch=8"]}


def script(folder: Path, code: str) -> list[str]:
    """A command that counts its runs in the folder, and then does something."""
    count = f"open({str(folder / 'runs')!r}, 'a').write('.')"
    return [sys.executable, "-c", f"import os\n{count}\n{code}"]


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text())


def leaves(folder: Path, state: str) -> str:
    say = "from sparton.training.status import Status, end_run; from pathlib import Path\n"
    return f"{say}end_run(Path({str(folder)!r}), Status({state!r}, 'as it said'))"


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
    end_run(tmp_path, Status("failed", "of an earlier try"))
    status = run_cell(script(tmp_path, code), tmp_path, SETTINGS)
    assert status.state == state and status.message.startswith(message)
    assert find_cells(tmp_path) == [(tmp_path, SETTINGS, status)]


def test_a_cell_does_not_outlive_its_sweep(tmp_path):
    """SIGKILL to the sweep: nobody is left to tell the cell, but the system does."""
    wait = script(tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))")
    wait[-1] += "\nimport time; time.sleep(60)"
    sweep = "from pathlib import Path; from sparton.sweeps.cells import run_cell\n"
    sweep += f"run_cell({wait!r}, Path({str(tmp_path)!r}), {SETTINGS!r})"
    with subprocess.Popen([sys.executable, "-c", sweep]) as process:
        _wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        process.send_signal(signal.SIGKILL)
    cell = Path("/proc", (tmp_path / "pid").read_text())
    _wait_for(lambda: not cell.exists() or "(zombie)" in (cell / "status").read_text())
    assert read_status(tmp_path) == Status("running")


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
