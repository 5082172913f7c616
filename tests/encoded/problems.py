"""Small collections and models to encode, and processes that do so."""

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sparton.datasets.texts import TextList
from sparton.encoded import (
    begin_folder,
    claims,
    encode_collection,
    encode_shards,
    encoding,
    plan_encoding,
)
from sparton.evaluation import load_retriever
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.csr import AutoencoderHead
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointHead
from sparton.models.pooling import Pooling

WORDS = [f"w{number}" for number in range(60)]
WEIGHTS = {"sparse": 0.5, "tokens": 1.0, "dense": 7.0}
HEADS = {
    "splade": EagerHead(),
    "colbert": ColbertHead(8),
    "joint": JointHead(EagerHead(), ColbertHead(8)),
    "three": JointHead(EagerHead(), ColbertHead(8), Pooling("mean", True), WEIGHTS),
    "csr": AutoencoderHead(hidden_dim=64, k=6, k_aux=8, dead_threshold=3),
    "dense": Pooling("mean", True),
    "wide": ColbertHead(512),
}

KINDS = [kind for kind in HEADS if kind != "wide"]


def make_texts(number: int, seed: int = 0) -> TextList:
    """Of up to 30 words; the last one is empty."""
    chosen = random.Random(seed)
    texts = [" ".join(chosen.choices(WORDS, k=chosen.randint(1, 30))) for _ in range(number - 1)]
    return TextList([*texts, ""], [f"{seed}-{row}" for row in range(number)])


def save_model(folder: Path, kind: str, seed: int = 0, words: Iterable[str] = tuple(WORDS)) -> Path:
    """A tiny model with random weights, others for each seed."""
    torch.manual_seed(seed)
    encoder = build_encoder(tiny(words, hidden_size=16, layers=1), HEADS[kind])
    for parameter in encoder.parameters():  # which some kinds begin with as they always do
        parameter.data.mul_(1 + seed / 10)
    save_encoder(encoder, folder, query_length=8, document_length=24)
    return folder


def work(model: Path, output: Path, rank: int, workers: int, number: int, rows: int) -> None:
    """What a process does that encodes alone or beside others; not for long does it wait."""
    torch.set_num_threads(1)
    claims.HEARTBEAT, claims.PATIENCE, encoding._POLL = 0.05, 2.0, 0.02
    texts = make_texts(number)
    encoder, tokenizer = load_retriever(model)
    settings = plan_encoding(encoder, tokenizer, rows_per_shard=rows)
    facts = begin_folder(output, settings, texts, "the model")
    encode_shards(
        encoder, tokenizer, texts, output, facts, rank=rank, workers=workers, progress=False
    )


def files(folder: Path) -> dict[str, bytes]:
    """All that a folder holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def peak_memory(model: Path, output: Path, number: int, rows: int) -> int:
    """Bytes by which the memory of this process grows at most while it encodes, without pages of
    files that lie in memory."""
    texts, retriever = make_texts(number), load_retriever(model)
    torch.set_num_threads(1)
    encode_collection(*retriever, make_texts(rows), output / "first", progress=False)
    settings = {"rows_per_shard": rows, "vector_dtype": "float32", "progress": False}
    with growth() as grown:
        encode_collection(*retriever, texts, output / "all", **settings)
    return grown[0]


@contextmanager
def growth() -> Iterator[list[int]]:
    """A list that at the end has the most bytes by which the memory of this process has grown
    meanwhile, without pages of files."""
    found, over, before = [0], threading.Event(), _anonymous()

    def watch() -> None:
        while not over.wait(0.002):
            found[0] = max(found[0], _anonymous() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    yield found
    over.set()
    watching.join()


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
