"""What a loss asks of the data is refused before the first step, or said."""

from collections.abc import Callable

import pytest

from sparton.cli.errors import explain
from sparton.datasets.demands import check, without_negatives, without_scores
from sparton.datasets.holdout import hold_out
from sparton.datasets.lookup import Source
from sparton.datasets.mixture import Mixture, text_mixture
from sparton.datasets.sources import text_records
from tests.datasets.numbered import Numbers

Write = Callable[..., str]


@pytest.fixture
def sources(write_jsonl: Write) -> dict[str, Source]:
    """One with negatives, one in which some records have none, one without any."""
    records = {
        "all": [["q", "p", "n"]] * 3,
        "some": [["q", "p", "n"], ["q", "p"], ["q", "r"]],
        "none": [["q", "p"]] * 4,
    }
    return {
        name: text_records(write_jsonl(lines, f"{name}.jsonl")) for name, lines in records.items()
    }


def test_queries_without_negatives_are_said(
    sources: dict[str, Source], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    data = Mixture({**sources, "user": Numbers("user", 5), "other": Numbers("other", 5, 3)})
    assert without_negatives(data, 0) == {}
    assert without_negatives(data, 3) == {"some": 2, "none": 4, "user": 5}
    check(data, 3)
    assert "batch alone: 2 of 3 of some, 4 of 4 of none, 5 of 5 of user" in caplog.text


def test_scores_of_pairs_that_no_loss_reads_are_said(
    write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [{"query": "q", "positive": "p", "score": score} for score in (0, 1)]
    data = Mixture({"sts": text_records(write_jsonl(pairs))})
    check(data, 0, needs_teacher=True)
    scored = {"query": "q", "positive": "p", "negatives": ["n"], "scores": [1, 0]}
    check(Mixture({"listed": text_records(write_jsonl([scored], "listed.jsonl"))}), 1)
    assert "the loss reads none" not in caplog.text
    check(data, 0)
    assert "source sts has a score beside every pair, and the loss reads none" in caplog.text


def test_a_loss_that_compares_with_negatives_needs_them_in_every_record(
    sources: dict[str, Source], write_jsonl: Write
) -> None:
    check(Mixture({"all": sources["all"]}), 1, needs_negatives=True)
    for name, message in (
        ("some", r"2 of the 3 records of source some .*some\.jsonl, line 2: .*'required' .*'skip'"),
        ("none", "none of the 4 examples of source none has any: leave this source out, mine some"),
    ):
        both = Mixture({"all": sources["all"], name: sources[name]})
        for demand in ("needs_negatives", "needs_teacher"):
            with pytest.raises(ValueError, match=message):
                check(both, 1, **{demand: True})
    unused = text_records(write_jsonl([["q", "p", "n"]]), negatives="none")
    with pytest.raises(ValueError, match=r"source a leaves its own unused \(negatives='none'\)"):
        check(Mixture({"a": unused}), 1, needs_negatives=True)
    with pytest.raises(ValueError, match="none of the 5 examples of source user has any"):
        check(Mixture({"user": Numbers("user", 5)}), 1, needs_negatives=True)


@pytest.mark.parametrize("scores", [[1.0, 0.99], [1.0, 0.5]])
def test_a_share_that_may_have_left_all_negatives_out_is_named(
    scores: list[float], write_jsonl: Write
) -> None:
    record = {"query": "q", "pos": ["p"], "neg": ["n"], "scores": scores}
    near = [{"query": "q", "pos": ["p"], "neg": ["n"], "scores": [1.0, 0.99]}]
    of_all = text_records(write_jsonl(near), teachers={"share": 0.9})
    some = text_records(write_jsonl([record, *near], "s.jsonl"), teachers={"share": 0.9})
    for source, demand in ((of_all, False), (of_all, True), (some, True)):
        with pytest.raises(ValueError, match="may have left them out, and a larger one") as caught:
            check(Mixture({"a": source}), 1, needs_negatives=demand)
        assert "; data.teachers.share=0.9 may have" in explain(caught.value)
    with pytest.raises(ValueError, match=r"line 1: no negatives that teachers\.share leaves"):
        text_records(write_jsonl(near), teachers={"share": 0.9}, negatives="required")
    without = text_records(write_jsonl([["q", "p"]], "p.jsonl"))
    with pytest.raises(ValueError, match="no source has negatives") as caught:
        check(Mixture({"a": without}), 1)
    assert "share" not in str(caught.value)


def test_negatives_that_no_source_has_are_refused(sources: dict[str, Source]) -> None:
    with pytest.raises(ValueError, match="num_negatives=2, but no source has negatives of its own"):
        check(Mixture({"a": sources["none"], "b": Numbers("b", 5)}), 2)
    check(Mixture({"a": sources["none"]}), 0)


def test_negatives_of_a_rest_are_those_of_the_whole(write_jsonl: Write) -> None:
    held = hold_out(text_mixture(write_jsonl([[f"q{n}", "p"] for n in range(9)])))
    with pytest.raises(ValueError, match="no source has negatives of its own"):
        check(held.rest, 1)


def test_a_source_of_a_user_gives_as_many_as_are_asked_for_or_none() -> None:
    data = Mixture({"a": Numbers("a", 5, 2), "b": Numbers("b", 5, 1)})
    with pytest.raises(ValueError, match="'b' does not give num_negatives=2, but 1"):
        check(data, 2)
    check(data, 1)


def test_a_loss_that_follows_a_teacher_needs_scores_of_all_sources() -> None:
    bare = Mixture({"a": Numbers("a", 5), "b": Numbers("b", 5, scored=True)})
    assert without_scores(bare) == ["a"]
    check(bare, 0)
    with pytest.raises(ValueError, match="loss follows a teacher, but a gives no teacher scores"):
        check(bare, 0, needs_teacher=True)
    check(Mixture({"b": bare.sources["b"]}), 0, needs_teacher=True)


def test_scores_of_one_teacher_and_means_of_several_are_not_mixed(write_jsonl: Write) -> None:
    def source(name: str, *scores: object) -> Source:
        record = {"query": "q", "documents": ["p", "n"], "scores": scores}
        return text_records(write_jsonl([record], f"{name}.jsonl"))

    raw, other, scaled = source("a", 9, -3), source("b", [8], [1]), source("c", [9, 1], [2, 0])
    check(Mixture({"a": raw, "b": other}), 1, needs_teacher=True)
    mixed = Mixture({"a": raw, "c": scaled})
    check(mixed, 1)
    with pytest.raises(ValueError, match="source a has raw scores of one where source c has mean"):
        check(mixed, 1, needs_teacher=True)
