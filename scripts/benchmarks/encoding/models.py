"""Models with random weights that encode, as this project and as sentence-transformers load them.

N texts, V terms, E width of a token's vector.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.texts import DOCUMENT_LENGTH, QUERY_LENGTH, VOCABULARY, build_tokenizer
from sparton.evaluation import load_retriever
from sparton.models.assembly import build_encoder
from sparton.models.backbones import random_bert
from sparton.models.colbert import ColbertHead
from sparton.models.folders import save_encoder
from sparton.models.heads import SpartonHead
from sparton.models.logits import start_near_identity
from sparton.models.pooling import Pooling
from sparton.representations import Representations
from sparton.retrieval.encoding import encode_texts, evaluating, groups_of, longest_first
from sparton.types import TokenBatch

SIZES = {"base": (768, 12, 12), "minilm": (384, 6, 12), "tiny": (64, 2, 2)}
HEADS: dict[str, Callable[[], Any]] = {
    "splade": SpartonHead,
    "colbert": lambda: ColbertHead(128),
    "dense": lambda: Pooling("mean", True),
}
CLASSES = {
    "splade": "SparseEncoder",
    "colbert": "MultiVectorEncoder",
    "dense": "SentenceTransformer",
}
PRECISION = {"cuda": "fp16", "cpu": "fp32"}  # the usual one
# Bias of the decoder: most terms of a text are not active, as of trained models.
_FEW_TERMS = {"base": -2.5, "minilm": -2.5, "tiny": -0.6}

Encode = Callable[[Sequence[str]], Any]


def write_model(folder: Path, kind: str, size: str) -> Path:
    """The folder of a model, written once."""
    path = folder / f"{size}-{kind}"
    if not path.exists():
        hidden, layers, heads = SIZES[size]
        backbone = random_bert(VOCABULARY, hidden, layers, heads, max_length=DOCUMENT_LENGTH)
        backbone.tokenizer = build_tokenizer()
        if kind == "splade":
            start_near_identity(backbone, bias=_FEW_TERMS[size])
        encoder = build_encoder(backbone, HEADS[kind]())
        save_encoder(encoder, path, query_length=QUERY_LENGTH, document_length=DOCUMENT_LENGTH)
    return path


def ours(path: Path, device: str, precision: str) -> Callable[[Sequence[str]], Representations]:
    """``encode_texts`` as it comes."""
    encoder, tokenizer = load_retriever(path, device=device)
    return lambda texts: encode_texts(encoder, tokenizer, texts, "document", precision=precision)


def theirs(path: Path, kind: str, device: str, batch: int, precision: str) -> Encode:
    """``encode_document`` of sentence-transformers, in the same precision."""
    import sentence_transformers

    dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
    model = getattr(sentence_transformers, CLASSES[kind])(
        str(path), device=device, model_kwargs={"dtype": dtype}
    )
    options = {"batch_size": batch, "show_progress_bar": False}
    if kind == "splade":
        return lambda texts: model.encode_document(list(texts), save_to_cpu=True, **options)
    return lambda texts: model.encode_document(list(texts), **options)


def forward_alone(
    path: Path, texts: Sequence[str], device: str, precision: str
) -> Callable[[], int]:
    """All that no encoding is without: the model on tokens that are on its device. Gives how many
    texts it has run on."""
    encoder, tokenizer = load_retriever(path, device=device)
    batches = list(_batches(tokenizer.documents(sorted(texts, key=len, reverse=True)), device))

    def run() -> int:
        with evaluating(encoder, precision):
            for batch in batches:
                encoder.encode(batch, "document")
        return len(texts)

    return run


def tokens_alone(
    path: Path, texts: Sequence[str], device: str, precision: str
) -> Callable[[], int]:
    """The making of tokens on the host, as encoding does it. Gives how many texts it has read."""
    _, tokenizer = load_retriever(path, device="cpu")
    order = longest_first(texts)

    def run() -> int:
        for rows in groups_of(order):
            tokenizer.documents([texts[row] for row in rows])
        return len(texts)

    return run


def _batches(tokens: TokenBatch, device: str) -> Iterator[TokenBatch]:
    size = 512 if device == "cuda" else 64
    for start in range(0, tokens.num_sequences, size):
        yield tokens.select(start, min(start + size, tokens.num_sequences)).to(device)


def as_rows(found: Any) -> Tensor:
    """What either library gives, as fp32 on the host: ``[N, V]``, or the vectors of all tokens
    ``[T, E]``, one text after the other."""
    if isinstance(found, Representations):
        if found.sparse is not None:
            assert not isinstance(found.sparse, Tensor)
            return found.sparse.dense()
        assert found.tokens is not None
        return found.tokens.values.float()
    if isinstance(found, Tensor):
        dense = found.to_dense() if found.is_sparse else found
        return dense.float().cpu()
    parts = [torch.as_tensor(each).float().cpu() for each in found]
    return torch.cat([part if part.dim() == 2 else part[None] for part in parts])
