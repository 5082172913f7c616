"""A small task, and encoders whose results are known."""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import TaskResult
from sparton.kernels.boundaries import sequence_ids
from sparton.models.encoder import Encoder
from sparton.models.words import SPECIAL_TOKENS, word_tokenizer
from sparton.representations import Representations, TokenVectors
from sparton.types import RetrievalTask, Side, TextCollection, TokenBatch

WORDS = ["red", "green", "blue", "crimson", "cat", "dog", "bird", "fish"]
VOCABULARY = [*SPECIAL_TOKENS, *WORDS]
DOCUMENTS = {
    "d0": "red cat",
    "d1": "crimson dog dog",
    "d2": "green bird",
    "d3": "",
    "d4": "blue fish fish fish",
    "own": "red dog",
}
QUERIES = {"q0": "red cat", "q1": "green", "own": "red dog"}
QRELS = {"q0": {"d0": 2, "d1": 1}, "q1": {"d2": 1, "d4": 0}, "own": {"d1": 1}}


class LexicalEncoder(Encoder):
    """Every word weighs 1, but "red" and "crimson" also stand for each other, at 0.5."""

    def __init__(self) -> None:
        super().__init__(word_tokenizer(WORDS, 8), max_length=None)
        weights = torch.eye(len(VOCABULARY))
        weights[: len(SPECIAL_TOKENS)] = 0
        red, crimson = VOCABULARY.index("red"), VOCABULARY.index("crimson")
        weights[red, crimson] = weights[crimson, red] = 0.5
        self.embedding = nn.Embedding.from_pretrained(weights)

    def forward(self, tokens: TokenBatch) -> torch.Tensor:
        owners = sequence_ids(tokens.cu_seqlens, tokens.num_tokens)
        reps = torch.zeros(tokens.num_sequences, self.embedding.embedding_dim)
        weights = self.embedding(tokens.input_ids)
        return reps.scatter_reduce(0, owners[:, None].expand_as(weights), weights, "amax")

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        return Representations(self(tokens))


class VectorEncoder(Encoder):
    """A word's vector; those of "red" and "crimson" have the similarity 0.6, others 0. Special
    tokens take no part. With ``sparse`` the weights of :class:`LexicalEncoder` besides."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sparse: bool = False) -> None:
        super().__init__(tokenizer, max_length=None)
        vectors = torch.eye(len(VOCABULARY))
        red, crimson = VOCABULARY.index("red"), VOCABULARY.index("crimson")
        vectors[crimson, red], vectors[crimson, crimson] = 0.6, 0.8
        self.embedding = nn.Embedding.from_pretrained(vectors)
        self.lexical = LexicalEncoder() if sparse else None
        self.kinds = ("sparse", "tokens") if sparse else ("tokens",)

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        kept = tokens.input_ids >= len(SPECIAL_TOKENS)
        vectors = TokenVectors(self.embedding(tokens.input_ids), tokens.cu_seqlens, kept)
        return Representations(None if self.lexical is None else self.lexical(tokens), vectors)


def packed_words() -> PackedTokenizer:
    return PackedTokenizer(word_tokenizer(WORDS, 8), query_length=8, document_length=8)


def make_task(name: str = "toy", exclude_self: bool = False) -> RetrievalTask:
    documents = TextCollection(list(DOCUMENTS), list(DOCUMENTS.values()))
    queries = TextCollection(list(QUERIES), list(QUERIES.values()))
    return RetrievalTask(name, documents, queries, QRELS, exclude_self)


def write_beir(folder: Path) -> Path:
    """The task as a folder in the layout of BEIR."""
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        lines = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    lines = [
        f"{query}\t{name}\t{grade}" for query, all in QRELS.items() for name, grade in all.items()
    ]
    header = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "test.tsv").write_text(header + "\n".join(lines) + "\n")
    return folder


def rankings(result: TaskResult) -> dict[str, list[str]]:
    return {query: [name for name, _ in found] for query, found in result.run.rankings()}
