"""Encoded collections, from their configuration."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig, ListConfig
from rich.console import Console

from sparton.arguments import refuse_below
from sparton.cli.collections import text_files
from sparton.cli.devices import check_gpus
from sparton.cli.errors import EXPECTED_ERRORS
from sparton.datasets.preparation import Reading
from sparton.datasets.texts import TextTable, text_table
from sparton.encoded import EncodedTexts, begin_folder, encode_shards, open_encoded, plan_encoding
from sparton.encoded.collection import missing_shards
from sparton.encoded.facts import Facts, check_place, read_facts
from sparton.errors import RunError
from sparton.evaluation import check_model, check_vector_dtype, choose_device, load_retriever
from sparton.representations import KINDS
from sparton.retrieval.encoding import check_precision
from sparton.training.processes import run_workers
from sparton.types import SIDES, Side

if TYPE_CHECKING:
    from sparton.datasets.tokenization import PackedTokenizer
    from sparton.models.encoder import Encoder

_PLURAL: dict[Side, str] = {"document": "documents", "query": "queries"}


def encode_here(cfg: DictConfig, program: Sequence[str]) -> Exception | None:
    """Encode in this process what Hydra has composed, or in several that it starts.

    Args:
        program: the words that start this command in another process, arguments included.

    Returns:
        The error that has ended it, if a user can mend that.
    """
    try:
        run_encoding(cfg, program)
    except EXPECTED_ERRORS as error:
        return error
    return None


def check_encoding(cfg: DictConfig) -> None:
    """Refuse what does not exist, before anything is read.

    Raises:
        ValueError: names the setting.
        OSError: there is no such model.
    """
    numbers = ("gpus", "length", "max_terms", "pool_factor", "rows_per_shard", "batch_tokens")
    refuse_below(1, **{name: cfg[name] for name in numbers})
    if not isinstance(cfg.data, str | ListConfig) or not len(cfg.data):
        raise ValueError(f"data={cfg.data}: name a folder, or files as in [a.jsonl,b.jsonl]")
    if cfg.side not in SIDES:
        raise ValueError(f"side={cfg.side}: must be {' or '.join(SIDES)}")
    for kind in cfg.kinds or ():
        if kind not in KINDS:
            raise ValueError(f"kinds={list(cfg.kinds)}: there are {' and '.join(KINDS)}")
    check_vector_dtype(cfg.vector_dtype)
    check_precision(cfg.precision)
    Reading(on_error=cfg.on_error).check()
    if cfg.model == "bm25":
        raise ValueError("model=bm25 is no encoder: name a trained model")
    check_model(cfg.model)
    check_place(Path(cfg.output))


def run_encoding(cfg: DictConfig, program: Sequence[str]) -> None:
    """Encode what the configuration names, and say what there is."""
    check_encoding(cfg)
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    names = [cfg.data] if isinstance(cfg.data, str) else [str(name) for name in cfg.data]
    files = text_files(names, cfg.side)
    texts = text_table(_PLURAL[cfg.side], files, Reading(on_error=cfg.on_error))
    output = Path(cfg.output)
    if workers or cfg.gpus == 1:
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
    else:
        check_gpus(cfg.gpus, cfg.device)
        _begin(cfg, texts, "cpu")  # what is wrong is said once
        ended = run_workers(program, cfg.gpus)
        if left := len(missing_shards(output, read_facts(output))):
            message = f"worker {ended.rank} {ended}; {left} shards are missing"
            raise RunError(f"{message}, and the same command goes on", told=ended.code > 0)
    if rank == 0:
        encoded = open_encoded(output)
        Console(soft_wrap=True, highlight=False).print(_summary(encoded), markup=False)


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


def _summary(encoded: EncodedTexts) -> str:
    settings, number = encoded.facts.settings, encoded.facts.rows
    found = {"sparse": ("weights", encoded.entries), "tokens": ("vectors", encoded.tokens)}
    means = [f"{found[kind][1] / number:.1f} {found[kind][0]}" for kind in settings.kinds]
    return (
        f"{number:,} {_PLURAL[settings.side]} of {' and '.join(means)} in {encoded.folder}: "
        f"{len(encoded.facts.shards())} shards, {encoded.nbytes / 2**20:,.1f} MiB"
    )
