"""Every configuration composes, names only what exists, and refuses what could not train."""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.conf import ConfigSourceInfo
from hydra.errors import (
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
)
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from sparton import config
from sparton.losses.joint import KINDS, Joint

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
GROUPS = {
    "backbone": "backbone",
    "head": "head",
    "loss": "loss",
    "regularizer": "regularizer@document_regularizer",
    "data": "data",
    "evaluation": "evaluation",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "logger": "logger",
    "experiment": "experiment",
    "debug": "debug",
}
HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_args_", "_recursive_")
OPTIONS = [
    f"{mount}={path.stem}"
    for group, mount in GROUPS.items()
    for path in sorted((CONFIGS / group).glob("*.yaml"))
]


@pytest.fixture(autouse=True)
def hydra_config():
    config.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def train_config(*overrides: str) -> DictConfig:
    return compose("train", list(overrides), return_hydra_config=False)


def nodes(node) -> Iterator[dict]:
    """All nodes with a ``_target_`` from a node on, interpolations left alone."""
    plain = OmegaConf.to_container(node) if isinstance(node, DictConfig | ListConfig) else node
    if isinstance(plain, dict):
        if "_target_" in plain:
            yield plain
        plain = list(plain.values())
    if isinstance(plain, list):
        for value in plain:
            yield from nodes(value)


def bind(node: dict) -> None:
    """Raise TypeError if the target does not take the node's keys."""
    target = get_object(node["_target_"])
    assert callable(target), node["_target_"]
    keys = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
    inspect.signature(target).bind_partial(**keys)


def test_every_group_has_options():
    for group in GROUPS:
        if group != "experiment":
            assert list((CONFIGS / group).glob("*.yaml")), group


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_names_what_exists(option):
    cfg = train_config(option, "num_negatives=1")
    config.check(cfg, world_size=1)
    found = list(nodes(cfg))
    assert found
    for node in found:
        bind(node)


@pytest.mark.parametrize("name", [path.stem for path in (CONFIGS / "loss").glob("*.yaml")])
def test_every_loss_is_built_and_says_what_it_needs(name):
    loss = instantiate(train_config(f"loss={name}").loss)
    scores = torch.arange(12.0).view(2, 6).requires_grad_()
    teacher = torch.eye(2, 3) if loss.needs_teacher else None
    halves = dict.fromkeys(KINDS, scores) if isinstance(loss, Joint) else scores
    value = loss(halves, torch.tensor([0, 3]), teacher)
    assert value.ndim == 0 and torch.autograd.grad(value, scores)[0].abs().sum() > 0
    if loss.needs_teacher:
        with pytest.raises(ValueError, match="no teacher scores"):
            loss(scores, torch.tensor([0, 3]), None)
    alone = scores[:, :2] if halves is scores else dict.fromkeys(KINDS, scores[:, :2])
    alone = alone, torch.tensor([0, 1]), torch.eye(2, 1)
    if loss.needs_negatives:
        with pytest.raises(ValueError, match="set num_negatives"):
            loss(*alone)
        with pytest.raises(ValueError, match=r"num_negatives=0, but the loss .* set num_neg"):
            config.check(train_config(f"loss={name}"), world_size=1)
    else:
        assert loss(*alone).isfinite()
        config.check(train_config(f"loss={name}"), world_size=1)


def test_a_sum_of_losses_takes_weights_settings_and_one_more_loss():
    overrides = ["loss.weights.margin_mse=0.25", "loss.losses.infonce.temperature=0.5"]
    more = ["+loss@loss.losses.triplet=triplet", "+loss.weights.triplet=2", "num_negatives=1"]
    loss = instantiate(train_config("loss=infonce_margin_mse", *overrides, *more).loss)
    assert loss.weights == {"infonce": 1.0, "margin_mse": 0.25, "triplet": 2}
    assert loss.losses["infonce"].temperature == 0.5
    assert type(loss.losses["triplet"]).__name__ == "Triplet"
    with pytest.raises(InstantiationException) as caught:
        config.check(train_config("loss=infonce_margin_mse", more[0]), world_size=1)
    assert "give each loss one weight" in config.explain(caught.value)


@pytest.mark.parametrize("name", [path.stem for path in (CONFIGS / "regularizer").glob("*.yaml")])
def test_every_regularizer_is_built(name):
    cfg = train_config(f"regularizer@document_regularizer={name}")
    reps = torch.ones(2, 300)
    for regularizer in instantiate(cfg.document_regularizer, _convert_="partial").values():
        assert regularizer.penalty(reps) > 0 and regularizer.weight_at(10**9) == regularizer.weight


def test_every_node_of_an_evaluation_binds():
    for path in sorted((CONFIGS / "evaluation").glob("*.yaml")):
        cfg = compose("evaluate", [f"evaluation={path.stem}"])
        assert len(list(nodes(cfg))) >= 2
        for node in nodes(cfg):
            bind(node)


def test_a_misspelt_key_does_not_bind():
    cfg = train_config("data=squad_acl")
    misspelt = OmegaConf.to_container(cfg.data)
    misspelt["sources"]["acl"]["spilt"] = "train"
    with pytest.raises(TypeError, match="spilt"):
        for node in nodes(misspelt):
            bind(node)
    with pytest.raises(TypeError, match="wieghts"):
        bind(OmegaConf.to_container(cfg.data) | {"wieghts": None})
    with pytest.raises(TypeError, match="temprature"):
        bind(OmegaConf.to_container(cfg.loss) | {"temprature": 1.0})


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_file_says_what_it_is_in_its_first_line(path):
    first, second = path.read_text().splitlines()[:2]
    assert first.startswith("# ") and (first != "# @package _global_" or second.startswith("# "))


def test_a_wrong_option_lists_the_right_ones():
    with pytest.raises(MissingConfigException, match=r"(?s)head/spartan.*sparton"):
        train_config("head=spartan")


@pytest.mark.parametrize(
    ("override", "message"),
    [("bacth=512", "bacth"), ("batch=lots", "lots"), ("num_workers=1.5", "1.5")],
)
def test_misspelt_or_mistyped_scalars_stop_before_any_work(override, message):
    with pytest.raises((ConfigCompositionException, MissingConfigException)) as caught:
        train_config(override)
    assert message in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["batch=0"], 1, "batch=0: must be at least 1"),
        (["micro_batch=0"], 1, "micro_batch=0: must be a whole number from 1 on, or null"),
        (["evaluation.every=lots"], 1, "evaluation.every=lots: must be a whole number"),
        (["clip_norm=-1"], 1, "clip_norm=-1.0: must be positive, or null"),
        (["num_negatives=-1"], 1, "num_negatives=-1: must not be negative"),
        (["precision=fp8"], 1, "precision=fp8: choose from fp32, bf16"),
        (["head.fp8=true", "precision=fp32"], 1, "needs products in 16 bit, got precision=fp32"),
        (["batch=6"], 4, "multiple of their number, 4; try batch=4"),
        (["batch=2"], 4, "try batch=4"),
        (["weight_decay=-0.1"], 1, "weight_decay=-0.1: must not be negative"),
        (["optimizer.lr=-1"], 1, "optimizer.lr=-1: must not be negative"),
        (["examples=100"], 1, "examples=100 makes no step of batch=512"),
    ],
)
def test_combinations_that_could_not_train_are_refused(overrides, world_size, message):
    with pytest.raises(ValueError, match=message):
        config.check(train_config(*overrides), world_size)


@pytest.mark.parametrize(
    "typed",
    ["backbone=modernbert_base", "backbone.name=/nowhere", "+backbone.logit_scale=1", "~backbone"],
)
def test_a_backbone_that_was_asked_for_beside_a_trained_model_is_refused(typed):
    cfg = train_config("init_from=runs/x/model", "backbone=bert_base")
    with pytest.raises(ValueError, match=rf"init_from=runs/x/model .* ignores {re.escape(typed)}:"):
        config.check(cfg, 1, ["init_from=runs/x/model", typed])


def test_how_a_trained_model_runs_may_be_asked_for_and_experiments_name_any_backbone():
    for name in ("compile", "half_residual", "gradient_checkpointing"):
        typed = ["experiment=in_domain", "init_from=runs/x/model", f"backbone.{name}=true"]
        config.check(train_config(*typed), 1, typed)


def test_settings_of_a_regularizer_that_was_not_chosen_are_refused():
    overrides = ["experiment=quickstart", "regularizer@document_regularizer=l1"]
    with pytest.raises(ValueError, match=r"document_regularizer\.flops has settings"):
        config.check(train_config(*overrides), world_size=1)
    config.check(train_config(*overrides, "~document_regularizer.flops"), world_size=1)


def test_fp8_trains_in_16_bit():
    for precision in ("bf16", "fp16", "bf16_pure"):
        config.check(train_config("head.fp8=true", f"precision={precision}"), world_size=1)


def test_the_defaults_are_the_recipe_of_the_paper():
    cfg = train_config()
    assert (cfg.batch, config.total_steps(cfg)) == (512, 50646)
    assert config.total_steps(train_config("batch=384")) == 67528
    assert (cfg.query_length, cfg.document_length, cfg.optimizer.lr) == (64, 256, 2e-5)


def test_table_3_has_the_rows_of_the_paper_and_the_other_heads():
    rows = sorted(path.stem for path in (CONFIGS / "experiment/table3").glob("*.yaml"))
    cells = []
    for row in rows:
        cfg = train_config("experiment=table3", f"+experiment/table3={row}")
        config.check(cfg, world_size=1)
        same = train_config(f"head={row.rsplit('_', 1)[0]}", f"batch={cfg.batch}")
        assert cfg.head == same.head
        assert config.identity(cfg) == config.identity(same)
        cells.append((row.rsplit("_", 1)[0], cfg.batch))
    others = [(head, 384) for head in ("eager", "tiled", "sparton_hybrid")]
    assert set(cells) == {("compiled", 384), ("sparton", 384), ("sparton", 512), *others}


@pytest.mark.parametrize("name", ["table3", "table3_multilingual"])
def test_a_table_of_the_paper_is_a_sweep_that_one_command_starts(name):
    cfg = compose("train", [f"experiment={name}"], return_hydra_config=True)
    assert cfg.hydra.mode == RunMode.MULTIRUN
    report = instantiate(cfg.hydra.callbacks.sweep_report, _recursive_=False)
    assert isinstance(report, config.SweepReport)
    published = json.loads((CONFIGS.parent / "results/paper.json").read_text())
    for row in published[cfg.hydra.callbacks.sweep_report.published]["rows"]:
        for head in row["heads"]:
            assert (CONFIGS / "head" / f"{head}.yaml").exists()


def test_a_cell_is_composed_from_the_files_of_its_sweep(tmp_path):
    cfg = compose("train", ["batch=64"], return_hydra_config=True)
    shipped, own = (ConfigSourceInfo(str(tmp_path), "file", by) for by in ("main", "command-line"))
    with open_dict(cfg):
        cfg.hydra.runtime.config_sources = [shipped, own]
        cfg.hydra.job.config_name = "train"
    command = config.cell_command(Path("train.py"), cfg.hydra, tmp_path / "cell")
    assert [word for word in command if word.startswith("--config")] == [
        "--config-name=train",
        f"--config-dir={tmp_path}",
    ]


def test_jobs_of_slurm_have_a_task_for_each_gpu():
    overrides = ["hydra/launcher=slurm", "gpus=4", "hydra.launcher.partition=large"]
    launcher = compose("train", overrides, return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("submitit_launcher.SlurmLauncher")
    assert (launcher.tasks_per_node, launcher.gpus_per_node, launcher.nodes) == (4, 4, 1)


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
    assert config.folder_name(overrides, left_out={"seed"}) == name


def test_long_folder_names_are_cut_and_stay_apart():
    first, second = (config.folder_name([f"x={'x' * 300}{end}"]) for end in "ab")
    assert first != second
    assert max(len(first), len(second)) < 140


def test_a_run_is_found_again_and_cells_of_a_sweep_stay_apart():
    """The folder of a run tells what makes it the run it is; that of a cell all that is swept."""

    def folders(*overrides: str) -> tuple[str, str]:
        hydra = compose("train", [*overrides], return_hydra_config=True).hydra
        return hydra.run.dir, f"{hydra.sweep.dir}/{hydra.sweep.subdir}"

    run, cell = folders("batch=64", "seed=2")
    assert run == "runs/default/batch-64/seed-2"
    assert cell == "runs/default/batch-64/batch-64/gpus-1/seed-2"
    for incidental in (
        ["micro_batch=8"],
        ["logger=wandb", "logger.wandb.project=x"],
        ["num_workers=0"],
        ["log_every=1"],
        ["checkpoint_every=null"],
        ["metrics=[ndcg@10]"],
    ):
        found, apart = folders("batch=64", "seed=2", *incidental)
        assert found == run
        assert apart != cell
    for decisive in ("data_dir=elsewhere", "head=eager", "+experiment/table3=sparton_512"):
        assert folders("batch=64", "seed=2", decisive)[0] != run


def test_the_identity_of_a_run_is_what_decides_its_result():
    base = config.identity(train_config())
    same = ["micro_batch=8", "num_workers=0", "log_every=1", "study=x", "logger=wandb"]
    assert config.identity(train_config(*same)) == base
    for override in ("batch=384", "data_dir=elsewhere", "optimizer.lr=1e-5", "data=squad_acl"):
        assert config.identity(train_config(override)) != base, override
