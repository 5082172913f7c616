"""What does not exist is refused by the name that was typed, with the one that was meant."""

import subprocess
import sys
from pathlib import Path

import pytest

from sparton.cli.command_line import read_request
from sparton.cli.composing import composer
from sparton.cli.nearest import did_you_mean, nearest

pytestmark = pytest.mark.usefixtures("here")


def refusal(command: str, *words: str) -> str:
    request = read_request(words, command)
    with composer(request, command) as opened, pytest.raises(ValueError) as caught:
        opened.variants()
    said = str(caught.value)
    assert said.count("\n") <= 2 and "object_type" not in said
    return said


TRAIN = [
    # of the top level
    ("bacth=64", "there is no setting bacth; did you mean batch=64?"),
    ("+bacth=64", "there is no setting bacth; did you mean batch=64?"),
    ("++bacth=64", "there is no setting bacth; did you mean batch=64?"),
    ("~bacth", "there is no setting bacth; did you mean ~batch?"),
    ("lr=1e-4", "there is no setting lr; did you mean optimizer.lr=1e-4?"),
    ("learning_rate=1e-4", "did you mean optimizer.lr=1e-4?"),
    ("temprature=2", "did you mean loss.temperature=2?"),
    ("batch_size=8", "did you mean batch=8?"),
    ("optimizer_lr=1", "there is no setting optimizer_lr; did you mean optimizer.lr=1?"),
    ("backbone_lora=null", "there is no setting backbone_lora; did you mean backbone.lora=null?"),
    ("optimiser.lr=1", "there is no setting optimiser; did you mean optimizer.lr=1?"),
    ("quux=1", "there is no setting quux; --help shows all"),
    ("+quux.x=1", "there is no setting quux"),
    ("+batch=3", "batch has a value already; another is batch=3"),
    ("tiny", "tiny: a setting has a value, as in batch=64"),
    ("data.files={mine:", "no setting can be read from this"),
    ("data.files=données.csv", """; as text it is "data.files='données.csv'\""""),
    ("data.files=[é.csv]", """ as within '...', and text like this has quotes: 'x=["é"]'"""),
    ("data.files=~/a.csv", "data.files=~/a.csv: ~ is not read here; write $HOME in its place"),
    # of the wrong type
    ("batch=lots", "batch=lots: must be a whole number"),
    ("num_workers=1.5", "must be a whole number"),
    ("micro_batch=1.5", "must be a whole number, or text, or null"),
    ("clip_norm=x", "must be a number, or null"),
    ("unique_positives=perhaps", "must be true or false"),
    ("metrics=ndcg@10", "must be a list, as in [a,b]"),
    # of an object
    ("loss.temprature=2", "loss has no temprature; did you mean loss.temperature=2?"),
    ("+loss.temprature=2", "InfoNCE takes no temprature; did you mean loss.temperature=2?"),
    ("+optimizer.learning_rate=1", "AdamW takes no learning_rate; did you mean optimizer.lr=1?"),
    ("+backbone.revison=x", "takes no revison; did you mean backbone.revision=x?"),
    ("+loss.quux=2", "InfoNCE takes no quux; it takes temperature, symmetric"),
    ("~loss.temprature", "did you mean ~loss.temperature?"),
    ("loss.quux=2", "loss has no quux; it has temperature, symmetric"),
    ("optimizer.lr.x=1", "optimizer.lr is a value and has no x"),
    ("optimizer.amsgrad=true", "leaves that to torch.optim.AdamW; +optimizer.amsgrad=true sets it"),
    ("+evaluation.tset.x=1", "no evaluation reads tset; did you mean evaluation.test?"),
    # of groups
    ("head=spartan", "no option spartan; did you mean head=sparton? Its options: colbert,"),
    ("optimizer=adam", "did you mean optimizer=adamw?"),
    ("heads=eager", "there is no setting heads; did you mean head=eager?"),
    ("+head=eager", "head has a choice already; another is head=eager"),
    ("query_regularizer=l1", "is chosen from a group: regularizer@query_regularizer=l1"),
    ("regularizer=l1", "regularizer@document_regularizer=l1 or regularizer@query_regularizer=l1"),
    ("regulariser@query_regularizer=l1", "did you mean regularizer@query_regularizer=l1?"),
    ("regularizer@query_regularizer=[l1,flop]", "mean regularizer@query_regularizer=flops?"),
    ("backbone=owner/model", "a model of this name is backbone.name=owner/model."),
    ("+experiment/table3=sparton_38", "did you mean experiment/table3=sparton_384?"),
    ("hydra/launcher=slum", "Could not find 'hydra/launcher/slum'"),
]  # fmt: skip


# Each fifth, and the others with the slow tests.
FEW = [
    pytest.param(*case, marks=pytest.mark.slow if row % 5 else ()) for row, case in enumerate(TRAIN)
]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("override", "message"), FEW)
def test_of_a_training(override, message):
    assert message in refusal("train", override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle=x", "there is no setting modle; did you mean model=x?"),
        ("+splitt=dev", "did you mean split=dev?"),
        ("query_length=many", "must be a whole number, or null"),
        ("encoder.serch=maxsim", "encoder has no serch; did you mean encoder.search=maxsim?"),
        ("+encoder.metric=3", "evaluate_encoder takes no metric; did you mean encoder.metrics=3?"),
        ("evaluation=big_beir", "evaluation has no option big_beir. Its options: beir13, "),
        ("scheduler=null", "scheduler has no option null. Its options: constant, "),
    ],
)
def test_of_an_evaluation(override, message):
    assert message in refusal("evaluate", "model=bm25", override)


def test_the_value_that_is_wrong_is_told_of_others():
    assert "did you mean batch=8?" in refusal("train", "head=eager", "seed=3", "bacth=8", "lr=1")
    assert "batch=lots: must be" in refusal("train", "-m", "seed=1,2", "batch=64,lots,65")


@pytest.mark.parametrize(
    "words",
    [
        ["head=splade", "+optimizer.amsgrad=true", "++batch=3", "~loss.symmetric"],
        ["data=text_files", "+data.files.mine=x", "+evaluation.test.more._target_=builtins.dict"],
        ["loss=infonce_margin_mse", "+loss@loss.losses.triplet=triplet", "+loss.weights.triplet=2"],
        ["experiment=table3", "+experiment/table3=sparton_384", "hydra.run.dir=x"],
        ["data=text_files", "data.files=a.csv", "loss.temperature=${weight_decay}"],
    ],
)
def test_what_exists_is_composed(words):
    with composer(read_request(words, "train"), "train") as opened:
        assert len(opened.variants()) == 1


def test_files_of_ones_own_are_checked_too():
    Path("configs/experiment").mkdir(parents=True)
    Path("configs/experiment/mine.yaml").write_text("# @package _global_\nbacth: 8\n")
    assert "In 'experiment/mine'" in refusal("train", "experiment=mine")
    Path("configs/experiment/mine.yaml").write_text("batch: 8\nhead: [1\n")
    said = refusal("train", "experiment=mine")
    assert "configs/experiment/mine.yaml, line 3: not YAML: expected ',' or ']'" in said
    Path("configs/train.yaml").write_text("model: of something else\n")
    assert "train.yaml is no configuration of this command" in refusal("train", "head=eager")


def test_the_nearest_name():
    assert nearest("temprature", ["temperature", "scale"]) == "temperature"
    assert nearest("learning_rate", ["lr", "eps"]) == "lr"
    assert nearest("learning_rate", ["eps"]) is None
    assert did_you_mean([None]) == ""
    assert did_you_mean(["a", None, "b"]) == "; did you mean a or b?"


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_the_command_says_it_in_one_line_and_leaves_nothing(command, tmp_path):
    words = [sys.executable, "-m", "sparton", command, "+bacth=64", "modle=x"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith(f"sparton {command}: +bacth=64: there is no setting bacth")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
