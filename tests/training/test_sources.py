"""The ranking loss of each source, in the log of a run."""

import pytest
import torch

from sparton.training.sources import SourceLosses
from tests.test_own_data import own
from tests.test_train import run_here
from tests.training.test_loggers import shown

CPU = torch.device("cpu")


def test_means_over_the_queries_since_they_were_forgotten():
    losses = SourceLosses(["a", "b", "c"], CPU)
    losses.count(torch.tensor([0, 0, 2]), torch.tensor([1.0, 3.0, 7.0]))
    losses.count(torch.tensor([0, 2, 2]), torch.tensor([5.0, 1.0, 1.0]))
    assert losses.read() == {"loss_of_a": 3.0, "loss_of_c": 3.0}
    again = SourceLosses(["a", "b", "c"], CPU)
    again.load_state(losses.state())
    assert again.read() == losses.read()
    losses.forget()
    assert losses.read() == {}
    losses.count(torch.tensor([1]), torch.tensor([2.0]))
    assert losses.read() == {"loss_of_b": 2.0}


def test_a_line_on_the_screen_names_the_sources():
    line = shown({"loss": 0.5, "loss_of_web": 0.25, "loss_of_faq": 1.0}, 10)
    assert line == "10/90  loss 0.5000  web 0.250  faq 1.000\n"


@pytest.mark.quick(1)
@pytest.mark.parametrize("homogeneous", [False, True])
def test_a_run_of_several_sources_logs_the_loss_of_each(tmp_path, homogeneous):
    """One with negatives, one without; what is logged adds up to the ranking loss."""
    for name, negatives in (("a", ["some other words"]), ("b", [])):
        rows = [f"what is {name} {n}?\t{name} is {n}" for n in range(40)]
        rows = ["\t".join([row, *negatives]) for row in rows]
        (tmp_path / f"{name}.tsv").write_text("".join(f"{row}\n" for row in rows))
    files = f"{{a: '{tmp_path}/a.tsv', b: '{tmp_path}/b.tsv'}}"
    changes = ("evaluation=none", "num_negatives=1", "steps=12", "log_every=4")
    changes += ("checkpoint_every=5", f"data.homogeneous={homogeneous}")
    run = tmp_path / "run"
    records = run_here(run, *own(files, *changes), miniature=())
    (run / "checkpoints" / "step-00000012.pt").unlink()
    resumed = run_here(run, *own(files, *changes), miniature=())
    last, again = (
        {key: value for key, value in each[-1].items() if key.startswith("loss")}
        for each in (records, resumed)
    )
    assert len(resumed) > len(records) and again == last, "steps 9 and 10 are before the checkpoint"
    found = [{key for key in record if key.startswith("loss_of_")} for record in records]
    assert set().union(*found) == {"loss_of_a", "loss_of_b"}
    assert len(found[0]) == (1 if homogeneous else 2), "of the first step alone"
    first = records[0]
    low, high = (f([first[key] for key in found[0]]) for f in (min, max))
    assert low - 1e-5 <= first["loss_ranking"] <= high + 1e-5
    if homogeneous:
        assert low == pytest.approx(first["loss_ranking"], rel=1e-5)
