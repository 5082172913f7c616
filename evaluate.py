"""Evaluate a retriever: ``python evaluate.py model=PATH evaluation=small_beir``."""

import os
import sys
from pathlib import Path

import hydra
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from rich.console import Console

from sparton import config, evaluation
from sparton.training.manifest import describe_environment

transformers.utils.logging.disable_progress_bar()


def run(cfg: DictConfig) -> None:
    resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    tasks = cfg.evaluation.get(cfg.split) if cfg.split in ("dev", "test") else None
    if not tasks:
        raise ValueError(f"split={cfg.split} has no tasks in this evaluation: try dev or test")
    overrides = HydraConfig.get().overrides.task
    of_encoders = [each for each in overrides if config.top_level(each) == "encoder"]
    if cfg.model == "bm25" and of_encoders:
        settings = ", ".join(of_encoders)
        raise ValueError(f"model=bm25 is no encoder and ignores {settings}: leave it out")
    asked, bounds = cfg.encoder, ("max_query_terms", "max_document_terms")
    evaluation.check_term_bounds(**{f"encoder.{name}": asked[name] for name in bounds})
    evaluation.check_search(asked.search, asked.rerank_depth, asked.vector_dtype)
    for name in ("metrics", "encoder.metrics", "bm25.metrics"):
        evaluation.check_metrics(OmegaConf.select(cfg, name), setting=name)
    for task in tasks.values():
        instantiate(task)  # Every task is downloaded and checked before the first is encoded.
    device = evaluation.choose_device(cfg.device)
    if cfg.model == "bm25":
        evaluate = instantiate(cfg.bm25, device=device)
    else:
        model = (cfg.model, cfg.query_length, cfg.document_length)
        evaluate = instantiate(cfg.encoder, *evaluation.load_retriever(*model, device=device))
    name = config.folder_name(overrides, left_out={"output", "device"})
    output = Path(cfg.output or Path("runs", "evaluate", name))
    output.mkdir(parents=True, exist_ok=True)
    description = {"config": resolved, "environment": describe_environment()}
    results = []
    for name, task in tasks.items():
        results.append(evaluate(instantiate(task)._replace(name=name)))
        evaluation.write_results(results, output, description)
        evaluation.write_task_run(results[-1], output)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(evaluation.results_table(results, title=cfg.model))
    console.print(f"written to {output}", soft_wrap=True, highlight=False, markup=False)


@hydra.main(version_base="1.3", config_path="configs", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    try:
        run(cfg)
    except (InstantiationException, MissingMandatoryValue, ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"evaluate.py: {config.explain(error)}")


if __name__ == "__main__":
    main()
