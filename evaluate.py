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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import TaskResult, results_table, write_results
from sparton.models.folder import Lengths, encoder_lengths, load_encoder
from sparton.training.manifest import describe_environment


def build_evaluator(cfg: DictConfig) -> Callable[..., TaskResult]:
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if cfg.model == "bm25":
        return instantiate(cfg.bm25, device=device)
    encoder = load_encoder(cfg.model).to(device)
    lengths = encoder_lengths(cfg.model) or Lengths(query=64, document=256)
    query_length = cfg.query_length or lengths.query
    document_length = cfg.document_length or lengths.document
    tokenizer = PackedTokenizer(
        encoder.tokenizer, query_length, document_length, max_length=encoder.backbone.max_length
    )
    return instantiate(cfg.encoder, encoder, tokenizer)


@hydra.main(version_base="1.3", config_path="configs", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    try:
        config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        evaluate = build_evaluator(cfg)
        tasks = {
            name: partial(instantiate, node) for name, node in cfg.evaluation[cfg.split].items()
        }
        for build in tasks.values():
            build()  # Every task is downloaded and checked before the first is encoded.
    except (ValueError, OSError, InstantiationException, OmegaConfBaseException) as error:
        sys.exit(f"evaluate.py: {error}")
    overrides = re.sub(r"[^\w.,=-]+", "_", HydraConfig.get().job.override_dirname)
    output = Path(cfg.output or Path("runs", "evaluate", overrides))
    results: list[TaskResult] = []
    for name, build in tasks.items():
        results.append(evaluate(build()._replace(name=name)))
        write_results(results, output, {"config": config, "environment": describe_environment()})
    Console().print(results_table(results, title=f"{cfg.model}, {output / 'results.json'}"))


if __name__ == "__main__":
    main()
