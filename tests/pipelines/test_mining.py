"""Mining on generated collections: against plain computations, interrupted, read by training."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparton.datasets.files import locate
from sparton.datasets.preparation import Reading
from sparton.datasets.sources import (
    beir_pairs,
    id_records,
    listed_records,
    mined_records,
    text_records,
)
from sparton.datasets.texts import TextList, TextTable, text_table
from sparton.pipelines.mining import (
    BM25Miner,
    CrossEncoder,
    Rule,
    TrainedModel,
    mine_hard_negatives,
    parts,
)
from sparton.pipelines.mining.examples import Barred
from sparton.pipelines.mining.miners import Setup
from sparton.pipelines.mining.mining import Mining
from sparton.pipelines.mining.pairs import Score, Teach
from sparton.pipelines.mining.selection import choose, ordered, windows
from tests.pipelines.mining_problems import bm25_scores, generate, mine, read_records, write


def table(folder: Path, texts: list[str]) -> TextTable:
    """A collection of these texts."""
    records = [{"_id": str(row), "text": text} for row, text in enumerate(texts)]
    files = locate(str(write(folder / "collection.jsonl", records)))
    return text_table("collection", files, Reading())


def plain_ranking(query: str, positive: str, documents: list[str]) -> list[tuple[str, float]]:
    """Documents with a score, best first, without the positive."""
    scored = zip(documents, bm25_scores(query, documents))
    left = [(text, score) for text, score in scored if text != positive and score > 0]
    return sorted(left, key=lambda each: -each[1])


def test_ranks_in_the_window_are_those_of_bm25_computed_plainly(pairs, tmp_path):
    records = mine(pairs, tmp_path / "out.jsonl", rule=Rule(4, skip=2, depth=6))
    documents = [example["positive"] for example in generate()]
    shifted = 0
    for example, record in zip(generate(), records, strict=True):
        assert (record["query"], record["pos"]) == (example["query"], [example["positive"]])
        ranking = plain_ranking(example["query"], example["positive"], documents)
        scores = dict(ranking)
        found = [scores[text] for text in record["neg"]]
        # By score: equal scores may come in either order.
        assert found == pytest.approx([score for _, score in ranking[2:6]], rel=1e-5)
        shifted += found != pytest.approx([score for _, score in ranking[3:7]], rel=1e-5)
    assert shifted > 30


@pytest.mark.parametrize("limit", [{"share": 0.7}, {"margin": 1.5}])
def test_negatives_stay_below_the_margin_to_the_positive(pairs, tmp_path, limit):
    def worst(output: str, **limit: float) -> tuple[float, float]:
        shares, margins = [], []
        for record in mine(pairs, tmp_path / output, rule=Rule(5, depth=40, **limit)):
            positive, *scores = bm25_scores(record["query"], [*record["pos"], *record["neg"]])
            by_text = dict(zip(documents, bm25_scores(record["query"], documents)))
            positive = by_text[record["pos"][0]]
            scores = [by_text[text] for text in record["neg"]]
            shares += [score / positive for score in scores]
            margins += [positive - score for score in scores]
        return max(shares), min(margins)

    documents = [example["positive"] for example in generate()]
    share, margin = worst("limited.jsonl", **limit)
    free_share, free_margin = worst("free.jsonl")
    if "share" in limit:
        assert share < 0.7 < free_share
    else:
        assert margin > 1.5 > free_margin


def test_a_positive_outside_of_the_collection_still_sets_the_margin(pairs, tmp_path):
    texts = [example["positive"] for example in generate()]
    settings = {"collection": table(tmp_path, texts[20:]), "rule": Rule(2, share=0.7)}
    records = mine(pairs, tmp_path / "out.jsonl", **settings)
    for record in records:
        scores = dict(zip(texts, bm25_scores(record["query"], texts)))
        assert set(record["neg"]) <= set(texts[20:])
        assert all(scores[text] < 0.7 * scores[record["pos"][0]] for text in record["neg"])


def test_no_positive_of_an_equal_query_is_a_negative_in_any_writing(tmp_path):
    examples = [
        ["momak dodok", "momak dodok gugug"],
        ["Momak  DODOK", "momak dodok lulak"],
        ["momak nunuk", "momak dodok nunuk"],
    ]
    collection = ["MOMAK dodok\tgugug", "momak  dodok Lulak ", "momak dodok", "momak babug", " "]
    pairs, texts = write(tmp_path / "pairs.jsonl", examples), table(tmp_path, collection)
    records = mine(pairs, tmp_path / "out.jsonl.gz", collection=texts, rule=Rule(3))
    assert [record["neg"] for record in records[:2]] == [["momak babug"]] * 2
    assert len(records[2]["neg"]) == 3  # for another query they are negatives
    assert collection[0] in records[2]["neg"]


def test_a_set_gives_its_first_text_as_query(tmp_path):
    members = ["momak", "momak dodok", "momak dodok gugug"]
    sets = [{"set": members}, {"set": ["nunuk", "nunuk momak"]}]
    records = mine(write(tmp_path / "sets.jsonl", sets), tmp_path / "out.jsonl", rule=Rule(1))
    assert records[0] == {"query": "momak", "pos": members[1:], "neg": ["nunuk momak"]}


@pytest.mark.parametrize(("short", "sizes"), [("keep", [2, 0]), ("pad", [5]), ("drop", [])])
def test_examples_with_too_few_negatives(tmp_path, short, sizes):
    pairs = write(tmp_path / "pairs.jsonl", [["momak", "momak dodok"], ["babak", "babak"]])
    texts = table(tmp_path, ["momak gugug", "momak lulak"])
    settings = {"collection": texts, "rule": Rule(5), "short": short}
    if not sizes:
        with pytest.raises(ValueError, match="no example has enough negatives"):
            mine(pairs, tmp_path / "out.jsonl", **settings)
        assert not parts.working_folder(tmp_path / "out.jsonl").exists()
        return
    records = mine(pairs, tmp_path / "out.jsonl", **settings)
    assert [len(record["neg"]) for record in records] == sizes
    counts = json.loads((tmp_path / "out.mined.json").read_text())["counts"]
    assert counts["short"] == 2
    assert counts["none"] == 1
    assert counts.get("dropped", 0) == 2 - len(sizes)
    if short == "pad":
        assert Counter(Counter(records[0]["neg"]).values()) == {3: 1, 2: 1}


def test_the_sample_is_fair_and_follows_the_seed(pairs, tmp_path):
    rules = [Rule(3, depth=10, sample=True, seed=n // 2) for n in range(3)]
    runs = [mine(pairs, tmp_path / f"{n}.jsonl", rule=rule) for n, rule in enumerate(rules)]
    assert runs[0] == runs[1] != runs[2]
    rule = Rule(3, depth=10, sample=True, share=0.5)
    taken: Counter[int] = Counter()
    for example in range(2000):
        order = ordered(rule, 10, example)
        # Rows 0 to 4 score too much; the others must be drawn alike.
        scores = (order < 5).astype(np.float32)
        choice = choose(rule, np.array([10]), [0.5], scores.__getitem__)
        taken.update(order[choice.places[0]].tolist())
    assert sorted(taken) == [5, 6, 7, 8, 9]
    assert all(abs(count - 1200) < 120 for count in taken.values())


def test_the_share_lies_below_a_positive_of_negative_score():
    rule = Rule(1, share=0.9)
    assert rule.limit([3.0, 2.0]) == pytest.approx(1.8, rel=1e-4)
    assert rule.limit([-2.0]) == pytest.approx(-2.2, rel=1e-4)
    assert Rule(1, margin=0.5).limit([-2.0]) == pytest.approx(-2.5, rel=1e-4)
    assert Rule(1).limit([1.0]) == math.inf


def test_barred_documents_take_no_rank():
    rule = Rule(2, skip=1, depth=3)
    hashes = np.arange(10, 20, dtype=np.uint64)
    hashes[4] = hashes[3]
    rows = np.array([[5, 0, 3, 4, 1, 2, -1], [5, 0, 3, 4, 1, 2, 6]])
    scores = np.arange(14, dtype=np.float32)[::-1].reshape(2, 7)
    # The second query may have what the first may not, and the other way round.
    barred = Barred(np.array([0, 1]), np.array([10, 15], np.uint64))
    found = windows(rule, rows, scores, hashes, barred, np.array([-1, -1]))
    assert found.sizes.tolist() == [1, 1]
    assert found.rows.tolist() == [3, 3]
    assert found.scores.tolist() == [11, 4]
    found = windows(rule, rows, scores, hashes, barred, np.array([5, 0]))
    assert found.sizes.tolist() == [2, 2]
    assert found.rows.tolist() == [4, 1, 4, 1]


def test_an_interrupted_run_goes_on_to_the_same_bytes(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART", 7)
    rule = Rule(3, sample=True, share=0.9)
    whole = tmp_path / "whole.jsonl"
    mine(pairs, whole, rule=rule)
    output = tmp_path / "out.jsonl"
    real, starts = Mining.part, []

    def part(self, start, stop):
        if start == 14 and starts == [0, 7]:
            raise KeyboardInterrupt
        starts.append(start)
        return real(self, start, stop)

    monkeypatch.setattr(Mining, "part", part)
    with pytest.raises(KeyboardInterrupt):
        mine(pairs, output, rule=rule)
    assert not output.exists()
    with pytest.raises(ValueError, match=r"seed=3 \(was 0\)"):
        mine(pairs, output, rule=replace(rule, seed=3))
    with pytest.raises(ValueError, match=r"k1=1.2 \(was 0.9\)"):
        mine(pairs, output, rule=rule, miners=[BM25Miner(k1=1.2)])
    starts.append(-1)
    mine(pairs, output, rule=rule, device="cpu")
    assert starts == [0, 7, -1, 14, 21, 28, 35]
    assert output.read_bytes() == whole.read_bytes()
    assert not parts.working_folder(output).exists()
    with pytest.raises(ValueError, match="exists: remove it"):
        mine(pairs, output, rule=rule)


def test_a_run_that_leaves_nothing_to_go_on_from_leaves_no_folder(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART", 20)
    folder, real = parts.working_folder(tmp_path / "out.jsonl"), Mining.part
    for whole in (0, 20):  # examples whose parts are done when it fails

        def part(self, *ends, whole=whole):
            return real(self, *ends) if ends[0] < whole else 1 / 0

        monkeypatch.setattr(Mining, "part", part)
        with pytest.raises(ZeroDivisionError):
            mine(pairs, tmp_path / "out.jsonl", rule=Rule(3))
        assert folder.exists() == bool(whole)


def test_changed_files_do_not_continue_an_unfinished_run(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART", 20)
    settings = {"output": tmp_path / "out.jsonl", "rule": Rule(3)}
    real = Mining.part
    with monkeypatch.context() as patched:
        patched.setattr(
            Mining, "part", lambda self, *ends: real(self, *ends) if ends[0] == 0 else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            mine(pairs, **settings)
    write(pairs, generate(39))
    with pytest.raises(ValueError, match="content of the files"):
        mine(pairs, **settings)


@pytest.fixture
def beir(tmp_path) -> Path:
    """Queries carry the ids of documents, as in ArguAna; document n answers query n + 1."""
    examples = generate(12)
    corpus = [{"_id": f"d{n}", "text": each["positive"]} for n, each in enumerate(examples)]
    queries = [{"_id": f"d{n}", "text": each["query"]} for n, each in enumerate(examples)]
    write(tmp_path / "beir/corpus.jsonl", corpus)
    write(tmp_path / "beir/queries.jsonl", queries)
    (tmp_path / "beir/qrels").mkdir()
    lines = "".join(f"d{n}\td{(n + 1) % 12}\t1\n" for n in range(12))
    (tmp_path / "beir/qrels/train.tsv").write_text(lines)
    return tmp_path / "beir"


def test_a_beir_folder_gives_ids_that_training_reads(beir, tmp_path):
    output = tmp_path / "out.jsonl"
    settings = {"ids": True, "rule": Rule(2), "progress": False}
    counts = mine_hard_negatives(beir_pairs(str(beir)), output, **settings)
    records = read_records(output)
    assert counts["written"] == len(records) == 12
    assert any(record["query_id"] in record["negative_ids"] for record in records)
    source = id_records(str(output), str(beir / "queries.jsonl"), str(beir / "corpus.jsonl"))
    texts = {each["_id"]: each["text"] for each in map(json.loads, (beir / "corpus.jsonl").open())}
    example = source.example(0, 5, 2)
    assert set(example.negatives) == {texts[name] for name in records[0]["negative_ids"]}
    others = tmp_path / "others.jsonl"
    mine_hard_negatives(beir_pairs(str(beir)), others, exclude_self=True, **settings)
    assert not any(each["query_id"] in each["negative_ids"] for each in read_records(others))
    mine_hard_negatives(source, tmp_path / "texts.jsonl", rule=Rule(2))
    by_id = read_records(tmp_path / "texts.jsonl")
    assert [texts[name] for name in records[3]["negative_ids"]] == by_id[3]["neg"]
    assert len(text_records(str(tmp_path / "texts.jsonl"))) == 12


def test_an_example_without_any_keeps_its_former_negatives(tmp_path):
    examples = listed_records(
        [["babak", "babak babok", "gugak", "gugok"], ["babok", "babak gugak"]]
    )
    collection = TextList(["babak babok"])
    found = {}
    for short in ("former", "keep"):
        output = tmp_path / f"{short}.jsonl"
        settings = {"collection": collection, "short": short, "progress": False, "rule": Rule(1)}
        mine_hard_negatives(examples, output, **settings)
        found[short] = [record["neg"] for record in read_records(output)]
    assert found == {
        "former": [["gugak", "gugok"], ["babak babok"]],
        "keep": [[], ["babak babok"]],
    }
    with pytest.raises(ValueError, match="short='former' keeps negatives that no teacher has sco"):
        mine_hard_negatives(
            examples, tmp_path / "out.jsonl", short="former", teachers=[BM25Miner()]
        )


def test_mined_ids_are_the_same_examples_with_other_negatives(beir, tmp_path):
    source = beir_pairs(str(beir))
    output = tmp_path / "mined.jsonl"
    settings = {"ids": True, "short": "former", "rule": Rule(2), "progress": False}
    mine_hard_negatives(source, output, **settings)
    mined = mined_records(source, output, cache_dir=str(tmp_path / "own"))
    texts = dict(zip(*source.texts[1].take(range(12))))
    assert len(mined) == len(source) and mined.name == source.name
    for row, record in enumerate(read_records(output)):
        assert mined.judged(row) == source.judged(row)
        expected = {texts[each] for each in record["negative_ids"]}
        assert {*mined.example(row, 5, 2).negatives} == expected
    assert (tmp_path / "own/sparton").is_dir()


def test_examples_and_collections_in_memory_give_what_those_in_files_give(pairs, tmp_path):
    examples = [(each["query"], each["positive"]) for each in generate()]
    texts = [positive for _, positive in examples[20:]]
    settings = {"rule": Rule(2, share=0.9)}
    listed = listed_records(examples)
    mine_hard_negatives(listed, tmp_path / "memory.jsonl", collection=TextList(texts), **settings)
    records = mine(pairs, tmp_path / "files.jsonl", collection=table(tmp_path, texts), **settings)
    assert read_records(tmp_path / "memory.jsonl") == records
    with pytest.raises(ValueError, match="examples, line 2: a list of 1 where"):
        listed_records([("one", "two"), ("alone",)])
    with pytest.raises(ValueError, match="collection has no texts to mine in"):
        mine_hard_negatives(listed, tmp_path / "none.jsonl", collection=TextList([]), **settings)
    scored = {"query": "one", "pos": ["two"], "scores": [np.float32(1)]}
    with pytest.raises(
        ValueError, match=r"examples, line 1: 'scores' holds .*1\.0.* is not a numb"
    ):
        listed_records([scored])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"negatives": 0}, "negatives=0 must be at least 1"),
        ({"negatives": 9, "depth": 10, "skip": 2}, "skip=2 and depth=10 leave 8 .* raise depth"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"share": 1.5}, r"share=1\.5 must lie above 0"),
        ({"margin": -1.0}, r"margin=-1\.0 must not be negative"),
    ],
)
def test_rules_that_could_choose_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Rule(**settings)


def test_miners_and_teachers_that_cannot_be_are_refused():
    for build, message in (
        (lambda: BM25Miner(k1=-1.0), r"got k1=-1\.0"),
        (lambda: TrainedModel("no/such/folder/at/all"), "no such folder"),
        (lambda: TrainedModel("a/model", max_document_terms=0), "max_document_terms=0 must be"),
        (lambda: CrossEncoder("a/model", batch=0), "batch=0 must be at least 1"),
        (lambda: CrossEncoder("/no/such/folder"), "/no/such/folder: no such folder"),
        (lambda: TrainedModel("/no/such/folder"), "/no/such/folder: no such folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            build()


class WrongTeacher(BM25Miner):
    """One whose scores of the second query's documents are not finite."""

    def load(self, setup: Setup, name: str) -> Teach:
        def teach(texts: Sequence[str]) -> Score:
            return lambda pairs: np.where(pairs.queries == 1, np.inf, 1.0).astype(np.float32)

        return teach


def test_a_score_that_is_not_finite_names_its_teacher_and_its_query(pairs, tmp_path):
    query = re.escape(read_records(pairs)[1]["query"][:40])
    with pytest.raises(ValueError, match=f"teacher 2 gave a document of the query '{query}.* fp32"):
        mine(pairs, tmp_path / "out.jsonl", teachers=[BM25Miner(), WrongTeacher()])


def test_outputs_that_training_would_not_read_are_refused(pairs, tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        mine(pairs, tmp_path / "out.tsv")
    with pytest.raises(ValueError, match="short='cut' must be keep, pad, drop"):
        mine(pairs, tmp_path / "out.jsonl", short="cut")
    for option in ("ids", "exclude_self"):
        with pytest.raises(ValueError, match=f"{option} needs examples with ids"):
            mine(pairs, tmp_path / "out.jsonl", **{option: True})
    assert not (tmp_path / "out.jsonl.parts").exists()
