"""The study's steps: what is done, and that its trainings are configurations that exist."""

import argparse
import json
from pathlib import Path

import pytest

import in_domain
from sparton.cli.checks import check
from tests.composing import composed


def test_a_study_goes_on_with_tests_that_are_missing(tmp_path):
    step = in_domain.Step("x", (), tmp_path / "results.json")
    assert not in_domain.is_done(step)
    for number in range(1, 5):
        step.done.write_text(json.dumps({"tasks": [{"name": f"{n}"} for n in range(number)]}))
        assert in_domain.is_done(step) == (number == 4)
    other = in_domain.Step("y", (), tmp_path / "idf.json")
    assert not in_domain.is_done(other)
    other.done.write_text("{}")
    assert in_domain.is_done(other)


@pytest.fixture(scope="module")
def trainings() -> list[in_domain.Step]:
    arguments = argparse.Namespace(
        data=Path("data"), output=Path("out"), adapt_steps=1, negatives=3, overrides=["steps=20"]
    )
    return [step for step in in_domain.study(arguments) if step.words[0] == "train.py"]


def test_every_training_of_the_study_composes(trainings):
    assert len(trainings) == 3 * len(in_domain.SYSTEMS) + 1  # one with a half residual
    for step in trainings:
        cfg = composed(*(word for word in step.words[1:] if not word.startswith("hydra.")))
        check(cfg, world_size=1)
        assert cfg.steps == 20 and cfg.num_negatives == (0 if "pairs" in step.name else 3)
