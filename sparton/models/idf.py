"""Inverse document frequencies of tokens: counted in a collection, kept as JSON.

The file is ``{token: idf}``, as OpenSearch's inference-free models and sentence-transformers'
``SparseStaticEmbedding.from_json`` have it. V vocabulary.
"""

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

_TEXTS_AT_ONCE = 2048


def idf_of_collection(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    *,
    advance: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """``log(1 + (N - df + 0.5) / (df + 0.5))`` of every token that occurs, in the order of rows.

    This is BM25's as Lucene has it, never negative, and what OpenSearch computes for its models
    (``get_idf.py`` of opensearch-sparse-model-tuning-sample). N counts the texts with at least one
    token, df those with this token. Whole texts count, special tokens do not.

    Args:
        texts: read once.
        tokenizer: of the encoder that will look the weights up.
        advance: told how many texts were done since it was last called.

    Raises:
        ValueError: no text holds a token.
    """
    special = tokenizer.all_special_ids
    frequencies = np.zeros(1 + max(tokenizer.get_vocab().values()), np.int64)
    num_texts = 0
    for size, owners, rows in _occurrences(texts, tokenizer):
        regular = ~np.isin(rows, special)
        owners, rows = owners[regular], rows[regular]
        pairs = np.unique(owners * len(frequencies) + rows)
        frequencies += np.bincount(pairs % len(frequencies), minlength=len(frequencies))
        num_texts += len(np.unique(owners))
        if advance:
            advance(size)
    if not num_texts:
        raise ValueError("an IDF needs a collection: none of its texts holds a token")
    seen = np.flatnonzero(frequencies)
    names = tokenizer.convert_ids_to_tokens(seen.tolist())
    df = frequencies[seen]
    idf = np.log1p((num_texts - df + 0.5) / (df + 0.5))
    return dict(zip(names, idf.tolist(), strict=True))


def write_idf(idf: Mapping[str, float], path: str | Path) -> None:
    """Write ``{token: idf}``, all of it or nothing; missing folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(json.dumps(dict(idf), ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    fresh.replace(path)


def read_idf(path: str | Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Read ``{token: idf}`` for a tokenizer that must know every token.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON object, a value that is no weight (a finite number from 0 on), or tokens
            that the tokenizer does not know; says how many and which first.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; scripts/compute_idf.py writes one")
    try:
        idf = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(idf, dict) or not idf:
        raise ValueError(f'{path} must hold a JSON object of weights by token, {{"token": 1.5}}')
    wrong = [token for token, value in idf.items() if not _is_weight(value)]
    if wrong:
        raise ValueError(
            f"{path}: {len(wrong)} of {len(idf)} values are no weights, which are finite numbers "
            f"from 0 on; the first is that of {wrong[0]!r}: {idf[wrong[0]]!r}"
        )
    vocabulary = tokenizer.get_vocab()
    unknown = [token for token in idf if token not in vocabulary]
    if unknown:
        raise ValueError(
            f"{path}: {len(unknown)} of {len(idf)} tokens are not in the vocabulary of "
            f"{len(vocabulary)} tokens, the first is {unknown[0]!r}: the weights were made for "
            "another tokenizer; compute them with this model's (scripts/compute_idf.py)"
        )
    return idf


def _is_weight(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value >= 0


def _occurrences(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Of some texts at a time: their number, and owner and vocabulary row of each token."""
    encoder = copy.deepcopy(tokenizer.backend_tokenizer)
    encoder.no_truncation()
    encoder.no_padding()
    remaining = iter(texts)
    while chunk := list(islice(remaining, _TEXTS_AT_ONCE)):
        encodings = encoder.encode_batch_fast(chunk, add_special_tokens=False)
        rows = [np.array(encoding.ids, np.int64) for encoding in encodings]
        owners = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        yield len(chunk), owners, np.concatenate(rows)
