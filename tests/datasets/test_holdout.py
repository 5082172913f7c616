"""A held-out share: never trained on, the same in all runs, and judged by its own positives."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparton.datasets.holdout import HeldOut, held_out_task, hold_out
from sparton.datasets.lookup import Rest
from sparton.datasets.mixture import Mixture, text_mixture
from sparton.datasets.quickstart import pairs
from sparton.datasets.sources import beir_pairs
from sparton.retrieval.metrics import Qrels, evaluate_run
from sparton.retrieval.run import Run
from sparton.types import Example, RetrievalTask, TextForm

Write = Callable[..., str]
QUERIES = 400


@pytest.fixture
def mixture(write_jsonl: Write, tmp_path: Path) -> Mixture:
    """Two files: every query has one positive in the first, and some have another in the second."""
    first = [[f"query {n}", f"positive {n}", f"negative {n}"] for n in range(QUERIES)]
    second = [[f"query {n}", f"other {n}", "negative"] for n in range(0, QUERIES, 4)]
    write_jsonl(first, "first.jsonl")
    write_jsonl(second, "second.jsonl")
    return text_mixture({"first": "first.jsonl", "second": "second.jsonl"}, root=str(tmp_path))


def trained_on(held: HeldOut) -> list[Example]:
    return held.rest.examples(range(len(held.rest)), seed=3, num_negatives=1)


def test_no_query_is_on_both_sides_and_no_example_is_lost(mixture: Mixture) -> None:
    held = hold_out(mixture, share=0.1)
    task = held_out_task(held)
    trained = trained_on(held)
    asked = set(task.queries.texts)
    assert asked.isdisjoint(example.query for example in trained)
    assert len(trained) == len(held.rest) == len(mixture) - sum(map(len, held.rows.values()))
    assert sum(map(len, held.rows.values())) == pytest.approx(0.1 * len(mixture), abs=1)
    everything = {example.query for example in trained} | asked
    assert everything == {f"query {n}" for n in range(QUERIES)}
    assert len({example.positive for example in trained}) == len(held.rest)
    assert all(example.negatives for example in trained)


def gains_of_equal_scores(documents: list[str], qrels: Qrels) -> list[float]:
    """NDCG@10 of a model that scores all documents alike, so that they rank by their places, or by
    their ids."""
    run = Run.from_scores({name: dict.fromkeys(documents, 1.0) for name in qrels})
    runs = (run, run.ties_by_id())
    return [evaluate_run(qrels, each, ["ndcg@10"])["ndcg@10"] for each in runs]


def test_a_model_that_tells_nothing_apart_finds_what_chance_would(mixture: Mixture) -> None:
    task = held_out_task(hold_out(mixture, share=0.1))
    assert max(gains_of_equal_scores(task.documents.ids, task.qrels)) < 0.03
    relevant = {name for grades in task.qrels.values() for name in grades}
    positives_first = sorted(task.documents.ids, key=lambda name: name not in relevant)
    assert gains_of_equal_scores(positives_first, task.qrels)[0] > 0.08
    named = {name: f"{name in relevant}{name}" for name in task.documents.ids}
    qrels = {query: {named[name]: 1 for name in own} for query, own in task.qrels.items()}
    assert gains_of_equal_scores(list(named.values()), qrels)[1] > 0.08


def test_the_positives_of_all_examples_of_a_query_are_right(mixture: Mixture) -> None:
    task = held_out_task(hold_out(mixture, share=0.2))
    text_of = dict(zip(task.documents.ids, task.documents.texts))
    sizes = set()
    for name, query in zip(task.queries.ids, task.queries.texts):
        number = int(query.split()[1])
        right = {f"positive {number}"} | ({f"other {number}"} if number % 4 == 0 else set())
        assert {text_of[document] for document in task.qrels[name]} == right
        sizes.add(len(right))
    assert sizes == {1, 2}
    assert len(set(task.documents.texts)) == len(task.documents.ids)


def test_the_collection_has_other_positives_as_well(mixture: Mixture) -> None:
    def positives(task: RetrievalTask) -> set[str]:
        text_of = dict(zip(task.documents.ids, task.documents.texts))
        return {text_of[name] for grades in task.qrels.values() for name in grades}

    held = hold_out(mixture, most=10)
    own = positives(held_out_task(held))
    for size in (1, 100, 10_000):
        task = held_out_task(held, documents=size)
        assert len(task.documents.ids) == max(len(own), min(size, QUERIES + QUERIES // 4))
        assert positives(task) == own


def test_the_choice_follows_from_the_texts_and_the_seed_alone(
    mixture: Mixture, write_jsonl: Write, tmp_path: Path
) -> None:
    chosen = set(held_out_task(hold_out(mixture)).queries.texts)
    assert chosen == set(held_out_task(hold_out(mixture)).queries.texts)
    assert chosen != set(held_out_task(hold_out(mixture, seed=1)).queries.texts)
    turned = Mixture(dict(reversed(mixture.sources.items())), {"first": 1.0, "second": 3.0})
    held = hold_out(turned)
    assert chosen == set(held_out_task(held).queries.texts)
    assert held.rest.weights == {"first": 1.0, "second": 3.0}


def test_sets_ids_and_generated_sources(
    write_jsonl: Write, write_beir: Write, tmp_path: Path
) -> None:
    sets = [{"set": [f"{n} a", f"{n} b", f"{n} c"]} for n in range(100)]
    held = hold_out(text_mixture(write_jsonl(sets)), share=0.05)
    task = held_out_task(held)
    for name, query in zip(task.queries.ids, task.queries.texts):
        assert query.endswith(" a") and len(task.qrels[name]) == 2
    assert {text.split()[0] for text in task.queries.texts}.isdisjoint(
        example.query.split()[0] for example in held.rest.examples(range(95), seed=0)
    )
    documents = [{"_id": f"d{n}", "title": "T", "text": f"text {n}"} for n in range(50)]
    queries = [{"_id": f"q{n}", "text": f"query {n}"} for n in range(25)]
    lines = [f"q{n // 2}\td{n}\t1" for n in range(50)]
    folder = beir_pairs(write_beir(documents, queries, lines, split="train"))
    held = hold_out(Mixture({"beir": folder}), share=0.2)
    task = held_out_task(held)
    assert len(task.queries.ids) == 5 and {len(each) for each in task.qrels.values()} == {2}
    assert task.documents.texts[0].startswith("T text ")
    generated = pairs()
    held = hold_out(Mixture({"quickstart": generated}), most=20)
    assert len(held.rest) == len(generated) - 20
    assert len(held_out_task(held).queries.ids) == 20


def test_one_query_is_held_out_of_few_with_a_warning(
    write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    held = hold_out(text_mixture(write_jsonl([["q", "p"], ["q", "r"], ["other", "s"]])))
    assert 1 <= sum(map(len, held.rows.values())) <= 2
    held_out_task(held)
    assert "of 3 examples are the dev set and are not trained on: 1 queries" in caplog.text
    assert "1 queries tells good models from bad ones only roughly: raise share and most" in (
        caplog.text
    )
    with pytest.raises(
        ValueError, match="have the same query, so none can be held out: give a dev set"
    ):
        hold_out(text_mixture(write_jsonl([["q", "p"], ["q", "r"]], "same.jsonl")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 0}, "share=0 of the examples is to be held out: must be above 0"),
        ({"share": 0.6}, "and at most 0.5"),
        ({"most": 0}, "most=0 examples are to be held out"),
    ],
)
def test_what_cannot_be_is_refused(mixture: Mixture, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hold_out(mixture, **settings)
    with pytest.raises(ValueError, match="documents=0"):
        held_out_task(hold_out(mixture), documents=0)


def test_a_rest_gives_every_other_example() -> None:
    generated = pairs()
    without = [0, 1, 5, len(generated) - 1]
    rest = Rest(generated, without)
    kept = np.setdiff1d(np.arange(len(generated)), without)
    assert len(rest) == len(kept)
    for index in (0, 1, 2, 3, 100, len(rest) - 1):
        assert rest.example(index, 7, 2) == generated.example(int(kept[index]), 7, 2)


def test_what_is_held_out_changes_no_setting_of_the_mixture(mixture: Mixture) -> None:
    settings = {"alpha": 0.3, "homogeneous": True, "forms": {"second": {"query_length": 8}}}
    held = hold_out(Mixture(mixture.sources, **settings))
    assert (held.rest.alpha, held.rest.homogeneous) == (0.3, True)
    assert held.rest.forms == {"second": TextForm(query_length=8)}
