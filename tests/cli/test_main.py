"""The command ``sparton``: what it says of itself, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from sparton import __version__
from sparton.cli.errors import one_sentence
from sparton.cli.main import COMMANDS, main
from sparton.errors import RunError

COMMAND_FILES = Path(__file__).resolve().parents[2] / "sparton" / "cli" / "commands"


def test_every_command_has_a_line_of_help(capsys):
    main(["--help"])
    said = capsys.readouterr().out
    files = {path.stem for path in COMMAND_FILES.glob("[a-z]*.py")}
    assert set(COMMANDS) == files
    assert all(f"\n  {name}" in said for name in files)


def test_the_version_is_that_of_the_package(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"sparton {__version__}\n"


def test_a_command_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(SystemExit, match="there is no command tarin; did you mean train"):
        main(["tarin"])


def test_help_reads_no_heavy_package():
    code = "import sys; from sparton.cli.main import main; main(['--help']); "
    code += "sys.exit(bool({'torch', 'hydra', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def refused(error: BaseException) -> str | int:
    with pytest.raises(SystemExit) as stop, one_sentence("sparton mine"):
        raise error
    return stop.value.code


def test_expected_errors_end_in_a_sentence_and_others_are_raised(monkeypatch, capsys):
    assert refused(ValueError("--k=0: must be positive")) == "sparton mine: --k=0: must be positive"
    assert refused(RunError("rank 1 said why", told=True)) == 1
    assert refused(KeyboardInterrupt("the same command goes on")) == 130
    assert capsys.readouterr().err == "\nsparton mine: interrupted; the same command goes on\n"
    with pytest.raises(TypeError, match="a bug"), one_sentence("sparton mine"):
        raise TypeError("a bug")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="shown"), one_sentence("sparton mine"):
        raise ValueError("shown")


def test_a_rank_says_who_it_is(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert refused(ValueError("batch=0")) == "sparton mine: rank 1: batch=0"
