"""Mining on generated collections: against plain computations, interrupted, read by training."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest

from hard_negatives import parts
from hard_negatives.mining import Mining
from hard_negatives.selection import Rule, choose, ordered, window
from sparton.datasets.sources import id_records, text_records
from tests.scripts.mining_problems import generate, mine, write

ROOT = Path(__file__).resolve().parents[2]
RETRIEVER = ["--teacher", "a/model", "--teacher-kind", "retriever"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def pairs(tmp_path) -> Path:
    return write(tmp_path / "pairs.jsonl", generate())


def bm25_scores(query: str, documents: list[str], k1: float = 0.9, b: float = 0.4) -> list[float]:
    """Lucene's formula, word for word."""
    bags = [Counter(document.split()) for document in documents]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = []
    for bag in bags:
        score = 0.0
        for term in query.split():
            df = sum(term in other for other in bags)
            idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
            saturation = k1 * (1 - b + b * bag.total() / mean)
            score += idf * bag[term] / (bag[term] + saturation)
        scores.append(score)
    return scores


def plain_ranking(query: str, positive: str, documents: list[str]) -> list[tuple[str, float]]:
    """Documents with a score, best first, without the positive."""
    scored = zip(documents, bm25_scores(query, documents))
    left = [(text, score) for text, score in scored if text != positive and score > 0]
    return sorted(left, key=lambda each: -each[1])


def test_ranks_in_the_window_are_those_of_bm25_computed_plainly(pairs, tmp_path):
    arguments = [pairs, "--negatives", 4, "--skip", 2, "--depth", 6]
    records = mine(*arguments, "--output", tmp_path / "out.jsonl")
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


@pytest.mark.parametrize("limit", [["--share", 0.7], ["--margin", 1.5]])
def test_negatives_stay_below_the_margin_to_the_positive(pairs, tmp_path, limit):
    def worst(*arguments: object) -> tuple[float, float]:
        shares, margins = [], []
        for record in mine(pairs, *arguments, "--depth", 40, "--negatives", 5):
            positive, *scores = bm25_scores(record["query"], [*record["pos"], *record["neg"]])
            by_text = dict(zip(documents, bm25_scores(record["query"], documents)))
            positive = by_text[record["pos"][0]]
            scores = [by_text[text] for text in record["neg"]]
            shares += [score / positive for score in scores]
            margins += [positive - score for score in scores]
        return max(shares), min(margins)

    documents = [example["positive"] for example in generate()]
    share, margin = worst(*limit, "--output", tmp_path / "limited.jsonl")
    free_share, free_margin = worst("--output", tmp_path / "free.jsonl")
    if limit[0] == "--share":
        assert share < 0.7 < free_share
    else:
        assert margin > 1.5 > free_margin


def test_a_positive_outside_of_the_collection_still_sets_the_margin(pairs, tmp_path):
    texts = [example["positive"] for example in generate()]
    collection = write(
        tmp_path / "texts.jsonl", [{"_id": str(n), "text": t} for n, t in enumerate(texts[20:])]
    )
    arguments = [pairs, "--collection", collection, "--share", 0.7, "--negatives", 2]
    records = mine(*arguments, "--output", tmp_path / "out.jsonl")
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
    texts = [{"_id": str(number), "text": text} for number, text in enumerate(collection)]
    records = mine(
        write(tmp_path / "pairs.jsonl", examples),
        "--collection", write(tmp_path / "collection.jsonl", texts),
        "--negatives", 3, "--output", tmp_path / "out.jsonl.gz",
    )  # fmt: skip
    assert [record["neg"] for record in records[:2]] == [["momak babug"]] * 2
    assert len(records[2]["neg"]) == 3  # for another query they are negatives
    assert collection[0] in records[2]["neg"]


def test_a_set_gives_its_first_text_as_query(tmp_path):
    members = ["momak", "momak dodok", "momak dodok gugug"]
    sets = [{"set": members}, {"set": ["nunuk", "nunuk momak"]}]
    records = mine(
        write(tmp_path / "sets.jsonl", sets), "--negatives", 1, "--output", tmp_path / "out.jsonl"
    )
    assert records[0] == {"query": "momak", "pos": members[1:], "neg": ["nunuk momak"]}


@pytest.mark.parametrize(("short", "sizes"), [("keep", [2, 0]), ("pad", [5]), ("drop", [])])
def test_examples_with_too_few_negatives(tmp_path, short, sizes, capsys):
    examples = [["momak", "momak dodok"], ["babak", "babak"]]
    texts = [{"_id": str(n), "text": f"momak {word}"} for n, word in enumerate(("gugug", "lulak"))]
    arguments = [
        write(tmp_path / "pairs.jsonl", examples),
        "--collection", write(tmp_path / "texts.jsonl", texts),
        "--negatives", 5, "--short", short, "--output", tmp_path / "out.jsonl",
    ]  # fmt: skip
    if not sizes:
        with pytest.raises(ValueError, match="no example has enough negatives"):
            mine(*arguments)
        return
    records = mine(*arguments)
    assert [len(record["neg"]) for record in records] == sizes
    counts = json.loads((tmp_path / "out.mined.json").read_text())["counts"]
    assert counts["short"] == 2
    assert counts["none"] == 1
    assert counts.get("dropped", 0) == 2 - len(sizes)
    if short == "pad":
        assert Counter(Counter(records[0]["neg"]).values()) == {3: 1, 2: 1}


def test_the_sample_is_fair_and_follows_the_seed(pairs, tmp_path):
    arguments = [pairs, "--sample", "--negatives", 3, "--depth", 10, "--output"]
    runs = [mine(*arguments, tmp_path / f"{n}.jsonl", "--seed", n // 2) for n in range(3)]
    assert runs[0] == runs[1] != runs[2]
    rule = Rule(3, 0, 10, True, 0, None, 0.5)
    taken: Counter[int] = Counter()
    for example in range(2000):
        order = ordered(rule, 10, example)
        # Rows 0 to 4 score too much; the others must be drawn alike.
        choice = choose(rule, [order], [0.5], lambda ps: np.array([float(r < 5) for _, r in ps]))
        taken.update(choice.rows[0])
    assert sorted(taken) == [5, 6, 7, 8, 9]
    assert all(abs(count - 1200) < 120 for count in taken.values())


def test_the_share_lies_below_a_positive_of_negative_score():
    rule = Rule(1, 0, 10, False, 0, None, 0.9)
    assert rule.limit([3.0, 2.0]) == pytest.approx(1.8, rel=1e-4)
    assert rule.limit([-2.0]) == pytest.approx(-2.2, rel=1e-4)
    assert Rule(1, 0, 10, False, 0, 0.5, None).limit([-2.0]) == pytest.approx(-2.5, rel=1e-4)
    assert Rule(1, 0, 10, False, 0, None, None).limit([1.0]) == math.inf


def test_barred_documents_take_no_rank():
    rule = Rule(2, 1, 3, False, 0, None, None)
    hashes = np.arange(10, 20, dtype=np.uint64)
    hashes[4] = hashes[3]
    rows, scores = np.array([5, 0, 3, 4, 1, 2, -1]), np.arange(7, dtype=np.float32)[::-1]
    barred = np.array([10], np.uint64)
    kept, values = window(rule, rows, scores, hashes, barred)
    assert kept.tolist() == [3]
    assert values.tolist() == [4.0]
    assert window(rule, rows, scores, hashes, barred, own_row=5)[0].tolist() == [4, 1]


def test_an_interrupted_run_goes_on_to_the_same_bytes(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART", 7)
    arguments = [pairs, "--sample", "--share", 0.9, "--negatives", 3]
    whole = tmp_path / "whole.jsonl"
    mine(*arguments, "--output", whole)
    output = tmp_path / "out.jsonl"
    real, starts = Mining.part, []

    def part(self, start, stop):
        if start == 14 and starts == [0, 7]:
            raise KeyboardInterrupt
        starts.append(start)
        return real(self, start, stop)

    monkeypatch.setattr(Mining, "part", part)
    with pytest.raises(KeyboardInterrupt):
        mine(*arguments, "--output", output)
    assert not output.exists()
    with pytest.raises(ValueError, match=r"seed=3 \(was 0\)"):
        mine(*arguments, "--seed", 3, "--output", output)
    starts.append(-1)
    mine(*arguments, "--device", "cpu", "--output", output)
    assert starts == [0, 7, -1, 14, 21, 28, 35]
    assert output.read_bytes() == whole.read_bytes()
    assert not parts.working_folder(output).exists()
    with pytest.raises(ValueError, match="exists: remove it"):
        mine(*arguments, "--output", output)


def test_changed_files_do_not_continue_an_unfinished_run(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART", 20)
    arguments = [pairs, "--negatives", 3, "--output", tmp_path / "out.jsonl"]
    real = Mining.part
    with monkeypatch.context() as patched:
        patched.setattr(
            Mining, "part", lambda self, *ends: real(self, *ends) if ends[0] == 0 else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            mine(*arguments)
    write(pairs, generate(39))
    with pytest.raises(ValueError, match="content of the files"):
        mine(*arguments)


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


def test_a_beir_folder_takes_no_limit(beir, tmp_path):
    for limit in (0, 3):
        with pytest.raises(ValueError, match="--columns and --limit do not apply to --beir"):
            mine("--beir", beir, "--limit", limit, "--output", tmp_path / "out.jsonl")


def test_a_beir_folder_gives_ids_that_training_reads(beir, tmp_path):
    output = tmp_path / "out.jsonl"
    arguments = ["--beir", beir, "--ids", "--negatives", 2]
    records = mine(*arguments, "--output", output)
    assert any(record["query_id"] in record["negative_ids"] for record in records)
    source = id_records(str(output), str(beir / "queries.jsonl"), str(beir / "corpus.jsonl"))
    texts = {each["_id"]: each["text"] for each in map(json.loads, (beir / "corpus.jsonl").open())}
    example = source.example(0, 5, 2)
    assert set(example.negatives) == {texts[name] for name in records[0]["negative_ids"]}
    others = mine(*arguments, "--exclude-self", "--output", tmp_path / "others.jsonl")
    assert not any(record["query_id"] in record["negative_ids"] for record in others)
    by_id = mine(
        output, "--queries", beir / "queries.jsonl", "--collection", beir / "corpus.jsonl",
        "--negatives", 2, "--output", tmp_path / "texts.jsonl",
    )  # fmt: skip
    assert [texts[name] for name in records[3]["negative_ids"]] == by_id[3]["neg"]
    assert len(text_records(str(tmp_path / "texts.jsonl"))) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--negatives", "9", "--depth", "10", "--skip", "2"], "raise --depth"),
        (["--share", "1.5"], "--share 1.5 must lie above 0"),
        (["--margin", "-1"], "--margin -1.0 must not be negative"),
        (["--ids"], "--ids needs examples with ids"),
        (["--queries", "q.tsv"], "need --collection too"),
        (["--collection", "none.tsv"], "none.tsv: no such file"),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--seed", "1"], "mining without --sample ignores --seed: leave"),
        (["--split", "dev"], "mining without --beir ignores --split: leave"),
        (["--beir", "folder"], "--beir FOLDER stands alone"),
        (["--miner", "no/such/folder/at/all"], "no such folder"),
        (["--max-document-terms", "0"], "--max-document-terms=0"),
        (["--k1", "-1"], "got k1=-1.0"),
        (["--limit", "0"], "--limit 0 must be at least 1"),
        (["--max-document-terms", "4"], "--miner bm25 ignores --max-document-terms: leave"),
        (["--query-length", "8", "--document-length", "9"], "--query-length, --document-length:"),
        (["--precision", "fp32"], "--miner bm25 ignores --precision"),
        (["--precision", "bf16", "--teacher", "some/cross-encoder"], "ignores --precision"),
        (["--teacher-kind", "retriever"], "mining without --teacher ignores --teacher-kind: leave"),
        (
            ["--teacher-activation", "--teacher-batch", "64", "--teacher-length", "9"],
            "ignores --teacher-activation, --teacher-batch, --teacher-length: leave that out",
        ),
        (
            [*RETRIEVER, "--teacher-batch", "8", "--teacher-activation"],
            "--teacher-kind retriever ignores --teacher-activation, --teacher-batch: leave that",
        ),
        (["--teacher", "a/model", "--teacher-batch", "0"], "--teacher-batch 0 must be at least 1"),
        ([*RETRIEVER, "--teacher-length", "9"], "retriever ignores --teacher-length: leave that"),
        (["--miner", "a/model", "--k1", "0.9", "--b", "1"], "--miner a/model ignores --k1, --b:"),
        (["--teacher", "/no/such/folder"], "--teacher /no/such/folder: no such folder"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(pairs, tmp_path, arguments, message):
    with pytest.raises((ValueError, OSError), match=message):
        mine(pairs, *arguments, "--output", tmp_path / "out.jsonl")
    assert not (tmp_path / "cache").exists(), "nothing is converted"
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        mine(pairs, "--output", tmp_path / "out.tsv")


def test_a_malformed_record_is_named_by_file_line_and_remedy(pairs, tmp_path):
    with pairs.open("a") as file:
        file.write('["a query alone"]\n')
    output = tmp_path / "out.jsonl"
    command = [sys.executable, ROOT / "scripts/mine_hard_negatives.py", pairs, "--output", output]
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "other"), "PATH": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 1
    assert f"{pairs}, line 41: a list of 1" in result.stderr
    assert "--on-error skip" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(mine(pairs, "--on-error", "skip", "--output", output)) == 40
