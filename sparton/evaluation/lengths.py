"""How many texts of a task are longer than what is read of them."""

import logging
from collections.abc import Mapping

import numpy as np

from sparton.datasets.tokenization import PackedTokenizer
from sparton.types import PLURAL, SIDES, RetrievalTask, Side, TextForm, Tokenizer

# Texts of a side that are looked at, which lie evenly among all.
SAMPLE = 1000
# Of queries, a larger share is worth a warning: they are short and few, and cost nothing to read.
_MANY = 0.05
log = logging.getLogger(__name__)


def lengths_read(tokenizer: Tokenizer, form: TextForm) -> Mapping[Side, int] | None:
    """By side, how many tokens of a text are read; None where the tokenizer reads no texts."""
    if not isinstance(tokenizer, PackedTokenizer):
        return None
    return {
        "query": form.query_length or tokenizer.query_length,
        "document": form.document_length or tokenizer.document_length,
    }


def shares_cut(
    tokenizer: Tokenizer, task: RetrievalTask, form: TextForm
) -> Mapping[Side, float] | None:
    """By side, the share of texts that have as many tokens as are kept of them, or more; a log of
    many queries. Of up to :data:`SAMPLE` texts of either side.

    Args:
        form: in which the texts of the task are read.

    Returns:
        None where the tokenizer reads no texts.
    """
    lengths = lengths_read(tokenizer, form)
    if lengths is None or not isinstance(tokenizer, PackedTokenizer):
        return None
    shares: dict[Side, float] = {}
    for side, texts in zip(SIDES, (task.queries.texts, task.documents.texts), strict=True):
        rows = np.linspace(0, len(texts) - 1, min(SAMPLE, len(texts))).astype(int)
        full = tokenizer.fill_length([texts[row] for row in rows], side, form)
        shares[side] = float(full.mean())
    if shares["query"] > _MANY:
        most = f", {tokenizer.max_length} at most" if tokenizer.max_length else ""
        if tokenizer.markup.expansion is not None:
            most += "; every query has as many vectors then"
        log.warning(
            "%s: %.0f %% of the %s have query_length=%d tokens or more, and what is cut off is not "
            "searched for: set query_length to more%s",
            task.name,
            100 * shares["query"],
            PLURAL["query"],
            lengths["query"],
            most,
        )
    return shares
