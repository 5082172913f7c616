"""What could not train, or would ignore what was asked for, is refused by name."""

import re

import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from sparton.cli.checks import check, check_cells, check_required
from sparton.cli.errors import explain
from sparton.cli.inputs import read_inputs
from sparton.training.distributed import World
from tests.composing import CONFIGS, composed


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["name=../mine"], 1, "name=../mine: a folder is called so"),
        (["study=latest"], 1, "study=latest: runs/latest is the run that began last"),
        (["~scheduler"], 1, "scheduler names no class in _target_, .* a file of configs/scheduler"),
        (["~head"], 1, "head names no class"),
        (["batch=0"], 1, "batch=0: must be at least 1"),
        (["micro_batch=0"], 1, "micro_batch=0: must be a whole number from 1 on, auto, or null"),
        (["micro_batch=x"], 1, "micro_batch=x: must be a whole number from 1 on, auto, or null"),
        (["evaluation.every=lots"], 1, "evaluation.every=lots: must be a whole number"),
        (
            ["evaluation=holdout", "evaluation.holdout.seed=null"],
            1,
            "evaluation.holdout.seed=null: must be a whole number from 0 on",
        ),
        (
            ["evaluation=holdout", "evaluation.holdout.seed=1.5"],
            1,
            "evaluation.holdout.seed=1.5: must be a whole number",
        ),
        (
            ["evaluation=holdout", "evaluation.holdout.most=0"],
            1,
            "evaluation.holdout.most=0: must be a whole number from 1 on",
        ),
        (
            ["evaluation=holdout", "evaluation.holdout=0.1"],
            1,
            "evaluation.holdout=0.1: must be settings with names, such as evaluation.holdout.share",
        ),
        (
            ["evaluation=none", "+evaluation.holdout={shares: 0.1}"],
            1,
            "evaluation.holdout.shares: there is no such setting, choose from share, most, ",
        ),
        (["clip_norm=-1"], 1, "clip_norm=-1.0: must be positive, or null"),
        (["num_negatives=-1"], 1, "num_negatives=-1: must not be negative"),
        (["precision=fp4"], 1, "precision=fp4: choose from fp32, bf16"),
        (["precision=fp8", "backbone.compile=true"], 1, "set backbone.compile=false, or precision"),
        (["precision=fp8", "backbone.lora={rank: 4}"], 1, "or backbone.lora=null to train all"),
        (["head.fp8=true", "precision=fp32"], 1, "needs products in 16 bit, got precision=fp32"),
        (["batch=6"], 4, "multiple of their number, 4; try batch=4"),
        (["batch=2"], 4, "try batch=4"),
        (["weight_decay=-0.1"], 1, "weight_decay=-0.1: must not be negative"),
        (["optimizer.lr=-1"], 1, "optimizer.lr=-1: must not be negative"),
        (["optimizer.lr=lots"], 1, "optimizer.lr=lots: must be a number"),
        (["optimizer.lr=null"], 1, "optimizer.lr=null: must be a number"),
        (["examples=100"], 1, "examples=100 makes no step of batch=512"),
        (["refresh=negatives"], 1, "num_negatives=0: no query would have the negatives that"),
        (
            ["refresh=negatives", "num_negatives=7", "steps=1000"],
            1,
            "refresh.every=1000: nothing would be mined in 1000 steps",
        ),
        (["backbone=bare", "head=colbert", "backbone.name=null"], 1, "backbone.name=null: name a"),
        (["optimizer.lr=true"], 1, "optimizer.lr=true: must be a number"),
        (["evaluation.every=true"], 1, "evaluation.every=true: must be a whole number from 1 on"),
    ],
)
def test_combinations_that_could_not_train_are_refused(overrides, world_size, message):
    with pytest.raises(ValueError, match=message):
        check(composed(*overrides), world_size)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer.betas=[a,b]"],
            r"optimizer=\{.*betas:\[a,b\],.*\} cannot be made: TypeError: ",
        ),
        (["optimizer.betas=[0.9,1.5]"], "cannot be made: ValueError: Invalid beta parameter at in"),
        (["loss.temperature=0"], "^loss: InfoNCE temperature must be positive and finite, got 0"),
        (
            ["head=sparton_colbert", "loss=joint", "loss.tokens.temperature=0"],
            r"^loss\.tokens: InfoNCE temperature must be positive and finite, got 0",
        ),
        (["scheduler.warmup=2"], "scheduler.warmup=2 must be a share of the steps"),
        (["averaging=swa", "averaging.start=2"], r"averaging.start=2 must be in \[0, 1\)"),
        (["document_regularizer.flops.weight=-1"], "document_regularizer.flops: a regularizer's"),
        (
            ["query_regularizer.l1.ramp.steps=-5"],
            "query_regularizer.l1: a ramp needs steps of at least 1, got -5",
        ),
    ],
)
def test_what_could_not_be_made_is_refused_before_data_are_read(overrides, message):
    with pytest.raises((ValueError, InstantiationException)) as caught:
        check(composed(*overrides), 1)
    assert re.search(message, explain(caught.value)), explain(caught.value)


def test_an_optimizer_of_ones_own_is_not_made_before_its_training():
    check(composed("optimizer._target_=tests.sweeps.broken.out_of_memory"), 1)


@pytest.mark.parametrize(
    "typed",
    ["backbone=modernbert_base", "backbone.name=/nowhere", "+backbone.logit_scale=1", "~backbone"],
)
def test_a_backbone_that_was_asked_for_beside_a_trained_model_is_refused(typed):
    cfg = composed("init_from=runs/x/model", "backbone=bert_base")
    with pytest.raises(ValueError, match=rf"init_from=runs/x/model .* ignores {re.escape(typed)}:"):
        check(cfg, 1, ["init_from=runs/x/model", typed])


def test_how_a_trained_model_runs_may_be_asked_for_and_experiments_name_any_backbone():
    for name in ("compile", "half_residual", "gradient_checkpointing"):
        typed = ["experiment=in_domain", "init_from=runs/x/model", f"backbone.{name}=true"]
        check(composed(*typed), 1, typed)


def test_settings_of_a_regularizer_that_was_not_chosen_are_refused():
    overrides = ["experiment=quickstart", "regularizer@document_regularizer=l1"]
    with pytest.raises(ValueError, match=r"document_regularizer\.flops has settings"):
        check(composed(*overrides), world_size=1)
    check(composed(*overrides, "~document_regularizer.flops"), world_size=1)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sharding=some", "sharding=some: choose from none, full"),
        ("micro_batch=auto", "with sharding=full set micro_batch=N, such as 16, or null"),
        ("precision=fp16", "with sharding=full set precision=bf16"),
        (
            "precision=fp8",
            "with sharding=full a GPU has none: set precision=bf16, or sharding=none",
        ),
        ("backbone.compile=true", "with sharding=full set backbone.compile=false"),
        ("refresh=negatives", "set refresh=none and mine before the training"),
    ],
)
def test_what_a_sharded_training_cannot_do_is_refused(override, message):
    sharded = ["sharding=full", "micro_batch=null"]
    check(composed(*sharded), world_size=2)
    with pytest.raises(ValueError, match=message):
        check(composed(*sharded, override), world_size=2)
    if "sharding" not in override:
        check(composed("micro_batch=null", "num_negatives=7", override), world_size=2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("every=0", "refresh.every=0 must be at least 1"),
        ("rule.share=2", "refresh.rule.share=2 must lie above 0"),
        ("rule.skip=99", "refresh.rule.skip=99 and refresh.rule.depth=100 leave 1 ranks for"),
    ],
)
def test_rules_of_refreshing_are_refused_by_their_settings(setting, message):
    with pytest.raises(InstantiationException) as error:
        check(composed("refresh=negatives", "num_negatives=7", f"refresh.{setting}"), 1)
    assert explain(error.value).startswith(message)


@pytest.mark.parametrize(
    ("experiment", "given"),
    [
        ("opensearch_doc_v3", "query_encoder.weights=idf.json"),
        ("colbert_zero_distillation", "init_from=runs/x/model"),
    ],
)
def test_what_an_experiment_leaves_to_the_user_must_be_set(experiment, given):
    setting = given.partition("=")[0]
    with pytest.raises(InterpolationResolutionError) as error:
        check_required(composed(f"experiment={experiment}"))
    assert explain(error.value).startswith(f"{setting}: has no value: set it to the ")
    check_required(composed(f"experiment={experiment}", given))


def test_no_experiment_leaves_a_value_to_a_question_mark_that_is_none():
    """``???`` over a value, null for one, leaves that value."""
    for file in (CONFIGS / "experiment").glob("*.yaml"):
        assert "???" not in file.read_text(), f"{file.name}: ${{required:WHAT}} says it"


def test_fp8_trains_in_16_bit():
    for precision in ("bf16", "fp16", "fp8", "bf16_pure"):
        check(composed("head.fp8=true", f"precision={precision}"), world_size=1)


def test_adapters_without_peft_are_refused(monkeypatch):
    adapters = composed("backbone.lora={rank: 4}")
    monkeypatch.setattr("sparton.cli.numeric_checks.find_spec", lambda name: name != "peft" or None)
    with pytest.raises(ModuleNotFoundError, match=r"backbone\.lora needs peft.*sparton\[lora\]"):
        check(adapters, world_size=1)
    check(composed(), world_size=1)
    monkeypatch.undo()
    check(adapters, world_size=1)


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_a_precision_that_the_device_lacks_is_refused_before_data_are_read(precision):
    missing = composed("data=text_files", "data.files=[there_is_none.jsonl]")
    of_a_cpu = World(0, 1, torch.device("cpu"))
    with pytest.raises(FileNotFoundError, match="there_is_none"):
        read_inputs(missing, of_a_cpu)
    missing.precision = precision
    with pytest.raises(ValueError, match=f"precision={precision} needs a CUDA GPU"):
        read_inputs(missing, of_a_cpu)


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        (
            ["data=text_files", "data.files=none.jsonl"],
            r" \(data\.root=FOLDER says where data is\)",
        ),
        (["data=msmarco_ids"], r" \(data_dir=FOLDER says where data is\)"),
        (["data=msmarco_ids", "data.sources.msmarco.root=there"], ""),
    ],
)
def test_files_that_are_missing_are_told_with_the_setting_that_leads_to_them(data, remedy):
    with pytest.raises(FileNotFoundError, match=rf"no such file[^(]*{remedy}$"):
        read_inputs(composed(*data), World(0, 1, torch.device("cpu")))


def test_a_logger_that_takes_no_step_to_start_from_is_refused():
    cfg = composed()
    cfg.logger = {"mine": {"_target_": "collections.Counter"}}
    with pytest.raises(
        ValueError, match=r"logger\.mine makes a Counter already: .*_partial_: true"
    ):
        read_inputs(cfg, World(0, 1, torch.device("cpu")))


def cell(*overrides: str) -> DictConfig:
    """As the composer gives the variants of a sweep."""
    cfg = composed(*overrides)
    OmegaConf.set_struct(cfg, False)
    return OmegaConf.create({**cfg, "hydra": {"overrides": {"task": [*overrides]}}})


def test_cells_of_a_sweep_lie_in_one_folder_and_each_in_its_own():
    check_cells([cell("batch=8", f"seed={seed}") for seed in (1, 2)])
    check_cells([cell(f"batch={batch}", "study=own") for batch in (8, 16)])
    for setting in ("study", "name"):
        message = rf"{setting}=... has several values \(a, b\)"
        with pytest.raises(ValueError, match=message):
            check_cells([cell(f"{setting}={value}") for value in ("a", "b")])
    files = [cell("batch=8", f"data.files={path}") for path in ("/no/x.jsonl", "/no_x.jsonl")]
    with pytest.raises(ValueError, match=r"would lie in one folder, data\.files-_no_x\.jsonl"):
        check_cells(files)
