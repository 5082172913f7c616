"""Mining with models as miners and teachers, and training on what was mined."""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from sparton.arguments import ArgumentError
from sparton.cli.training import run_training
from sparton.datasets.texts import TextList
from sparton.models.backbones import tiny
from sparton.models.dense import DenseEncoder
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.pooling import Pooling
from sparton.models.splade import SpladeEncoder
from sparton.pipelines.mining import BM25Miner, CrossEncoder, Rule, TrainedModel, miners, parts
from sparton.pipelines.mining.mining import Mining
from sparton.pipelines.mining.pairs import HeldDocuments, Pairs, Similarities
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.bm25 import BM25
from sparton.training.distributed import World
from sparton.types import TokenBatch
from tests.composing import composed
from tests.pipelines.mining_problems import (
    WORDS,
    bm25_scores,
    check_hardest,
    generate,
    mine,
    mine_after_a_failure,
)

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path) -> Path:
    torch.manual_seed(0)
    texts = [example["positive"] for example in generate()]
    encoder = SpladeEncoder(tiny(texts, hidden_size=32, layers=1, max_length=32), EagerHead())
    save_encoder(encoder, tmp_path / "model", query_length=16, document_length=32)
    return tmp_path / "model"


def model_scores(model: Path, queries: list[str], documents: list[str]) -> torch.Tensor:
    encoder = load_encoder(model, EagerHead()).eval()

    def encode(texts: list[str], length: int) -> torch.Tensor:
        ids = encoder.tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        return encoder(TokenBatch.from_lists(ids))

    with torch.no_grad():
        return encode(queries, 16) @ encode(documents, 32).T


def test_a_model_mines_what_its_scores_say_and_keeps_what_it_encoded(
    pairs, model, tmp_path, monkeypatch
):
    documents = [example["positive"] for example in generate()]
    queries = [example["query"] for example in generate()]
    records = mine_after_a_failure(pairs, model, tmp_path / "out.jsonl", monkeypatch)
    check_hardest(records, documents, model_scores(model, queries, documents), 1e-4)


def test_a_model_as_teacher_writes_its_scores(pairs, model, tmp_path):
    settings = {"teachers": [TrainedModel(model)], "rule": Rule(2)}
    records = mine(pairs, tmp_path / "out.jsonl", **settings)
    for record in records[:5]:
        expected = model_scores(model, [record["query"]], [*record["pos"], *record["neg"]])
        found = torch.tensor([record["pos_scores"] + record["neg_scores"]])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def cross_encoder(tmp_path) -> Path:
    """Random weights, with the same words as the collection; a sigmoid unless told otherwise."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    tokenizer = tiny(WORDS, hidden_size=16, layers=1, max_length=64).tokenizer
    settings = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, num_labels=1, initializer_range=2.0,
    )  # fmt: skip
    BertForSequenceClassification(settings).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_a_cross_encoder_scores_and_sets_the_margin(pairs, cross_encoder, tmp_path):
    import sentence_transformers

    settings = {"teachers": [CrossEncoder(cross_encoder)], "rule": Rule(3, depth=30)}
    limited = mine(
        pairs, tmp_path / "limited.jsonl", **settings | {"rule": Rule(3, depth=30, margin=0.5)}
    )
    free = mine(pairs, tmp_path / "free.jsonl", **settings)
    for record in limited:
        assert len(record["neg_scores"]) == len(record["neg"])
        assert all(score < record["pos_scores"][0] - 0.5 for score in record["neg_scores"])
    assert any(max(each["neg_scores"]) > each["pos_scores"][0] - 0.5 for each in free)
    teacher = sentence_transformers.CrossEncoder(str(cross_encoder), device="cpu")
    record = free[0]
    logits = teacher.predict(
        [(record["query"], text) for text in [*record["pos"], *record["neg"]]],
        activation_fn=torch.nn.Identity(),
    )
    found = record["pos_scores"] + record["neg_scores"]
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    settings["teachers"] = [CrossEncoder(cross_encoder, activation=True)]
    squashed = mine(pairs, tmp_path / "sigmoid.jsonl", **settings)
    np.testing.assert_allclose(
        squashed[0]["pos_scores"], 1 / (1 + np.exp(-logits[:1])), rtol=1e-4, atol=1e-5
    )


@pytest.fixture
def dense(tmp_path) -> Path:
    torch.manual_seed(2)
    backbone = tiny(WORDS, hidden_size=16, layers=1, max_length=64)
    save_encoder(
        DenseEncoder(backbone, Pooling("mean", True)),
        tmp_path / "dense",
        query_length=16,
        document_length=32,
    )
    return tmp_path / "dense"


def test_teachers_of_four_kinds_score_each_in_its_own_column(
    pairs, model, dense, cross_encoder, tmp_path
):
    import sentence_transformers

    kinds = [CrossEncoder(cross_encoder), BM25Miner(1.2), TrainedModel(dense), TrainedModel(model)]
    settings = {"rule": Rule(3, depth=30, margin=0.5), "short": "pad"}
    records = mine(pairs, tmp_path / "out.jsonl", teachers=kinds, **settings)
    alone = mine(pairs, tmp_path / "alone.jsonl", teachers=kinds[:1], **settings)
    assert [each["neg"] for each in records] == [each["neg"] for each in alone]
    assert [[row[0] for row in each["neg_scores"]] for each in records] == [
        each["neg_scores"] for each in alone
    ]
    collection = [each["positive"] for each in generate()]
    vectors = sentence_transformers.SentenceTransformer(str(dense), device="cpu")
    for record in records[:4]:
        texts = [*record["pos"], *record["neg"]]
        found = np.array(record["pos_scores"] + record["neg_scores"])
        assert found.shape == (4, 4)
        plain = dict(zip(collection, bm25_scores(record["query"], collection, k1=1.2)))
        np.testing.assert_allclose(found[:, 1], [plain[text] for text in texts], rtol=1e-5)
        other = dict(zip(collection, bm25_scores(record["query"], collection)))
        assert not np.allclose(found[:, 1], [other[text] for text in texts], rtol=1e-2)
        cosines = vectors.encode(texts) @ vectors.encode(record["query"])
        np.testing.assert_allclose(found[:, 2], cosines, atol=1e-3)  # vectors are kept in fp16
        assert not np.allclose(found[:, 2], cosines[[1, 0, 2, 3]], atol=1e-3)
        dots = model_scores(model, [record["query"]], texts)[0]
        np.testing.assert_allclose(found[:, 3], dots, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_training_weighs_the_teachers_that_mined_files_keep_apart(pairs, model, dense, tmp_path):
    teachers = [BM25Miner(), TrainedModel(dense)]
    mine(pairs, tmp_path / "mined/out.jsonl", teachers=teachers, rule=Rule(3), short="drop")
    overrides = "loss=kl_divergence", f"data.root={tmp_path / 'mined'}"
    losses = [
        one_step(tmp_path / f"{row}", *overrides, *more)
        for row, more in enumerate(
            ([], ["data.teachers.weights=[1,1]"], ["data.teachers.weights=[1,0]"],
             ["data.teachers.scaling=z_score"])
        )
    ]  # fmt: skip
    assert losses[0] == losses[1] and len({*losses}) == 3


def test_without_sentence_transformers_the_remedy_is_named(pairs, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "sentence_transformers", None)
        with pytest.raises(ValueError, match="pip install 'sentence-transformers"):
            mine(pairs, tmp_path / "out.jsonl", teachers=[CrossEncoder("some/teacher")])
    assert mine(pairs, tmp_path / "out.jsonl")  # no work, no bond


@pytest.mark.quick(1)
@pytest.mark.parametrize("loss", ["infonce", "margin_mse", "kl_divergence"])
def test_training_reads_what_was_mined(pairs, cross_encoder, tmp_path, loss):
    teachers = [] if loss == "infonce" else [CrossEncoder(cross_encoder)]
    mine(pairs, tmp_path / "mined/out.jsonl", teachers=teachers, rule=Rule(3))
    losses = [one_step(tmp_path / loss, f"loss={loss}", f"data.root={tmp_path / 'mined'}")]
    assert math.isfinite(losses[0])
    assert losses[0] > 0


def one_step(folder: Path, *overrides: str) -> float:
    folder.mkdir()
    miniature = ["experiment=quickstart", "debug=tiny", "backbone.hidden_size=32", "steps=1"]
    data = ["data=distillation", "num_negatives=3", "evaluation=none", "unique_positives=false"]
    cfg = composed(*miniature, *data, *overrides)
    run_training(cfg, World(0, 1, torch.device("cpu")), folder)
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]


def test_a_model_without_a_trained_classifier_is_no_teacher(pairs, model, tmp_path):
    output = tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=r"BertForMaskedLM.*TrainedModel"):
        mine(pairs, output, teachers=[CrossEncoder(model)])
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no cross-encoder that sentence-transformers can load"):
        mine(pairs, output, teachers=[CrossEncoder(tmp_path / "none")])


def test_a_loaded_model_mines_and_teaches_as_its_folder_does(pairs, model, tmp_path):
    loaded = load_encoder(model, EagerHead())
    records = []
    for number, source in enumerate((model, loaded, loaded)):
        asked = TrainedModel(source, query_length=16, document_length=32 if number < 2 else 4)
        output = tmp_path / f"{number}.jsonl"
        records.append(mine(pairs, output, miners=[asked], teachers=[asked], rule=Rule(3)))
    assert records[0] == records[1] != records[2]


def test_a_model_that_cuts_many_queries_says_so_once(pairs, model, tmp_path, caplog):
    whole, cut = TrainedModel(model), TrainedModel(model, query_length=6)  # four words and two
    own = TrainedModel(load_encoder(model, EagerHead()), 6, 32)  # as of a training
    told = f"{model}: 100 % of the queries have query_length=6 tokens or more"
    for number, (miner, teacher, times) in enumerate(
        ((cut, cut, 1), (whole, cut, 1), (own, own, 0))
    ):
        caplog.clear()
        mine(pairs, tmp_path / f"{number}.jsonl", miners=[miner], teachers=[teacher], rule=Rule(1))
        said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert [each.startswith(told) for each in said] == [True] * times


def test_a_teacher_encodes_each_document_of_a_collection_once(pairs, model, tmp_path, monkeypatch):
    """Whose scores are those of the documents encoded for each pair."""
    encoded: Counter[str] = Counter()
    encode = miners.encode_texts

    def counted(encoder, tokenizer, texts, side, **options):
        encoded.update(texts if side == "document" else ())
        return encode(encoder, tokenizer, texts, side, **options)

    monkeypatch.setattr(miners, "encode_texts", counted)
    monkeypatch.setattr(miners, "SLAB", 7)
    monkeypatch.setattr(parts, "PART", 5)
    settings = {"teachers": [TrainedModel(model)], "rule": Rule(2)}
    records = mine(pairs, tmp_path / "held.jsonl", **settings)
    assert set(encoded.values()) == {1}
    monkeypatch.setattr(miners.Setup, "pairs", 0)
    others = mine(pairs, tmp_path / "apart.jsonl", **settings)
    assert max(encoded.values()) > 2
    for record, other in zip(records, others, strict=True):
        assert record["neg"] == other["neg"]
        assert record["neg_scores"] == pytest.approx(other["neg_scores"], rel=1e-5)
        assert record["neg_scores"] != pytest.approx(other["neg_scores"][::-1], rel=1e-5)


@pytest.mark.parametrize("taught", [True, False])
def test_several_miners_make_the_examples_that_each_makes_alone(
    pairs, model, tmp_path, monkeypatch, taught
):
    """Those of an example one after the other; the model reads every text once for all."""
    encoded: Counter[tuple[str, str]] = Counter()
    encode = miners.encode_texts

    def counted(encoder, tokenizer, texts, side, **options):
        encoded.update((side, text) for text in texts)
        return encode(encoder, tokenizer, texts, side, **options)

    monkeypatch.setattr(miners, "encode_texts", counted)
    monkeypatch.setattr(parts, "PART", 20)
    asked = [BM25Miner(), TrainedModel(model)]
    teachers = asked[::-1] if taught else []
    settings = {"teachers": teachers, "rule": Rule(3, depth=30, sample=True, margin=0.1)}
    together = mine(pairs, tmp_path / "both.jsonl", miners=asked, **settings)
    assert len(encoded) == 80 and set(encoded.values()) == {1}
    alone = [mine(pairs, tmp_path / f"{n}.jsonl", miners=[asked[n]], **settings) for n in (0, 1)]
    assert together == [record for each in zip(*alone, strict=True) for record in each]
    assert alone[0] != alone[1]
    with pytest.raises(ArgumentError, match=r"miners=\[\]: name one"):
        mine(pairs, tmp_path / "none.jsonl", miners=[], **settings)


@pytest.mark.parametrize("failing", [None, 2, 4])
def test_a_miner_that_is_a_teacher_too_encodes_everything_once(
    pairs, model, tmp_path, monkeypatch, failing
):
    """Interrupted in the third slab, or in the second part, or not at all; what is written is what
    a miner and a teacher write that encode apart."""
    encoded: Counter[tuple[str, str]] = Counter()
    calls: list[int] = []
    encode = miners.encode_texts

    def counted(encoder, tokenizer, texts, side, **options):
        calls.append(len(texts))
        if len(calls) - 1 == failing:
            raise KeyboardInterrupt
        encoded.update((side, text) for text in texts)
        return encode(encoder, tokenizer, texts, side, **options)

    monkeypatch.setattr(miners, "encode_texts", counted)
    monkeypatch.setattr(miners, "SLAB", 16)
    monkeypatch.setattr(parts, "PART", 20)
    both = TrainedModel(model)
    settings = {"teachers": [both], "rule": Rule(3, depth=30, sample=True, share=0.9)}
    if failing is not None:
        with pytest.raises(KeyboardInterrupt):
            mine(pairs, tmp_path / "one.jsonl", miners=[both], **settings)
        assert len(calls) == failing + 1
    mine(pairs, tmp_path / "one.jsonl", miners=[both], **settings)
    assert len(encoded) == 80 and set(encoded.values()) == {1}
    alike = TrainedModel(model, query_length=16)  # as it was trained
    failing = None
    mine(pairs, tmp_path / "two.jsonl", miners=[alike], **settings)
    assert set(encoded.values()) == {3}
    one, two = ((tmp_path / f"{name}.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two
    mine(pairs, tmp_path / "other.jsonl", miners=[TrainedModel(model, query_length=3)], **settings)
    assert (tmp_path / "other.jsonl").read_bytes() != one


def test_what_one_teacher_encoded_is_not_taken_for_anothers(
    pairs, model, dense, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(Mining, "part", lambda self, *ends: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mine(pairs, tmp_path / "out.jsonl", teachers=[TrainedModel(dense)])
    with pytest.raises(ValueError, match="teacher_1_model"):
        mine(pairs, tmp_path / "out.jsonl", teachers=[TrainedModel(model)])
    assert mine(pairs, tmp_path / "out.jsonl", teachers=[TrainedModel(dense)])


def test_a_part_encodes_a_query_once_and_bm25_is_fitted_once(pairs, model, tmp_path, monkeypatch):
    encoded: Counter[str] = Counter()
    counted_terms: Counter[str] = Counter()
    fitted: list[BM25] = []
    encode, fit, count = miners.encode_texts, BM25.fit, BM25.queries

    def counted(encoder, tokenizer, texts, side, **options):
        encoded.update(texts if side == "query" else ())
        return encode(encoder, tokenizer, texts, side, **options)

    monkeypatch.setattr(miners, "encode_texts", counted)
    monkeypatch.setattr(BM25, "fit", lambda self, texts: fitted.append(self) or fit(self, texts))
    monkeypatch.setattr(
        BM25, "queries", lambda self, texts: counted_terms.update(texts) or count(self, texts)
    )
    rule = Rule(3, depth=30, sample=True, share=0.9)  # of several rounds
    teachers = [TrainedModel(model), BM25Miner()]
    mine(pairs, tmp_path / "out.jsonl", miners=[BM25Miner()], teachers=teachers, rule=rule)
    counts = json.loads((tmp_path / "out.mined.json").read_text())["counts"]
    assert counts["refused"] > 0, "candidates are scored in more than one round"
    assert set(encoded.values()) == {1} and len(fitted) == 1
    assert set(counted_terms.values()) == {1}
    mine(pairs, tmp_path / "two.jsonl", miners=[BM25Miner(1.2)], teachers=teachers, rule=rule)
    assert len(fitted) == 3 and set(counted_terms.values()) == {3}


def test_held_documents_are_scored_by_row_and_by_text_with_others_among_them():
    def encode(texts):
        return Representations(
            dense=TokenVectors.of_texts(torch.tensor([[float(x)] for x in texts]))
        )

    texts = ["3", "1", "4", "15", "9"]
    slabs = [encode(texts[first : first + 2]) for first in (0, 2, 4)]
    teach = Similarities(encode, encode, CPU, HeldDocuments(TextList(texts), slabs))
    score = teach(["10", "2", "10"])
    asked = ["9", "26", "3", "15", "5", "4", "9"]
    queries = np.array([0, 1, 2, 1, 0, 0, 0])
    products = np.array([10, 2, 10, 2, 10, 10, 10]) * np.array([*map(float, asked)])
    by_text = Pairs(queries, np.full(7, -1), lambda: asked)
    assert score(by_text).tolist() == products.tolist()
    known = [0, 2, 3, 5, 6]
    rows = np.array([4, 0, 3, 2, 4])
    by_row = Pairs(queries[known], rows, lambda: 1 / 0)  # texts that nobody needs
    assert score(by_row).tolist() == products[known].tolist()
    slabs[0] = encode(["-1", "-1"])
    assert score(by_row).tolist() == [90, -10, 30, 40, 90]


def test_what_a_miner_is_refused_for_can_be_mended(pairs, model, tmp_path):
    teacher, output = TrainedModel(model), tmp_path / "mined.jsonl"
    settings = {"output": output, "rule": Rule(3), "teachers": [teacher]}
    with pytest.raises(ValueError, match="is more than the 32 positions of the model"):
        mine(pairs, miners=[TrainedModel(model, query_length=64)], **settings)
    assert mine(pairs, miners=[TrainedModel(model, query_length=24)], **settings)
