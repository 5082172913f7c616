"""What sentence-transformers' arguments and folders say of reading a model is done here, too."""

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from tokenizers import normalizers
from torch import Tensor
from transformers import BertTokenizer

import sparton
from sparton.arguments import ArgumentError
from sparton.evaluation.models import packed_tokenizer
from sparton.kernels.maxsim import maxsim_reference
from sparton.models.asymmetric import static_queries
from sparton.models.autoencoder import SparseAutoencoder
from sparton.models.backbones import bare, pretrained, tiny
from sparton.models.checkpoint import TRANSFORMER_FILE
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.encoder import Encoder
from sparton.models.folders import find_model, load_encoder, save_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.pooling import Pooling
from sparton.models.repository import Source
from sparton.models.splade import SpladeEncoder
from sparton.models.static import StaticEncoder

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.0")

TEXTS = ["the quick brown FOX jumps over the Lazy dog", "a lazy CAT", "foxes Hunt quick hens"]


def make(kind: str, seed: int = 0) -> Encoder:
    torch.manual_seed(seed)
    backbone = tiny([text.lower() for text in TEXTS], hidden_size=32, layers=1, seed=seed)
    with torch.no_grad():
        backbone.decoder.bias.add_(2 * torch.rand(backbone.decoder.out_features))
        for parameter in backbone.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)
    backbone.tokenizer.backend_tokenizer.normalizer = None  # a cased tokenizer of lower-case words
    if kind == "splade":
        return SpladeEncoder(backbone, EagerHead())
    if kind == "dense":
        return DenseEncoder(backbone, Pooling("mean", normalize=True))
    if kind == "colbert":
        return ColbertEncoder(backbone, ColbertHead(8))
    return AutoencoderEncoder(backbone, AutoencoderHead(hidden_dim=64, k=6))


def save(encoder: Encoder, path: Path) -> Path:
    save_encoder(encoder, path, query_length=16, document_length=16)
    return path


@torch.no_grad()
def scores(encoder: Encoder) -> Tensor:
    """Of the texts as queries and as documents, ``[3, 3]``."""
    encoder.eval()
    tokenizer = packed_tokenizer(encoder, 16, 16)
    queries = encoder.encode(tokenizer.queries(TEXTS), "query")
    documents = encoder.encode(tokenizer.documents(TEXTS), "document")
    if queries.sparse is not None:
        return queries.sparse @ documents.sparse.T
    return maxsim_reference(
        queries.tokens.values,
        documents.tokens.values,
        queries.tokens.cu_seqlens,
        documents.tokens.cu_seqlens,
        queries.tokens.mask,
        documents.tokens.mask,
    )


KINDS = {
    "splade": "SparseEncoder",
    "csr": "SparseEncoder",
    "dense": "SentenceTransformer",
    "colbert": "MultiVectorEncoder",
}


def scores_elsewhere(kind: str, path: Path | str, **arguments: object) -> Tensor:
    model = getattr(sentence_transformers, KINDS[kind])(str(path), device="cpu", **arguments)
    return model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS)).to_dense()


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_become_lower_case_where_a_folder_says_so(kind, tmp_path):
    path = save(make(kind), tmp_path / "model")
    as_they_are = scores(load_encoder(path))
    edit(path / TRANSFORMER_FILE, do_lower_case=True)
    expected = scores_elsewhere(kind, path)
    again = load_encoder(path)
    torch.testing.assert_close(scores(again), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(as_they_are, expected, atol=1e-2)
    saved = save(again, tmp_path / "again")  # in whose tokenizer it stands
    torch.testing.assert_close(scores_elsewhere(kind, saved), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores(load_encoder(saved)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_so_they_do_with_tokenizers_whose_files_cannot_say_it(kind, tmp_path):
    """transformers makes a BertTokenizer's normaliser of its settings, not of its files."""
    encoder = make(kind)
    vocabulary = encoder.tokenizer.get_vocab()
    path = save(encoder, tmp_path / "model")
    BertTokenizer(vocab=vocabulary, do_lower_case=False).save_pretrained(path)
    edit(path / TRANSFORMER_FILE, do_lower_case=True)
    expected = scores_elsewhere(kind, path)
    saved = save(load_encoder(path), tmp_path / "again")
    torch.testing.assert_close(scores_elsewhere(kind, saved), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores(load_encoder(saved)), expected, rtol=1e-4, atol=1e-4)
    edit(saved / TRANSFORMER_FILE, do_lower_case=False)
    assert not torch.allclose(scores(load_encoder(saved)), expected, atol=1e-2)


@pytest.mark.parametrize(
    "normalizer, lowers",
    [
        (None, False),
        (normalizers.Sequence([]), False),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), False),
        (normalizers.Sequence([normalizers.Lowercase(), normalizers.NFC()]), True),
        (normalizers.Lowercase(), True),
    ],
)
def test_any_normalizer_says_whether_it_lowers_case_first(normalizer, lowers, tmp_path):
    encoder = make("splade")
    encoder.tokenizer.backend_tokenizer.normalizer = normalizer
    path = save(encoder, tmp_path / "model")
    assert json.loads((path / TRANSFORMER_FILE).read_text())["do_lower_case"] == lowers


def test_static_queries_stay_lower_case(tmp_path):
    path = save(make("splade"), tmp_path / "model")
    vocabulary = load_encoder(path).tokenizer.get_vocab()
    BertTokenizer(vocab=vocabulary, do_lower_case=False).save_pretrained(path)
    edit(path / TRANSFORMER_FILE, do_lower_case=True)
    encoder = static_queries(load_encoder(path, EagerHead()))
    saved = save(encoder, tmp_path / "static")
    expected = scores(encoder)
    torch.testing.assert_close(scores(load_encoder(saved)), expected)
    torch.testing.assert_close(scores_elsewhere("splade", saved), expected)
    encoder.query.tokenizer.backend_tokenizer.normalizer = None
    assert not torch.allclose(scores(encoder), expected, atol=1e-2)


def test_the_size_of_chunks_changes_nothing(tmp_path):
    path = save(make("splade"), tmp_path / "model")
    expected = scores(load_encoder(path))
    edit(path / "1_SpladePooling/config.json", chunk_size=3)
    torch.testing.assert_close(scores_elsewhere("splade", path), expected)
    assert torch.equal(scores(load_encoder(path)), expected)
    for head in (EagerHead(chunk_size=3), SpartonHead(chunk_size=3)):
        torch.testing.assert_close(scores(load_encoder(path, head)), expected)


@pytest.mark.parametrize("stored", [True, False])
def test_a_configuration_may_be_changed(stored, tmp_path):
    """By arguments, or by those that a Transformer module names."""
    path = save(make("splade"), tmp_path / "model")
    before, change = scores(load_encoder(path)), {"hidden_act": "relu"}
    if stored:
        edit(path / TRANSFORMER_FILE, config_args=change, model_args={"dtype": "float64"})
        expected, given = scores_elsewhere("splade", path).float(), {}
    else:
        expected = scores_elsewhere("splade", path, config_kwargs=change)
        given = {"config_args": change}
    source = Source(str(path), **given)
    torch.testing.assert_close(scores(load_encoder(source)), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)
    retriever = sparton.load(path, **given)
    torch.testing.assert_close(scores(retriever.encoder), expected, rtol=1e-4, atol=1e-4)
    for begin in (pretrained, bare):
        assert begin(str(path), **given).model.config.hidden_act == "relu"


def test_a_tokenizer_may_be_changed(tmp_path):
    path = save(make("colbert"), tmp_path / "model")
    change = {"mask_token": "dog"}  # with which queries are filled up
    expected = scores_elsewhere("colbert", path, processor_kwargs=change)
    encoder = load_encoder(Source(str(path), tokenizer_args=change))
    torch.testing.assert_close(scores(encoder), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores(load_encoder(path)), expected, atol=1e-2)


def test_arguments_reach_the_model(tmp_path):
    path = str(save(make("splade"), tmp_path / "model"))
    pretrained(path, model_args={"use_safetensors": True})
    with pytest.raises(OSError, match=r"pytorch_model\.bin"):
        pretrained(path, model_args={"use_safetensors": False})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_args": {"dtype": "float16"}}, "model_args={.*} sets dtype, which is not to be"),
        ({"model_args": {"attn_implementation": "eager"}}, "sets attn_implementation, which"),
        ({"model_args": {"ignore_mismatched_sizes": True}}, "sets ignore_mismatched_sizes"),
        ({"tokenizer_args": {"truncation_side": "left"}}, "tokenizer_args=.*truncation_side"),
        ({"config_args": {"attention_probs_dropout_prob": 0.1}}, "attention_probs_dropout_prob"),
        ({"config_args": {"revision": "v1"}}, "sets revision, which is not to be chosen there"),
        ({"config_args": {"hiden_act": "relu"}}, "config_args=.* has hiden_act, which the conf"),
        ({"model_args": {"colour": "red"}}, "model_args=.* are not all arguments .*'colour'"),
    ],
)
def test_what_is_not_to_be_chosen_is_refused(given, message, tmp_path):
    path = save(make("splade"), tmp_path / "model")
    with pytest.raises(ArgumentError, match=message):
        sparton.load(path, **given)
    with pytest.raises(ArgumentError, match=message):
        pretrained(str(path), **given)


def cache(folder: Path, name: str, **revisions: Path) -> None:
    """A cache of the hub's library, with a snapshot of a repository at each revision."""
    repository = folder / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    for number, (revision, path) in enumerate(revisions.items()):
        commit = f"{number:040x}"
        (repository / "refs" / revision).write_text(commit)
        (repository / "snapshots" / commit).symlink_to(path)


def test_models_are_found_in_a_cache_by_their_revision(tmp_path):
    paths = [save(make("splade", seed), tmp_path / f"model{seed}") for seed in (0, 1)]
    cache(tmp_path / "cache", "some/model", main=paths[0], v1=paths[1])
    place = str(tmp_path / "cache")
    older = Source("some/model", "v1", place)
    expected = scores_elsewhere("splade", "some/model", revision="v1", cache_folder=place)
    torch.testing.assert_close(scores(load_encoder(older)), expected)
    assert not torch.allclose(scores(load_encoder(older._replace(revision=None))), expected)
    given = {"revision": "v1", "cache_dir": place}
    retriever = sparton.load("some/model", **given)
    torch.testing.assert_close(scores(retriever.encoder), expected)
    assert (retriever.tokenizer.query_length, retriever.encoder.origin.base_model) == (
        16,
        "some/model",
    )
    backbone = pretrained("some/model", **given)
    torch.testing.assert_close(scores(SpladeEncoder(backbone, EagerHead())), expected)
    assert torch.equal(
        bare("some/model", **given).model.get_input_embeddings().weight,
        backbone.model.get_input_embeddings().weight,
    )
    find_model(older)
    with pytest.raises(OSError, match="some/model"):
        find_model(older._replace(cache_dir=str(tmp_path / "other")))


def defaults(of: type) -> dict[str, object]:
    parameters = inspect.signature(of).parameters.values()
    return {each.name: each.default for each in parameters}


def test_defaults_are_those_of_sentence_transformers(tmp_path):
    from sentence_transformers.sparse_encoder.modules import (
        SparseAutoEncoder,
        SparseStaticEmbedding,
    )

    theirs = defaults(SparseAutoEncoder)
    assert defaults(SparseAutoencoder) == theirs
    head = {each.name: each.default for each in fields(AutoencoderHead)}
    del theirs["input_dim"]
    assert theirs.items() <= head.items()
    assert defaults(StaticEncoder)["frozen"] == defaults(SparseStaticEmbedding)["frozen"]
    torch.manual_seed(0)
    backbone = tiny(TEXTS, hidden_size=32, layers=1)
    path = save(AutoencoderEncoder(backbone, AutoencoderHead()), tmp_path / "model")
    expected = scores_elsewhere("csr", path)
    (path / "2_SparseAutoEncoder/config.json").write_text('{"input_dim": 32}')
    torch.testing.assert_close(scores(load_encoder(path)), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores_elsewhere("csr", path), expected)
    assert load_encoder(path).autoencoder.dead_threshold == theirs["dead_threshold"]


def test_a_projection_that_names_no_activation_has_that_of_sentence_transformers(tmp_path):
    path = save(make("colbert"), tmp_path / "model")
    file = path / "1_Dense/config.json"
    content = json.loads(file.read_text())
    del content["activation_function"]
    file.write_text(json.dumps(content))
    model = sentence_transformers.MultiVectorEncoder(str(path), device="cpu")
    assert isinstance(model[1].activation_function, torch.nn.Tanh)
    with pytest.raises(ValueError, match=r"1_Dense has activation=Tanh; only .*Identity"):
        load_encoder(path)
