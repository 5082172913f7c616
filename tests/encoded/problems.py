"""Small collections and models to encode, and processes that do so."""

import random
from pathlib import Path

import torch

from sparton.datasets.texts import TextList
from sparton.encoded import begin_folder, claims, encode_shards, encoding, plan_encoding
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
HEADS = {
    "splade": EagerHead(),
    "colbert": ColbertHead(8),
    "joint": JointHead(EagerHead(), ColbertHead(8)),
    "csr": AutoencoderHead(hidden_dim=64, k=6, k_aux=8, dead_threshold=3),
    "dense": Pooling("mean", True),
}


def make_texts(number: int, seed: int = 0) -> TextList:
    """Of up to 30 words; the last one is empty."""
    chosen = random.Random(seed)
    texts = [" ".join(chosen.choices(WORDS, k=chosen.randint(1, 30))) for _ in range(number - 1)]
    return TextList([*texts, ""], [f"{seed}-{row}" for row in range(number)])


def save_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """A tiny model with random weights, others for each seed."""
    torch.manual_seed(seed)
    encoder = build_encoder(tiny(WORDS, hidden_size=16, layers=1), HEADS[kind])
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
