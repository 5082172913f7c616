"""Encoded collections, from their configuration."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from sparton.arguments import refuse_below, refuse_ignored
from sparton.cli.collections import text_files
from sparton.cli.devices import check_gpus
from sparton.datasets.downloads import hub_texts, ir_datasets_texts
from sparton.datasets.preparation import Reading
from sparton.datasets.texts import TextTable, text_table
from sparton.encoded import (
    EncodedTexts,
    begin_folder,
    encode_shards,
    open_encoded,
    plan_encoding,
)
from sparton.encoded.collection import missing_shards
from sparton.encoded.facts import Facts, check_place, read_facts
from sparton.encoded.folders import find_texts
from sparton.errors import RunError
from sparton.evaluation import check_model, choose_device, load_retriever
from sparton.representations import KINDS
from sparton.retrieval.encoding import check_precision
from sparton.retrieval.storing import check_vector_dtype
from sparton.training.processes import run_workers
from sparton.types import PLURAL, SIDES, Side

if TYPE_CHECKING:
    from sparton.datasets.tokenization import PackedTokenizer
    from sparton.models.encoder import Encoder

ECHO = 20.0  # seconds in which the first worker ends all if it refuses the same, and says so alone


def check_encoding(cfg: DictConfig) -> None:
    """Refuse what does not exist, before anything is read.

    Raises:
        ValueError: names the setting.
        OSError: there is no such model.
    """
    numbers = ("gpus", "length", "max_terms", "pool_factor", "rows_per_shard", "batch_tokens")
    refuse_below(1, **{name: cfg[name] for name in numbers})
    _check_source(cfg)
    if cfg.side not in SIDES:
        raise ValueError(f"side={cfg.side}: must be {' or '.join(SIDES)}")
    for kind in cfg.kinds or ():
        if kind not in KINDS:
            raise ValueError(f"kinds={list(cfg.kinds)}: there are {', '.join(KINDS)}")
    check_vector_dtype(cfg.vector_dtype)
    check_precision(cfg.precision)
    _reading(cfg).check()
    if cfg.source != "files":
        refuse_ignored(f"source={cfg.source}", columns=cfg.columns)
    if cfg.model == "bm25":
        raise ValueError("model=bm25 is no encoder: name a trained model")
    check_model(cfg.model)
    check_place(Path(cfg.output))


def _check_source(cfg: DictConfig) -> None:
    """Refuse what names no texts."""
    data = OmegaConf.to_container(cfg.data) if OmegaConf.is_config(cfg.data) else cfg.data
    match cfg.source, data:
        case "files", str() | [_, *_] if data:
            return
        case "files", _:
            raise ValueError(f"data={data}: name a folder, or files as in [a.jsonl,b.jsonl]")
        case "ir_datasets", str() if data:
            return
        case "ir_datasets", _:
            raise ValueError(f"data={data}: name a collection of ir_datasets, as in beir/scifact")
        case "hub", str() if data:
            return
        case "hub", {"repository": str(), **more} if more.keys() <= {"split", "subset"}:
            return
        case "hub", _:
            raise ValueError(
                f"data={data}: name a data set of the hub, as in mteb/scifact or, with a split or "
                "a subset, {repository: xlangai/BRIGHT, split: biology}"
            )
    raise ValueError(f"source={cfg.source}: must be files, ir_datasets or hub")


def _texts(cfg: DictConfig) -> TextTable:
    """The texts that ``data`` names, on disk."""
    if cfg.source == "ir_datasets":
        return ir_datasets_texts(cfg.data, cfg.side)
    if cfg.source == "hub":
        named = {"repository": cfg.data} if isinstance(cfg.data, str) else dict(cfg.data)
        return hub_texts(side=cfg.side, on_error=cfg.on_error, **named)
    names = [cfg.data] if isinstance(cfg.data, str) else [str(name) for name in cfg.data]
    files = text_files(names, cfg.side)
    return text_table(PLURAL[cfg.side], files, _reading(cfg))


def _reading(cfg: DictConfig) -> Reading:
    columns = cfg.columns
    if not isinstance(columns, ListConfig | DictConfig | None):
        raise ValueError(f"columns={columns}: write a list, or {{NAME: KNOWN}}")
    plain: Any = columns and OmegaConf.to_container(columns)
    return Reading(columns=plain or None, on_error=cfg.on_error)


def run_encoding(cfg: DictConfig, command: Sequence[str]) -> None:
    """Encode what the configuration names in this process, or in several that it starts, and say
    what there is.

    Args:
        command: the words that start it in another process.
    """
    check_encoding(cfg)
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    texts = _texts(cfg)
    output = Path(cfg.output)
    found = find_texts(output, texts)
    complete = found is not None and not found.missing
    if not workers and cfg.gpus > 1:
        check_gpus(cfg.gpus, cfg.device)
        if complete:
            _begin(cfg, texts, "cpu")
        else:  # each worker begins by itself: they need not wait for a model to be read here
            _encode_in_workers(command, cfg.gpus, output)
    else:
        encoder, tokenizer, facts = _begin(cfg, texts, _device(cfg.device))
        encode_shards(
            encoder,
            tokenizer,
            texts,
            output,
            facts,
            batch_tokens=cfg.batch_tokens,
            rank=rank,
            workers=max(workers, 1),
            progress=cfg.progress and rank == 0,
        )
        if workers and "GROUP_RANK" not in os.environ:
            return  # who started this process says what there is
    if rank == 0:
        said = [_summary(open_encoded(output))]
        if found is not None and complete:
            said.insert(0, _already(len(found.deleted), cfg.side, append=cfg.append))
        print("\n".join(said))


def _encode_in_workers(command: Sequence[str], number: int, output: Path) -> None:
    """Encode what is left in as many processes.

    Raises:
        RunError: one has ended before that was done.
    """
    ended = run_workers(command, number)
    if check_place(output):
        left = len(missing_shards(output, read_facts(output)))
        missing = f"{_count(left, 'shard', 'shards')} {'is' if left == 1 else 'are'} missing"
    else:
        left, missing = None, "nothing is encoded yet"
    if left != 0:
        message = f"worker {ended.rank} {ended}; {missing}"
        raise RunError(f"{message}, and the same command goes on", told=ended.code > 0)


def _begin(
    cfg: DictConfig, texts: TextTable, device: torch.device | str
) -> "tuple[Encoder, PackedTokenizer, Facts]":
    """The model, and what the folder says of itself."""
    lengths = (cfg.length, None) if cfg.side == "query" else (None, cfg.length)
    encoder, tokenizer = load_retriever(cfg.model, *lengths, device=device)
    settings = plan_encoding(
        encoder,
        tokenizer,
        cfg.side,
        output=Path(cfg.output),
        kinds=cfg.kinds,
        max_terms=cfg.max_terms,
        vector_dtype=cfg.vector_dtype,
        pool_factor=cfg.pool_factor,
        precision=cfg.precision,
        rows_per_shard=cfg.rows_per_shard,
    )
    name = str(Path(cfg.model).resolve()) if Path(cfg.model).is_dir() else cfg.model
    return (
        encoder,
        tokenizer,
        begin_folder(Path(cfg.output), settings, texts, name, append=cfg.append),
    )


def _device(name: str | None) -> torch.device:
    """Where this process encodes: its own GPU, unless a device is named."""
    local = os.environ.get("LOCAL_RANK")
    if name is None and local is not None and torch.cuda.is_available():
        name = f"cuda:{local}"
    return choose_device(name)


def _already(deleted: int, side: Side, *, append: bool) -> str:
    """What became of texts that a folder had, of which as many were deleted."""
    if not deleted:
        return "these texts are there already" if append else "complete already"
    if append:
        return f"{_count(deleted, side, PLURAL[side])} brought back"
    verb, pronoun = ("is", "it") if deleted == 1 else ("are", "them")
    return (
        f"complete already; {deleted:,} of these {PLURAL[side]} {verb} deleted: append=true "
        f"brings {pronoun} back"
    )


def _summary(encoded: EncodedTexts) -> str:
    settings, stored = encoded.facts.settings, encoded.facts.rows
    found = {
        "sparse": f"{encoded.entries / stored:.1f} weights",
        "tokens": f"{encoded.tokens / stored:.1f} vectors",
        "dense": "a dense vector",
    }
    means = [found[kind] for kind in settings.kinds]
    deleted = f", {len(encoded.deleted):,} deleted" if len(encoded.deleted) else ""
    return (
        f"{_count(len(encoded), settings.side, PLURAL[settings.side])} of {' and '.join(means)} "
        f"in {encoded.folder}: {_count(len(encoded.facts.shards()), 'shard', 'shards')}, "
        f"{encoded.nbytes / 2**20:,.1f} MiB{deleted}"
    )


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
