"""The command ``sparton``: what it says of itself, and how it ends."""

import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
from hydra.errors import InstantiationException

from sparton import __version__
from sparton.arguments import ArgumentError, Instance
from sparton.cli.errors import explain, one_sentence
from sparton.cli.main import COMMANDS, main
from sparton.errors import DeviceMemoryError, NonFiniteLossError, OtherRunError, RunError

HEAVY = ["hydra", "numpy", "torch", "transformers", "datasets", "ranx", "sentence_transformers"]
LIGHT = {"hydra", "numpy"}
COMMAND_FILES = Path(__file__).resolve().parents[2] / "sparton" / "cli" / "commands"


def test_every_command_has_a_line_of_help(capsys):
    main(["--help"])
    said = capsys.readouterr().out
    files = COMMAND_FILES.glob("*.py")
    texts = {path.stem.replace("_", "-"): path.read_text() for path in files}
    commands = {name for name, text in texts.items() if "\ndef main(arguments" in text}
    assert set(COMMANDS) == commands
    assert all(f"\n  {name}" in said for name in commands)


SUBCOMMANDS = [["tune", "head"], ["tune", "maxsim"]]
HELPED = [[name] for name in COMMANDS if name not in ("train", "evaluate", "encode")]


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert not end.code
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [*HELPED, *SUBCOMMANDS], ids=" ".join)
def test_help_fits_into_a_terminal(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = help_of(words, capsys)
    assert [line for line in said.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("words", [*HELPED, *SUBCOMMANDS], ids=" ".join)
def test_every_flag_has_a_word_of_help(words, capsys, monkeypatch):
    parsers: list[ArgumentParser] = []
    monkeypatch.setattr(ArgumentParser, "print_help", lambda parser: parsers.append(parser))
    help_of(words, capsys)
    (parser,) = parsers
    kinds = {"head|maxsim"}  # each has its own
    actions = [action for action in parser._actions if action.metavar not in kinds]
    assert [action.dest for action in actions if not action.help] == []


def test_the_help_of_a_command_lists_its_own_groups_alone(capsys):
    listed = {}
    for command in ("train", "evaluate", "encode"):
        said = help_of([command], capsys)
        assert said.startswith(f"sparton {command} ")
        assert max(map(len, said.partition("== Config ==")[0].splitlines())) <= 80
        listed[command] = set(re.findall(r"^([\w/]+): \w+, ", said, re.MULTILINE))
    assert {"backbone", "regularizer", "experiment", "suite"} <= listed["train"]
    assert listed["evaluate"] == {"evaluation", "index", "suite"}
    assert not listed["encode"] and "index" not in listed["train"]


def test_the_version_is_that_of_the_package(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"sparton {__version__}\n"


def test_a_command_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(SystemExit, match="there is no command tarin; did you mean train"):
        main(["tarin"])


def imported(*words: str) -> set[str]:
    """The heavy packages that a process has imported when ``sparton`` has ended."""
    code = f"""if True:
        import sys
        from sparton.cli.main import main
        try:
            main({list(words)!r})
        except SystemExit as end:
            assert end.code, end
        print("imported", *(set({HEAVY!r}) & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *names = done.stdout.splitlines()[-1].split()
    assert first == "imported"
    return set(names)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("words", "packages"),
    [
        (["--help"], set()),
        (["tarin"], set()),
        (["train", "--help"], LIGHT),
        (["train", "--batch", "3"], LIGHT),
        (["train", "bacth=64"], LIGHT),
        (["train", "batch=0"], LIGHT),
        (["train", "init_from=/nowhere"], LIGHT),
        (["train", "precision=fp9"], LIGHT),
        (["evaluate", "model=/nowhere"], LIGHT),
        (["train", "backbone=tiny", "data.root=/nowhere"], LIGHT | {"torch"}),
    ],
)
def test_what_is_refused_imports_nothing_that_it_does_not_need(
    words, packages, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert imported(*words) <= packages


def refused(error: BaseException) -> str | int:
    with pytest.raises(SystemExit) as stop, one_sentence("sparton mine", "it goes on again"):
        raise error
    return stop.value.code


def test_expected_errors_end_in_a_sentence_and_others_are_raised(monkeypatch, capsys):
    assert refused(ValueError("--k=0: must be positive")) == "sparton mine: --k=0: must be positive"
    assert refused(RunError("rank 1 said why", told=True)) == 1
    assert refused(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "\nsparton mine: interrupted; it goes on again\n"
    with pytest.raises(TypeError, match="a bug"), one_sentence("sparton mine"):
        raise TypeError("a bug")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="shown"), one_sentence("sparton mine"):
        raise ValueError("shown")


def test_a_rank_says_who_it_is(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert refused(ValueError("batch=0")) == "sparton mine: rank 1: batch=0"


def test_arguments_of_the_library_are_told_as_the_overrides_that_give_them():
    malformed = ArgumentError("line 3: set {on_error} or {batch:name}", on_error="skip", batch=3)
    assert str(malformed) == "line 3: set on_error='skip' or batch"
    assert explain(malformed) == "line 3: set data.on_error=skip or batch"
    kinds = {"head": Instance("JointHead"), "loss": Instance("InfoNCE")}
    other = ArgumentError("set {head} or {loss}", **kinds)
    assert str(other) == "set head=JointHead(...) or loss=InfoNCE(...)"
    assert explain(other) == "set head=sparton_colbert or loss=infonce"
    wrapped = InstantiationException("Error in call to target")
    wrapped.__cause__ = other
    assert explain(wrapped) == explain(other)
    unknown = ArgumentError("set {head}", head=Instance("OwnHead"))
    assert explain(unknown) == "set head=OwnHead"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (BlockingIOError("x: another process works"), ": wait for its end, or name another one"),
        (OtherRunError("Give this run a folder of its own"), "(name=NAME gives it one)"),
        (NonFiniteLossError("Try a smaller learning rate"), "(optimizer.lr, clip_norm, precision,"),
        (DeviceMemoryError("9 GiB more"), "Set micro_batch=N, which changes no gradient"),
    ],
)
def test_what_overrides_can_do_about_an_error_is_told(error, remedy):
    assert explain(error).startswith(str(error)) and remedy in explain(error)


def test_help_that_nobody_can_read_ends_in_a_sentence():
    for words, code in ((["--help"], 1), (["--version"], 1)):
        with Path("/dev/full").open("w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "sparton", *words],
                stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        assert ended.returncode == code
        assert "No space left" in ended.stderr and "Traceback" not in ended.stderr
