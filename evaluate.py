"""Evaluate a retriever: ``python evaluate.py model=PATH evaluation=small_beir``."""

import os
import sys

import hydra
import transformers
from omegaconf import DictConfig

from sparton.cli.errors import EXPECTED_ERRORS, explain
from sparton.cli.evaluation import run_evaluation

transformers.utils.logging.disable_progress_bar()


@hydra.main(version_base="1.3", config_path="configs", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    """One model on the tasks of one split."""
    try:
        run_evaluation(cfg)
    except EXPECTED_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"evaluate.py: {explain(error)}")


if __name__ == "__main__":
    main()
