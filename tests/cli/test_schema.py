"""The typed top level, and what of it tells one run from another."""

import pytest

from sparton.cli.schema import identity
from tests.composing import composed


@pytest.mark.slow
def test_a_run_is_found_again_and_cells_of_a_sweep_stay_apart():
    """The folder of a run tells what makes it the run it is; that of a cell all that is swept."""

    def folders(*overrides: str) -> tuple[str, str]:
        hydra = composed(*overrides, with_hydra=True).hydra
        return hydra.run.dir, f"{hydra.sweep.dir}/{hydra.sweep.subdir}"

    run, cell = folders("batch=64", "seed=2")
    assert run == "runs/default/batch-64/seed-2"
    assert cell == "runs/default/batch-64/batch-64/gpus-1/seed-2"
    assert folders("batch=64", "seed=2", "name=mine") == (
        "runs/default/mine/seed-2", "runs/default/mine/batch-64/gpus-1/seed-2"
    )  # fmt: skip
    for incidental in (
        ["micro_batch=8"],
        ["sharding=full"],
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
    base = identity(composed())
    same = ["micro_batch=8", "num_workers=0", "log_every=1", "study=x", "name=x", "logger=wandb"]
    assert identity(composed(*same)) == base
    for override in ("batch=384", "data_dir=elsewhere", "optimizer.lr=1e-5", "data=squad_acl"):
        assert identity(composed(override)) != base, override
