"""Files to training examples: every format, every fault with its place, and bounded memory."""

import logging
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparton.datasets import store
from sparton.datasets.lookup import Records
from sparton.datasets.preparation import random_part
from sparton.datasets.sources import beir_pairs, id_records, text_records
from sparton.types import Example

DATA = Path(os.environ.get("SPARTON_DATA", Path(__file__).resolve().parents[2] / "../shared/data"))
QUERIES = ["1\tquery one", "2\tquery two"]
COLLECTION = ["10\tdoc ten", "11\tdoc eleven", "12\tdoc twelve", "13\t"]

Write = Callable[..., str]


def all_examples(source: Records, num_negatives: int = 0, draw: int = 0) -> list[Example]:
    return [source.example(index, draw, num_negatives) for index in range(len(source))]


@pytest.fixture
def write_ids(write_lines: Write) -> Callable[..., Records]:
    """``write_ids(lines)`` prepares id records over QUERIES and COLLECTION."""

    def write(lines: list[str], **settings: Any) -> Records:
        return id_records(
            write_lines(lines, "triples.tsv"),
            write_lines(QUERIES, "queries.tsv"),
            write_lines(COLLECTION, "collection.tsv"),
            **settings,
        )

    return write


def test_all_shapes_from_one_gzipped_file(write_jsonl: Write) -> None:
    records = [
        ["q1", "p1"],
        ["q2", "p2", "n2"],
        {"set": ["a", "b"]},
        {"query": "q4", "pos": ["p4"]},
        {"query": "q5", "pos": ["p5"], "neg": ["n5"]},
    ]
    source = text_records(write_jsonl(records, "data.jsonl.gz"))
    examples = all_examples(source)
    assert [examples[index] for index in (0, 1, 3, 4)] == [
        Example(f"q{number}", f"p{number}") for number in (1, 2, 4, 5)
    ]
    pairs = {source.example(2, draw, 0)[:2] for draw in range(50)}
    assert pairs == {("a", "b"), ("b", "a")}
    assert source.example(4, 0, 1).negatives == ("n5",)


def test_tsv_without_and_with_a_header(write_lines: Write) -> None:
    plain = text_records(write_lines(["q\tp\tn\tm"], "plain.tsv"))
    assert set(plain.example(0, 0, 2).negatives) == {"n", "m"}
    named = text_records(write_lines(["negative\tquery\tpositive", "n\tq\tp"], "named.tsv"))
    assert all_examples(named, 1) == [Example("q", "p", ("n",))]
    names = ["id", "neg", "query", "pos"]
    numbered = text_records(write_lines(["7\tn\tq\tp"], "x.tsv"), columns=names)
    assert all_examples(numbered, 1) == [Example("q", "p", ("n",))]
    with pytest.raises(ValueError, match=r"y\.tsv, line 2: 2 tab-separated fields expected, not 1"):
        text_records(write_lines(["q\tp", "q"], "y.tsv"), columns=["query", "positive"])


def test_tsv_with_a_header_of_other_names(
    write_lines: Write, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    lines = ["question\tid\tpositive", "q\t7\tp"]
    named = text_records(write_lines(lines, "named.tsv"), columns={"question": "query"})
    assert all_examples(named) == [Example("q", "p")]
    assert "no header" not in caplog.text
    with pytest.raises(ValueError, match=r"named\.tsv, line 1: none of \['anchor text'\].*header"):
        text_records(write_lines(lines, "named.tsv"), columns={"anchor text": "query"})
    # Names that nobody knows may be texts: that they are taken for such is said.
    text_records(write_lines(["frage\tantwort", "q\tp"], "unknown.tsv"))
    assert "unknown.tsv: no header, its first record is: frage | antwort" in caplog.text


def test_parquet_with_other_names(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = {"question": ["q", "r"], "pos": ["p", "s"], "neg": [["n"], []]}
    pq.write_table(pa.table(table), path)
    source = text_records(str(path), columns={"question": "query"})
    assert all_examples(source) == [Example("q", "p"), Example("r", "s")]
    assert source.without_negatives == 1
    assert source.table.facts["first_without_negatives"] == f"{path}, row 2"


def test_draws_choose_every_positive_and_negatives_without_replacement(write_jsonl: Write) -> None:
    record = {"query": "q", "pos": ["p", "r"], "neg": ["a", "b", "c", "d"]}
    source = text_records(write_jsonl([record]))
    drawn = [source.example(0, draw, 2) for draw in range(2000)]
    assert all(len(set(example.negatives)) == 2 for example in drawn)
    # Five standard deviations of a fair draw; each pair of negatives has chance 1 / 12.
    for counts, chance in (
        (Counter(example.positive for example in drawn), 1 / 2),
        (Counter(example.negatives for example in drawn), 1 / 12),
    ):
        assert len(counts) == round(1 / chance)
        slack = 5 * (2000 * chance * (1 - chance)) ** 0.5
        assert all(abs(count - 2000 * chance) < slack for count in counts.values())


def test_too_few_negatives_are_all_used_before_any_again(write_jsonl: Write) -> None:
    source = text_records(write_jsonl([["q", "p", "a", "b"]]))
    for draw in range(20):
        assert sorted(Counter(source.example(0, draw, 5).negatives).values()) == [2, 3]


def test_teacher_scores_follow_their_documents(write_jsonl: Write) -> None:
    record = {"query": "q", "pos": ["9", "8"], "pos_scores": [9, 8], "neg": ["1", "2", "3"]}
    source = text_records(write_jsonl([{**record, "neg_scores": [1, 2, 3]}]))
    for draw in range(20):
        example = source.example(0, draw, 2)
        documents = (example.positive, *example.negatives)
        assert example.teacher_scores == tuple(float(text) for text in documents)


def test_scores_of_several_teachers_from_lists_and_parquet(
    write_jsonl: Write, tmp_path: Path
) -> None:
    record = {"query": "q", "pos": ["p"], "neg": ["n", "m"]}
    record |= {"scores": [[30, 0.5], [10, 1], [20, 0]]}
    pq.write_table(
        pa.table({name: [cell] for name, cell in record.items()}), tmp_path / "x.parquet"
    )
    expected = {"p": 0.75, "n": 0.5, "m": 0.25}
    for path in (write_jsonl([record]), str(tmp_path / "x.parquet")):
        example = text_records(path).example(0, 0, 2)
        documents = (example.positive, *example.negatives)
        assert example.teacher_scores == tuple(expected[text] for text in documents)
    alone = record | {"scores": [3, 2, 1]}
    with pytest.raises(ValueError, match="line 2: scores of 1 teachers, but the records before h"):
        text_records(write_jsonl([record, alone], "mixed.jsonl"))
    mixed = text_records(write_jsonl([alone, record], "other.jsonl"), on_error="skip")
    assert len(mixed) == 1 and mixed.example(0, 0, 0).teacher_scores == (3.0,)


def test_ids_are_resolved(write_ids: Callable[..., Records]) -> None:
    source = write_ids(["2\t11\t10", "1\t12\t11"])
    assert all_examples(source, 1) == [
        Example("query two", "doc eleven", ("doc ten",)),
        Example("query one", "doc twelve", ("doc eleven",)),
    ]
    assert source.without_negatives == 0


def test_margin_mse_columns(write_ids: Callable[..., Records]) -> None:
    columns = ["pos_score", "neg_score", "qid", "pid", "nid"]
    source = write_ids(["9.5\t-1\t2\t11\t10"], columns=columns)
    expected = Example("query two", "doc eleven", ("doc ten",), (9.5, -1.0))
    assert all_examples(source, 1) == [expected]


def test_scored_documents_from_parquet(tmp_path: Path) -> None:
    tables = {
        "train": {"query_id": [7], "document_ids": [[3, 5]], "scores": [[0.25, 0.75]]},
        "queries": {"query_id": [7], "text": ["seven"]},
        "documents": {"document_id": [5, 3], "text": ["five", "three"]},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    names = [f"{name}.parquet" for name in tables]
    source = id_records(*names, root=str(tmp_path))
    assert all_examples(source, 1) == [Example("seven", "five", ("three",), (0.75, 0.25))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("9\t10\t11", "line 2: the query id '9' is not in the file of texts"),
        ("1\t10\t99", "line 2: the document id '99' is not in the file of texts"),
        ("1\t13\t10", "line 2: the text of document '13' is empty"),
        ("1", "line 2: a list of 1 where"),
    ],
)
def test_faults_of_ids_stop_or_are_counted(
    write_ids: Callable[..., Records], caplog: pytest.LogCaptureFixture, line: str, message: str
) -> None:
    lines = ["1\t10\t11", line, "2\t12\t10"]
    with pytest.raises(ValueError, match=rf"triples\.tsv, {message}.*on_error='skip'"):
        write_ids(lines)
    with caplog.at_level(logging.WARNING):
        source = write_ids(lines, on_error="skip")
    assert [example.positive for example in all_examples(source)] == ["doc ten", "doc twelve"]
    assert "skipped 1 malformed records of 3" in caplog.text and f"triples.tsv, {message}" in (
        caplog.text
    )


def test_records_of_unknown_ids_decide_nothing_about_the_others(
    write_ids: Callable[..., Records], write_lines: Write, write_jsonl: Write
) -> None:
    with pytest.raises(ValueError, match=r"no usable record in .*; .*the query id '9' is not in"):
        write_ids(["9\t10", "8\t10"], on_error="skip")
    known = {"query_id": "1", "document_ids": ["10", "11"], "scores": [2.0, 1.0]}
    unknown = {"query_id": "9", "positive_id": "10"}
    source = id_records(
        write_jsonl([unknown, known], "scored.jsonl"),
        write_lines(QUERIES, "queries.tsv"),
        write_lines(COLLECTION, "collection.tsv"),
        on_error="skip",
    )
    assert all_examples(source, 1) == [Example("query one", "doc ten", ("doc eleven",), (2.0, 1.0))]
    assert source.table.facts["first_without_negatives"] is None


def test_ids_that_occur_twice(write_lines: Write) -> None:
    contents = {"t.tsv": ["1\t1"], "q.tsv": ["1\tx"], "c.tsv": ["1\ta", "2\tb", "1\tc"]}
    files = [write_lines(lines, name) for name, lines in contents.items()]
    with pytest.raises(ValueError, match=r"c\.tsv, line 3: the id '1' .* first at .*, line 1$"):
        id_records(*files)


FAULTY_LINES = {
    "bad JSON": (b'["q", "p"', r"not JSON .* Expecting ',' delimiter at column 10"),
    "not UTF-8": (b'["caf\xe9", "p"]', "not UTF-8 text: byte 0xe9 at column 6"),
    "empty query": (b'["", "p"]', "'query' holds an empty text"),
    "wrong keys": (b'{"a": 1}', r"the keys \['a'\] lack a query"),
    "other scores": (b'{"query": "q", "pos": "p", "scores": [1]}', "teacher scores, but the rec"),
}


@pytest.mark.parametrize("fault", FAULTY_LINES)
def test_faults_stop_or_are_counted(
    write_lines: Write, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    line, message = FAULTY_LINES[fault]
    path = write_lines([b'["q1", "p1"]', line, b'["q2", "p2"]'], "data.jsonl")
    with pytest.raises(ValueError, match=rf"{path}, line 2: {message}.*on_error='skip'"):
        text_records(path)
    for _ in range(2):  # The second time, the counts come from the cache.
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            source = text_records(path, on_error="skip", name="mine")
        assert all_examples(source) == [Example("q1", "p1"), Example("q2", "p2")]
        assert f"mine: skipped 1 malformed records of 3; the first: {path}, line 2" in caplog.text


def test_each_policy_of_negatives(write_jsonl: Write) -> None:
    path = write_jsonl([["q", "p", "n"], ["q", "p"], {"set": ["a", "b"]}])
    sampled = text_records(path)
    assert [len(each.negatives) for each in all_examples(sampled, 2)] == [2, 0, 0]
    assert sampled.without_negatives == 2
    unused = text_records(path, negatives="none")
    assert [each.negatives for each in all_examples(unused, 2)] == [()] * 3
    assert unused.without_negatives == 3
    with pytest.raises(ValueError, match="line 2: no negatives"):
        text_records(path, negatives="required")
    required = text_records(path, negatives="required", on_error="skip")
    assert [each.negatives for each in all_examples(required, 2)] == [("n", "n")]
    assert required.without_negatives == 0
    with pytest.raises(ValueError, match="negatives='some' must be required, sample or none"):
        text_records(path, negatives="some")  # type: ignore[arg-type]


def test_negatives_that_are_positives_are_left_out_and_counted(
    write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl([["q", "p", "p"], ["q", "p", "n", "p"]])
    source = text_records(path)
    assert source.without_negatives == 1
    assert [each.negatives for each in all_examples(source, 2)] == [(), ("n", "n")]
    assert "left out 2 negatives that are positives of their own records" in caplog.text
    with pytest.raises(ValueError, match="line 1: no negatives"):
        text_records(path, negatives="required")


def test_scores_are_those_of_the_documents_that_a_policy_leaves(write_jsonl: Write) -> None:
    record = {"query": "q", "pos": ["p"], "pos_scores": [9], "neg": ["1", "2"]}
    path = write_jsonl([{**record, "neg_scores": [1, 2]}])
    assert text_records(path, negatives="none").example(0, 0, 2).teacher_scores == (9.0,)
    for draw in range(9):
        example = text_records(path).example(0, draw, 1)
        assert example.teacher_scores == (9.0, float(example.negatives[0]))


def test_records_that_are_left_out_do_not_count_as_without_negatives(
    write_ids: Callable[..., Records],
) -> None:
    lines = ["1\t10\t11", "1\t99", "2\t12"]
    source = write_ids(lines, on_error="skip")
    assert len(source) == 2 and source.without_negatives == 1


def test_nothing_usable_and_wrong_settings(write_lines: Write) -> None:
    path = write_lines([b"[]"], "data.jsonl")
    with pytest.raises(
        ValueError, match=rf"mine: no usable record in {path}; {path}, line 1: a list of 0"
    ):
        text_records(path, on_error="skip", name="mine")
    empty = [write_lines([], f"empty-{number}.jsonl") for number in range(3)]
    with pytest.raises(ValueError, match=rf"mine: no usable record in {empty[0]} and 2 more$"):
        text_records(empty, name="mine")
    with pytest.raises(ValueError, match="on_error='ignore' must be stop or skip"):
        text_records(path, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="format='xlsx' must be"):
        text_records(path, format="xlsx")
    with pytest.raises(ValueError, match="limit=0 must be"):
        text_records(path, limit=0)


def test_limit_takes_a_random_part_of_all_files(write_jsonl: Write, tmp_path: Path) -> None:
    names = [f"{file}{number:02}" for file in "ab" for number in range(50)]
    write_jsonl([[name, "p"] for name in names[:50]], "in/a.jsonl")
    write_jsonl([[name, "p"] for name in names[50:]], "in/b.jsonl.gz")

    def taken(limit: int, seed: int = 0) -> list[str]:
        root = str(tmp_path / "in")
        source = text_records("*.jsonl*", root=root, limit=limit, limit_seed=seed)
        return [example.query for example in all_examples(source)]

    first = taken(40)
    assert len(first) == 40 and first == sorted(first), "in the order of the files"
    assert set(first) <= set(names)
    assert 8 < sum(name < "b" for name in first) < 32, "5 standard deviations around 20"
    assert first != names[:40]
    other = taken(40, seed=1)
    assert len(other) == 40 and other != first
    assert taken(100) == taken(1000) == names
    assert [*random_part(100, 40, 0)] == [name in first for name in names]


def test_every_record_is_in_a_random_part_as_often_as_another() -> None:
    size, seeds = 70_000, 60  # of two stretches
    times = np.array([[*random_part(size, size // 4, seed)] for seed in range(seeds)])
    assert (times.sum(1) == size // 4).all()
    counts = times.sum(0)
    assert abs(counts.var() / (seeds / 4 * 3 / 4) - 1) < 0.05
    halves = counts[: size // 2].mean(), counts[size // 2 :].mean()
    assert abs(halves[0] - halves[1]) < 5 * (seeds * 3 / 16 * 4 / size) ** 0.5


def test_what_is_not_in_the_random_part_is_not_parsed(
    write_lines: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 20 lines, those outside of the part are not JSON: they are counted, and no fault."""
    part = [*random_part(20, 5, 0)]
    lines = [f'["q{row}", "p"]' if taken else "broken" for row, taken in enumerate(part)]
    path = write_lines(lines, "data.jsonl")
    assert len(text_records(path, limit=5)) == 5
    with pytest.raises(ValueError, match=r"data\.jsonl, line \d+: not JSON"):
        text_records(path, limit=6)


@pytest.mark.parametrize("ending", ["csv", "tsv", "json", "parquet", "arrow"])
def test_headers_and_arrays_are_counted_as_they_are_read(tmp_path: Path, ending: str) -> None:
    rows = [{"question": f"what is {row}?", "passage": "it is this or that"} for row in range(30)]
    table, path = pd.DataFrame(rows), tmp_path / f"data.{ending}"
    if ending == "parquet":
        table.to_parquet(path)
    elif ending == "arrow":
        table.to_feather(path, compression="uncompressed")
    elif ending == "json":
        table.to_json(path, orient="records")
    else:
        table.to_csv(path, sep="\t" if ending == "tsv" else ",", index=False)
    source = text_records(str(path), limit=7)
    expected = [row["question"] for row, taken in zip(rows, random_part(30, 7, 0)) if taken]
    assert [example.query for example in all_examples(source)] == expected


def test_a_header_that_is_not_found_is_said_once(
    write_lines: Write, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    text_records(write_lines(["frage\tantwort", "q\tp"], "unknown.tsv"), limit=1)
    assert caplog.text.count("no header") == 1


def test_truncated_gzip_stops_even_when_skipping_and_leaves_no_table(
    write_jsonl: Write, own_cache: Path
) -> None:
    path = Path(write_jsonl([["q", f"p{number}"] for number in range(5000)], "data.jsonl.gz"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"data\.jsonl\.gz: the gzip data is damaged or cut short"):
        text_records(str(path), on_error="skip")
    assert not [each for each in (own_cache / "sparton").iterdir() if each.is_dir()]
    path.write_bytes(whole)
    assert len(text_records(str(path))) == 5000


def test_prepared_once_and_again_when_the_file_changes(
    write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[str] = []
    build = store._build_whole
    monkeypatch.setattr(
        store, "_build_whole", lambda name, *rest: (builds.append(name), build(name, *rest))
    )
    path = write_jsonl([["q", "p"]])
    for _ in range(2):
        text_records(path, name="mine")
    assert builds == ["mine"]
    text_records(path, name="mine", limit=1)
    write_jsonl([["q", "p"], ["q", "r"]])
    assert len(text_records(path, name="mine")) == 2
    assert builds == ["mine"] * 3


def test_sources_can_be_sent_to_another_process(write_jsonl: Write) -> None:
    source = text_records(write_jsonl([["q", "p" * 1000]] * 2000))
    packed = pickle.dumps(source)
    assert len(packed) < 10_000
    assert pickle.loads(packed).example(7, 0, 0) == source.example(7, 0, 0)


def test_beir_pairs(write_beir: Write) -> None:
    documents = [{"_id": name, "title": "T", "text": name} for name in ("a", "b", "c")]
    queries = [{"_id": name, "text": f"query {name}"} for name in ("x", "y")]
    folder = write_beir(documents, queries, ["x\ta\t1", "x\tb\t0", "y\tc\t2"], split="train")
    source = beir_pairs(folder)
    assert all_examples(source) == [Example("query x", "T a"), Example("query y", "T c")]
    assert source.without_negatives == len(source)
    folder = write_beir(documents, queries, ["x\ta\t1", "z\tc\t2"], split="train")
    with pytest.raises(ValueError, match=r"train\.tsv, line 3: the query id 'z' is not in"):
        beir_pairs(folder)
    assert len(beir_pairs(folder, on_error="skip")) == 1


@pytest.mark.skipif(not DATA.is_dir(), reason="set SPARTON_DATA to the folder of the real data")
@pytest.mark.parametrize(("name", "pairs"), [("squad", 83_625), ("acl_title_abstract", 21_194)])
def test_real_pairs(name: str, pairs: int) -> None:
    source = beir_pairs(str(DATA / name))
    assert len(source) == pairs
    example = source.example(pairs - 1, 0, 0)
    assert example.query and example.positive


MEMORY_PROBE = """
import json, sys
from pathlib import Path
from sparton.datasets.files import DataFile, read_lines
from sparton.datasets.sources import text_records

def megabytes(name):
    status = Path("/proc/self/status").read_text()
    return int(status.split(name + ":")[1].split()[0]) // 1024

path, cache = sys.argv[1:]
text_records(path, cache_dir=cache, limit=10)
peak = megabytes("VmHWM")
source = text_records(path, cache_dir=cache)
print(megabytes("VmHWM") - peak)
own = megabytes("RssAnon")
for index in range(len(source)):
    source.example(index, 0, 0)
print(megabytes("RssAnon") - own)
held = [json.loads(line) for _, line in read_lines(DataFile(path, Path(path)))]
print(megabytes("RssAnon") - own)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_does_not_grow_with_the_file(write_jsonl: Write, tmp_path: Path) -> None:
    """120 MB of text are prepared in less than 60 MB and read in less than 20 MB, mapped pages
    aside, which the system takes back when it needs them; holding the texts takes more."""
    text = "some words of a passage " * 200
    path = write_jsonl([f"query {number}", text + str(number)] for number in range(25_000))
    command = [sys.executable, "-c", MEMORY_PROBE, path, str(tmp_path / "probe")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    preparing, reading, holding = map(int, output.split())
    assert preparing < 60 < holding, output
    assert reading < 20 < holding, output
