"""``sparton tune`` searches every length it is asked for and says what it refused."""

import pytest
import torch

from sparton import ops
from sparton.cli.commands.tune import main
from sparton.kernels.tuning import Trial


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


HEAD = ("head", "--hidden-size", "384", "--vocabulary", "1000")
MAXSIM = ("maxsim", "--width", "96", "--query-length", "16")


@pytest.mark.parametrize(
    ("words", "function", "sizes"),
    [(HEAD, "tune_splade_head", (384, 1000)), (MAXSIM, "tune_maxsim", (96, 16))],
)
def test_every_length_is_searched_and_the_refused_are_named(
    words, function, sizes, monkeypatch, capsys
):
    searched = []

    def tune(*args, **options):
        searched.append((*args, *options.values()))
        trials = [Trial("fast", None, 1.25), Trial("faster", "7 scores", float("inf"))]
        return {"forward": trials, "backward": trials[:1]}

    monkeypatch.setattr(ops, function, tune)
    main([*words, "--lengths", "32", "64", "--dtype", "float16", "--tokens", "99"])
    assert searched == [(*sizes, length, torch.float16, 99) for length in (32, 64)]
    printed = capsys.readouterr().out
    for said in ("backward, mean length 64, a GPU", "1.250", "7 scores", "tuned.json"):
        assert said in printed
    assert "SPARTON_TUNED=1" in printed


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (HEAD, ["--lengths", "--tokens", "--hidden-size", "--vocabulary"]),
        (MAXSIM, ["--lengths", "--tokens", "--width", "--query-length"]),
    ],
)
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_numbers_are_positive(words, options, value, capsys):
    for option in options:
        with pytest.raises(SystemExit) as stopped:
            main([*words, option, value])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert option in error
        assert value in error


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        main(HEAD)
