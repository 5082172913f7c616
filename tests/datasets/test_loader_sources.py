"""Batches of sources that differ: with or without negatives, in forms of their own, or alone."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sparton.datasets.loader import BatchStream, train_loader
from sparton.datasets.mixture import Mixture, text_mixture
from sparton.datasets.sources import text_records
from sparton.datasets.tokenization import PackedTokenizer
from sparton.types import TextForm, TokenBatch, TrainBatch
from tests.datasets.numbered import Numbers
from tests.datasets.test_loader import equal, sequences

Write = Callable[..., str]


@pytest.fixture
def tokenizer(word_tokenizer: PreTrainedTokenizerFast) -> PackedTokenizer:
    return PackedTokenizer(word_tokenizer, 8, 16)


@pytest.fixture
def sources(write_jsonl: Write) -> dict:
    """Pairs, and triples of which each second has three negatives and the others none."""
    pairs = [[f"w{n} w1", f"w{n} w2"] for n in range(60)]
    triples = [
        [f"w{n} w3", f"w{n} w4", *(f"w{n} w{k}" for k in range(5, 8) if n % 2)] for n in range(60)
    ]
    return {
        name: text_records(write_jsonl(records, f"{name}.jsonl"))
        for name, records in (("pairs", pairs), ("triples", triples))
    }


def documents_of(batch: TrainBatch) -> list[list[list[int]]]:
    """The documents of each query."""
    documents = sequences(batch.documents)
    return [documents[start:stop] for start, stop in pairwise(batch.bounds())]


def test_queries_have_negatives_of_their_own_or_none(
    sources: dict, tokenizer: PackedTokenizer
) -> None:
    data = Mixture(sources)
    (batch,) = train_loader(BatchStream(data, tokenizer, 30, num_negatives=2), 0, 1)
    examples = data.examples(range(30), seed=0, num_negatives=2)
    assert batch.counts.most == batch.most_documents == 3
    assert batch.counts.each.tolist() == [1 + len(example.negatives) for example in examples]
    assert set(batch.counts.each.tolist()) == {1, 3}
    for example, documents in zip(examples, documents_of(batch), strict=True):
        texts = [example.positive, *example.negatives]
        assert documents == sequences(tokenizer.documents(texts))
    assert batch.sources.tolist() == data.numbers(range(30), 0).tolist()
    plain = train_loader(BatchStream(data, tokenizer, batch=30), 0, 1)
    assert all(each.counts is None and each.most_documents == 1 for each in plain)


def test_that_documents_are_counted_follows_from_the_data_and_not_from_the_batch(
    sources: dict, tokenizer: PackedTokenizer
) -> None:
    """So that ranks agree: also where by chance all queries of one have as many."""
    data = Mixture(sources, homogeneous=True)
    stream = BatchStream(data, tokenizer, batch=4, num_negatives=2)
    counts = [stream[step].counts.each.tolist() for step in range(12)]
    assert [1] * 4 in counts
    alone = Mixture({"pairs": sources["pairs"]})
    assert BatchStream(alone, tokenizer, batch=4)[0].sources is None


def test_scores_are_carried_where_all_sources_have_them(
    write_jsonl: Write, sources: dict, tokenizer: PackedTokenizer
) -> None:
    scored = [
        {"query": f"w{n}", "pos": ["w8"], "pos_scores": [9], "neg": ["w9"], "neg_scores": [n]}
        for n in range(20)
    ]
    source = text_records(write_jsonl(scored, "scored.jsonl"))

    def batch(**chosen: object) -> TrainBatch:
        return BatchStream(Mixture(chosen), tokenizer, batch=8, num_negatives=1)[0]

    assert batch(a=source).teacher_scores.shape == (8, 2)
    assert batch(a=source, b=Numbers("b", 20, 1)).teacher_scores is None
    assert batch(a=source, b=sources["triples"]).teacher_scores is None


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("homogeneous", [False, True])
def test_ranks_together_hold_the_global_batch(
    sources: dict, tokenizer: PackedTokenizer, world_size: int, homogeneous: bool
) -> None:
    forms = {"pairs": TextForm(query_prompt="w100 ")}

    def stream(rank: int, size: int) -> BatchStream:
        data = Mixture(sources, homogeneous=homogeneous, forms=forms)
        ranks = {"rank": rank, "world_size": size, "unique_positives": True}
        return BatchStream(data, tokenizer, batch=8, num_negatives=2, **ranks)

    for step in (0, 5):
        parts = [stream(rank, world_size)[step] for rank in range(world_size)]
        whole = stream(0, 1)[step]
        assert [each for part in parts for each in documents_of(part)] == documents_of(whole)
        assert [each for part in parts for each in sequences(part.queries)] == sequences(
            whole.queries
        )
        for name in ("counts", "sources"):
            of_parts = [getattr(part, name) for part in parts]
            of_parts = [each.each if name == "counts" else each for each in of_parts]
            of_whole = whole.counts.each if name == "counts" else whole.sources
            assert torch.equal(torch.cat(of_parts), of_whole)
        assert len(set(whole.sources.tolist())) == 1 or not homogeneous


def test_workers_and_resuming_change_nothing(sources: dict, tokenizer: PackedTokenizer) -> None:
    data = Mixture(sources, homogeneous=True, forms={"triples": {"document_length": 5}})
    stream = BatchStream(data, tokenizer, batch=8, num_negatives=2, unique_positives=True)
    whole = list(train_loader(stream, 0, 9))
    resumed = list(train_loader(stream, 4, 9, num_workers=1))
    assert len(resumed) == 5 and all(map(equal, whole[4:], resumed))
    assert {int(batch.sources[0]) for batch in whole} == {0, 1}


def test_texts_are_read_in_the_form_of_their_source(
    sources: dict, tokenizer: PackedTokenizer
) -> None:
    forms = {"triples": {"query_prompt": "w100 ", "document_prompt": "w101 ", "document_length": 4}}
    plain, formed = (
        BatchStream(Mixture(sources, forms=given), tokenizer, batch=20, num_negatives=2)[0]
        for given in (None, forms)
    )
    form = Mixture(sources, forms=forms).forms["triples"]

    def read(tokens: TokenBatch) -> list[list[int]]:
        return sequences(tokens)

    for number, query, documents, other, others in zip(
        formed.sources.tolist(),
        read(formed.queries),
        documents_of(formed),
        read(plain.queries),
        documents_of(plain),
        strict=True,
    ):
        if number == 0:
            assert (query, documents) == (other, others)
            continue
        assert query == [2, 104, *other[1:]], "w100 behind [CLS]"
        assert documents == [[2, 105, each[1], 3] for each in others], "cut at four tokens"
    assert form.query_length is None


def test_a_form_without_room_is_refused_with_its_source_before_the_first_step(
    sources: dict, tokenizer: PackedTokenizer
) -> None:
    data = Mixture(sources, forms={"triples": {"document_length": 2}})
    with pytest.raises(
        ValueError, match="forms of source triples: document_length=2 leaves no roo"
    ):
        BatchStream(data, tokenizer, batch=4)


def test_a_source_that_cannot_fill_a_batch_is_refused_before_the_first_step(
    sources: dict, tokenizer: PackedTokenizer
) -> None:
    """By the step that would lack examples: a rare source may be drawn once, or never."""

    def loaded(data: Mixture, batch: int, stop: int, unique: bool = True) -> int:
        stream = BatchStream(data, tokenizer, batch, unique_positives=unique)
        return len(train_loader(stream, 0, stop))

    data = Mixture({**sources, "small": Numbers("small", 7)}, homogeneous=True)
    message = r"source small has 7 different .* takes 8 examples of it: .*=False or unique_positiv"
    with pytest.raises(ValueError, match=message):
        loaded(data, 8, 50)
    assert loaded(data, 7, 50) and loaded(data, 8, 50, unique=False)
    assert loaded(Mixture(data.sources), 8, 50)

    few = {"many": Numbers("many", 900), "lone": Numbers("lone", 1)}
    data = Mixture(few, weights={"many": 30, "lone": 1})
    with pytest.raises(
        ValueError, match=r"lone has 1 different .* batch of step (\d+) takes 2"
    ) as e:
        loaded(data, 8, 400)
    step = int(re.search(r"step (\d+)", str(e.value))[1])
    assert step > 1 and loaded(data, 8, step - 1) == step - 1
    stream = BatchStream(data, tokenizer, 8, unique_positives=True)
    with pytest.raises(ValueError, match=r"source lone has 1 examples"):
        stream[step - 1]
    assert all(stream[number] for number in range(step - 1))


def test_of_very_many_steps_the_first_are_checked(tokenizer: PackedTokenizer, monkeypatch) -> None:
    seen = []
    numbers = Mixture.numbers

    def counted(data: Mixture, positions: range, *rest: int):
        seen.append(len(positions))
        return numbers(data, positions, *rest)

    monkeypatch.setattr(Mixture, "numbers", counted)
    data = Mixture({"few": Numbers("few", 5), "many": Numbers("many", 10**6)})
    stream = BatchStream(data, tokenizer, 8, unique_positives=True)
    assert len(train_loader(stream, 3, 10**9)) == 10**9 - 3
    assert 2**20 < sum(seen) < 2**22


def test_what_a_worker_refuses_is_told_without_its_traceback(
    sources: dict, tokenizer: PackedTokenizer, monkeypatch
) -> None:
    data = Mixture(
        {"lone": Numbers("lone", 1), **sources}, weights=dict.fromkeys(sources, 9) | {"lone": 1}
    )
    stream = BatchStream(data, tokenizer, 8, unique_positives=True)
    monkeypatch.setattr(BatchStream, "check_sources", lambda *_: None)
    with pytest.raises(ValueError, match=r"^unique_positives: 100 draws .* log says were taken$"):
        list(train_loader(stream, 0, 100, num_workers=1))


def test_a_source_of_a_user_that_gives_other_numbers_is_refused_in_the_step(
    tokenizer: PackedTokenizer,
) -> None:
    class Unsteady(Numbers):
        def example(self, index: int, draw: int, num_negatives: int):
            return super().example(index, draw, 0 if index == 3 else num_negatives)

    stream = BatchStream(Mixture({"a": Unsteady("a", 8, 2)}), tokenizer, batch=8, num_negatives=2)
    with pytest.raises(ValueError, match="an example of step 0 has 0 negatives and not num_negati"):
        stream[0]


def test_columns_of_fifty_negatives_beside_pairs(
    tmp_path: Path, write_jsonl: Write, tokenizer: PackedTokenizer
) -> None:
    """MS MARCO as sentence-transformers has it with hard negatives, and pairs of questions."""
    names = ["query", "positive", *(f"negative_{k}" for k in range(1, 51))]
    columns = {name: [f"w{row} {name}" for row in range(6)] for name in names}
    pq.write_table(pa.table(columns), tmp_path / "hard.parquet")
    write_jsonl([[f"w{n}", f"w{n} w1"] for n in range(6)], "pairs.jsonl")
    data = text_mixture({"hard": "hard.parquet", "pairs": "pairs.jsonl"}, root=str(tmp_path))
    (batch,) = train_loader(BatchStream(data, tokenizer, 12, num_negatives=7), 0, 1)
    assert sorted(batch.counts.each.tolist()) == [1] * 6 + [8] * 6
    examples = data.examples(range(12), seed=0, num_negatives=7)
    assert {len(set(example.negatives)) for example in examples} == {0, 7}
