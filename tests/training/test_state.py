"""What a checkpoint has of an encoder whose weights are frozen in part, and which are kept."""

import shutil

import pytest
import torch
from torch import nn

from sparton.errors import CheckpointError
from sparton.models.identity import weights_digest
from sparton.training.state import (
    frozen_state,
    learned_state,
    load_checkpoint,
    load_learned_state,
    save_checkpoint,
)


def part_frozen() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"frozen": nn.Linear(2, 3), "learns": nn.BatchNorm1d(3)})
    model["tied"] = nn.Linear(2, 3, bias=False)
    model["tied"].weight = model["frozen"].weight
    model["frozen"].requires_grad_(False)
    return model


def test_frozen_parameters_are_left_out_by_every_name_and_buffers_stay():
    model = part_frozen()
    assert set(frozen_state(model)) == {"frozen.weight", "frozen.bias", "tied.weight"}
    buffers = {f"learns.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(learned_state(model)) == {"learns.weight", "learns.bias"} | buffers
    assert set(learned_state(model.requires_grad_(True))) == set(model.state_dict())


def test_a_learned_state_is_loaded_and_leaves_the_rest():
    model, other = part_frozen(), part_frozen()
    nn.init.constant_(model["learns"].weight, 7.0)
    nn.init.constant_(model["frozen"].weight, 7.0)
    load_learned_state(other, learned_state(model))
    assert (other["learns"].weight == 7).all() and not (other["frozen"].weight == 7).any()


@pytest.mark.parametrize("change", ["lacks", "has"])
def test_a_state_of_something_else_is_refused(change):
    model = part_frozen()
    state = learned_state(model)
    if change == "lacks":
        del state["learns.bias"]
    else:
        state["frozen.weight"] = model["frozen"].weight
    with pytest.raises(CheckpointError, match=r"do not both have (learns\.bias|frozen\.weight):"):
        load_learned_state(model, state)


def test_the_digest_of_frozen_weights_tells_them_apart_and_not_what_learns():
    model, other = part_frozen(), part_frozen()
    nn.init.constant_(other["learns"].weight, 7.0)
    digests = [weights_digest(frozen_state(each)) for each in (model, other)]
    assert digests[0] == digests[1]
    with torch.no_grad():
        other["frozen"].weight[0, 0] += 1e-6
    assert weights_digest(frozen_state(other)) != digests[0]


def test_copies_under_other_names_are_left_alone_and_take_no_place_of_a_checkpoint(tmp_path):
    save_checkpoint(tmp_path, 1, {})
    copies = ["step-00000001-mine.pt", "step-00000009.pt.bak"]
    for name in copies:
        shutil.copy(tmp_path / "step-00000001.pt", tmp_path / name)
    for step in (2, 3):
        save_checkpoint(tmp_path, step, {})
    kept = ["step-00000002.pt", "step-00000003.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*copies, *kept])
    found = load_checkpoint(tmp_path)
    assert found is not None and found["step"] == 3


def test_the_newest_checkpoint_is_that_of_the_most_steps_however_long_its_name(tmp_path):
    for step in (99_999_999, 100_000_000, 100_000_001):
        save_checkpoint(tmp_path, step, {})
    found = load_checkpoint(tmp_path)
    assert found is not None and found["step"] == 100_000_001
