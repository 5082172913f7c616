"""BM25 as sparse vectors: Lucene's formula, searched by the same index as learned weights.

N documents, Q queries, V terms.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_vectors import SparseVectors

_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*")
_STOP_WORDS = frozenset(
    """a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with""".split()  # noqa: SIM905
)


class Analyzer:
    """Text to terms: lower-case words, English stop words removed, Porter stems.

    Words are runs of letters and digits; an inner apostrophe joins, a possessive 's is dropped.
    As in Lucene, words of one or two letters are their own stems: Porter's rules would make
    nothing of "s".
    """

    def __init__(self) -> None:
        import snowballstemmer

        self._stemmer = snowballstemmer.stemmer("porter")
        self._stems: dict[str, str] = {}

    def __call__(self, text: str) -> list[str]:
        found = (match.group().replace("\u2019", "'") for match in _WORD.finditer(text.lower()))
        words = (word.removesuffix("'s") for word in found)
        return [self._stem(word) for word in words if word not in _STOP_WORDS]

    def _stem(self, word: str) -> str:
        stem = self._stems.get(word)
        if stem is None:
            stem = self._stemmer.stemWord(word) if len(word) > 2 else word
            self._stems[word] = stem
        return stem


class BM25:
    """Okapi BM25 with exact document lengths.

    A document's weight for a term is ``idf * tf / (tf + k1 * (1 - b + b * length / mean length))``
    with ``idf = log(1 + (N - df + 0.5) / (df + 0.5))``, as in Lucene 8 and later; a query's weight
    is the number of times it uses the term.

    Args:
        k1: saturation of the term frequency. 0.9 and b 0.4 are Anserini's defaults.
        b: strength of the length normalisation, 0 to 1.
    """

    def __init__(self, k1: float = 0.9, b: float = 0.4) -> None:
        numbers = all(isinstance(x, int | float) for x in (k1, b))
        if not numbers or k1 < 0 or not 0 <= b <= 1:
            raise ValueError(f"BM25 needs numbers k1 >= 0 and 0 <= b <= 1, got k1={k1}, b={b}")
        self.k1 = k1
        self.b = b
        self._analyze = Analyzer()
        self._columns: dict[str, int] = {}

    def fit(self, texts: Iterable[str]) -> SparseVectors:
        """Learn the collection's terms and statistics; returns the document weights ``[N, V]``."""
        self._columns = {}
        counts = _vectors((self._grown(text) for text in texts), self._columns)
        terms, num_documents = counts.terms.numpy(), counts.num_vectors
        document_frequencies = np.bincount(terms, minlength=len(self._columns))
        rarity = (num_documents - document_frequencies + 0.5) / (document_frequencies + 0.5)
        self._idf = np.log1p(rarity)
        self._mean_length = max(_lengths(counts).mean(), 1e-9) if num_documents else 1.0
        return self._weighted(counts)

    def documents(self, texts: Iterable[str]) -> SparseVectors:
        """Weights ``[N, V]`` of documents by the statistics that :meth:`fit` has learned; of a text
        that was among the fitted ones, the same. Terms that the collection does not hold are
        dropped, and count in no length."""
        return self._weighted(_vectors((self._known(text) for text in texts), self._columns))

    def _weighted(self, counts: SparseVectors) -> SparseVectors:
        terms, tf = counts.terms.numpy(), counts.values.numpy().astype(np.float64)
        relative = _lengths(counts) / self._mean_length
        saturation = self.k1 * (1 - self.b + self.b * relative)
        owners = np.repeat(np.arange(counts.num_vectors), counts.lengths.numpy())
        weights = self._idf[terms] * tf / (tf + saturation[owners])
        return counts._replace(values=torch.from_numpy(weights.astype(np.float32)))

    def queries(self, texts: Iterable[str]) -> SparseVectors:
        """Term counts ``[Q, V]``; terms that the collection does not hold are dropped."""
        return _vectors((self._known(text) for text in texts), self._columns)

    def _grown(self, text: str) -> dict[int, int]:
        columns = self._columns
        terms = Counter(self._analyze(text))
        return {columns.setdefault(term, len(columns)): count for term, count in terms.items()}

    def _known(self, text: str) -> dict[int, int]:
        terms = Counter(self._analyze(text))
        return {self._columns[term]: n for term, n in terms.items() if term in self._columns}


def _lengths(counts: SparseVectors) -> NDArray[np.float64]:
    """Terms of each text, with repetitions."""
    lengths = np.zeros(counts.num_vectors)
    owners = np.repeat(np.arange(counts.num_vectors), counts.lengths.numpy())
    np.add.at(lengths, owners, counts.values.numpy())
    return lengths


def _vectors(counts: Iterator[dict[int, int]], columns: Collection[str]) -> SparseVectors:
    """One dictionary from column to count per text. ``columns`` may grow while they are read."""
    lengths: list[int] = []
    terms: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    values: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    for row in counts:
        own = np.fromiter(row.keys(), np.int32, len(row))
        order = np.argsort(own)
        lengths.append(len(row))
        terms.append(own[order])
        values.append(np.fromiter(row.values(), np.float32, len(row))[order])
    return SparseVectors(
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(np.concatenate(terms)),
        cu_seqlens_of(torch.tensor(lengths, dtype=torch.int64)),
        len(columns),
    )
