"""What a cell of a sweep is told."""

from pathlib import Path

from hydra.conf import ConfigSourceInfo
from omegaconf import open_dict

from sparton.cli.sweeps import cell_command
from tests.composing import composed


def test_a_cell_is_composed_from_the_files_of_its_sweep(tmp_path):
    cfg = composed("batch=64", with_hydra=True)
    shipped, own = (ConfigSourceInfo(str(tmp_path), "file", by) for by in ("main", "command-line"))
    with open_dict(cfg):
        cfg.hydra.runtime.config_sources = [shipped, own]
        cfg.hydra.job.config_name = "train"
    command = cell_command(Path("train.py"), cfg.hydra, tmp_path / "cell")
    assert [word for word in command if word.startswith("--config")] == [
        "--config-name=train",
        f"--config-dir={tmp_path}",
    ]
