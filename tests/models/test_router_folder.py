"""Router folders against sentence-transformers, both ways, and folders that must be refused."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.asymmetric import AsymmetricEncoder, separate_queries, static_queries
from sparton.models.backbone import Backbone
from sparton.models.backbones import tiny
from sparton.models.folders import encoder_lengths, load_encoder, save_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.types import Markup, Side
from tests.models.malformed import edit

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt quick hens", ""]
SIDES: tuple[Side, Side] = ("query", "document")
QUERY_LENGTH, DOCUMENT_LENGTH = 7, 12
STATIC, POOLING = "query_0_SparseStaticEmbedding", "document_1_SpladePooling"


def make_splade(seed: int = 0, layers: int = 1, head=None) -> SpladeEncoder:
    backbone = tiny(TEXTS, hidden_size=16, layers=layers, seed=seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        bias = backbone.decoder.bias
        bias.add_(2 * torch.rand(bias.shape, generator=generator))
    return SpladeEncoder(backbone, head or EagerHead()).eval()


def make_static(seed: int = 0) -> AsymmetricEncoder:
    encoder = static_queries(make_splade(), frozen=False)
    weights = torch.randn(encoder.vocabulary_size, generator=torch.Generator().manual_seed(seed))
    encoder.query.weights.data[5:] = weights[5:]  # about half of them count as 0
    return encoder.eval()


def make_separate() -> AsymmetricEncoder:
    query = make_splade(seed=3, head=EagerHead("sum"))
    return separate_queries(make_splade(layers=2), query.backbone, query.head).eval()


@torch.no_grad()
def encode(encoder: AsymmetricEncoder) -> list[Tensor]:
    lengths = QUERY_LENGTH, DOCUMENT_LENGTH
    own = PackedTokenizer(encoder.tokenizer, *lengths, query_tokenizer=encoder.query_tokenizer)
    batches = own.queries(TEXTS), own.documents(TEXTS)
    encoder.eval()
    return [encoder.encode(batch, side).sparse for batch, side in zip(batches, SIDES, strict=True)]


def encode_elsewhere(path: Path) -> list[Tensor]:
    model = sentence_transformers.SparseEncoder(str(path), device="cpu")
    options = {"convert_to_sparse_tensor": False, "convert_to_tensor": True}
    return [model.encode_query(TEXTS, **options), model.encode_document(TEXTS, **options)]


def save(encoder: AsymmetricEncoder, path: Path) -> Path:
    save_encoder(encoder, path, query_length=QUERY_LENGTH, document_length=DOCUMENT_LENGTH)
    return path


@pytest.fixture(params=[make_static, make_separate])
def encoder(request: pytest.FixtureRequest) -> AsymmetricEncoder:
    return request.param()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(make_static(), tmp_path / "model")


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_round_trip_is_exact(encoder, tmp_path):
    expected = encode(encoder)
    again = load_encoder(save(encoder, tmp_path / "model"), EagerHead())
    assert isinstance(again, AsymmetricEncoder)
    assert type(again.query) is type(encoder.query)
    assert torch.equal(encode(again)[1], expected[1])
    assert_close(encode(again), expected)
    assert not torch.allclose(expected[0], encode(make_static(seed=9))[0])
    assert encoder_lengths(tmp_path / "model") == (QUERY_LENGTH, DOCUMENT_LENGTH)


def test_sentence_transformers_loads_the_folder_with_equal_representations(encoder, tmp_path):
    expected = encode(encoder)
    path = save(encoder, tmp_path / "model")
    assert_close(encode_elsewhere(path), expected)
    with pytest.raises(AssertionError):
        assert_close(encode_elsewhere(path), expected[::-1])
    model = sentence_transformers.SparseEncoder(str(path), device="cpu")
    assert model.similarity_fn_name == "dot"
    scores = model.similarity(*(each.to_sparse() for each in encode_elsewhere(path)))
    torch.testing.assert_close(scores.to_dense(), expected[0] @ expected[1].T)


def test_a_folder_written_by_sentence_transformers_loads(encoder, tmp_path):
    expected = encode(encoder)
    path = save(encoder, tmp_path / "model")
    sentence_transformers.SparseEncoder(str(path), device="cpu").save(str(tmp_path / "newer"))
    config = json.loads((tmp_path / "newer/router_config.json").read_text())
    assert "document_0_MLMTransformer" in config["types"]  # not the layout of this project
    assert_close(encode(load_encoder(tmp_path / "newer")), expected)
    assert encoder_lengths(tmp_path / "newer") == (QUERY_LENGTH, DOCUMENT_LENGTH)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_composed_in_sentence_transformers_loads(saved, tmp_path, frozen):
    from sentence_transformers.sparse_encoder.modules import (
        Router,
        SparseStaticEmbedding,
        SpladePooling,
        Transformer,
    )

    transformer = Transformer(str(saved), transformer_task="fill-mask", max_seq_length=12)
    query = SparseStaticEmbedding(transformer.tokenizer, frozen=frozen)
    pooling = SpladePooling("max", "log1p_relu")
    router = Router.for_query_document([query], [transformer, pooling])
    sentence_transformers.SparseEncoder(modules=[router]).save(str(tmp_path / "theirs"))
    again = load_encoder(tmp_path / "theirs")
    assert again.query.frozen == frozen
    assert again.document.head.activation == "log1p_relu"
    assert_close(encode(again)[1:], encode_elsewhere(tmp_path / "theirs")[1:])
    queries = PackedTokenizer(again.tokenizer, 40, 40).queries(TEXTS)
    assert_close([again.query(queries)], encode_elsewhere(tmp_path / "theirs")[:1])
    assert encoder_lengths(tmp_path / "theirs") == (12, 12)


def test_the_layout_of_opensearch_loads(saved):
    """As published: no dimension, nothing of this project, a tokenizer of 512 tokens."""
    expected = encode(make_static())
    (saved / "sparton.json").unlink()
    edit(saved / "document_1_SpladePooling/config.json", word_embedding_dimension=None)
    edit(saved / STATIC / "config.json", frozen=True)
    edit(saved / STATIC / "tokenizer_config.json", model_max_length=512)
    again = load_encoder(saved)
    assert again.query.frozen
    assert_close(encode(again), expected)
    assert encoder_lengths(saved) == (DOCUMENT_LENGTH, DOCUMENT_LENGTH)


def test_weights_from_a_json_file(saved):
    """The other form that sentence-transformers reads; tokens that it does not name have 0."""
    (saved / "idf.json").write_text(json.dumps({"quick": 1.5, "lazy": 0.25}))
    (saved / STATIC / "model.safetensors").unlink()
    edit(saved / STATIC / "config.json", path=str(saved / "idf.json"))
    again = load_encoder(saved)
    assert_close(encode(again), encode_elsewhere(saved))
    assert sorted(again.query.weights[again.query.weights > 0].tolist()) == [0.25, 1.5]


def test_prompts_travel_both_ways(tmp_path):
    encoder = make_separate()
    encoder.markup = Markup(query_prompt="a quick ", document_prompt="lazy dog ")
    path = tmp_path / "model"
    save_encoder(encoder, path, query_length=QUERY_LENGTH, document_length=DOCUMENT_LENGTH)
    again = load_encoder(path)
    assert again.markup == encoder.markup
    prompted = PackedTokenizer(
        again.tokenizer, QUERY_LENGTH, DOCUMENT_LENGTH, markup=again.markup
    ).queries(["fox"])
    ours = again.eval().encode(prompted, "query").sparse
    model = sentence_transformers.SparseEncoder(str(path), device="cpu")
    options = {"convert_to_sparse_tensor": False, "convert_to_tensor": True}
    theirs = model.encode_query(["fox"], **options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    bare = model.encode_query(["fox"], prompt="", **options)
    assert not torch.allclose(ours, bare, rtol=0, atol=2e-4)


def test_the_document_model_is_a_stock_checkpoint(saved):
    stock = AutoModelForMaskedLM.from_pretrained(saved)
    decoder = make_static().document.backbone.decoder
    assert torch.equal(stock.get_output_embeddings().weight, decoder.weight)


def test_a_padded_vocabulary_travels_both_ways(build_mlm, tokenizer, tmp_path):
    """sentence-transformers sizes static weights by the tokenizer: theirs is filled up to V."""
    short = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, model_max_length=32, unk_token="[UNK]",
        pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    mlm = build_mlm("bert")
    mlm.resize_token_embeddings(64)
    encoder = static_queries(SpladeEncoder(Backbone(mlm, short), SpartonHead())).eval()
    assert len(short) == 60 and encoder.vocabulary_size == 64
    path = save(encoder, tmp_path / "model")
    texts = ["w5 w6 w7 w6", "w59", "[padding", ""]
    model = sentence_transformers.SparseEncoder(str(path), device="cpu")
    theirs = model.encode_query(texts, convert_to_sparse_tensor=False, convert_to_tensor=True)
    ours = encoder.query(PackedTokenizer(short, 16, 16).queries(texts))
    assert torch.equal(theirs, ours) and ours.shape == (4, 64) and not ours[:, 60:].any()
    documents = model.encode_document(texts)
    assert model.similarity(theirs.to_sparse(), documents).shape == (4, 4)
    again = load_encoder(path)
    assert torch.equal(again.query.weights, encoder.query.weights)
    assert len(short) == 60, "saving changed the tokenizer"
    save(again, tmp_path / "again")
    assert torch.equal(load_encoder(tmp_path / "again").query.weights, encoder.query.weights)


def test_negative_weights_of_a_folder_count_as_zero_and_are_reported(saved, caplog):
    file = saved / STATIC / "model.safetensors"
    weights = load_file(file)["weight"]
    save_file({"weight": weights - 0.1}, file)
    with caplog.at_level(logging.WARNING):
        again = load_encoder(saved)
    assert f"of {len(weights)} weights are below zero" in caplog.text
    assert (encode(again)[0] >= 0).all()


def test_equal_routes_are_a_symmetric_encoder(tmp_path):
    path = save(make_separate(), tmp_path / "model")
    config = json.loads((path / "router_config.json").read_text())
    structure = dict.fromkeys(("query", "document"), config["structure"]["document"])
    edit(path / "router_config.json", structure=structure)
    again = load_encoder(path)
    assert isinstance(again, SpladeEncoder) and len(again.backbone.model.bert.encoder.layer) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"structure": {"query": []}}, "has the routes query, types and the mappings none"),
        ({"parameters": {"route_mappings": {"('query', None)": "document"}}}, "mappings {"),
        (
            {"structure": {"query": [STATIC], "document": [STATIC]}},
            "route document, composes SparseStaticEmbedding; a SPLADE",
        ),
        (
            {"structure": {"query": [POOLING], "document": ["", POOLING]}},
            "route query, composes SpladePooling; a SPLADE",
        ),
    ],
)
def test_routes_of_another_kind_are_refused(saved, changes, message):
    edit(saved / "router_config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_encoder(saved)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("router_config.json", "router_config.json is missing"),
        (f"{STATIC}/config.json", f"{STATIC}/config.json is missing"),
        (f"{STATIC}/model.safetensors", f"{STATIC} has no model.safetensors"),
        (f"{STATIC}/tokenizer.json", "no tokenizer in"),
        ("document_1_SpladePooling/config.json", "config.json is missing"),
    ],
)
def test_missing_files_are_named(saved, file, message):
    (saved / file).unlink()
    with pytest.raises(OSError, match=message):
        load_encoder(saved)


def test_damaged_or_unfitting_weights_are_named(saved):
    file = saved / STATIC / "model.safetensors"
    save_file({"weight": torch.ones(99)}, file)
    with pytest.raises(ValueError, match=r"each of the documents' \d+ .* holds {'weight': \(99,\)"):
        load_encoder(saved)
    save_file({"embedding": torch.ones(5)}, file)
    with pytest.raises(ValueError, match=r"as 'weight', but holds {'embedding'"):
        load_encoder(saved)
    os.truncate(file, 20)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_encoder(saved)


def test_a_head_that_differs_from_the_folder_is_refused(saved):
    with pytest.raises(ValueError, match=r"pooling='sum' \(the folder: 'max'\)"):
        load_encoder(saved, EagerHead("sum"))
