"""The command searches every length it is asked for and says what it refused."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from sparton.kernels.splade_head.tuning import Trial

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/tune_head.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("tune_head", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return module


def call(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["tune_head.py", *arguments])
    script.main()


def test_every_length_is_searched_and_the_refused_are_named(script, monkeypatch, capsys):
    searched = []

    def tune(*args, **options):
        searched.append((*args, options["dtype"]))
        return [Trial("fast", None, 1.25), Trial("faster", "7 representations", float("inf"))]

    monkeypatch.setattr(script, "tune_splade_head", tune)
    options = ("--hidden-size", "384", "--vocabulary", "1000", "--lengths", "32", "64")
    call(script, monkeypatch, *options, "--dtype", "float16")
    assert searched == [(384, 1000, n, torch.float16) for n in (32, 64)]
    printed = capsys.readouterr().out
    for word in ("1.250", "7 representations", "segment_max.json", "SPARTON_TUNED=1"):
        assert word in printed


@pytest.mark.parametrize("option", ["--lengths", "--tokens", "--hidden-size", "--vocabulary"])
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_numbers_are_positive(script, monkeypatch, capsys, option, value):
    options = {"--hidden-size": "8", "--vocabulary": "8"} | {option: value}
    with pytest.raises(SystemExit) as stopped:
        call(script, monkeypatch, *(word for pair in options.items() for word in pair))
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert option in error
    assert value in error


def test_without_a_gpu_it_says_so(script, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        call(script, monkeypatch, "--hidden-size", "8", "--vocabulary", "8")
    assert "needs a CUDA device" in capsys.readouterr().err
