"""``sparton.train``: what it returns, and what it leaves as it was."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

import sparton
from sparton.cli.overrides import written
from sparton.training.status import Status, read_status
from tests.forking import environment

pytestmark = pytest.mark.usefixtures("here")

MINIATURE = ("experiment=quickstart", "debug=tiny", "backbone.hidden_size=32")


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2e-05, -1.5, "colbert", "a b", "it's", "", "null", "1", "a,b", "x=${y}",
        "\\'", [1, "two", None], {"mine": ["a b.jsonl", "c"]}, "runs/a-b/model", "${nothing}",
    ],
)  # fmt: skip
def test_values_are_written_as_hydra_reads_them(value):
    assert OverridesParser.create().parse_override(f"key={written(value)}").value() == value


def test_a_value_that_no_override_can_hold_is_refused():
    with pytest.raises(ValueError, match="is no value of a setting"):
        written(object())
    assert written(Path("a b")) == "'a b'"


def test_numbers_of_numpy_are_numbers():
    assert written(np.int64(64)) == "64"
    assert written([np.float32(0.5), np.float64(1e-5)]) == "[0.5,1e-05]"


@pytest.mark.parametrize("words", [["head=eager"], {"head": "eager"}, 3])
def test_what_is_no_override_is_refused(words):
    with pytest.raises(ValueError, match="is no override: each is a text of its own"):
        sparton.train(words)


@pytest.mark.slow
def test_it_trains_as_the_command_does(tmp_path):
    run = sparton.train(*MINIATURE, steps=2, study="here", head="eager")
    words = "backbone.hidden_size-32+debug-tiny+experiment-quickstart+head-eager+steps-2"
    assert run.folder == tmp_path / "runs" / "here" / words / "seed-0"
    assert run.model == run.folder / "model"
    assert run.results == json.loads((run.folder / "results.json").read_text())
    assert 0 < run.results["mean"]["ndcg@10"] < 1
    assert read_status(run.folder) == Status("ok")
    assert "its ramp is longer" in (run.folder / "train.log").read_text()
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert (manifest["config"]["steps"], manifest["config"]["batch"]) == (2, 8)
    again = sparton.train(*MINIATURE, steps=2, study="here", head="eager")
    assert "all 2 steps were done before" in (again.folder / "train.log").read_text()
    with only_writer_elsewhere(run.folder), pytest.raises(BlockingIOError, match="another process"):
        sparton.train(*MINIATURE, steps=2, study="here", head="eager")


@pytest.mark.slow
def test_a_command_that_is_refused_changes_nothing_of_the_run_that_is_there():
    words = [*MINIATURE, "steps=2", "name=there", "evaluation=none"]
    folder = sparton.train(*words).folder
    assert not (folder / ".hydra").exists(), "it would be the last command's, not the run's"
    command = [sys.executable, "-m", "sparton", "train", *words, "seed=0"]

    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = content()
    with only_writer_elsewhere(folder):
        refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and f"{folder}: another process works" in refused.stderr
    assert content() == before
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert content() != before and not (folder / ".hydra").exists()


@contextmanager
def only_writer_elsewhere(folder: Path) -> Iterator[None]:
    """Another process holds the lock of a folder meanwhile."""
    code = (
        "import sys; from pathlib import Path; from sparton.training.status import only_writer\n"
        f"with only_writer(Path({str(folder)!r})): print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        yield
        process.stdin.close()


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        (MINIATURE, {"batch": 0}, "batch=0: must be at least 1"),
        (["experiment=table3"], {}, "a sweep, which the command runs"),
        (["-m", *MINIATURE], {}, "options such as -m"),
        (["--help"], {}, "options such as -m and --help"),
        ([*MINIATURE, "query_regularizer.flops.weight=-1"], {}, "weight must not be negative"),
    ],
)
def test_refusals_are_exceptions(overrides, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        sparton.train(*overrides, **settings)
    assert not isinstance(caught.value, InstantiationException)


def test_hydra_and_logging_are_as_they_were(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("answer: 42\nname: ${twice:${answer}}\n")
    OmegaConf.register_new_resolver("twice", lambda number: 2 * number, replace=True)
    logger = logging.getLogger("sparton")
    before = (logger.level, list(logger.handlers), list(logging.getLogger().handlers))
    command = HydraConfig.instance().cfg  # of another test in this process, if any
    with initialize_config_dir(str(tmp_path / "own"), version_base="1.2"):
        sparton.train(*MINIATURE, steps=1, evaluation="none")
        with pytest.raises(ValueError, match="batch=0"):
            sparton.train(*MINIATURE, batch=0)
        assert HydraConfig.instance().cfg == command
        assert compose("mine").name == 84
    assert not GlobalHydra.instance().is_initialized()
    assert (logger.level, logger.handlers, logging.getLogger().handlers) == before


@pytest.mark.slow
def test_a_script_outside_of_the_clone_trains_with_several_processes(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sparton\n"
        "if __name__ == '__main__':\n"
        f"    run = sparton.train(*{MINIATURE!r}, steps=2, gpus=2, evaluation='none')\n"
        "    print(run.folder.name, run.results)\n"
    )
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "seed-0 None"
