"""Evaluate a retriever: ``python evaluate.py model=PATH evaluation=small_beir``."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from rich.console import Console

from sparton import evaluation
from sparton.training.manifest import describe_environment


def build_evaluator(cfg: DictConfig) -> Callable[..., evaluation.TaskResult]:
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if cfg.model == "bm25":
        return instantiate(cfg.bm25, device=device)
    lengths = (cfg.query_length, cfg.document_length)
    return instantiate(cfg.encoder, *evaluation.load_retriever(cfg.model, *lengths, device=device))


def build_tasks(cfg: DictConfig) -> dict[str, partial]:
    nodes = cfg.evaluation.get(cfg.split) or sys.exit(f"no split={cfg.split}: try dev or test")
    tasks = {name: partial(instantiate, node) for name, node in nodes.items()}
    for build in tasks.values():
        build()  # Every task is downloaded and checked before the first is encoded.
    return tasks


@hydra.main(version_base="1.3", config_path="configs", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    try:
        config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        evaluate, tasks = build_evaluator(cfg), build_tasks(cfg)
    except MissingMandatoryValue as error:
        sys.exit(f"set {error.full_key}=..., see configs/evaluate.yaml")
    except (ValueError, OSError, InstantiationException) as error:
        sys.exit(str(error))
    overrides = re.sub(r"[^\w.+-]+", "_", HydraConfig.get().job.override_dirname)
    output = Path(cfg.output or Path("runs", "evaluate", overrides))
    description = {"config": config, "environment": describe_environment()}
    results = []
    for name, build in tasks.items():
        results.append(evaluate(build()._replace(name=name)))
        evaluation.write_results(results, output, description)
        evaluation.write_task_run(results[-1], output)
    Console().print(evaluation.results_table(results, title=cfg.model), f"written to {output}")


if __name__ == "__main__":
    main()
