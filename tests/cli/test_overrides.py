"""Names of folders that overrides make."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from sparton.cli.overrides import (
    cell_name,
    fixed_settings,
    folder_name,
    typed_overrides,
    written,
)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["head=sparton", "batch=512"], "batch-512+head-sparton"),
        (["data.path=../../x y"], "data.path-.._.._x_y"),
        (["+regularizer@x=[flops,l1]"], "+regularizer@x-_flops_l1_"),
        (["seed=1", "~seed.x", "seeds=2", "loss.seed=3"], "loss.seed-3+seeds-2"),
        (["seed=1"], "defaults"),
    ],
)
def test_folder_names_need_no_quotes_and_stay_one_folder(overrides, name):
    assert folder_name(overrides, left_out={"seed"}) == name


def test_overrides_are_told_as_they_were_typed():
    words = ["data.root=${oc.env:NOWHERE_SET}", "batch=${nothing}"]
    assert typed_overrides(OmegaConf.create({"overrides": {"task": words}})) == words


@pytest.mark.parametrize(
    "text", ["it's", 'a"b', "a\\", "\\'", "a b", "été", "${a}", "a=[b]", "TRUE"]
)
def test_any_text_is_read_as_it_was_written(text):
    parser = OverridesParser.create()
    assert parser.parse_override(f"hydra.run.dir={written(text)}").value() == text


def test_a_cell_is_named_by_what_its_sweep_varies():
    sweep = ["batch=64,128", "data.files='a b.csv'", "+x=1", "steps=2", "lr=range(1,3)", "seed=0,1"]
    fixed = fixed_settings(sweep)
    assert fixed == ["data.files", "x", "steps"]
    assert fixed_settings(["batch=8", "batch=64,128", "x=1,2", "x=3"]) == ["x"]
    cell = ["batch=64", "data.files='a b.csv'", "+x=1", "steps=2", "lr=1", "seed=0"]
    assert cell_name(cell, fixed, {"seed"}) == "batch-64+lr-1"
    # What a sweeper adds is in no cell's command, and a job of no sweep has all.
    assert cell_name(["batch=64", "lr=3"], ["batch"], ()) == "lr-3"
    assert cell_name(["batch=64"], ["batch"], ()) == "batch-64"


def test_long_folder_names_are_cut_and_stay_apart():
    first, second = (folder_name([f"x={'x' * 300}{end}"]) for end in "ab")
    assert first != second
    assert max(len(first), len(second)) < 140


def test_names_that_an_override_cannot_hold_are_refused():
    assert written({"a-b.c/d": 1}) == "{a-b.c/d:1}"
    for name in ("a b", "\u00e9"):
        with pytest.raises(ValueError, match="is no name in a setting"):
            written({name: 1})
