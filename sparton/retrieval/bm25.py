"""BM25 as sparse vectors: Lucene's formula, searched by the same index as learned weights.

N documents, Q queries, V terms.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_vectors import SparseVectors

# Of characters beyond these, a class would be searched one range after the other.
_COMMON = range(2**16)
_IDEOGRAPHS = "\u3041-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_STOP_WORDS = frozenset(
    """a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with""".split()  # noqa: SIM905
)


_WORDS_AT_ONCE = 2**20  # whose counts are made together
_Value = TypeVar("_Value")


class Analyzer:
    """Text to terms: lower-case words, English stop words removed, Porter stems.

    Words are runs of letters and digits with the marks that combine with them, such as the vowels
    of Hindi, in Unicode's composed form; an inner apostrophe joins, a possessive 's is dropped. As
    in Lucene, each ideograph of Chinese and Japanese, and each hiragana, is a word, and the writing
    of Thai or Khmer, which has no spaces, is not cut; and words of one or two letters are their own
    stems: Porter's rules would make nothing of "s".
    """

    def __init__(self) -> None:
        import snowballstemmer

        self._word = _word_pattern()
        self._stemmer = snowballstemmer.stemmer("porter")
        self._terms = _Memory(self.term)

    def __call__(self, text: str) -> list[str]:
        return [term for term in map(self._terms.__getitem__, self.words(text)) if term]

    def words(self, text: str) -> list[str]:
        """The words of a text in lower case, in their order."""
        return self._word.findall(unicodedata.normalize("NFC", text.lower()))

    def term(self, word: str) -> str:
        """The term of a word in lower case, empty of a stop word."""
        word = word.replace("\u2019", "'").removesuffix("'s")
        if word in _STOP_WORDS:
            return ""
        return self._stemmer.stemWord(word) if len(word) > 2 else word


@cache
def _word_pattern() -> re.Pattern[str]:
    """What is a word; made when it is first asked for, as looking for marks takes a while."""
    marks = [chr(code) for code in _COMMON if unicodedata.category(chr(code))[0] == "M"]
    mark, letter = f"[{''.join(marks)}\u200c\u200d]", rf"[^\W_{_IDEOGRAPHS}]"  # joiners, too
    run = f"{letter}+(?:{mark}+{letter}*)*"
    return re.compile(f"[{_IDEOGRAPHS}]{mark}*|{run}(?:['\u2019]{run})*")


class _Memory(dict[str, _Value]):
    """What a function makes of words, each of which it is asked for once."""

    def __init__(self, function: Callable[[str], _Value]) -> None:
        self._function = function

    def __missing__(self, word: str) -> _Value:
        value = self[word] = self._function(word)
        return value


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
        self._analyzer = Analyzer()
        self._columns: dict[str, int] = {}  # of terms
        self._known = _Memory(self._found)

    def fit(self, texts: Iterable[str]) -> SparseVectors:
        """Learn the collection's terms and statistics; returns the document weights ``[N, V]``."""
        self._columns = {}
        columns = _Memory(self._grown)
        counts = self._counts(texts, columns)
        self._known = _Memory(self._found)
        self._known.update(columns)
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
        return self._weighted(self._counts(texts, self._known))

    def _weighted(self, counts: SparseVectors) -> SparseVectors:
        terms, tf = counts.terms.numpy(), counts.values.numpy().astype(np.float64)
        relative = _lengths(counts) / self._mean_length
        saturation = self.k1 * (1 - self.b + self.b * relative)
        owners = np.repeat(np.arange(counts.num_vectors), counts.lengths.numpy())
        weights = self._idf[terms] * tf / (tf + saturation[owners])
        return counts._replace(values=torch.from_numpy(weights.astype(np.float32)))

    def queries(self, texts: Iterable[str]) -> SparseVectors:
        """Term counts ``[Q, V]``; terms that the collection does not hold are dropped."""
        return self._counts(texts, self._known)

    def _grown(self, word: str) -> int:
        """The column of a word, a new one if need be; -1 of a stop word."""
        term = self._analyzer.term(word)
        return self._columns.setdefault(term, len(self._columns)) if term else -1

    def _found(self, word: str) -> int:
        """The column of a word; -1 of a stop word, and of one that the collection lacks."""
        return self._columns.get(self._analyzer.term(word), -1)

    def _counts(self, texts: Iterable[str], column_of: Mapping[str, int]) -> SparseVectors:
        """How often each text has each term, ``[N, V]``."""
        parts = []
        found, ends = array("q"), array("q")
        for text in texts:
            found.extend(map(column_of.__getitem__, self._analyzer.words(text)))
            ends.append(len(found))
            if len(found) >= _WORDS_AT_ONCE:
                parts.append(_counted(found, ends))
                found, ends = array("q"), array("q")
        parts.append(_counted(found, ends))
        terms, counts, lengths = (np.concatenate(each) for each in zip(*parts))
        return SparseVectors(
            torch.from_numpy(counts),
            torch.from_numpy(terms),
            cu_seqlens_of(torch.from_numpy(lengths)),
            len(self._columns),
        )


class _Counts(NamedTuple):
    """The different terms of some texts one after the other, int32; how often each text has each,
    fp32; and how many terms each text has, int64."""

    terms: NDArray[np.int32]
    counts: NDArray[np.float32]
    lengths: NDArray[np.int64]


def _counted(columns: "array[int]", ends: "array[int]") -> _Counts:
    """Counts of texts by the columns of all their words, -1 without one, and where each ends."""
    found = np.array(columns, np.int64)
    stops = np.array(ends, np.int64)
    owners = np.searchsorted(stops, np.arange(len(found)), side="right")
    width = found.max(initial=0) + 1
    places, counts = np.unique((owners * width + found)[found >= 0], return_counts=True)
    return _Counts(
        (places % width).astype(np.int32),
        counts.astype(np.float32),
        np.bincount(places // width, minlength=len(stops)),
    )


def _lengths(counts: SparseVectors) -> NDArray[np.float64]:
    """Terms of each text, with repetitions."""
    owners = np.repeat(np.arange(counts.num_vectors), counts.lengths.numpy())
    return np.bincount(owners, counts.values.numpy(), counts.num_vectors).astype(np.float64)
