"""How many texts are longer than what is read of them."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sparton.datasets.tokenization import PackedTokenizer
from sparton.types import PLURAL, SIDES, RetrievalTask, Side, TextForm, Tokenizer

if TYPE_CHECKING:
    from sparton.datasets.mixture import Mixture

# Texts of a side that are looked at, which lie evenly among all.
SAMPLE = 1000
# Of queries, a larger share is worth a warning: they are short and few, and cost nothing to read.
_MANY = 0.05
Shares = Mapping[Side, float]
log = logging.getLogger(__name__)


def lengths_read(tokenizer: Tokenizer, form: TextForm) -> Mapping[Side, int] | None:
    """By side, how many tokens of a text are read; None where the tokenizer reads no texts."""
    if not isinstance(tokenizer, PackedTokenizer):
        return None
    return {
        "query": form.query_length or tokenizer.query_length,
        "document": form.document_length or tokenizer.document_length,
    }


def sample_rows(number: int) -> list[int]:
    """Up to :data:`SAMPLE` rows of so many, which lie evenly among all."""
    return np.linspace(0, number - 1, min(SAMPLE, number)).astype(int).tolist()


def shares_cut(
    name: str,
    tokenizer: Tokenizer,
    texts: Mapping[Side, Sequence[str]],
    form: TextForm = TextForm(),  # noqa: B008
) -> Shares | None:
    """By side, the share of texts that have as many tokens as are kept of them, or more: those
    that are cut, and a few that just fit. A warning tells of many queries.

    Args:
        name: of what reads the texts, or of where they are from, for the warning.
        texts: of either side, at least one.
        form: in which they are read.

    Returns:
        None where the tokenizer reads no texts.
    """
    lengths = lengths_read(tokenizer, form)
    if lengths is None or not isinstance(tokenizer, PackedTokenizer):
        return None
    shares = {side: float(tokenizer.fill_length(texts[side], side, form).mean()) for side in SIDES}
    if shares["query"] > _MANY:
        most = f", {tokenizer.max_length} at most" if tokenizer.max_length else ""
        if tokenizer.markup.expansion is not None:
            most += "; every query has as many vectors then"
        log.warning(
            "%s: %.0f %% of the %s have query_length=%d tokens or more, and what is cut off is not "
            "read: set query_length to more%s",
            name,
            100 * shares["query"],
            PLURAL["query"],
            lengths["query"],
            most,
        )
    return shares


def examples_cut(
    data: "Mixture", tokenizer: Tokenizer, *, seed: int, batch: int = 1
) -> Mapping[str, Shares]:
    """By source, the :func:`shares_cut` of the queries of training examples and of their positives,
    of up to :data:`SAMPLE` examples in all. They are logged.

    Args:
        seed, batch: of the stream, see :meth:`~sparton.datasets.mixture.Mixture.locate`.

    Returns:
        Nothing where the tokenizer reads no texts.
    """
    found: dict[str, Shares] = {}
    if lengths_read(tokenizer, TextForm()) is None:
        return found
    positions = sample_rows(len(data))
    examples = data.examples(positions, seed=seed, batch=batch)
    numbers = data.numbers(positions, seed, batch)
    for number, name in enumerate(data.sources):
        own = [examples[row] for row in np.flatnonzero(numbers == number)]
        texts: dict[Side, list[str]] = {
            "query": [each.query for each in own],
            "document": [each.positive for each in own],
        }
        form = data.forms.get(name, TextForm())
        if own and (shares := shares_cut(f"source {name}", tokenizer, texts, form)):
            found[name] = shares
    words = [
        f"{name} {shares['query']:.1%} of the queries, {shares['document']:.1%} of the positives"
        for name, shares in found.items()
    ]
    log.info("texts that are cut: %s", "; ".join(words))
    return found


class CutCounter:
    """Counts the :func:`shares_cut` of tasks, of up to :data:`SAMPLE` texts of either side; of a
    task that stays in memory once, however often it is evaluated."""

    def __init__(self) -> None:
        self._counted: dict[str, tuple[Sequence[str], Shares | None]] = {}
        self._warned: set[tuple[object, ...]] = set()

    def warn_once(self, said: str, *values: object) -> None:
        """Log what an evaluation before has not said."""
        if (said, *values) not in self._warned:
            self._warned.add((said, *values))
            log.warning(said, *values)

    def __call__(self, tokenizer: Tokenizer, task: RetrievalTask) -> Shares | None:
        """The shares of a task, whose texts are read by a tokenizer of the same lengths every time.

        Returns:
            None where the tokenizer reads no texts.
        """
        queries, shares = self._counted.get(task.name, (None, None))
        if queries is task.queries.texts:
            return shares
        texts: dict[Side, list[str]] = {
            side: [own[row] for row in sample_rows(len(own))]
            for side, own in zip(SIDES, (task.queries.texts, task.documents.texts), strict=True)
        }
        shares = shares_cut(task.name, tokenizer, texts, task.form)
        self._counted[task.name] = task.queries.texts, shares
        return shares
