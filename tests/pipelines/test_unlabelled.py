"""Pairs made of texts alone."""

import json
import math
import random
from collections import Counter

import pytest

from sparton.pipelines import unlabelled
from sparton.pipelines.unlabelled import pair_texts

FOX = "The quick brown fox jumps over the lazy dog, and nobody has seen it since that day."
LONG = [" ".join(f"{word}{text}" for word in "abcdefghijklmnopqrst") for text in range(400)]


def made(texts, tmp_path, **options):
    output = tmp_path / "pairs.jsonl"
    counts = pair_texts(texts, output, progress=False, **options)
    pairs = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return counts, [(pair["query"], pair["positive"]) for pair in pairs]


def test_a_span_is_cut_out_of_its_text(tmp_path):
    counts, pairs = made(iter(LONG), tmp_path, by=["spans"])
    assert counts == {"spans": 400, "too_short": 0}
    kept = Counter()
    for text, (query, positive) in zip(LONG, pairs, strict=True):
        words = query.split()
        assert 4 <= len(words) <= 10, "half of 20 words at most"
        assert query in text
        before, after = (part.strip() for part in text.split(query))
        kept[positive == text] += 1
        assert positive in (text, f"{before} {after}".strip())
    assert 15 <= kept[True] <= 75, "one in ten keeps its words"
    assert len({len(query.split()) for query, _ in pairs}) == 7
    assert len({query[0] for query, _ in pairs}) > 10, "spans begin anywhere"


def test_keywords_are_the_rarest_words_as_they_are_written(tmp_path, monkeypatch):
    """By hand: of three texts, words of one have an idf of log(1 + 2.5 / 1.5), of two log(1.6)."""
    monkeypatch.setattr(unlabelled, "KEYWORDS", (3, 3))
    monkeypatch.setattr(unlabelled, "RAREST", 3)
    texts = [
        "The Foxes, a fox and (red) hens met foxes in spring.",
        "Hens and spring rain met.",
        "Red rain.",
    ]
    one, two = math.log(1 + 2.5 / 1.5), math.log(1 + 1.5 / 2.5)
    # fox three times: one * 3 / 4; red, hen, met and spring, of two texts: two / 2.
    assert one * 3 / 4 > two / 2
    counts, pairs = made(texts, tmp_path, by=["keywords"])
    assert counts == {"keywords": 2, "too_short": 1}
    assert pairs[0] == ("Foxes red hens", texts[0])
    assert pairs[1][0].split() == ["Hens", "spring", "rain"]


def test_a_word_of_several_terms_comes_once(tmp_path):
    counts, pairs = made(["alpha-beta gamma", "delta epsilon"], tmp_path, by=["keywords"])
    assert counts["keywords"] == 2
    assert {*pairs[0][0].split()} <= {"alpha-beta", "gamma"}
    assert len(pairs[0][0].split()) <= 2


def test_the_same_seed_makes_the_same_pairs(tmp_path):
    runs = [made(LONG[:20], tmp_path, per_text=3, seed=seed)[1] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len(runs[0]) == 20 * 3 * 2
    # What a text gives does not depend on what others drew.
    alone = made(LONG[:1], tmp_path, by=["spans"], per_text=3, seed=1)[1]
    assert alone == runs[0][:3]
    assert random.Random("1 0").random() != random.Random("1 1").random()


def test_short_texts_are_counted(tmp_path):
    counts, pairs = made([FOX, "", "two words", "word"], tmp_path)
    assert counts == {"spans": 1, "keywords": 2, "too_short": 2}
    assert pairs[-1] == ("two words", "two words")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([FOX], {"by": ["questions"]}, r"by=\['questions'\]: choose from spans, keywords"),
        ([FOX], {"by": []}, "choose from"),
        ([FOX], {"per_text": 0}, "per_text"),
        (iter([FOX]), {}, "twice: give a list"),
        (["", "word"], {}, "no text is long enough: spans need 8 words"),
    ],
)
def test_what_makes_no_pairs_is_refused(texts, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        made(texts, tmp_path, **options)
    assert not list(tmp_path.iterdir()), "nothing half-written stays"
