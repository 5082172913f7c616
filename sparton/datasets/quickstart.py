"""The quickstart collection: generated, readable, and hard for exact matching.

A document is about a handful of concepts of one topic. It names each of them by one or two of the
concept's four synonyms, between function words, adverbs, invented names and stray words of other
topics. A query asks for five concepts of one document, two of them on average by synonyms that the
document does not use. Exact matching therefore finds only some of the words; a model that has
learned from training pairs which words stand for the same concept finds nearly all of them.

Everything is a pure function of the seed. The documents behind the development and test queries
are in the collection, but no training query was made from any of them.
"""

import itertools
import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from sparton.datasets.thesaurus import (
    ADJECTIVES,
    ADVERBS,
    ENDINGS,
    MIDDLES,
    ONSETS,
    TOPICS,
    Concept,
)
from sparton.types import Example, RetrievalTask, TextCollection

Split = Literal["train", "dev", "test"]

DOCUMENTS = 2400
HELD_OUT = 200  # documents behind the dev queries, and as many behind the test queries
SENTENCES = 4  # of a document, enough to name every concept
TRAIN_QUERIES_PER_DOCUMENT = 4
SAME_WORD = 0.6  # chance that a query names a concept by a word that its document uses
JUDGED_IRRELEVANT = 10

DOCUMENT_SENTENCES = (
    "the {adjective} {noun} {verb} the {noun} near {name}.",
    "{adverb} the {noun} of {name} {verb} one {noun}.",
    "{name} and the {noun} {verb} the {adjective} {noun}.",
    "one {noun} with the {noun} was {adverb} {adjective}.",
    "after the {stray} the {noun} {verb} the {noun}.",
)
QUERIES = (
    "which {noun} {verb} the {adjective} {noun} with one {noun}",
    "who {verb} the {adjective} {noun} and the {noun} near the {noun}",
    "was the {noun} {adverb} {verb} by the {adjective} {noun} of the {noun}",
    "{noun} {verb} {adjective} {noun} {noun}",
    "{name} asked how one {noun} {verb} the {noun} after the {adjective} {noun}",
)


class Facts(NamedTuple):
    """What a text is about."""

    nouns: tuple[Concept, ...]
    verbs: tuple[Concept, ...]
    adjectives: tuple[Concept, ...]

    @property
    def concepts(self) -> tuple[Concept, ...]:
        return (*self.nouns, *self.verbs, *self.adjectives)

    @property
    def gist(self) -> frozenset[str]:
        """The concepts of a text, each by its first word."""
        return frozenset(concept[0] for concept in self.concepts)


class Document(NamedTuple):
    id: str
    text: str
    topic: str
    facts: Facts
    gist: frozenset[str]


class Query(NamedTuple):
    """A question about the document in row ``source`` of the collection."""

    id: str
    text: str
    source: int
    gist: frozenset[str]


class Generated(NamedTuple):
    documents: tuple[Document, ...]
    queries: dict[str, tuple[Query, ...]]


class QuickstartPairs:
    """Training source: queries, each with the document that it was made from."""

    def __init__(self, documents: tuple[Document, ...], queries: tuple[Query, ...]) -> None:
        self.documents = documents
        self.queries = queries

    def __len__(self) -> int:
        return len(self.queries)

    def example(self, index: int, draw: int, num_negatives: int) -> Example:
        """Query ``index`` with its document; ``draw`` decides about the random negatives."""
        query = self.queries[index]
        rng = random.Random(draw)
        negatives: list[str] = []
        while len(negatives) < num_negatives:
            document = rng.choice(self.documents)
            if _grade(query, document) == 0:
                negatives.append(document.text)
        return Example(query.text, self.documents[query.source].text, tuple(negatives))


def pairs(seed: int = 0) -> QuickstartPairs:
    """The training queries of a collection, as a source for :class:`Mixture`."""
    generated = _generate(seed)
    return QuickstartPairs(generated.documents, generated.queries["train"])


def corpus_texts(seed: int = 0) -> list[str]:
    """The texts from which a tokenizer is built: all documents and the training queries."""
    generated = _generate(seed)
    documents = [document.text for document in generated.documents]
    return documents + [query.text for query in generated.queries["train"]]


def task(split: Split = "test", seed: int = 0) -> RetrievalTask:
    """The collection with the queries and graded judgments of one split.

    Grade 2: the document that the query was made from; 1: it expresses at least four of the
    query's five concepts; 0: documents of the same topic, judged irrelevant.

    Raises:
        ValueError: for a split other than train, dev and test.
    """
    generated = _generate(seed)
    if split not in generated.queries:
        splits = ", ".join(generated.queries)
        raise ValueError(f"quickstart has no split {split!r}; choose one of {splits}")
    documents, queries = generated.documents, generated.queries[split]
    by_topic: dict[str, list[int]] = {topic.name: [] for topic in TOPICS}
    for row, document in enumerate(documents):
        by_topic[document.topic].append(row)
    qrels = {}
    for query in queries:
        topic = documents[query.source].topic
        grades = {documents[row].id: _grade(query, documents[row]) for row in by_topic[topic]}
        grades[documents[query.source].id] = 2
        judged_irrelevant = [id for id, grade in grades.items() if grade == 0][:JUDGED_IRRELEVANT]
        kept = {id: grade for id, grade in grades.items() if grade > 0}
        qrels[query.id] = kept | dict.fromkeys(judged_irrelevant, 0)
    return RetrievalTask(
        "quickstart",
        TextCollection([document.id for document in documents], [d.text for d in documents]),
        TextCollection([query.id for query in queries], [query.text for query in queries]),
        qrels,
    )


def _grade(query: Query, document: Document) -> int:
    """1 for a document that expresses all but one of the query's concepts, or all of them."""
    return int(len(query.gist & document.gist) >= len(query.gist) - 1)


@lru_cache(maxsize=2)
def _generate(seed: int) -> Generated:
    rng = random.Random(f"sparton quickstart {seed}")
    names = _names(rng, 400)
    documents = tuple(_document(rng, row, names) for row in range(DOCUMENTS))
    rows = rng.sample(range(DOCUMENTS), DOCUMENTS)
    sources = {
        "dev": rows[:HELD_OUT],
        "test": rows[HELD_OUT : 2 * HELD_OUT],
        "train": rows[2 * HELD_OUT :] * TRAIN_QUERIES_PER_DOCUMENT,
    }
    queries = {}
    taken: set[str] = set()
    for split, split_rows in sources.items():
        made = []
        for number, row in enumerate(split_rows):
            text, facts = _query(rng, documents[row], names)
            while text in taken:
                text, facts = _query(rng, documents[row], names)
            taken.add(text)
            made.append(Query(f"{split}-{number}", text, row, facts.gist))
        queries[split] = tuple(made)
    return Generated(documents, queries)


def _names(rng: random.Random, count: int) -> list[str]:
    names: set[str] = set()
    concepts = [*(c for topic in TOPICS for c in (*topic.nouns, *topic.verbs)), *ADJECTIVES]
    known = {word for concept in concepts for word in concept}
    while len(names) < count:
        name = "".join(rng.choice(parts) for parts in (ONSETS, MIDDLES, ENDINGS))
        if name not in known:
            names.add(name)
    return sorted(names)


def _document(rng: random.Random, row: int, names: list[str]) -> Document:
    topic = rng.choice(TOPICS)
    facts = Facts(
        tuple(rng.sample(topic.nouns, 5)),
        tuple(rng.sample(topic.verbs, 2)),
        tuple(rng.sample(ADJECTIVES, 2)),
    )
    words = {concept: rng.sample(concept, rng.choice((1, 1, 2))) for concept in facts.concepts}
    templates = rng.sample(DOCUMENT_SENTENCES, SENTENCES)
    sentences = _fill(rng, templates, facts, words, names)
    return Document(f"d{row}", " ".join(sentences), topic.name, facts, facts.gist)


def _query(rng: random.Random, document: Document, names: list[str]) -> tuple[str, Facts]:
    facts = Facts(
        tuple(rng.sample(document.facts.nouns, 3)),
        tuple(rng.sample(document.facts.verbs, 1)),
        tuple(rng.sample(document.facts.adjectives, 1)),
    )
    used = set(document.text.replace(".", "").split())
    words = {}
    for concept in facts.concepts:
        same = rng.random() < SAME_WORD
        words[concept] = [rng.choice([word for word in concept if (word in used) == same])]
    (text,) = _fill(rng, [rng.choice(QUERIES)], facts, words, names)
    return text, facts


def _fill(
    rng: random.Random,
    templates: Sequence[str],
    facts: Facts,
    words: dict[Concept, list[str]],
    names: list[str],
) -> list[str]:
    """Templates with their slots filled: concepts take turns, and so do the words of each."""
    turns = {concept: itertools.cycle(words[concept]) for concept in facts.concepts}
    slots = {
        "noun": itertools.cycle(facts.nouns),
        "verb": itertools.cycle(facts.verbs),
        "adjective": itertools.cycle(facts.adjectives),
    }

    def fill(slot: re.Match[str]) -> str:
        match slot[1]:
            case "name":
                return rng.choice(names)
            case "adverb":
                return rng.choice(ADVERBS)
            case "stray":
                return rng.choice(rng.choice(rng.choice(TOPICS).nouns))
            case kind:
                return next(turns[next(slots[kind])])

    return [re.sub(r"{(\w+)}", fill, template) for template in templates]
