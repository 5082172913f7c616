"""An evaluation, from its configuration."""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from sparton import evaluation
from sparton.arguments import ArgumentError
from sparton.cli.devices import check_gpus, shared_index
from sparton.cli.errors import EXPECTED_ERRORS
from sparton.cli.evaluation_checks import TERM_BOUNDS, refuse_ignored
from sparton.cli.overrides import folder_name, overrides_in, typed_overrides
from sparton.cli.schema import flat_settings
from sparton.cli.targets import refuse_wrong_settings
from sparton.cli.tasks import are_ours, build_first, task_builders
from sparton.encoded import EncodedTexts, open_encoded
from sparton.errors import RunError
from sparton.reading import read_json
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.encoding import check_precision
from sparton.retrieval.indexes.exact import exact_index
from sparton.training.distributed import World, join_world, leave_world
from sparton.training.manifest import describe_environment
from sparton.training.outcome import ECHO, termination_told
from sparton.training.processes import run_ranks
from sparton.types import RetrievalTask

System = Callable[..., evaluation.TaskResult]  # of a RetrievalTask

_INCIDENTAL = {"output", "gpus", "device"}  # settings that change no result
_SHOWN = 3  # of the settings that differ


def evaluate_here(cfg: DictConfig, again: Sequence[str]) -> None:
    """Evaluate in this process what Hydra has composed, or in several that it starts.

    Args:
        again: the words that start this program in the same way.
    """
    words, alone = typed_overrides(HydraConfig.get()), "RANK" not in os.environ
    if cfg.gpus > 1 and alone:
        _evaluate_on_gpus(cfg, [*again, *words, "hydra.mode=RUN"])
        return
    own = World(0, 1, evaluation.choose_device(cfg.device)) if alone else join_world()
    with termination_told("the same command evaluates anew"), _echoes_held(own):
        run_evaluation(cfg, words, own)
        leave_world()


@contextmanager
def _echoes_held(world: World) -> Iterator[None]:
    """What no user can mend may be the echo of a rank that is gone, for which this one is ended."""
    try:
        yield
    except EXPECTED_ERRORS:
        raise
    except Exception:
        if world.size > 1:
            time.sleep(ECHO)
        raise


def _evaluate_on_gpus(cfg: DictConfig, command: Sequence[str]) -> None:
    """Run the command once for each GPU.

    Raises:
        RunError: a process failed; the others ended with it.
    """
    check_gpus(cfg.gpus, cfg.device)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if cfg.device == "cpu" else {}
    ended = run_ranks(command, cfg.gpus, lambda: False, hidden)
    if ended.code:
        raise RunError(f"process {ended.rank} {ended}", told=ended.code > 0)


def run_evaluation(cfg: DictConfig, typed: Sequence[str], world: World) -> None:
    """Evaluate the model that the configuration names, on the tasks of its split.

    Args:
        cfg: as :func:`~sparton.cli.evaluation_checks.check_evaluation` lets it pass.
        typed: the overrides of the command line.
        world: this process among those that encode.
    """
    if not world.is_main:  # the main process says the same
        logging.getLogger("sparton").setLevel(logging.ERROR)
    refuse_wrong_settings(cfg, ("evaluation", "encoder", "bm25"))
    name = folder_name(typed, left_out=_INCIDENTAL)
    output = Path(cfg.output or Path("runs", "evaluate", name))
    resolved: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    place = Path(cfg.model)
    model = str(place.resolve()) if place.is_dir() else cfg.model
    _refuse_other_results(output, resolved, model)
    builders = task_builders(cfg, cfg.split)
    if not builders:  # as a folder without such judgments gives
        other = "test" if cfg.split == "dev" else "dev"
        raise ValueError(
            f"split={cfg.split} has no judgments in this evaluation: try split={other}"
        )
    given = [name for name in ("query_length", "document_length") if cfg[name] is not None]
    builders = {name: partial(_at_given_lengths, build, given) for name, build in builders.items()}
    if len(builders) == 1:  # of several, no two are held in memory
        builders = {name: cache(build) for name, build in builders.items()}
    if cfg.model == "bm25":
        evaluate = build_bm25(cfg, world.device)
    else:
        stored = _documents(cfg, builders)
        system = build_encoder(cfg, typed, world)

        def evaluate(task: RetrievalTask) -> evaluation.TaskResult:
            return system(task, documents=stored.get(task.name))

    # Every task is downloaded and checked before the first is encoded.
    together = len(builders) == 1 and are_ours(cfg, cfg.split)
    build_first((), builders.values(), world, together=together)
    output.mkdir(parents=True, exist_ok=True)
    description = {
        "config": resolved,
        "model": model,
        "environment": describe_environment(),
    }
    evaluation.run_tests(
        evaluate, builders, output, description, title=cfg.model, quiet=not world.is_main
    )
    if world.is_main:
        print(f"written to {output}")


def _refuse_other_results(output: Path, settings: Mapping[str, Any], model: str) -> None:
    """Results of the same settings and model are made anew; no others are lost."""
    file = output / "results.json"
    if not file.is_file():
        return
    try:
        found = read_json(file)
    except ValueError:
        return  # what is damaged is no loss
    before = found.get("config", {})
    if found.get("model", model) != model:  # runs/latest is another after each training
        raise FileExistsError(
            f"output={output} holds the results of {found['model']}, and this is {model}: name "
            "another folder, or remove it"
        )
    own, other = (
        flat_settings({key: value for key, value in each.items() if key not in _INCIDENTAL})
        for each in (settings, before)
    )
    if changed := [key for key in other | own if own.get(key) != other.get(key)]:
        said = ", ".join(f"{key}={other.get(key, 'absent')}" for key in changed[:_SHOWN])
        more = ", ..." if changed[_SHOWN:] else ""
        raise FileExistsError(
            f"output={output} holds the results of other settings ({said}{more}): name another "
            "folder, or remove it"
        )


def _documents(cfg: DictConfig, tasks: Collection[str]) -> dict[str, EncodedTexts]:
    """The documents of each task that were encoded before; nothing where none were.

    Raises:
        FileNotFoundError: one of several tasks has none.
        ValueError: a damaged folder.
    """
    if cfg.documents is None:
        return {}
    folder = Path(cfg.documents)
    if len(tasks) == 1 and not any((folder / name).is_dir() for name in tasks):
        return {name: open_encoded(folder) for name in tasks}
    if missing := [name for name in tasks if not (folder / name).is_dir()]:
        raise FileNotFoundError(
            f"documents={folder}: of {len(tasks)} tasks each has its documents in a folder of its "
            f"own, and there is no {folder / missing[0]}: encode them with that as output"
        )
    return {name: open_encoded(folder / name) for name in tasks}


def _at_given_lengths(build: Callable[[], RetrievalTask], given: Sequence[str]) -> RetrievalTask:
    """A task without the lengths that a user has given for all: the tokenizer has those."""
    task = build()
    return task._replace(form=task.form._replace(**dict.fromkeys(given)))


def build_bm25(cfg: DictConfig, device: torch.device) -> System:
    """BM25, whose settings are checked.

    Raises:
        ValueError: names the setting.
    """
    BM25(cfg.bm25.k1, cfg.bm25.b)  # refuses what is out of range
    return instantiate(cfg.bm25, device=device)


def build_encoder(cfg: DictConfig, typed: Sequence[str], world: World) -> System:
    """A trained model and how it is searched; what it ignores or cannot do is refused.

    Raises:
        ValueError: names the setting.
        OSError: there is no such model, or files are missing.
    """
    asked, words = cfg.encoder, {"k1": cfg.bm25.k1, "b": cfg.bm25.b}
    BM25(**words)  # refuses what cannot be
    index = instantiate(asked.index)  # refuses what cannot be, too
    model = (cfg.model, cfg.query_length, cfg.document_length)
    settings = {name: asked[name] for name in ("metrics", "k", "search", "rerank_depth")}
    bounds = {f"encoder.{name}": asked[name] for name in TERM_BOUNDS}
    try:
        check_precision(asked.precision)  # refuses what does not exist
        encoder, tokenizer = evaluation.load_retriever(*model, device=world.device, width=cfg.width)
        check_precision(asked.precision, encoder)
        search = evaluation.plan_search(encoder, **settings)
        evaluation.check_bounds_apply(search, encoder, **bounds)
        evaluation.check_index(index, search, encoder)
    except ArgumentError as error:
        raise error.renamed(search="encoder.search", precision="encoder.precision") from error
    evaluation.check_pooling(asked.pool_factor, search, encoder)
    if evaluation.bm25_finds(search, encoder):
        rest = overrides_in(typed, ["bm25"], but=("bm25.k1", "bm25.b"))
        because = "BM25 finds the encoder.rerank_depth candidates with bm25.k1 and bm25.b, and"
        refuse_ignored(because, rest)
    else:
        rest = overrides_in(typed, ["bm25"])
        refuse_ignored(f"search={search} with this model takes no BM25 and", rest)
    system = partial(instantiate(asked, encoder, tokenizer, **words), crew=world)
    is_exact = getattr(index, "func", None) is exact_index
    return partial(system, index=shared_index(world)) if is_exact else system
