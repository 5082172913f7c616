"""Every configuration composes, names only what exists, and refuses what could not train."""

import inspect
import json
from collections.abc import Iterator
from itertools import zip_longest

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor

from sparton.cli.checks import check
from sparton.cli.errors import explain
from sparton.cli.schema import identity, total_steps
from sparton.cli.sweeps import SweepReport
from sparton.cli.targets import refuse_wrong_settings
from sparton.losses.contract import Scored, total
from sparton.representations import Representations
from tests.composing import CONFIGS, composed

GROUPS = {
    "backbone": "backbone",
    "head": "head",
    "loss": "loss",
    "regularizer": "regularizer@document_regularizer",
    "data": "data",
    "evaluation": "evaluation",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "averaging": "averaging",
    "refresh": "refresh",
    "logger": "logger",
    "experiment": "experiment",
    "debug": "debug",
}
HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_args_", "_recursive_")
# What is of no account to each other is composed together, which takes most of the time.
APART = ("head", "loss", "data", "experiment", "debug")


def options(group: str) -> list[str]:
    """The overrides that choose each option of a group."""
    names = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    return [f"{GROUPS[group]}={name}" for name in names]


CHOICES = [
    *([option] for group in APART for option in options(group)),
    *(
        [option for option in row if option]
        for row in zip_longest(*(options(group) for group in GROUPS if group not in APART))
    ),
]


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


LEFT_TO_THE_USER = {
    "experiment=colbert_zero_distillation": "init_from=runs/x/model",
    "experiment=opensearch_doc_v3": "query_encoder.weights=idf.json",
}


@pytest.mark.parametrize("choices", CHOICES, ids=" ".join)
def test_every_option_composes_and_names_what_exists(choices):
    given = [LEFT_TO_THE_USER[each] for each in choices if each in LEFT_TO_THE_USER]
    cfg = composed(*choices, "num_negatives=1", *given)
    check(cfg, world_size=1)
    refuse_wrong_settings(cfg, [name for name in cfg if OmegaConf.is_dict(cfg[name])])
    found = list(nodes(cfg))
    assert found
    for node in found:
        bind(node)


@pytest.mark.parametrize("name", [path.stem for path in (CONFIGS / "loss").glob("*.yaml")])
def test_every_loss_is_built_and_says_what_it_needs(name):
    loss = instantiate(composed(f"loss={name}").loss)
    scores = torch.arange(12.0).view(2, 6).requires_grad_()
    teacher = torch.eye(2, 3) if loss.needs_teacher else None

    def value(scores: Tensor, positives: list[int], teacher: Tensor | None) -> Tensor:
        nothing, halves = Representations(), dict.fromkeys(loss.halves or {"sparse"}, scores)
        batch = Scored(nothing, nothing, halves, torch.tensor(positives), teacher)
        return total(loss.terms(batch))

    found = value(scores, [0, 3], teacher)
    assert found.ndim == 0 and torch.autograd.grad(found, scores)[0].abs().sum() > 0
    if loss.needs_teacher:
        with pytest.raises(ValueError, match="no teacher scores"):
            value(scores, [0, 3], None)
    alone = scores[:, :2], [0, 1], torch.eye(2, 1)
    if loss.needs_negatives:
        with pytest.raises(ValueError, match="set num_negatives"):
            value(*alone)
        with pytest.raises(ValueError, match=r"num_negatives=0, but the loss .* set num_neg"):
            check(composed(f"loss={name}"), world_size=1)
    else:
        assert value(*alone).isfinite()
        check(composed(f"loss={name}"), world_size=1)


def test_a_sum_of_losses_takes_weights_settings_and_one_more_loss():
    overrides = ["loss.weights.margin_mse=0.25", "loss.losses.infonce.temperature=0.5"]
    more = ["+loss@loss.losses.triplet=triplet", "+loss.weights.triplet=2", "num_negatives=1"]
    loss = instantiate(composed("loss=infonce_margin_mse", *overrides, *more).loss)
    assert loss.weights == {"infonce": 1.0, "margin_mse": 0.25, "triplet": 2}
    assert loss.losses["infonce"].temperature == 0.5
    assert type(loss.losses["triplet"]).__name__ == "Triplet"
    with pytest.raises(InstantiationException) as caught:
        check(composed("loss=infonce_margin_mse", more[0]), world_size=1)
    assert "give each loss one weight" in explain(caught.value)


@pytest.mark.parametrize("name", [path.stem for path in (CONFIGS / "regularizer").glob("*.yaml")])
def test_every_regularizer_is_built(name):
    cfg = composed(f"regularizer@document_regularizer={name}")
    reps = torch.ones(2, 300)
    for regularizer in instantiate(cfg.document_regularizer, _convert_="partial").values():
        assert regularizer.penalty(reps) > 0 and regularizer.weight_at(10**9) == regularizer.weight


def test_every_node_of_an_evaluation_binds():
    for path in sorted((CONFIGS / "evaluation").glob("*.yaml")):
        cfg = composed(f"evaluation={path.stem}", name="evaluate")
        assert len(list(nodes(cfg))) >= 2
        refuse_wrong_settings(cfg, ["encoder", "bm25", "index", "evaluation"])
        for node in nodes(cfg):
            bind(node)


def test_a_misspelt_key_does_not_bind():
    cfg = composed("data=squad_acl")
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


def test_what_people_type_for_the_usual_head_is_that_head():
    assert composed("head=splade") == composed("head=sparton")


def test_the_defaults_are_the_recipe_of_the_paper():
    cfg = composed()
    assert (cfg.batch, total_steps(cfg)) == (512, 50646)
    assert total_steps(composed("batch=384")) == 67528
    assert (cfg.query_length, cfg.document_length, cfg.optimizer.lr) == (64, 256, 2e-5)


def test_table_3_has_the_rows_of_the_paper_and_the_other_heads():
    rows = sorted(path.stem for path in (CONFIGS / "experiment/table3").glob("*.yaml"))
    cells = []
    for row in rows:
        cfg = composed("experiment=table3", f"+experiment/table3={row}")
        check(cfg, world_size=1)
        head = f"head={row.rsplit('_', 1)[0]}"
        same = composed(head, f"batch={cfg.batch}", "backbone=splade_cocondenser")
        assert cfg.head == same.head
        assert identity(cfg) == identity(same)
        cells.append((row.rsplit("_", 1)[0], cfg.batch))
    others = [(head, 384) for head in ("eager", "tiled", "sparton_hybrid")]
    assert set(cells) == {("compiled", 384), ("sparton", 384), ("sparton", 512), *others}


def test_the_sample_of_the_authors_differs_in_what_it_says():
    ours, sample = (
        OmegaConf.to_container(composed(f"experiment={name}", "+experiment/table3=sparton_512"))
        for name in ("table3", "table3_authors_sample")
    )
    differing = {key for key in ours if ours[key] != sample[key]} - {"study", "run_name"}
    assert differing == {"query_regularizer", "document_regularizer", "precision", "scheduler"}
    assert (sample["precision"], sample["scheduler"]["warmup"]) == ("fp16", 0)
    for side in ("query_regularizer", "document_regularizer"):
        assert list(sample[side]) == ["l1", "flops_of_sums"]
        for penalty in sample[side].values():
            assert penalty["weight"] == 1e-4 and penalty["ramp"]["steps"] == 10_000


@pytest.mark.parametrize("name", ["table3", "table3_authors_sample", "table3_multilingual"])
def test_a_table_of_the_paper_is_a_sweep_that_one_command_starts(name):
    cfg = composed(f"experiment={name}", with_hydra=True)
    assert cfg.hydra.mode == RunMode.MULTIRUN
    report = instantiate(cfg.hydra.callbacks.sweep_report, _recursive_=False)
    assert isinstance(report, SweepReport)
    published = json.loads((CONFIGS.parent / "results/paper.json").read_text())
    for row in published[cfg.hydra.callbacks.sweep_report.published]["rows"]:
        for head in row["heads"]:
            assert (CONFIGS / "head" / f"{head}.yaml").exists()


def test_jobs_of_slurm_have_a_task_for_each_gpu():
    overrides = ["hydra/launcher=slurm", "gpus=4", "hydra.launcher.partition=large"]
    launcher = composed(*overrides, with_hydra=True).hydra.launcher
    assert launcher._target_.endswith("submitit_launcher.SlurmLauncher")
    assert (launcher.tasks_per_node, launcher.gpus_per_node, launcher.nodes) == (4, 4, 1)
