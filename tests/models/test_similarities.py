"""How folders say that vectors are compared and cut, against sentence-transformers; refusals."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparton.datasets.tokenization import PackedTokenizer
from sparton.losses.objective import all_scores
from sparton.models.asymmetric import separate_queries, static_queries
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.encoder import Encoder
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.pooling import Pooling
from sparton.models.splade import SpladeEncoder
from sparton.retrieval.encoding import encode_texts
from sparton.types import TokenBatch

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.0")

TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt quick hens"]
LENGTHS = {"query_length": 16, "document_length": 16}
CONFIG = "config_sentence_transformers.json"


def backbone(seed: int = 0):
    return tiny(TEXTS, hidden_size=32, layers=1, max_length=20, seed=seed, decoder_bias=0.5)


def splade(seed: int = 0) -> SpladeEncoder:
    return SpladeEncoder(backbone(seed), EagerHead())


def static() -> Encoder:
    encoder = static_queries(splade(), frozen=False)
    encoder.query.weights.data[5:] = torch.rand(encoder.vocabulary_size - 5)
    return encoder


def separate() -> Encoder:
    query = splade(seed=1)
    return separate_queries(splade(), query.backbone, query.head)


def csr(pooling: str = "mean") -> Encoder:
    torch.manual_seed(0)
    head = AutoencoderHead(hidden_dim=96, k=12, pooling=pooling, normalize_pooled=True)
    return AutoencoderEncoder(backbone(), head)


def joint() -> Encoder:
    return JointEncoder(backbone(), JointHead(EagerHead(), ColbertHead(8)))


def colbert() -> Encoder:
    return ColbertEncoder(backbone(), ColbertHead(8))


def dense(normalize: bool = True, cosine: bool = True) -> DenseEncoder:
    return DenseEncoder(backbone().bare(), Pooling("mean", normalize), cosine=cosine)


SPARSE = [splade, static, separate, csr, joint]


def save(encoder: Encoder, path: Path, **changes: object) -> Path:
    """The folder, with other entries in what it says of the model as a whole."""
    save_encoder(encoder.eval(), path, **LENGTHS)
    return edit(path, **changes)


def edit(path: Path, file: str = CONFIG, **changes: object) -> Path:
    (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | changes))
    return path


def says(path: Path, key: str) -> object:
    return json.loads((path / CONFIG).read_text()).get(key)


def searched(encoder: Encoder, max_terms: int | None = None) -> Tensor:
    """Scores of every text as a query against every text as a document, as search computes them."""
    tokenizer = PackedTokenizer(
        encoder.tokenizer, 16, 16,
        query_tokenizer=encoder.query_tokenizer, markup=encoder.markup,
    )  # fmt: skip
    queries, documents = (
        encode_texts(encoder, tokenizer, TEXTS, side, kinds={"sparse"}, max_terms=max_terms).sparse
        for side in ("query", "document")
    )
    return queries.dense() @ documents.dense().T


def searched_elsewhere(path: Path, most: int | None = None) -> Tensor:
    model = sentence_transformers.SparseEncoder(str(path), device="cpu")
    sides = [
        encode(TEXTS, max_active_dims=most)
        for encode in (model.encode_query, model.encode_document)
    ]
    return model.similarity(*sides)


@pytest.mark.parametrize("build", SPARSE)
@pytest.mark.parametrize("most", [None, 4])
def test_sparse_vectors_are_compared_as_the_folder_says(build, most, tmp_path):
    """By dot product where it says nothing; what is loaded is saved again."""
    path = save(build(), tmp_path / "model")
    products = searched(load_encoder(path), most)
    assert says(path, "similarity_fn_name") == "dot"
    for name in ("dot", None, "cosine"):
        encoder = load_encoder(edit(path, similarity_fn_name=name))
        expected = searched_elsewhere(path, most)
        torch.testing.assert_close(searched(encoder, most), expected, rtol=1e-5, atol=1e-5)
        assert torch.allclose(expected, products, rtol=1e-5, atol=1e-5) == (name != "cosine")
    again = save(encoder, tmp_path / "again")
    assert says(again, "similarity_fn_name") == "cosine"
    assert torch.equal(searched(load_encoder(again), most), searched(encoder, most))


def test_training_compares_by_dot_product(tmp_path):
    """As the other library's sparse losses do, whatever the model's similarity."""
    path = save(splade(), tmp_path / "model", similarity_fn_name="cosine")
    plain, encoder = splade().eval(), load_encoder(path, EagerHead())
    tokens = TokenBatch.from_lists(plain.tokenizer(TEXTS)["input_ids"])
    with torch.no_grad():
        given, expected = (each.encode(tokens, "query") for each in (encoder, plain))
    assert torch.equal(all_scores(given, given)["sparse"], all_scores(expected, expected)["sparse"])


def test_an_autoencoder_begun_elsewhere_on_a_dense_model_keeps_its_cosine(tmp_path):
    model = sentence_transformers.SparseEncoder(
        str(save(dense(), tmp_path / "dense")), device="cpu"
    )
    model.save(str(tmp_path / "csr"))
    assert says(tmp_path / "csr", "similarity_fn_name") == "cosine"
    assert says(tmp_path / "csr", "max_active_dims") == 8
    encoder = load_encoder(tmp_path / "csr")
    expected = searched_elsewhere(tmp_path / "csr")
    torch.testing.assert_close(searched(encoder), expected, rtol=1e-5, atol=1e-5)
    assert (expected.diagonal() - 1).abs().max() < 1e-5


def compared(encoder: Encoder) -> Tensor:
    tokens = TokenBatch.from_lists(encoder.tokenizer(TEXTS)["input_ids"])
    with torch.no_grad():
        reps = encoder.eval().encode(tokens, "query")
    return all_scores(reps, reps)["tokens"]


def compared_elsewhere(path: Path) -> Tensor:
    model = sentence_transformers.SentenceTransformer(str(path), device="cpu")
    return model.similarity(*[model.encode(TEXTS, convert_to_tensor=True)] * 2)


@pytest.mark.parametrize("size", [None, 1, 7, 32, 100])
@pytest.mark.parametrize("name", ["cosine", "dot", None])
@pytest.mark.parametrize("normalize", [True, False])
def test_dense_vectors_are_cut_and_compared_as_the_folder_says(normalize, name, size, tmp_path):
    """Both ways. The cut comes after the modules, so that it leaves no vector of length 1."""
    path = save(dense(normalize), tmp_path / "own", similarity_fn_name=name, truncate_dim=size)
    encoder = load_encoder(path)
    expected = compared_elsewhere(path)
    torch.testing.assert_close(compared(encoder), expected, rtol=1e-5, atol=1e-5)
    whole = compared(dense(normalize, name != "dot"))
    assert torch.allclose(expected, whole, rtol=1e-4, atol=1e-4) == (size in (None, 32, 100))
    again = save(encoder, tmp_path / "again")
    assert (says(again, "truncate_dim"), says(again, "similarity_fn_name")) == (
        size, name or "cosine",
    )  # fmt: skip
    model = sentence_transformers.SentenceTransformer(str(again), device="cpu")
    model.save(str(tmp_path / "newer"))
    for folder in (again, tmp_path / "newer"):
        assert torch.equal(compared(load_encoder(folder)), compared(encoder))


@pytest.mark.parametrize("cosine", [True, False])
def test_a_truncated_encoder_trains_what_it_compares(cosine):
    encoder = DenseEncoder(
        backbone().bare(), Pooling("mean", True), cosine=cosine, truncate_dim=5
    ).eval()
    tokens = TokenBatch.from_lists(encoder.tokenizer(TEXTS)["input_ids"])
    values = encoder.encode(tokens, "query").tokens.values
    whole = dense().eval().encode(tokens, "query").tokens.values[:, :5]
    assert values.shape == (3, 5)
    torch.testing.assert_close(values, whole / whole.norm(dim=1, keepdim=True) if cosine else whole)
    assert (whole.norm(dim=1) < 0.9).all()
    values.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in encoder.body.parameters())


@pytest.mark.parametrize("build", [splade, static, csr, joint])
def test_where_the_other_library_does_not_cut_neither_do_we(build, tmp_path):
    path = save(build(), tmp_path / "model")
    expected = searched_elsewhere(path)
    edit(path, truncate_dim=3)
    torch.testing.assert_close(searched_elsewhere(path), expected)
    torch.testing.assert_close(searched(load_encoder(path)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [None, "MaxSim", "maxsim", "cosine", "dot"])
@pytest.mark.parametrize("build", [colbert, joint])
def test_names_that_mean_maxsim_for_token_vectors(build, name, tmp_path):
    path = save(build(), tmp_path / "model")
    half = path / "colbert" if build is joint else path
    edit(half, similarity_fn_name=name, truncate_dim=3)
    encoder = load_encoder(path).eval()
    tokenizer = PackedTokenizer(encoder.tokenizer, 16, 16, markup=encoder.markup)
    with torch.no_grad():
        queries = encoder.encode(tokenizer.queries(TEXTS), "query")
        documents = encoder.encode(tokenizer.documents(TEXTS), "document")
    model = sentence_transformers.MultiVectorEncoder(str(half), device="cpu")
    expected = model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS))
    given = all_scores(queries, documents)["tokens"]
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["meanmaxsim", "euclidean", "xtr"])
@pytest.mark.parametrize("build", [colbert, joint])
def test_other_scores_of_token_vectors_are_refused(build, name, tmp_path):
    path = save(build(), tmp_path / "model")
    half = path / "colbert" if build is joint else path
    edit(half, similarity_fn_name=name)
    message = rf"{half.name}/{CONFIG}: similarity_fn_name is '{name}', and token vectors .*'maxsim'"
    with pytest.raises(ValueError, match=message):
        load_encoder(path)


@pytest.mark.parametrize("name", ["euclidean", "manhattan", "maxsim"])
@pytest.mark.parametrize("build", [dense, *SPARSE])
def test_other_similarities_of_single_vectors_are_refused(build, name, tmp_path):
    path = save(build(), tmp_path / "model", similarity_fn_name=name)
    message = rf"model/{CONFIG}: similarity_fn_name is '{name}', and vectors are .*'dot' or 'cosin"
    with pytest.raises(ValueError, match=message):
        load_encoder(path)


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "32"])
def test_what_is_no_number_of_dimensions_is_refused(size, tmp_path):
    path = save(dense(), tmp_path / "model", truncate_dim=size)
    said = rf"model/{CONFIG}: truncate_dim(=| is ).* must be a whole"
    with pytest.raises(ValueError, match=said):
        load_encoder(path)
    with pytest.raises(ValueError, match=f"truncate_dim={size!r} must be a whole"):
        DenseEncoder(backbone().bare(), Pooling(), truncate_dim=size)


@pytest.mark.parametrize(("build", "own"), [(splade, "all"), (static, "all"), (csr, "12")])
def test_another_number_of_weights_of_a_text_is_refused(build, own, tmp_path):
    """It would have changed what is found elsewhere."""
    path = save(build(), tmp_path / "model")
    expected = searched_elsewhere(path)
    edit(path, max_active_dims=2)
    assert not torch.allclose(searched_elsewhere(path), expected, rtol=1e-2)
    message = rf"model/{CONFIG}: max_active_dims=2 keeps .* this model keeps {own}: take it out"
    with pytest.raises(ValueError, match=message):
        load_encoder(path)


@pytest.mark.parametrize("build", [dense, colbert, *SPARSE])
def test_a_model_that_says_nothing_is_compared_as_its_class_does(build, tmp_path):
    """Folders of older versions have no such entries at all."""
    path = save(build(), tmp_path / "model")
    content = json.loads((path / CONFIG).read_text())
    del content["similarity_fn_name"]
    (path / CONFIG).write_text(json.dumps(content))
    encoder = load_encoder(path)
    assert encoder.similarity == "dot"
    assert build is not dense or encoder.cosine


def test_queries_of_their_own_are_compared_as_the_documents_are(tmp_path):
    document = load_encoder(save(splade(), tmp_path / "model", similarity_fn_name="cosine"))
    assert static_queries(document).similarity == "cosine"
    assert static_queries(splade()).similarity == "dot"
