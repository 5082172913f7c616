"""Weights of tokens, kept as JSON.

The file is ``{token: weight}``, as OpenSearch's inference-free models and sentence-transformers'
``SparseStaticEmbedding.from_json`` have it.
"""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from sparton.reading import read_json, shown

_LARGEST = torch.finfo(torch.float32).max


def read_idf(path: str | Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Read ``{token: idf}`` for a tokenizer that must know every token.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON object, a value that is no weight (a number from 0 on that fp32 holds),
            or tokens that the tokenizer does not know; says how many and which first.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `sparton idf` writes one")
    idf = read_json(path)
    if not isinstance(idf, dict) or not idf:
        raise ValueError(f'{path} must hold a JSON object of weights by token, {{"token": 1.5}}')
    wrong = [token for token, value in idf.items() if not _is_weight(value)]
    if wrong:
        raise ValueError(
            f"{path}: {len(wrong)} of {len(idf)} values are no weights, which are numbers from 0 "
            f"on that fp32 holds; the first is that of {wrong[0]!r}: {shown(idf[wrong[0]])}"
        )
    vocabulary = tokenizer.get_vocab()
    unknown = [token for token in idf if token not in vocabulary]
    if unknown:
        raise ValueError(
            f"{path}: {len(unknown)} of {len(idf)} tokens are not in the vocabulary of "
            f"{len(vocabulary)} tokens, the first is {unknown[0]!r}: the weights were made for "
            "another tokenizer; compute them with this model's (sparton.pipelines.compute_idf)"
        )
    return idf


def _is_weight(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= _LARGEST
