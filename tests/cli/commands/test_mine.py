"""``sparton mine``: flags to arguments, and what is said of flags that cannot be."""

from pathlib import Path

import pytest

from sparton.cli.commands.mine import main
from sparton.pipelines.mining import BM25Miner, CrossEncoder, Rule, TrainedModel
from tests.pipelines.conftest import own_cache, pairs
from tests.pipelines.mining_problems import generate, read_records, write

__all__ = ["own_cache", "pairs"]  # fixtures

RETRIEVER = ["--teacher", "a/model", "--teacher-kind", "retriever"]


def mine(*arguments: object) -> list[dict]:
    """Run the command here; gives the records of its output."""
    words = [*map(str, arguments)]
    main(words)
    return read_records(Path(words[words.index("--output") + 1]))


def test_flags_become_arguments(pairs, tmp_path, monkeypatch, capsys):
    records = mine(
        pairs, "--negatives", 2, "--skip", 1, "--depth", 9, "--sample", "--seed", 3,
        "--share", 0.9, "--k1", 1.2, "--limit", 30, "--output", tmp_path / "out.jsonl.gz",
    )  # fmt: skip
    assert len(records) == 30
    said = capsys.readouterr().out
    assert "examples read" in said and "30" in said and "out.jsonl.gz" in said
    asked = {}

    def note(examples, output, **settings):
        asked.update(settings)
        return {"none": 1}

    monkeypatch.setattr("sparton.pipelines.mining.mine_hard_negatives", note)
    main(
        [
            *(str(pairs), "--miner", "a/model", "--query-length", "8", "--teacher", "b/model"),
            *("--teacher-activation", "--teacher-batch", "8", "--teacher-length", "9"),
            *("--device", "cpu", "--short", "keep", "--output", str(tmp_path / "other.jsonl")),
        ]
    )
    assert asked["miners"] == [TrainedModel("a/model", query_length=8)]
    assert asked["teachers"] == [CrossEncoder("b/model", True, 8, 9)]
    assert asked["rule"] == Rule() and asked["device"] == "cpu"
    assert "data.negatives=required data.on_error=skip" in capsys.readouterr().out


def test_teachers_of_several_kinds_keep_their_order(pairs, tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "sparton.pipelines.mining.mine_hard_negatives",
        lambda examples, output, **settings: asked.update(settings) or {},
    )
    output = ["--output", str(tmp_path / "out.jsonl")]
    main(
        [
            *(str(pairs), "--teacher", "a/model", "--teacher", "bm25", "--teacher", "b/model"),
            *("--teacher-kind", "retriever", "--teacher-kind", "cross-encoder", "--k1", "1.2"),
            *("--teacher-batch", "8", "--precision", "bf16", *output),
        ]
    )
    assert asked["teachers"] == [
        TrainedModel("a/model", precision="bf16"), BM25Miner(1.2), CrossEncoder("b/model", batch=8)
    ]  # fmt: skip
    assert asked["miners"] == [BM25Miner(1.2)]
    main([str(pairs), *RETRIEVER, "--teacher", "b/model", *output])
    assert asked["teachers"] == [TrainedModel("a/model"), TrainedModel("b/model")]
    main([str(pairs), "--miner", "a/model", "--miner", "bm25", "--b", "0.75", *output])
    assert asked["miners"] == [TrainedModel("a/model"), BM25Miner(b=0.75)]


def test_ids_and_collections_come_from_files(tmp_path):
    examples = generate(12)
    corpus = [{"_id": f"d{n}", "text": each["positive"]} for n, each in enumerate(examples)]
    queries = [{"_id": f"d{n}", "text": each["query"]} for n, each in enumerate(examples)]
    folder = tmp_path / "beir"
    write(folder / "corpus.jsonl", corpus)
    write(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    lines = "".join(f"d{n}\td{(n + 1) % 12}\t1\n" for n in range(12))
    (folder / "qrels/train.tsv").write_text(lines)
    output = tmp_path / "out.jsonl"
    records = mine("--beir", folder, "--ids", "--negatives", 2, "--output", output)
    assert any(record["query_id"] in record["negative_ids"] for record in records)
    others = mine(
        "--beir", folder, "--ids", "--negatives", 2, "--exclude-self",
        "--output", tmp_path / "others.jsonl",
    )  # fmt: skip
    assert not any(record["query_id"] in record["negative_ids"] for record in others)
    texts = {each["_id"]: each["text"] for each in corpus}
    by_id = mine(
        output, "--queries", folder / "queries.jsonl", "--collection", folder / "corpus.jsonl",
        "--negatives", 2, "--output", tmp_path / "texts.jsonl",
    )  # fmt: skip
    assert [texts[name] for name in records[3]["negative_ids"]] == by_id[3]["neg"]
    elsewhere = write(tmp_path / "collection.jsonl", corpus[6:])
    pairs = write(tmp_path / "pairs.jsonl", examples[:2])
    found = mine(pairs, "--collection", elsewhere, "--output", tmp_path / "elsewhere.jsonl")
    assert {text for each in found for text in each["neg"]} <= {each["text"] for each in corpus[6:]}
    for limit in (0, 3):
        with pytest.raises(ValueError, match="--columns and --limit do not apply to --beir"):
            mine("--beir", folder, "--limit", limit, "--output", tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--negatives", "9", "--depth", "10", "--skip", "2"], "raise --depth"),
        (["--share", "1.5"], r"--share 1\.5 must lie above 0"),
        (["--margin", "-1"], r"--margin -1\.0 must not be negative"),
        (["--ids"], "--ids needs examples with ids"),
        (["--queries", "q.tsv"], "need --collection too"),
        (["--collection", "none.tsv"], "none.tsv: no such file"),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--seed", "1"], "mining without --sample ignores --seed: leave"),
        (["--split", "dev"], "mining without --beir ignores --split: leave"),
        (["--beir", "folder"], "--beir FOLDER stands alone"),
        (["--miner", "no/such/folder/at/all"], "no such folder"),
        (["--miner", "a/model", "--max-document-terms", "0"], "--max-document-terms 0 must be at"),
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
        (
            ["--teacher", "bm25", "--teacher-kind", "retriever"],
            "bm25 ignores --teacher-kind: leave",
        ),
        (["--teacher", "bm25", "--teacher-batch", "8"], "--teacher bm25 ignores --teacher-batch"),
        (
            [*RETRIEVER, *RETRIEVER, "--teacher", "some/third"],
            "2 times --teacher-kind for 3 models as --teacher: give one for all",
        ),
        (["--teacher", "/no/such/folder"], "/no/such/folder: no such folder"),
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
    with pytest.raises(ValueError, match=f"{pairs}, line 41: a list of 1.*--on-error skip"):
        mine(pairs, "--output", output)
    assert len(mine(pairs, "--on-error", "skip", "--output", output)) == 40


def test_no_negatives_at_all_are_said_of_flags(tmp_path):
    pairs = write(tmp_path / "pairs.jsonl", [["babak", "babak"]])
    with pytest.raises(ValueError, match="raise --depth, relax --margin or --share"):
        mine(pairs, "--short", "drop", "--output", tmp_path / "out.jsonl")
