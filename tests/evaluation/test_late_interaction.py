"""Evaluating encoders that give token vectors, alone or beside sparse ones."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import (
    TokenMatch,
    evaluate_bm25,
    evaluate_encoder,
    explain,
    explain_match,
    results_table,
    write_results,
)
from sparton.evaluation.results import TaskResult
from sparton.representations import Representations
from tests.evaluation.problems import (
    LexicalEncoder,
    VectorEncoder,
    make_task,
    packed_words,
    rankings,
)

MAXSIM = {
    "q0": [("d0", 2), ("own", 1), ("d1", 0.6), ("d4", 0), ("d2", 0)],
    "q1": [("d2", 1), ("own", 0), ("d4", 0), ("d1", 0), ("d0", 0)],
    "own": [("own", 2), ("d1", 1.6), ("d0", 1), ("d4", 0), ("d2", 0)],
}


@pytest.fixture
def tokenizer() -> PackedTokenizer:
    return packed_words()


def evaluate(
    tokenizer: PackedTokenizer, *, sparse: bool = False, exclude_self: bool = False, **options
) -> TaskResult:
    encoder = VectorEncoder(tokenizer.tokenizer, sparse)
    return evaluate_encoder(
        encoder, tokenizer, make_task(exclude_self=exclude_self), progress=False, **options
    )


def scored(result: TaskResult) -> dict:
    return {
        query: [(name, pytest.approx(score, abs=1e-3)) for name, score in found]
        for query, found in result.run.rankings()
    }


@pytest.mark.parametrize("search", [None, "maxsim"])
@pytest.mark.parametrize("vector_dtype", ["float16", "float32"])
def test_token_vectors_are_searched_by_maxsim(tokenizer, search, vector_dtype):
    result = evaluate(tokenizer, search=search, vector_dtype=vector_dtype)
    assert scored(result) == MAXSIM
    assert result.search == "maxsim"
    assert result.metrics["mrr@10"] == pytest.approx((1 + 1 + 1 / 2) / 3, abs=1e-12)
    assert result.query_vectors == pytest.approx((2 + 1 + 2) / 3)
    assert result.document_vectors == pytest.approx((2 + 3 + 2 + 0 + 4 + 2) / 6)
    assert (result.query_terms, result.document_terms, result.flops) == (None, None, None)


def test_own_document_is_left_out_of_both_stages(tokenizer):
    for sparse, search in ((False, "maxsim"), (False, "rerank"), (True, None)):
        found = rankings(evaluate(tokenizer, sparse=sparse, search=search, exclude_self=True))
        assert found["own"][:2] == ["d1", "d0"]
        assert "own" in found["q0"]


@pytest.mark.parametrize("search", [None, "rerank"])
def test_both_kinds_of_vectors_find_and_then_order(tokenizer, search):
    result = evaluate(tokenizer, sparse=True, search=search)
    found = rankings(evaluate_encoder(LexicalEncoder(), tokenizer, make_task(), progress=False))
    expected = {
        query: [(name, score) for name, score in ranking if name in found[query]]
        for query, ranking in MAXSIM.items()
    }
    assert scored(result) == expected != MAXSIM
    assert result.search == "sparse + maxsim"
    assert None not in (result.query_terms, result.flops, result.document_vectors)
    shallow = evaluate(
        tokenizer, sparse=True, search=search, rerank_depth=1, metrics=["mrr@1"], k=5
    )
    assert rankings(shallow) == {"q0": ["d0"], "q1": ["d2"], "own": ["own"]}
    assert shallow.run.rows.shape == (3, 1)
    # Depths beyond the collection take no memory, and find what its size finds.
    deep = {"rerank_depth": 10**12, "metrics": ["mrr@10"], "k": 10**12}
    found = evaluate(tokenizer, sparse=True, search=search, **deep)
    assert scored(found) == expected


@pytest.mark.parametrize("search", ["sparse", "maxsim"])
def test_either_kind_of_vectors_alone(tokenizer, search):
    result = evaluate(tokenizer, sparse=True, search=search)
    alone = LexicalEncoder() if search == "sparse" else VectorEncoder(tokenizer.tokenizer)
    expected = evaluate_encoder(alone, tokenizer, make_task(), progress=False)
    np.testing.assert_array_equal(result.run.rows, expected.run.rows)
    np.testing.assert_array_equal(result.run.scores, expected.run.scores)
    for field in ("search", "metrics", "query_terms", "flops", "document_vectors"):
        assert getattr(result, field) == getattr(expected, field)


def test_bm25_finds_for_an_encoder_without_sparse_vectors(tokenizer):
    result = evaluate(tokenizer, search="rerank")
    found = rankings(evaluate_bm25(make_task()))
    expected = {
        query: [(name, score) for name, score in ranking if name in found[query]]
        for query, ranking in MAXSIM.items()
    }
    assert scored(result) == expected != MAXSIM
    assert result.search == "bm25 + maxsim"
    assert (result.query_terms, result.flops) == (None, None), "BM25's are not the encoder's"


def test_bm25_finds_with_its_own_settings(tokenizer):
    options = {"search": "rerank", "rerank_depth": 2, "metrics": ["recall@2"]}
    candidates = [
        {name for name, _ in scored(evaluate(tokenizer, **options, k1=k1))["own"]}
        for k1 in (0.9, 0.0)
    ]
    assert candidates == [{"own", "d1"}, {"own", "d0"}], "d1 says dog twice"
    with pytest.raises(ValueError, match="k1=-1"):
        evaluate(tokenizer, search="rerank", k1=-1)


class SilentEncoder(LexicalEncoder):
    def encode(self, tokens, side):
        raise AssertionError("nothing is encoded before the refusal")


class SilentVectors(VectorEncoder):
    encode = SilentEncoder.encode


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sparse", {"search": "maxsim"}, "token vectors, which SilentEncoder does not give: set"),
        ("sparse", {"search": "rerank"}, "search='rerank' compares token .*search=sparse, or"),
        ("tokens", {"search": "sparse"}, "sparse vectors, which SilentVectors.*maxsim or rerank"),
        ("tokens", {"max_query_terms": 3}, "max_query_terms=3 keeps .* search=maxsim"),
        ("tokens", {"search": "rerank", "max_document_terms": 3}, "in search=rerank with this"),
        ("both", {"search": "maxsim", "max_query_terms": 3}, "max_query_terms=3 keeps"),
        ("both", {"rerank_depth": 500}, "recall@1000 looks deeper than the rerank_depth=500"),
        ("both", {"rerank_depth": 0}, "rerank_depth=0: must be a whole number"),
        (
            "both",
            {"search": "plaid"},
            "search=plaid: must be sparse, maxsim, dense, rerank, sum, or left",
        ),
        (
            "both",
            {"vector_dtype": "int8"},
            "vector_dtype='int8' must be float16, bfloat16, float32 or ",
        ),
    ],
)
def test_what_an_encoder_cannot_do_is_refused_before_anything_is_encoded(
    tokenizer, kind, options, message
):
    encoder = SilentEncoder()
    if kind != "sparse":
        encoder = SilentVectors(tokenizer.tokenizer, sparse=kind == "both")
    with pytest.raises(ValueError, match=message):
        evaluate_encoder(encoder, tokenizer, make_task(), progress=False, **options)


def test_bounds_of_terms_hold_for_candidates(tokenizer):
    full = evaluate(tokenizer, sparse=True)
    cut = evaluate(tokenizer, sparse=True, max_query_terms=1, max_document_terms=1)
    assert (cut.query_terms, cut.document_terms) == (1, 5 / 6)
    assert full.query_terms > 1
    assert cut.document_vectors == full.document_vectors


def lines(results: list[TaskResult]) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table(results))
    return [line for line in console.export_text().splitlines() if line.strip()]


def test_table_and_file_show_what_there_is(tokenizer, tmp_path):
    vectors, both = evaluate(tokenizer), evaluate(tokenizer, sparse=True)
    lexical = evaluate_encoder(LexicalEncoder(), tokenizer, make_task(), progress=False)
    for results, shown in (
        ([vectors], {"vectors q/d"}),
        ([lexical], {"terms q/d", "FLOPS"}),
        ([both, vectors], {"vectors q/d", "terms q/d", "FLOPS"}),
    ):
        header, *rows = lines(results)
        assert "…" not in header + "".join(rows)
        assert {name for name in ("vectors q/d", "terms q/d", "FLOPS") if name in header} == shown
        write_results(results, tmp_path, {})
        tasks = json.loads((tmp_path / "results.json").read_text())["tasks"]
        for task, result in zip(tasks, results, strict=True):
            assert ("flops" in task) is (result is not vectors)
            assert ("query_vectors" in task) is (result is not lexical)
    shown = lines([both, vectors])
    rows = shown[: len(shown) // 2]
    mean = rows[-1]
    assert f"{both.query_terms:.1f}/{both.document_terms:.1f}" in mean
    assert "1.7/2.2" in mean
    assert [("-/-" in row) for row in rows if row.startswith(" toy")] == [False, True]


def test_match_tells_which_token_answers(tokenizer):
    encoder = VectorEncoder(tokenizer.tokenizer).train()
    matches = explain_match(encoder, tokenizer, "red dog", "cat crimson fish dog dog")
    assert matches == [
        TokenMatch("red", "crimson", pytest.approx(0.6)),
        TokenMatch("dog", "dog", 1.0),
    ]
    assert encoder.training
    assert explain_match(encoder, tokenizer, "red", "") == []
    assert explain_match(encoder, tokenizer, "", "red") == []
    result = evaluate(tokenizer, vector_dtype="float32")
    total = sum(
        match.similarity
        for match in explain_match(encoder, tokenizer, "red dog", "crimson dog dog")
    )
    assert dict(dict(result.run.rankings())["own"])["d1"] == pytest.approx(total)


def test_match_of_sparse_vectors_tells_the_terms_that_add_up(tokenizer):
    matches = explain_match(LexicalEncoder(), tokenizer, "crimson dog", "dog red red cat")
    assert sorted(matches) == [("crimson", 0.5), ("dog", 1.0), ("red", 0.5)]
    assert explain_match(LexicalEncoder(), tokenizer, "crimson dog", "dog red", k=1) == [
        ("dog", 1.0)
    ]
    assert explain_match(LexicalEncoder(), tokenizer, "cat", "fish") == []


def test_explanations_of_what_an_encoder_does_not_give(tokenizer):
    encoder = VectorEncoder(tokenizer.tokenizer)
    with pytest.raises(ValueError, match="VectorEncoder gives no sparse vectors"):
        explain(encoder, tokenizer, "red")

    class Pooled(VectorEncoder):
        def encode(self, tokens, side):
            vectors = super().encode(tokens, side).tokens
            return Representations(None, vectors._replace(values=vectors.values[:1]))

    with pytest.raises(ValueError, match="Pooled makes 1 vectors of the 3 tokens of a query"):
        explain_match(Pooled(tokenizer.tokenizer), tokenizer, "red", "red")
