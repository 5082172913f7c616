"""Texts to packed token batches. N texts, T tokens in all."""

import copy
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from sparton.types import TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PackedTokenizer:
    """Tokenizes queries and documents, each cut at its own length, without padding.

    Args:
        tokenizer: a fast tokenizer of Hugging Face transformers.
        query_length: tokens kept of a query, special tokens included.
        document_length: tokens kept of a document, special tokens included.
        max_length: positions the model supports, if known.

    Raises:
        ValueError: a slow tokenizer, a length with no room for text, or one beyond ``max_length``.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        query_length: int,
        document_length: int,
        *,
        max_length: int | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} is a slow tokenizer; a fast one "
                "(tokenizer.json in the model folder) is needed"
            )
        special = tokenizer.num_special_tokens_to_add(pair=False)
        lengths = {"query_length": query_length, "document_length": document_length}
        for name, length in lengths.items():
            if length <= special:
                raise ValueError(
                    f"{name}={length} leaves no room for text beside {special} special tokens"
                )
            if max_length is not None and length > max_length:
                raise ValueError(
                    f"{name}={length} is more than the {max_length} positions of the model: "
                    f"set {name} to {max_length} or less"
                )
        self.tokenizer = tokenizer
        self.query_length = query_length
        self.document_length = document_length
        # A copy of its own, so that the truncation set here is not saved with the model.
        self._encoder = copy.deepcopy(tokenizer.backend_tokenizer)
        self._encoder.no_padding()

    def queries(self, texts: Sequence[str]) -> TokenBatch:
        """N queries packed; an empty text keeps its special tokens."""
        return self._pack(texts, self.query_length)

    def documents(self, texts: Sequence[str]) -> TokenBatch:
        """N documents packed; an empty text keeps its special tokens."""
        return self._pack(texts, self.document_length)

    def _pack(self, texts: Sequence[str], length: int) -> TokenBatch:
        self._encoder.enable_truncation(length)
        sequences = [encoding.ids for encoding in self._encoder.encode_batch_fast(list(texts))]
        lengths = np.fromiter(map(len, sequences), np.int64, count=len(sequences))
        boundaries = np.concatenate([[0], np.cumsum(lengths)])
        total = int(boundaries[-1])
        input_ids = np.fromiter(chain.from_iterable(sequences), np.int64, count=total)
        position_ids = np.arange(total) - np.repeat(boundaries[:-1], lengths)
        return TokenBatch(
            torch.from_numpy(input_ids),
            torch.from_numpy(position_ids),
            torch.from_numpy(boundaries.astype(np.int32)),
            max(int(lengths.max(initial=1)), 1),
        )
