"""Pairs of texts that nobody has asked for: a part of each text, or its rarest words, as a query.

They are the training pairs where there are no queries, and more of them beside a few. A model
learns words from them rather than questions; with the scores of a teacher it learns the teacher's
order on them.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from sparton.arguments import ArgumentError, refuse_below
from sparton.retrieval.bm25 import Analyzer
from sparton.retrieval.progress import progress_bar
from sparton.writing import replacing

Way = Literal["spans", "keywords"]
WAYS: tuple[Way, ...] = get_args(Way)
# A query and its positive, of a text that is long enough.
Make = Callable[[str, random.Random], tuple[str, str] | None]
# Words of a span and of a query of keywords; of how many keywords they are drawn; how often a span
# stays in its text.
SPAN, KEYWORDS, RAREST, KEPT = (4, 16), (2, 5), 8, 0.1
_WORD = re.compile(r"\S+")
_EDGES = ".,;:!?()[]{}\"'\u201c\u201d\u2018\u2019"


def pair_texts(
    texts: Iterable[str],
    output: str | Path,
    *,
    by: Collection[str] = WAYS,
    per_text: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, int]:
    """Write pairs for ``data=text_files``, as JSON lines ``{"query": ..., "positive": ...}``.

    "spans" takes 4 to 16 consecutive words as the query, and what is left of the text as its
    positive; in one of ten pairs the text keeps them (the inverse cloze task: Lee et al., arXiv
    1906.00300). "keywords" takes 2 to 5 of the text's 8 words with the largest
    ``idf * tf / (tf + 1)``, in the order of the text, and leaves the text whole. Words are compared
    as BM25 compares them. The same texts and seed give the same pairs.

    Args:
        texts: read once by spans alone, else twice: a list, or what can be begun again.
        output: the file.
        by: how queries are made, of :data:`WAYS`.
        per_text: pairs of each text and way.
        seed: of what is drawn.
        progress: show a bar on standard error.

    Returns:
        The number of pairs by way, and under ``too_short`` that of the texts which gave none.

    Raises:
        ArgumentError: another way, or ``per_text`` below 1.
        ValueError: texts that can be read only once, or that are all too short.
        OSError: ``output`` could not be written.
    """
    if not by or not {*by} <= {*WAYS}:
        raise ArgumentError("{by}: choose from {}", ", ".join(WAYS), by=by)
    refuse_below(1, per_text=per_text)
    ways: dict[Way, Make] = {}
    if "spans" in by:
        ways["spans"] = _span_of
    if "keywords" in by:
        if iter(texts) is texts:
            raise ValueError("keywords read the texts twice: give a list, not an iterator")
        ways["keywords"] = _Keywords(texts, progress)
    counts = Counter(dict.fromkeys((*ways, "too_short"), 0))
    with (
        progress_bar("pairs" if progress else None, None) as advance,
        replacing(Path(output)) as fresh,
        fresh.open("w", encoding="utf-8") as file,
    ):
        for row, text in enumerate(texts):
            found = list(_pairs_of(text, ways, per_text, random.Random(f"{seed} {row}")))
            counts.update(way for way, _ in found)
            counts["too_short"] += not found
            for _, (query, positive) in found:
                pair = {"query": query, "positive": positive}
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")
            advance(1)
        if counts["too_short"] == counts.total():
            raise ValueError(
                f"no text is long enough: spans need {2 * SPAN[0]} words of a text, keywords "
                f"{KEYWORDS[0]} different ones"
            )
    return dict(counts)


def _pairs_of(
    text: str, ways: Mapping[Way, Make], per_text: int, chance: random.Random
) -> Iterator[tuple[Way, tuple[str, str]]]:
    for way, make in ways.items():
        for _ in range(per_text):
            if (pair := make(text, chance)) is not None:
                yield way, pair


def _span_of(text: str, chance: random.Random) -> tuple[str, str] | None:
    """Some consecutive words, at most half of the text, and the text, most often without them."""
    words = [match.span() for match in _WORD.finditer(text)]
    most = min(SPAN[1], len(words) // 2)
    if most < SPAN[0]:
        return None
    length = chance.randint(SPAN[0], most)
    first = chance.randint(0, len(words) - length)
    begin, end = words[first][0], words[first + length - 1][1]
    query = text[begin:end]
    if chance.random() < KEPT:
        return query, text
    return query, f"{text[:begin].rstrip()} {text[end:].lstrip()}".strip()


class _Keywords:
    """Queries of the words that tell a text from the others of its collection."""

    def __init__(self, texts: Iterable[str], progress: bool) -> None:
        self._analyze = Analyzer()
        frequencies: Counter[str] = Counter()
        number = 0
        with progress_bar("words" if progress else None, None) as advance:
            for text in texts:
                frequencies.update({*self._analyze(text)})
                number += 1
                advance(1)
        df = np.fromiter(frequencies.values(), np.float64, len(frequencies))
        idf = np.log1p((number - df + 0.5) / (df + 0.5))
        self._idf = dict(zip(frequencies, idf.tolist(), strict=True))

    def __call__(self, text: str, chance: random.Random) -> tuple[str, str] | None:
        forms = self._forms(text)
        count = Counter(term for term, _ in forms)
        weights = {term: self._idf[term] * tf / (tf + 1) for term, tf in count.items()}
        # In the order of the text where weights are equal.
        rarest = sorted(weights, key=lambda term: -weights[term])[:RAREST]
        if len(rarest) < KEYWORDS[0]:
            return None
        number = chance.randint(KEYWORDS[0], min(KEYWORDS[1], len(rarest)))
        chosen = {*chance.sample(rarest, number)}
        first = dict(reversed([form for form in forms if form[0] in chosen]))
        # A word of several terms comes once.
        words = dict.fromkeys(first[term] for term in weights if term in chosen)
        return " ".join(words), text

    def _forms(self, text: str) -> list[tuple[str, str]]:
        """The terms of a text, each with the word that it comes from."""
        return [(term, word.strip(_EDGES)) for word in text.split() for term in self._analyze(word)]
