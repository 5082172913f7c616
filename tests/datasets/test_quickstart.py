"""The generated collection: reproducible, splits apart, hard for BM25, easy for an oracle."""

from statistics import mean

import pytest

from sparton.datasets import quickstart
from sparton.datasets.mixture import Mixture
from sparton.datasets.thesaurus import ADJECTIVES, ADVERBS, TOPICS
from sparton.evaluation import evaluate_bm25
from sparton.types import RetrievalTask, TextCollection

CONCEPTS = [*(c for topic in TOPICS for c in (*topic.nouns, *topic.verbs)), *ADJECTIVES]
SPLITS = ("train", "dev", "test")


@pytest.fixture(scope="module")
def held_out_task() -> RetrievalTask:
    return quickstart.task("test")


def content_words(text: str) -> set[str]:
    known = {word for concept in CONCEPTS for word in concept}
    return {word.strip(".") for word in text.split()} & known


def oracle_text(text: str) -> str:
    """Every word of a concept replaced by the concept's first; exact matching of such texts is what
    knowing all synonyms would be worth."""
    first = {word: concept[0] for concept in CONCEPTS for word in concept}
    return " ".join(first.get(word.strip("."), word) for word in text.split())


def in_first_words(task: RetrievalTask) -> RetrievalTask:
    """The task as an oracle that knows all synonyms reads it."""
    documents, queries = (
        TextCollection(side.ids, [oracle_text(text) for text in side.texts])
        for side in (task.documents, task.queries)
    )
    return task._replace(documents=documents, queries=queries)


def test_every_word_has_one_meaning():
    words = [word for concept in (*CONCEPTS, ADVERBS) for word in concept]
    assert len(words) == len(set(words))
    assert {len(concept) for concept in CONCEPTS} == {4}


@pytest.mark.slow
def test_the_collection_is_a_pure_function_of_the_seed():
    first = [quickstart.task(split, seed=3) for split in SPLITS]
    texts = quickstart.corpus_texts(3)
    quickstart._generate.cache_clear()
    assert [quickstart.task(split, seed=3) for split in SPLITS] == first
    assert quickstart.corpus_texts(3) == texts
    assert quickstart.task("test", seed=4) != first[2]


@pytest.mark.slow
def test_no_query_and_no_source_document_is_shared_between_splits():
    tasks = {split: quickstart.task(split) for split in SPLITS}
    texts = [text for task in tasks.values() for text in task.queries.texts]
    assert len(texts) == len(set(texts))
    sources = {
        split: {id for grades in task.qrels.values() for id, grade in grades.items() if grade == 2}
        for split, task in tasks.items()
    }
    assert sources["train"].isdisjoint(sources["dev"] | sources["test"])
    assert sources["dev"].isdisjoint(sources["test"])
    assert all(task.documents == tasks["train"].documents for task in tasks.values())
    assert sources["test"] < set(tasks["test"].documents.ids)


def test_the_tokenizer_corpus_holds_no_held_out_query(held_out_task):
    corpus = set(quickstart.corpus_texts())
    unseen = {*held_out_task.queries.texts, *quickstart.task("dev").queries.texts}
    assert corpus.isdisjoint(unseen)
    assert set(held_out_task.documents.texts) <= corpus


def test_grades_count_the_concepts_that_query_and_document_share(held_out_task):
    texts = dict(zip(held_out_task.documents.ids, held_out_task.documents.texts))
    for query_id, query in zip(held_out_task.queries.ids, held_out_task.queries.texts):
        grades = held_out_task.qrels[query_id]
        assert sorted(grades.values(), reverse=True)[:2] in ([2, 1], [2, 0])
        asked = content_words(oracle_text(query))
        assert len(asked) == 5
        for document_id, grade in grades.items():
            shared = asked & content_words(oracle_text(texts[document_id]))
            assert len(shared) >= {2: 5, 1: 4, 0: 0}[grade], (query, texts[document_id])
        assert 0 in grades.values()


def test_a_query_uses_about_three_of_five_words_of_its_document(held_out_task):
    texts = dict(zip(held_out_task.documents.ids, held_out_task.documents.texts))
    shares = []
    for query_id, query in zip(held_out_task.queries.ids, held_out_task.queries.texts):
        grades = held_out_task.qrels[query_id]
        source = texts[max(grades, key=grades.__getitem__)]
        asked = content_words(query)
        shares.append(len(asked & content_words(source)) / len(asked))
    assert 0.5 < mean(shares) < 0.7
    assert min(shares) < 0.3


def test_knowing_the_synonyms_is_worth_far_more_than_bm25(held_out_task):
    bm25 = evaluate_bm25(held_out_task, metrics=["ndcg@10"]).metrics["ndcg@10"]
    oracle = evaluate_bm25(in_first_words(held_out_task), metrics=["ndcg@10"]).metrics["ndcg@10"]
    assert 0.3 < bm25 < 0.6
    assert oracle > 0.9


def test_negatives_come_from_documents_that_are_not_relevant():
    source = quickstart.pairs()
    task = quickstart.task("train")
    id_of = dict(zip(task.documents.texts, task.documents.ids))
    for index in range(50):
        example = source.example(index, draw=index, num_negatives=8)
        grades = task.qrels[task.queries.ids[index]]
        assert grades[id_of[example.positive]] == 2
        assert example.query == task.queries.texts[index]
        assert all(grades.get(id_of[text], 0) == 0 for text in example.negatives)
    assert source.example(0, 1, 4) == source.example(0, 1, 4)
    assert source.example(0, 1, 4).negatives != source.example(0, 2, 4).negatives


def test_the_pairs_are_a_source_of_a_mixture():
    pairs = quickstart.pairs()
    mixture = Mixture({"quickstart": pairs})
    examples = mixture.examples(range(len(pairs)), seed=0)
    assert {example.query for example in examples} == {query.text for query in pairs.queries}


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'dve'.*dev"):
        quickstart.task("dve")
