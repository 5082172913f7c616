"""An evaluation, from its configuration."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from sparton import evaluation
from sparton.cli.errors import EXPECTED_ERRORS
from sparton.cli.evaluation_checks import TERM_BOUNDS, refuse_ignored
from sparton.cli.overrides import folder_name, overrides_in
from sparton.cli.targets import refuse_unknown_settings
from sparton.cli.tasks import task_builders
from sparton.encoded import open_encoded
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.encoding import check_precision
from sparton.training.manifest import describe_environment
from sparton.types import RetrievalTask

System = Callable[[RetrievalTask], evaluation.TaskResult]


def evaluate_here(cfg: DictConfig) -> Exception | None:
    """Evaluate in this process what Hydra has composed.

    Returns:
        The error that has ended it, if a user can mend that.
    """
    try:
        run_evaluation(cfg, HydraConfig.get().overrides.task)
    except EXPECTED_ERRORS as error:
        return error
    return None


def run_evaluation(cfg: DictConfig, typed: Sequence[str]) -> None:
    """Evaluate the model that the configuration names, on the tasks of its split.

    Args:
        cfg: as :func:`~sparton.cli.evaluation_checks.check_evaluation` lets it pass.
        typed: the overrides of the command line.
    """
    refuse_unknown_settings(cfg, ("evaluation", "encoder", "bm25"))
    builders = task_builders(cfg, cfg.split)
    given = [name for name in ("query_length", "document_length") if cfg[name] is not None]
    builders = {name: partial(_at_given_lengths, build, given) for name, build in builders.items()}
    if cfg.documents is not None and len(builders) > 1:
        raise ValueError(
            f"documents={cfg.documents} are those of one task, and there are {len(builders)}: "
            f"{', '.join(builders)}"
        )
    evaluate = build_bm25(cfg) if cfg.model == "bm25" else build_encoder(cfg, typed)
    for build in builders.values():
        build()  # Every task is downloaded and checked before the first is encoded.
    name = folder_name(typed, left_out={"output", "device"})
    output = Path(cfg.output or Path("runs", "evaluate", name))
    output.mkdir(parents=True, exist_ok=True)
    resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    description = {"config": resolved, "environment": describe_environment()}
    evaluation.run_tests(evaluate, builders, output, description, title=cfg.model)
    Console().print(f"written to {output}", soft_wrap=True, highlight=False, markup=False)


def _at_given_lengths(build: Callable[[], RetrievalTask], given: Sequence[str]) -> RetrievalTask:
    """A task without the lengths that a user has given for all: the tokenizer has those."""
    task = build()
    return task._replace(form=task.form._replace(**dict.fromkeys(given)))


def build_bm25(cfg: DictConfig) -> System:
    """BM25, whose settings are checked.

    Raises:
        ValueError: names the setting.
    """
    BM25(cfg.bm25.k1, cfg.bm25.b)  # refuses what is out of range
    return instantiate(cfg.bm25, device=evaluation.choose_device(cfg.device))


def build_encoder(cfg: DictConfig, typed: Sequence[str]) -> System:
    """A trained model and how it is searched; what it ignores or cannot do is refused.

    Raises:
        ValueError: names the setting.
        OSError: there is no such model, or files are missing.
    """
    asked, words = cfg.encoder, {"k1": cfg.bm25.k1, "b": cfg.bm25.b}
    evaluation.check_vector_dtype(asked.vector_dtype)
    check_precision(asked.precision)  # refuses what does not exist
    BM25(**words)  # refuses what cannot be
    device = evaluation.choose_device(cfg.device)
    model = (cfg.model, cfg.query_length, cfg.document_length)
    encoder, tokenizer = evaluation.load_retriever(*model, device=device)
    settings = {name: asked[name] for name in ("metrics", "k", "search", "rerank_depth")}
    search = evaluation.plan_search(encoder, **settings)
    bounds = {f"encoder.{name}": asked[name] for name in TERM_BOUNDS}
    evaluation.check_bounds_apply(search, encoder, **bounds)
    if evaluation.bm25_finds(search, encoder):
        rest = overrides_in(typed, ["bm25"], but=("bm25.k1", "bm25.b"))
        because = "BM25 finds the encoder.rerank_depth candidates with bm25.k1 and bm25.b, and"
        refuse_ignored(because, rest)
    else:
        rest = overrides_in(typed, ["bm25"])
        refuse_ignored(f"search={search} with this model takes no BM25 and", rest)
    system = instantiate(asked, encoder, tokenizer, **words)
    if cfg.documents is None:
        return system
    return partial(system, documents=open_encoded(cfg.documents))
