"""Small late-interaction encoders, and the scores that any library must give for them."""

import string
from pathlib import Path

import torch
from torch import Tensor

from sparton.datasets.tokenization import PackedTokenizer
from sparton.kernels.maxsim import maxsim_reference
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.encoder import Encoder
from sparton.models.folders import save_encoder

TEXTS = [
    "the quick brown fox jumps over the lazy dog, again and again!",
    "a lazy cat.",
    "foxes hunt quick hens?",
    "",
]
LENGTHS = {"query_length": 9, "document_length": 14}
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def make_encoder(seed: int = 0, **settings) -> ColbertEncoder:
    """Its vocabulary has all punctuation, which PyLate takes for granted."""
    torch.manual_seed(seed)
    texts = [*TEXTS, " ".join(string.punctuation)]
    backbone = tiny(texts, hidden_size=32, layers=1, max_length=20, seed=seed)
    return ColbertEncoder(backbone, ColbertHead(8, **settings)).eval()


def saved(encoder: Encoder, path: Path) -> Path:
    save_encoder(encoder, path, **LENGTHS)
    return path


@torch.no_grad()
def scores(encoder: Encoder) -> Tensor:
    """Of every text as a query against every text as a document."""
    tokenizer = PackedTokenizer(encoder.tokenizer, **LENGTHS, markup=encoder.markup)
    encoder.eval()
    queries = encoder.encode(tokenizer.queries(TEXTS), "query").tokens
    documents = encoder.encode(tokenizer.documents(TEXTS), "document").tokens
    return maxsim_reference(
        queries.values,
        documents.values,
        queries.cu_seqlens,
        documents.cu_seqlens,
        queries.mask,
        documents.mask,
    )
