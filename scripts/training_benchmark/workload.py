"""What all systems train on: one model folder with random weights, one file of pairs.

A word of the vocabulary is a token, so that the number of words is the number of tokens.
"""

import json
from collections.abc import Iterator
from itertools import chain, count, islice, product
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from sparton.models.backbone import Backbone
from sparton.models.backbones import SPECIAL_TOKENS, rescale_logits, start_near_identity
from training_benchmark.suites import OWN_WORDS, Lengths

POSITIONS = 512
PAIRS, MINIATURE_PAIRS = 32_768, 400
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
_AROUND = 2  # [CLS] and [SEP]
_ZIPF_SHIFT = 2.7  # Mandelbrot's, of English
# Of all logits: of BERT-base it leaves about 40 terms of a query active, and 150 of a document.
_BIAS, _MINIATURE_BIAS = -2.3, -0.2
_MINIATURE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
}
_SHARED = 0.5  # of a query's words come from its document


def words(vocabulary: int) -> list[str]:
    """Invented words, all different, short ones first."""
    by_length = (map("".join, product(_SYLLABLES, repeat=length)) for length in count(1))
    return list(islice(chain.from_iterable(by_length), vocabulary - len(SPECIAL_TOKENS)))


def write_model(folder: Path, vocabulary: int, activity: str, miniature: bool) -> None:
    """BERT-base with random weights, a masked-language-modelling head, and its tokenizer.

    Of a text its own words are active and some that lie near, as many as trained models have; or
    nearly all terms are, the most work that a sparse model can make.
    """
    config = BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=POSITIONS,
        attention_probs_dropout_prob=0.0,
        **(_MINIATURE if miniature else {}),
    )
    torch.manual_seed(0)
    backbone = Backbone(BertForMaskedLM(config), word_tokenizer(vocabulary))
    if activity == OWN_WORDS:
        start_near_identity(backbone, bias=_MINIATURE_BIAS if miniature else _BIAS)
    else:  # at their own scale random terms would give losses of several hundred
        rescale_logits(backbone, 1 / 16)
    with backbone.decoder_in_place() as model:
        model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)


def write_pairs(path: Path, vocabulary: int, lengths: Lengths, pairs: int) -> None:
    """JSON lines of a query and its positive: what our ``text_files`` and ``datasets`` read."""
    with path.open("w", encoding="utf-8") as file:
        for query, document in _pairs(vocabulary, lengths, pairs):
            file.write(json.dumps({"query": query, "positive": document}) + "\n")


def _pairs(vocabulary: int, lengths: Lengths, pairs: int) -> Iterator[tuple[str, str]]:
    random = np.random.default_rng(0)
    names = np.array(words(vocabulary))
    weights = 1.0 / (np.arange(len(names)) + _ZIPF_SHIFT)
    cumulative = np.cumsum(weights) / weights.sum()

    def draw(count: int) -> np.ndarray:
        return names[np.searchsorted(cumulative, random.random(count)).clip(max=len(names) - 1)]

    for _ in range(pairs):
        query_size, document_size = (
            int(random.integers(low, high + 1)) - _AROUND for low, high in lengths
        )
        document, query = draw(document_size), draw(query_size)
        shared = random.random(query_size) < _SHARED
        query[shared] = random.choice(document, shared.sum())
        yield " ".join(query), " ".join(document)


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """BERT's tokenizer, of a vocabulary of whole words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    rows = {word: row for row, word in enumerate((*SPECIAL_TOKENS, *words(vocabulary)))}
    tokenizer = Tokenizer(models.WordPiece(rows, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, rows[token]) for token in ("[CLS]", "[SEP]")],
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **names)


def prepare(
    folder: Path, vocabulary: int, activity: str, lengths: Lengths, miniature: bool
) -> tuple[str, str]:
    """Write what is not there yet.

    Returns:
        The model folder and the file of pairs, relative to ``folder``.
    """
    model = f"bert-{vocabulary}-{activity}"
    pairs = (
        "pairs-" + "-".join(map(str, (vocabulary, *lengths.query, *lengths.document))) + ".jsonl"
    )
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / model).exists():
        write_model(folder / f"{model}.part", vocabulary, activity, miniature)
        (folder / f"{model}.part").rename(folder / model)
    if not (folder / pairs).exists():
        count = MINIATURE_PAIRS if miniature else PAIRS
        write_pairs(folder / f"{pairs}.part", vocabulary, lengths, count)
        (folder / f"{pairs}.part").rename(folder / pairs)
    return model, pairs
