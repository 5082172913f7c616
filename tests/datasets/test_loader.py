"""Batches by step: the same for every resume, number of ranks and number of workers."""

import warnings
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sparton.datasets.loader import BatchStream, train_loader
from sparton.datasets.mixture import Mixture
from sparton.datasets.sources import text_records
from sparton.datasets.tokenization import PackedTokenizer
from sparton.types import Example, TokenBatch, TrainBatch


def tensors(batch: TrainBatch) -> list[Tensor]:
    counts = batch.counts and batch.counts.each
    others = [each for each in (batch.teacher_scores, counts, batch.sources) if each is not None]
    return [*batch.queries[:3], *batch.documents[:3], *others]


def equal(left: TrainBatch, right: TrainBatch) -> bool:
    lengths = (left.queries.max_seqlen, left.documents.max_seqlen)
    return lengths == (right.queries.max_seqlen, right.documents.max_seqlen) and all(
        torch.equal(a, b) for a, b in zip(tensors(left), tensors(right), strict=True)
    )


def sequences(tokens: TokenBatch) -> list[list[int]]:
    bounds = tokens.cu_seqlens.tolist()
    return [tokens.input_ids[a:b].tolist() for a, b in pairwise(bounds)]


@pytest.fixture
def tokenizer(word_tokenizer: PreTrainedTokenizerFast) -> PackedTokenizer:
    return PackedTokenizer(word_tokenizer, 8, 16)


@pytest.fixture
def mixture(write_jsonl: Callable[..., str]) -> Mixture:
    """Scored records with three negatives; a positive text belongs to five of them."""
    records = [
        {
            "query": f"w{number} w1",
            "positive": f"w{number // 5} w2 w3",
            "negatives": [f"w{number} w4" + " w5" * times for times in range(3)],
            "scores": [number, 1, 2, 3],
        }
        for number in range(150)
    ]
    first = text_records(write_jsonl(records[:110], "a.jsonl"))
    second = text_records(write_jsonl(records[110:], "b.jsonl"))
    return Mixture({"first": first, "second": second}, {"first": 3, "second": 1})


def test_a_batch_holds_what_the_stream_says(mixture: Mixture, tokenizer: PackedTokenizer) -> None:
    stream = BatchStream(mixture, tokenizer, batch=6, num_negatives=2, seed=4)
    (batch,) = train_loader(stream, 3, 4)
    examples = mixture.examples(range(18, 24), seed=4, num_negatives=2)
    assert batch.most_documents == 3 and batch.counts is None
    assert batch.sources.tolist() == mixture.numbers(range(18, 24), 4).tolist()
    assert sequences(batch.queries) == sequences(tokenizer.queries([e.query for e in examples]))
    for row, example in enumerate(examples):
        texts = [example.positive, *example.negatives]
        documents = sequences(batch.documents)[3 * row : 3 * row + 3]
        assert documents == sequences(tokenizer.documents(texts))
    assert batch.teacher_scores is not None and batch.teacher_scores.dtype == torch.float32
    assert batch.teacher_scores.tolist() == [list(e.teacher_scores) for e in examples]


@pytest.mark.parametrize("unique", [False, True])
def test_resuming_gives_the_batches_of_the_uninterrupted_run(
    mixture: Mixture, tokenizer: PackedTokenizer, unique: bool
) -> None:
    def batches(start: int, seed: int = 0) -> list[TrainBatch]:
        settings = {"num_negatives": 2, "seed": seed, "unique_positives": unique}
        return list(train_loader(BatchStream(mixture, tokenizer, 8, **settings), start, 30))

    whole, resumed = batches(0), batches(13)
    assert (len(whole), len(resumed)) == (30, 17)
    assert all(map(equal, whole[13:], resumed))
    assert not equal(whole[12], resumed[0])
    assert not equal(batches(29, seed=1)[0], whole[29])


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_hold_the_global_batch(
    mixture: Mixture, tokenizer: PackedTokenizer, world_size: int, unique: bool
) -> None:
    def stream(rank: int, size: int) -> BatchStream:
        return BatchStream(
            mixture,
            tokenizer,
            batch=8,
            num_negatives=1,
            rank=rank,
            world_size=size,
            unique_positives=unique,
        )

    for step in (0, 7):
        parts = [stream(rank, world_size)[step] for rank in range(world_size)]
        whole = stream(0, 1)[step]
        for kind in ("queries", "documents"):
            together = [ids for part in parts for ids in sequences(getattr(part, kind))]
            assert together == sequences(getattr(whole, kind))
        scores = torch.cat([part.teacher_scores for part in parts])
        assert torch.equal(scores, whole.teacher_scores)


def test_workers_change_nothing_and_do_not_warn(
    mixture: Mixture, tokenizer: PackedTokenizer
) -> None:
    tokenizer.documents(["w1"] * 100)
    runs = []
    for workers in (0, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork, from Python 3.12 on
            stream = BatchStream(mixture, tokenizer, batch=8)
            runs.append(list(train_loader(stream, 0, 9, num_workers=workers)))
    assert all(map(equal, *runs))


def test_there_are_no_more_workers_than_cores(
    mixture: Mixture, tokenizer: PackedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3})
    stream = BatchStream(mixture, tokenizer, batch=8)
    for asked, made in ((0, 0), (1, 1), (4, 2)):
        loader = train_loader(stream, 0, 9, num_workers=asked)
        assert loader._parcels.num_workers == made


def test_unique_positives(mixture: Mixture, tokenizer: PackedTokenizer) -> None:
    def examples(unique: bool, step: int) -> list[Example]:
        stream = BatchStream(mixture, tokenizer, batch=16, unique_positives=unique)
        return stream.examples(step)

    def source_of(example: Example) -> bool:
        return int(example.query.split()[0][1:]) < 110

    replaced = 0
    for step in range(40):
        plain, unique = examples(False, step), examples(True, step)
        assert len({example.positive for example in unique}) == 16
        seen: set[str] = set()
        for before, after in zip(plain, unique):
            if before.positive not in seen:
                assert after == before
            assert source_of(after) == source_of(before)
            replaced += after != before
            seen.add(before.positive)
    assert replaced > 40


def test_a_query_with_two_positives_comes_once(
    write_jsonl: Callable[..., str], tokenizer: PackedTokenizer
) -> None:
    pairs = [[f"w{number // 2}", f"w{number} w1"] for number in range(40)]
    data = Mixture({"a": text_records(write_jsonl(pairs))})

    def queries(unique: bool, step: int) -> list[str]:
        stream = BatchStream(data, tokenizer, batch=10, unique_positives=unique)
        return [example.query for example in stream.examples(step)]

    assert any(len(set(queries(False, step))) < 10 for step in range(4))
    assert all(len(set(queries(True, step))) == 10 for step in range(4))


def test_too_few_different_positives(
    write_jsonl: Callable[..., str], tokenizer: PackedTokenizer
) -> None:
    source = text_records(write_jsonl([[f"w{number}", f"w{number % 3}"] for number in range(20)]))
    stream = BatchStream(Mixture({"a": source}), tokenizer, batch=4, unique_positives=True)
    message = r"that the batch of 4 already holds, at last the positive 'w\d', and source a"
    with pytest.raises(ValueError, match=message):
        stream[0]
    assert BatchStream(Mixture({"a": source}), tokenizer, batch=3, unique_positives=True)[0]
    assert BatchStream(Mixture({"a": source}), tokenizer, batch=21, unique_positives=False)[0]
    with pytest.raises(ValueError, match=r"batch=21 is more than the 20 examples .* 20 at most"):
        BatchStream(Mixture({"a": source}), tokenizer, batch=21, unique_positives=True)


def test_what_the_first_batch_lacks_is_said_in_the_parent_process(
    write_jsonl: Callable[..., str], tokenizer: PackedTokenizer
) -> None:
    source = text_records(write_jsonl([[f"w{number}", f"w{number % 3}"] for number in range(15)]))

    def length(steps: int, batch: int = 4) -> int:
        stream = BatchStream(Mixture({"a": source}), tokenizer, batch, unique_positives=True)
        return len(train_loader(stream, 5, steps, num_workers=1))

    with pytest.raises(ValueError, match=r"^source a has 3 different .* step 6 takes 4 examples"):
        length(steps=6)
    assert length(steps=5) == 0, "no step is left, so none is tried"
    assert length(steps=6, batch=3) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 2, "world_size": 4}, "batch=2 is smaller than the number of processes, 4"),
        ({"batch": 10, "world_size": 4}, "batch=10 does not divide .*that do are 8 and 12"),
        ({"batch": 8, "rank": 2, "world_size": 2}, "rank=2 is not one of world_size=2"),
        ({"batch": 8, "num_negatives": -1}, "num_negatives=-1 must not be negative"),
    ],
)
def test_impossible_sizes(
    mixture: Mixture, tokenizer: PackedTokenizer, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BatchStream(mixture, tokenizer, **settings)


def test_missing_negatives_stop_before_the_first_batch(
    write_jsonl: Callable[..., str], tokenizer: PackedTokenizer
) -> None:
    data = Mixture({"a": text_records(write_jsonl([["q", "p", "n"], ["q", "p"]]))})
    settings = {"batch": 2, "num_negatives": 1}
    assert BatchStream(data, tokenizer, **settings)
    for demand in ("needs_negatives", "needs_teacher"):
        with pytest.raises(ValueError, match=r"have none, the first of them .*data\.jsonl, line 2"):
            BatchStream(data, tokenizer, **settings, **{demand: True})
