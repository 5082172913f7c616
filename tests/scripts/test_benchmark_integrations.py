"""The script that measures the drop-ins, in miniature."""

import argparse

import pytest

import benchmark_integrations as script

pytest.importorskip("sentence_transformers", minversion="6.0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "bert"
    script.write_model(folder, small=True)
    return folder


def test_variants_differ_in_what_is_fused(folder):
    found = {}
    for variant in script.VARIANTS:
        model, loss, *_ = script.build(variant, folder)
        function = getattr(loss, "similarity_fct", None)
        scores = getattr(function, "func", function)
        found[variant] = ("forward" in vars(model[0]), getattr(scores, "__module__", "")[:7])
    theirs = "sentenc"
    assert found == {
        "splade plain": (False, ""),
        "splade fused": (True, ""),
        "colbert plain": (False, theirs),
        "colbert scores": (False, "sparton"),
        "colbert fused": (True, "sparton"),
        "colbert bf16": (True, "sparton"),
    }


def test_a_record_of_a_training(folder):
    options = argparse.Namespace(batch=4, windows=2, small=True)
    record = script.measure("splade fused", folder, options)
    low, high = record["slowest_and_fastest"]
    assert 0 < low <= record["pairs_per_second"] <= high
    assert 0 < record["loss"] < 10


def test_texts_have_the_lengths_of_the_training_benchmark():
    data = script.pairs("splade", 200, 400)
    for column, (low, high) in zip(("query", "positive"), script.LENGTHS["splade"], strict=True):
        lengths = [len(text.split()) + script.AROUND for text in data[column]]
        assert min(lengths) >= low and max(lengths) <= high
        assert max(lengths) - min(lengths) > (high - low) / 2
