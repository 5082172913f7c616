"""What all systems train on: one model folder with random weights, one file of pairs.

A word of the vocabulary is a token, so that the number of words is the number of tokens.
``python -m benchmarks.training.workload FILE VOCABULARY`` writes such a file for
``backbone=random`` or ``backbone=random_xlm_roberta``.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from benchmarks.training.decoders import DECODERS
from benchmarks.training.suites import (
    BERT_BASE,
    LENGTHS,
    MODERNBERT_BASE,
    OWN_WORDS,
    SPLADE,
    Cell,
    Lengths,
    Plan,
)
from benchmarks.words import AROUND, Frequencies
from sparton.models.backbone import Backbone
from sparton.models.backbones import random_bert
from sparton.models.logits import start_logits, start_near_identity
from sparton.models.words import SPECIAL_TOKENS, word_tokenizer

PAIRS, MINIATURE_PAIRS = 32_768, 400
# Of all logits: of BERT-base it leaves about 40 terms of a query active, and 150 of a document.
_BIAS, _MINIATURE_BIAS = -2.3, -0.2
_SHARED = 0.5  # of a query's words come from its document
_FIRST = len(SPECIAL_TOKENS)


def write_model(
    folder: Path, vocabulary: int, activity: str, miniature: bool, kind: str = BERT_BASE
) -> None:
    """BERT-base or ModernBERT-base with random weights, a masked-language-modelling head, and its
    tokenizer.

    Of a text its own words are active and some that lie near, as many as trained models have; or
    nearly all terms are, the most work that a sparse model can make.
    """
    build = random_modernbert if kind == MODERNBERT_BASE else random_bert
    backbone = build(vocabulary, *((32, 2, 2) if miniature else ()))
    if miniature and kind == BERT_BASE:  # whose results do not depend on how a batch is cut
        backbone.model.config.hidden_dropout_prob = 0.0
    if activity == OWN_WORDS:
        start_near_identity(backbone, bias=_MINIATURE_BIAS if miniature else _BIAS)
    else:  # at their own scale random terms would give losses of several hundred
        start_logits(backbone, scale=1 / 16)
    with backbone.decoder_in_place() as model:
        model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)


def random_modernbert(
    vocabulary: int, hidden_size: int = 768, layers: int = 22, heads: int = 12
) -> Backbone:
    """ModernBERT with random weights, and the tokenizer of :func:`random_bert`, up to 512 tokens.

    What ModernBERT has in the middle of a layer is 1.5 times its width.
    """
    words = [f"w{row}" for row in range(_FIRST, vocabulary)]
    tokenizer = word_tokenizer(words, 512)
    config = ModernBertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Backbone(ModernBertForMaskedLM(config), tokenizer)


def write_pairs(path: Path, vocabulary: int, lengths: Lengths, pairs: int) -> None:
    """JSON lines of a query and its positive: what our ``text_files`` and ``datasets`` read."""
    with path.open("w", encoding="utf-8") as file:
        for query, document in _pairs(vocabulary, lengths, pairs):
            file.write(json.dumps({"query": query, "positive": document}) + "\n")


def _pairs(vocabulary: int, lengths: Lengths, pairs: int) -> Iterator[tuple[str, str]]:
    random = np.random.default_rng(0)
    # The last row may be another mark, as XLM-RoBERTa has it.
    names = np.array([f"w{row}" for row in range(_FIRST, vocabulary - 1)])
    frequencies = Frequencies(len(names))
    for _ in range(pairs):
        sizes = (int(random.integers(low, high + 1)) - AROUND for low, high in lengths)
        query_size, document_size = sizes
        document, query = (
            names[frequencies.draw(random, size)] for size in (document_size, query_size)
        )
        shared = random.random(query_size) < _SHARED
        query[shared] = random.choice(document, shared.sum())
        yield " ".join(query), " ".join(document)


def prepare(folder: Path, cell: Cell, plan: Plan, miniature: bool) -> tuple[str, str]:
    """Write what is not there yet.

    Returns:
        The model folder and the file of pairs, relative to ``folder``.
    """
    vocabulary, lengths = plan.vocabulary, plan.lengths
    decoder = DECODERS.get(cell.backbone)
    # A miniature has a vocabulary of its own.
    model = f"{cell.backbone}-{vocabulary}-{cell.activity}"
    pairs = (
        "pairs-" + "-".join(map(str, (vocabulary, *lengths.query, *lengths.document))) + ".jsonl"
    )
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / model).exists():
        part = folder / f"{model}.part"
        if decoder is None:
            write_model(part, vocabulary, cell.activity, miniature, cell.backbone)
        else:
            decoder.write(part, miniature)
        part.rename(folder / model)
    if not (folder / pairs).exists():
        count = MINIATURE_PAIRS if miniature else PAIRS
        write_pairs(folder / f"{pairs}.part", vocabulary, lengths, count)
        (folder / f"{pairs}.part").rename(folder / pairs)
    return model, pairs


if __name__ == "__main__":
    write_pairs(Path(sys.argv[1]), int(sys.argv[2]), LENGTHS[SPLADE], PAIRS)
