"""What is timed, what is counted, and what is left out of rankings."""

import time

import pytest
import torch

from sparton.datasets.lengths import CutCounter
from sparton.evaluation import evaluate_bm25, evaluate_encoder, speed
from sparton.evaluation.speed import time_queries
from sparton.evaluation.system import System, retrieve
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.exact import exact_index
from sparton.retrieval.indexes.protocols import Found, Index
from sparton.types import RetrievalTask, TextCollection, TextForm
from tests.evaluation.problems import (
    LexicalEncoder,
    VectorEncoder,
    make_task,
    packed_words,
    rankings,
)


def test_queries_are_timed_one_at_a_time_after_a_warm_up():
    asked = []

    def answer(text: str) -> None:
        asked.append(text)
        time.sleep(0.02 if text == "39" else 0.002)

    found = time_queries(answer, [str(number) for number in range(40)], 5)
    sample = ["0", "9", "19", "29", "39"]
    assert asked == sample[:3] + sample
    assert found.queries == 5
    assert 2 <= found.p50 < 15 < found.p95 <= found.p99, "milliseconds"


def test_slow_answers_end_the_measurement(monkeypatch):
    monkeypatch.setattr(speed, "_LONGEST", 0.004)
    found = time_queries(lambda _: time.sleep(0.002), ["a"] * 50, 50)
    assert 1 <= found.queries <= 3


@pytest.mark.parametrize("sparse", [False, True])
def test_speed_of_an_encoder_and_bytes_of_its_index(sparse):
    tokenizer = packed_words()
    encoder = LexicalEncoder() if sparse else VectorEncoder(tokenizer.tokenizer)
    result = evaluate_encoder(encoder, tokenizer, make_task(), progress=False)
    assert result.speed is not None
    documents, queries = 6 / result.seconds["documents"], result.seconds["queries"]
    assert result.speed.documents_per_second == pytest.approx(documents)
    asked = 3 / (queries + result.seconds["search"])
    assert result.speed.queries_per_second == pytest.approx(asked)
    assert result.speed.latency.queries == 3
    if sparse:  # 13 postings of 6 bytes, 14 boundaries of 13 terms
        assert result.speed.index_bytes == 13 * 6 + 14 * 8
    else:  # 13 vectors of 13 halves, boundaries, the five documents with tokens and their ends
        assert result.speed.index_bytes == 13 * 13 * 2 + 7 * 8 + 5 * 8 + 6 * 8
    unmeasured = evaluate_encoder(encoder, tokenizer, make_task(), timed_queries=0, progress=False)
    assert unmeasured.speed is None and unmeasured.metrics == result.metrics


def test_what_is_compiled_by_the_first_search_is_not_timed():
    class Compiling:
        """An index whose first search takes a second."""

        def __init__(self, index: Index) -> None:
            self._index, self.searches = index, 0
            self.kinds, self.exact, self.nbytes = index.kinds, index.exact, index.nbytes

        def search(self, *arguments: object, **options: object) -> Found:
            self.searches += 1
            time.sleep(1.0 if self.searches == 1 else 0)
            return self._index.search(*arguments, **options)

    def build(documents, device, *, rerank_depth):
        return Compiling(exact_index(documents, device, rerank_depth=rerank_depth))

    tokenizer = packed_words()
    seconds = {
        timed: evaluate_encoder(
            LexicalEncoder(), tokenizer, make_task(), index=build, timed_queries=timed,
            progress=False,
        ).seconds
        for timed in (0, 1)
    }  # fmt: skip
    assert seconds[1]["search"] + seconds[1]["index"] < 0.8 < 1 <= seconds[0]["search"]


def test_how_many_queries_are_timed_is_no_negative_number():
    for evaluate in (evaluate_bm25, lambda task, **k: evaluate_encoder(None, None, task, **k)):
        with pytest.raises(ValueError, match="timed_queries=-1 must be at least 0"):
            evaluate(make_task(), timed_queries=-1)
    assert evaluate_bm25(make_task(), timed_queries=2).speed.latency.queries == 2


def test_excluded_documents_leave_room_for_others():
    task = make_task()._replace(excluded={"q0": {"d0", "own"}, "q1": {"d3", "elsewhere"}})
    tokenizer = packed_words()
    options = {"k": 1, "metrics": ["mrr@1"], "progress": False}
    full = evaluate_encoder(LexicalEncoder(), tokenizer, make_task(), **options)
    assert rankings(full) == {"q0": ["d0"], "q1": ["d2"], "own": ["own"]}
    cut = evaluate_encoder(LexicalEncoder(), tokenizer, task, **options)
    assert rankings(cut) == {"q0": ["d1"], "q1": ["d2"], "own": ["own"]}
    both = evaluate_encoder(
        LexicalEncoder(), tokenizer, task._replace(exclude_self=True), **options
    )
    assert rankings(both) == {"q0": ["d1"], "q1": ["d2"], "own": ["d1"]}


@pytest.mark.parametrize("kind", ["tokens", "dense"])
def test_excluded_documents_are_no_candidates(kind):
    """Two queries, of which all prefer the first documents; one must do without the best 12."""
    weights, angles = torch.linspace(2, 1, 30)[:, None], torch.linspace(0.1, 1.2, 30)
    vectors = torch.stack((angles.cos(), angles.sin()), 1)

    def represented(weights: torch.Tensor, vectors: torch.Tensor) -> Representations:
        halves = {"sparse": SparseVectors.from_dense(weights), kind: TokenVectors.of_texts(vectors)}
        return Representations(**halves)

    system = System(
        lambda texts, _: represented(weights, vectors),
        lambda texts, _: represented(torch.ones(2, 1), torch.tensor([[1.0, 0.0]] * 2)),
    )
    names = [f"d{row}" for row in range(30)]
    task = RetrievalTask(
        "toy",
        TextCollection(names, ["x"] * 30),
        TextCollection(["q", "other"], ["x"] * 2),
        {"q": {"d12": 1}, "other": {"d0": 1}},
        excluded={"q": [*names[:12], "elsewhere"]},
    )
    found = retrieve(
        task, system, ["mrr@10"], 1000, search="any", timed_queries=0, device="cpu", rerank_depth=10
    )
    assert rankings(found) == {"q": names[12:22], "other": names[:10]}
    assert found.metrics == {"mrr@10": 1.0}


def test_the_form_of_a_task_cuts_and_prompts_its_texts():
    tokenizer = packed_words()
    task = make_task()
    whole = evaluate_encoder(LexicalEncoder(), tokenizer, task, progress=False)
    short = task._replace(form=TextForm(query_length=3, document_length=4))
    cut = evaluate_encoder(LexicalEncoder(), tokenizer, short, progress=False)
    assert (whole.query_terms, whole.document_terms) == (7 / 3, 13 / 6)
    assert cut.query_terms == pytest.approx((2 + 1 + 2) / 3), "the first word of each, red twice"
    assert cut.document_terms == pytest.approx((3 + 3 + 2 + 0 + 2 + 3) / 6)
    prompted = task._replace(form=TextForm(query_prompt="blue ", document_prompt="bird "))
    found = evaluate_encoder(LexicalEncoder(), tokenizer, prompted, progress=False)
    assert found.query_terms == pytest.approx(whole.query_terms + 1)
    assert rankings(found)["q1"] == ["d4", "d2"]  # and not d2 alone


def test_a_form_longer_than_the_model_is_cut_at_the_model(caplog):
    encoder, tokenizer = LexicalEncoder(), packed_words()
    encoder.max_length = 8
    task = make_task()._replace(form=TextForm(query_length=512, document_length=6))
    result = evaluate_encoder(encoder, tokenizer, task, progress=False)
    assert result.query_terms == pytest.approx(7 / 3)
    said = "toy: the task keeps 512 tokens of a query, the model has 8 positions"
    assert caplog.messages == [said]
    counter = CutCounter()  # as a training has it for all of its evaluations
    for _ in range(2):
        evaluate_encoder(encoder, tokenizer, task, counter=counter, progress=False)
    assert caplog.messages == [said] * 2
    other = task._replace(name="other")
    evaluate_encoder(encoder, tokenizer, other, counter=counter, progress=False)
    assert len(caplog.messages) == 3
