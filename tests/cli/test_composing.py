"""Command lines, and the folders of configurations that they are composed from."""

from pathlib import Path

import pytest

from sparton.cli.command_line import Request, read_request
from sparton.cli.composing import composer, config_folders, show
from sparton.cli.shipped import shipped

pytestmark = pytest.mark.usefixtures("here")


def composed(*words: str):
    with composer(read_request(words, "train"), "train") as opened:
        return opened.variants()


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_a_command_line_is_options_and_overrides(tmp_path):
    words = ["-m", "batch=8,16", "--config-dir", ".", "-cn", "evaluate", "hydra.verbose=true"]
    request = read_request(words, "train")
    assert request == Request("evaluate", ("batch=8,16", "hydra.verbose=true"), True, tmp_path)
    assert read_request(request.again(), "train").config_dir == tmp_path


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--cfg", "job"], ["-c", "all", "batch=3"], ["--info"], ["-sc", "install"]],
)
def test_what_only_shows_something_is_told_apart(words):
    assert read_request(words, "train").shows
    assert not read_request(["batch=3", "-r"], "train").shows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "64"], "no option --batch: settings have no dashes: batch="),
        (["--config-dir=nowhere"], "--config-dir=nowhere: no such folder"),
        (["--config-name"], "expected one argument"),
        (["--cfg", "jobs"], "--cfg/-c: invalid choice: 'jobs'"),
    ],
)
def test_options_that_do_not_exist_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        read_request(words, "train")


def test_own_files_come_before_those_of_the_package(tmp_path):
    write("configs/experiment/mine.yaml", "# @package _global_\nbatch: 24\n")
    write("configs/optimizer/adamw.yaml", "lr: 0.5\n")
    write("given folder/optimizer/adamw.yaml", "lr: 0.25\n")
    [cfg] = composed("experiment=mine")
    assert (cfg.batch, cfg.optimizer, cfg.steps) == (24, {"lr": 0.5}, None)
    [cfg] = composed("--config-dir", "given folder", "experiment=mine")
    assert (cfg.batch, cfg.optimizer) == (24, {"lr": 0.25})
    write("more/head/mine.yaml", "tile: 8\n")
    [cfg] = composed("hydra.searchpath=[file://more]", "head=mine")
    assert (cfg.head, cfg.optimizer) == ({"tile": 8}, {"lr": 0.5})
    folders = [tmp_path / "given folder", tmp_path / "configs", shipped("configs")]
    assert config_folders(folders[0]) == folders


def test_in_a_clone_its_own_configurations_are_read_once(monkeypatch):
    monkeypatch.chdir(shipped("configs").parent)
    assert config_folders(None) == [shipped("configs")]


def test_every_value_of_a_sweep_is_composed_once():
    found = composed("-m", "batch=8,16", "seed=range(3)", "head=sparton,eager")
    assert [(cfg.batch, cfg.seed) for cfg in found] == [(8, 0), (16, 0), (8, 1), (8, 2), (8, 0)]
    assert found[-1].hydra.runtime.choices["head"] == "eager"


def test_several_values_without_a_sweep_are_refused():
    with pytest.raises(ValueError, match=r"batch=8,16: several values .* -m runs; .*\[8,16\]"):
        composed("batch=8,16")
    assert len(composed("experiment=table3", "batch=8,16")) == 2  # this experiment is a sweep


def test_what_is_shown_is_composed_from_all_folders(capsys):
    write("configs/loss/mine.yaml", "margin: 24\n")
    show(read_request(["--help"], "train"), "train")
    said = capsys.readouterr().out
    assert (
        said.startswith("sparton train setting=value") and "kl_margin_mse, margin_mse, mine" in said
    )
    words = ["--cfg", "job", "loss=mine", "--package", "loss"]
    show(read_request(words, "train"), "train")
    assert capsys.readouterr().out == "# @package loss\nmargin: 24\n"
