"""An evaluation, from its configuration."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from sparton import evaluation
from sparton.cli.command_line import Request
from sparton.cli.composing import composer
from sparton.cli.errors import EXPECTED_ERRORS
from sparton.cli.overrides import folder_name, overrides_in
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.encoding import autocast_dtype
from sparton.training.manifest import describe_environment
from sparton.types import RetrievalTask

System = Callable[[RetrievalTask], evaluation.TaskResult]


def evaluate(request: Request) -> None:
    """Evaluate what a command line names.

    Raises:
        EXPECTED_ERRORS: what a user can mend.
    """
    with composer(request) as opened:
        variants = opened.variants()
        if opened.sweeps(variants[0]):
            ended = [job.return_value for jobs in opened.sweep(_evaluation) for job in jobs]
        else:
            ended = [opened.run(_evaluation)]
    for error in filter(None, ended):
        raise error


def _evaluation(cfg: DictConfig) -> Exception | None:
    """One evaluation; an error that a user can mend is given back, as Hydra would tell of it in its
    own words."""
    try:
        run_evaluation(cfg)
    except EXPECTED_ERRORS as error:
        return error
    return None


def run_evaluation(cfg: DictConfig) -> None:
    """Evaluate the model that the configuration names, on the tasks of its split."""
    resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    tasks = cfg.evaluation.get(cfg.split) if cfg.split in ("dev", "test") else None
    if not tasks:
        raise ValueError(f"split={cfg.split} has no tasks in this evaluation: try dev or test")
    overrides = HydraConfig.get().overrides.task
    evaluate = (build_bm25 if cfg.model == "bm25" else build_encoder)(cfg, overrides)
    builders = {name: partial(instantiate, task) for name, task in tasks.items()}
    for build in builders.values():
        build()  # Every task is downloaded and checked before the first is encoded.
    name = folder_name(overrides, left_out={"output", "device"})
    output = Path(cfg.output or Path("runs", "evaluate", name))
    output.mkdir(parents=True, exist_ok=True)
    description = {"config": resolved, "environment": describe_environment()}
    evaluation.run_tests(evaluate, builders, output, description, title=cfg.model)
    Console().print(f"written to {output}", soft_wrap=True, highlight=False, markup=False)


def build_bm25(cfg: DictConfig, overrides: Sequence[str]) -> System:
    """BM25; what it ignores or cannot do is refused.

    Raises:
        ValueError: names the setting.
    """
    of_encoders = ("encoder", "query_length", "document_length")
    _refuse(overrides_in(overrides, of_encoders), "model=bm25 is no encoder and")
    _check_metrics(cfg, "bm25")
    BM25(cfg.bm25.k1, cfg.bm25.b)  # refuses what is out of range
    return instantiate(cfg.bm25, device=evaluation.choose_device(cfg.device))


def build_encoder(cfg: DictConfig, overrides: Sequence[str]) -> System:
    """A trained model and how it is searched; what it ignores or cannot do is refused.

    Raises:
        ValueError: names the setting.
        OSError: there is no such model, or files are missing.
    """
    asked, words = cfg.encoder, {"k1": cfg.bm25.k1, "b": cfg.bm25.b}
    bounds = {f"encoder.{name}": asked[name] for name in ("max_query_terms", "max_document_terms")}
    evaluation.check_term_bounds(**bounds)
    evaluation.check_search(asked.search, asked.rerank_depth, asked.vector_dtype)
    _check_metrics(cfg, "encoder")
    autocast_dtype(asked.precision)  # refuses what does not exist
    BM25(**words)  # likewise
    device = evaluation.choose_device(cfg.device)
    model = (cfg.model, cfg.query_length, cfg.document_length)
    encoder, tokenizer = evaluation.load_retriever(*model, device=device)
    settings = {name: asked[name] for name in ("metrics", "k", "search", "rerank_depth")}
    search = evaluation.plan_search(encoder, **settings)
    evaluation.check_bounds_apply(search, encoder, **bounds)
    if evaluation.bm25_finds(search, encoder):
        rest = overrides_in(overrides, ["bm25"], but=("bm25.k1", "bm25.b"))
        _refuse(rest, "BM25 finds the encoder.rerank_depth candidates with bm25.k1 and bm25.b, and")
    else:
        rest = overrides_in(overrides, ["bm25"])
        _refuse(rest, f"search={search} with this model takes no BM25 and")
    return instantiate(asked, encoder, tokenizer, **words)


def _refuse(overrides: Sequence[str], because: str) -> None:
    if overrides:
        raise ValueError(f"{because} ignores {', '.join(overrides)}: leave that out")


def _check_metrics(cfg: DictConfig, system: str) -> None:
    evaluation.check_metrics(cfg.metrics)
    asked = cfg[system]
    evaluation.check_metrics(asked.metrics, asked.k, f"{system}.k", f"{system}.metrics")
