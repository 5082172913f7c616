"""Train a retriever: ``python train.py head=sparton batch=512``; configs/ holds every choice."""

import os

# OpenMP threads that spin while they wait would starve the processes that tokenise ahead.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Lengths change from batch to batch: blocks that cannot grow leave gaps.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import sys
from pathlib import Path

import hydra
import transformers
from omegaconf import DictConfig

from sparton.cli import schema
from sparton.cli.launching import launch
from sparton.training.distributed import leave_world

PROGRAM = Path(__file__).resolve()

schema.register()
transformers.utils.logging.disable_progress_bar()


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    """A cell of a sweep, the starter of several processes, or a training."""
    if message := launch(cfg, PROGRAM):
        sys.exit(f"train.py: {message}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("train.py: stopped; the same command goes on from the last checkpoint")
    leave_world()
