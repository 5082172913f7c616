"""Configurations, as the command line composes them."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from sparton.cli import schema

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def composed(*overrides: str, name: str = "train", with_hydra: bool = False) -> DictConfig:
    """With the overrides of ``train.py``, or of another of the first files of configs/."""
    schema.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(name, list(overrides), return_hydra_config=with_hydra)
