"""Inverse document frequencies of a collection's tokens, the weights of static queries.

V vocabulary.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from sparton.datasets.preparation import chunks
from sparton.datasets.tokenization import without_truncation
from sparton.models.checkpoint import load_tokenizer
from sparton.retrieval.progress import progress_bar
from sparton.writing import replacing

_TEXTS_AT_ONCE = 2048


def compute_idf(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerFast | str | Path,
    output: str | Path | None = None,
    *,
    progress: bool = True,
) -> dict[str, float]:
    """``log(1 + (N - df + 0.5) / (df + 0.5))`` of every token that occurs, in the order of rows.

    This is BM25's as Lucene has it, never negative, and what OpenSearch computes for its models
    (``get_idf.py`` of opensearch-sparse-model-tuning-sample). N counts the texts with at least one
    token, df those with this token. Whole texts count, special tokens do not.

    Args:
        texts: read once.
        tokenizer: of the encoder that will look the weights up, or its folder or hub name.
        output: JSON file to write ``{token: idf}`` to, which
            :func:`~sparton.models.asymmetric.static_queries` reads; None for no file.
        progress: show a bar on standard error.

    Raises:
        FileNotFoundError: no tokenizer of that name.
        ValueError: no text holds a token.
        OSError: ``output`` could not be written.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        tokenizer = load_tokenizer(str(tokenizer))
    num_texts, frequencies = _count(texts, tokenizer, progress)
    if not num_texts:
        raise ValueError("an IDF needs a collection: none of its texts holds a token")
    seen = np.flatnonzero(frequencies)
    df = frequencies[seen]
    weights = np.log1p((num_texts - df + 0.5) / (df + 0.5)).tolist()
    idf = dict(zip(tokenizer.convert_ids_to_tokens(seen.tolist()), weights, strict=True))
    if output is not None:
        with replacing(Path(output)) as fresh:
            content = json.dumps(idf, ensure_ascii=False, indent=0) + "\n"
            fresh.write_text(content, encoding="utf-8")
    return idf


def _count(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerFast, progress: bool
) -> tuple[int, NDArray[np.int64]]:
    """The number of texts that hold a token, and of those that hold each one, int64 ``[V]``."""
    special = tokenizer.all_special_ids
    frequencies = np.zeros(1 + max(tokenizer.get_vocab().values()), np.int64)
    num_texts = 0
    with progress_bar("texts" if progress else None, None) as advance:
        for size, owners, rows in _occurrences(texts, tokenizer):
            regular = ~np.isin(rows, special)
            owners, rows = owners[regular], rows[regular]
            pairs = np.unique(owners * len(frequencies) + rows)
            frequencies += np.bincount(pairs % len(frequencies), minlength=len(frequencies))
            num_texts += len(np.unique(owners))
            advance(size)
    return num_texts, frequencies


def _occurrences(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Some texts at a time: how many they are, and the owner and vocabulary row of each token."""
    encoder = without_truncation(tokenizer)
    for chunk in chunks(texts, _TEXTS_AT_ONCE):
        encodings = encoder.encode_batch_fast(chunk, add_special_tokens=False)
        rows = [np.array(encoding.ids, np.int64) for encoding in encodings]
        owners = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        yield len(chunk), owners, np.concatenate(rows)
