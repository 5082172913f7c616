"""Scores of several teachers, combined, against numpy and numbers worked out by hand."""

import numpy as np
import pytest

from sparton.cli.errors import explain
from sparton.datasets.mixture import text_mixture
from sparton.datasets.records import IDS, TEXTS, parse_record
from sparton.datasets.sources import text_records
from sparton.datasets.teachers import Teachers

SCORES = [[9.0, 0.25, 4.0], [5.0, 0.5, 4.0], [1.0, 0.0, 4.0], [3.0, 0.1, 4.0]]


def test_min_max_by_hand():
    combined, count = Teachers([3, 1, 4]).combine(SCORES)
    assert count == 3  # the third finds all equal, and has no say
    assert combined == pytest.approx(
        [3 / 8 + 0.5 / 8, 3 / 8 * 0.5 + 1 / 8, 0, 3 / 8 * 0.25 + 0.2 / 8]
    )
    assert Teachers().combine(SCORES)[0] != pytest.approx(combined)


def test_z_scores_are_those_of_numpy():
    scores = np.array(SCORES)[:, :2]
    expected = (scores - scores.mean(0)) / scores.std(0) @ [0.75, 0.25]
    combined, _ = Teachers([3, 1], "z_score").combine(scores.tolist())
    assert combined == pytest.approx(expected.tolist())
    assert Teachers([3, 1]).combine(scores.tolist())[0] != pytest.approx(expected.tolist())
    sample = (scores - scores.mean(0)) / scores.std(0, ddof=1) @ [0.75, 0.25]
    assert combined != pytest.approx(sample.tolist(), rel=1e-2)


def test_a_lone_teacher_and_a_weight_of_zero():
    assert Teachers(scaling="z_score").combine([[9.0], [5.0]]) == ([9.0, 5.0], 1)
    assert Teachers([1, 0]).combine([[9.0, 0.0], [5.0, 2.0]]) == ([1.0, 0.0], 2)
    assert Teachers([0, 1]).combine([[9.0, 0.0], [5.0, 2.0]]) == ([0.0, 1.0], 2)


@pytest.mark.parametrize(
    "weights", [[1, -1], [0, 0], [float("nan"), 1], [float("inf"), 1], "abc", [1, "x"], 5, []]
)
def test_weights_that_cannot_be_are_refused(weights):
    with pytest.raises(ValueError, match="finite numbers, none negative, and one above 0"):
        Teachers(weights)


@pytest.mark.parametrize(
    ("share", "kept"), [(None, ["a", "b", "c", "d"]), (0.9, ["b", "d"]), (1.0, ["b", "c", "d"])]
)
def test_negatives_at_a_share_of_the_positive_are_left_out(share, kept):
    record = {"query": "q", "pos": ["p", "r"], "neg": ["a", "b", "c", "d"]}
    record |= {"pos_scores": [10.0, 12.0], "neg_scores": [11.0, 8.99, 9.0, -3.0]}
    row = parse_record(record, TEXTS, Teachers(share=share))
    assert row.negatives == kept and row.positives == ["p", "r"]
    by_name = dict(zip("abcd", record["neg_scores"]))
    assert row.scores == [10.0, 12.0, *(by_name[name] for name in kept)]


def test_a_share_of_a_negative_score_lies_below_it():
    record = {"query_id": "q", "document_ids": ["a", "b", "c"], "scores": [-2.0, -2.1, -2.3]}
    row = parse_record(record, IDS, Teachers(share=0.9))
    assert (row.positives, row.negatives, row.scores) == (["a"], ["c"], [-2.0, -2.3])


def test_a_share_needs_scores_and_goes_with_a_lone_teacher(write_jsonl):
    record = {"query": "q", "pos": ["p"], "neg": ["n", "m"], "scores": [4, 3, 1]}
    given = text_records(write_jsonl([record]), teachers={"share": 0.5})
    assert given.example(0, 0, 1).negatives == ("m",)
    record.pop("scores")
    with pytest.raises(ValueError, match=r"line 1: no teacher scores, by which teachers\.share"):
        text_records(write_jsonl([record], "none.jsonl"), teachers={"share": 0.5})
    for share in (1.5, "high"):
        with pytest.raises(ValueError, match="must lie above 0 and not above 1") as caught:
            Teachers(share=share)
        assert explain(caught.value).startswith(f"data.teachers.share={share} must")


def test_other_scales_and_numbers_of_weights_are_refused(write_jsonl):
    with pytest.raises(ValueError, match="scaling='softmax' must be min_max or z_score"):
        Teachers(scaling="softmax")
    record = {"query": "q", "pos": ["p"], "neg": ["n"], "scores": [[1, 0], [0, 2]]}
    with pytest.raises(
        ValueError, match=r"teacher_weights=\[1, 2, 3\] for the scores of 2 teachers"
    ):
        text_records(write_jsonl([record]), teachers={"weights": [1, 2, 3]}, on_error="skip")
    lone = write_jsonl([record | {"scores": [1, 0]}], "lone.jsonl")
    with pytest.raises(
        ValueError, match=r"teachers of source .*lone\.jsonl .* one at most: leave"
    ) as told:
        text_records(lone, teachers=Teachers([1, 2]))
    assert explain(told.value).startswith("data.teachers of source")


def test_weights_can_change_and_choose_another_positive(write_jsonl):
    record = {"query": "q", "documents": ["a", "b"], "scores": [[1, 0], [0, 5]]}
    path = write_jsonl([record])
    for weights, expected in (([2, 1], ("a", 2 / 3, 1 / 3)), ([1, 3], ("b", 0.75, 0.25))):
        data = text_mixture({"mine": path}, teachers={"weights": weights})
        example = data.sources["mine"].example(0, 0, 1)
        assert (example.positive, *example.teacher_scores) == pytest.approx(expected)
    own = {"mine": {"files": path, "teachers": {"weights": [2, 1]}}}
    example = text_mixture(own).sources["mine"].example(0, 0, 1)
    assert example.positive == "a"
