"""Exported vectors: what is read back gives the project's own scores; formats, refusals."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from sparton.datasets.texts import TextList
from sparton.evaluation import load_retriever
from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.models.assembly import build_encoder
from sparton.models.asymmetric import static_queries
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.csr import AutoencoderHead
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointHead
from sparton.models.pooling import Pooling
from sparton.pipelines import export as pipeline
from sparton.pipelines.export import export_vectors, term_names
from sparton.pipelines.vector_files import SparseFile, TokenFile, quantized
from sparton.representations import Representations
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.indexes.exact import exact_index
from sparton.types import SIDES, Side
from tests.pipelines.mining_problems import generate, read_records

DOCUMENTS = [*(each["positive"] for each in generate()), "", 'Ünïcode "quoted" \\ \u2028 line']
QUERIES = [each["query"] for each in generate(20)]
TEXTS: dict[Side, TextList] = {
    "document": TextList(DOCUMENTS, [f"corpus-{row}" for row in range(len(DOCUMENTS))]),
    "query": TextList(QUERIES),
}
HEADS = {
    "splade": EagerHead(),
    "static": EagerHead(),
    "csr": AutoencoderHead(hidden_dim=64, k=6, k_aux=8, dead_threshold=3),
    "colbert": ColbertHead(16),
    "joint": JointHead(EagerHead(), ColbertHead(16)),
    "dense": Pooling("mean", True),
}


@pytest.fixture
def model(tmp_path) -> Callable[[str], Path]:
    def save(kind: str) -> Path:
        torch.manual_seed(0)
        encoder = build_encoder(tiny(DOCUMENTS, hidden_size=32, layers=1), HEADS[kind])
        if kind == "static":
            encoder = static_queries(encoder, frozen=False)
            encoder.query.weights.data.uniform_(-1, 1)  # half of them count as 0
        save_encoder(encoder, tmp_path / kind, query_length=16, document_length=32)
        return tmp_path / kind

    return save


def export(model: object, output: object, side: Side = "document", **settings: object) -> Path:
    """Gives the file."""
    export_vectors(model, TEXTS[side], output, side, progress=False, **settings)
    return Path(getattr(output, "path", output))


def expected(model: Path, side: Side, **options: object) -> Representations:
    """What evaluation makes of the same texts."""
    texts = TEXTS[side].take(range(len(TEXTS[side]))).texts
    return encode_texts(*load_retriever(model), texts, side, **options)


def read_sparse(file: Path, names: list[str]) -> SparseVectors:
    """As a search engine does that knows nothing but the file."""
    columns = {name: column for column, name in enumerate(names)}
    vectors = [record["vector"] for record in read_records(file)]
    indices = [columns[term] for vector in vectors for term in vector]
    values = [weight for vector in vectors for weight in vector.values()]
    return SparseVectors(
        torch.tensor(values),
        torch.tensor(indices, dtype=torch.int32),
        cu_seqlens_of(torch.tensor([len(vector) for vector in vectors])),
        len(names),
    )


def read_tokens(file: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Ids, vectors and boundaries, by the library of the format."""
    with safe_open(file, "np") as tensors:
        assert set(tensors.keys()) == {"vectors", "cu_seqlens"}
        vectors, bounds = tensors.get_tensor("vectors"), tensors.get_tensor("cu_seqlens")
    return file.with_suffix(".ids").read_text().splitlines(), vectors, bounds


@pytest.mark.parametrize("kind", ["splade", "static", "csr", "joint"])
def test_sparse_vectors_rank_as_the_projects_own(kind, model, tmp_path):
    folder = model(kind)
    encoder, _ = load_retriever(folder)
    if kind == "csr":
        names = [str(column) for column in range(64)]
    else:
        names = encoder.tokenizer.convert_ids_to_tokens(list(range(encoder.vocabulary_size)))
    read, own = {}, {}
    for side in SIDES:
        read[side] = read_sparse(export(folder, tmp_path / f"{side}.jsonl", side), names)
        own[side] = expected(folder, side, kinds=["sparse"])
        assert len(own[side].sparse.values)
        for ours, theirs in zip(own[side].sparse[:3], read[side][:3]):
            np.testing.assert_array_equal(ours, theirs)
    ranked = exact_index(own["document"]).search(own["query"], 10)
    queries, documents = (Representations(read[side]) for side in ("query", "document"))
    again = exact_index(documents).search(queries, 10)
    for ours, theirs in zip(ranked, again):
        np.testing.assert_array_equal(ours, theirs)
    rounded = read["document"]._replace(values=read["document"].values.round(decimals=2))
    assert not torch.equal(rounded.values, own["document"].sparse.values)
    other, _ = exact_index(Representations(rounded)).search(queries, 10)
    assert not np.array_equal(other, ranked[0]), "digits are there for a reason"


def test_bounded_terms_are_those_of_evaluation(model, tmp_path):
    folder = model("splade")
    output = export(folder, SparseFile(tmp_path / "bounded.jsonl", max_terms=3))
    own = expected(folder, "document", max_terms=3).sparse
    lengths = [len(record["vector"]) for record in read_records(output)]
    assert lengths == own.lengths.tolist() and max(lengths) == 3
    names = load_retriever(folder)[0].term_names(range(own.width))
    np.testing.assert_array_equal(read_sparse(output, names).values, own.values)


def test_quantised_weights_are_rounded(model, tmp_path):
    factor, folder, output = 20, model("splade"), tmp_path / "vectors.jsonl.gz"
    export(folder, SparseFile(output, quantize=factor, contents=True))
    records = read_records(output)
    assert list(records[0]) == ["id", "contents", "vector"]
    assert [record["contents"] for record in records] == DOCUMENTS
    assert [record["id"] for record in records] == [f"corpus-{row}" for row in range(42)]
    weights = [weight for record in records for weight in record["vector"].values()]
    assert all(type(weight) is int and weight > 0 for weight in weights)

    own = expected(folder, "document").sparse
    assert len(weights) < len(own.values), "some are rounded to nothing"
    read = read_sparse(output, load_retriever(folder)[0].term_names(range(own.width)))
    assert within_half(dense(read), factor * dense(own))
    assert within_half(dense(quantized(own, factor)), factor * dense(own))
    assert not within_half(np.floor(factor * dense(own)), factor * dense(own))
    queries = dense(expected(folder, "query").sparse)
    bound = 0.5 / factor * queries.sum(1, keepdims=True) + 1e-4
    error = np.abs(queries @ (dense(read) / factor - dense(own)).T)
    assert (error <= bound).all()
    wrong = np.abs(queries @ (np.floor(factor * dense(own)) / factor - dense(own)).T)
    assert (wrong > bound).any()


def dense(vectors: SparseVectors) -> np.ndarray:
    return vectors._replace(values=vectors.values.double()).dense().numpy()


def within_half(whole: np.ndarray, exact: np.ndarray) -> bool:
    return bool((np.abs(whole - exact) <= 0.5 + 1e-5).all())


@pytest.mark.parametrize("kind", ["colbert", "joint", "dense"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_token_vectors_give_the_projects_own_maxsim(kind, dtype, model, tmp_path):
    folder, read, own = model(kind), {}, {}
    for side in SIDES:
        output = tmp_path / f"{side}.safetensors"
        export(folder, output if dtype == "float16" else TokenFile(output, dtype), side)
        ids, vectors, bounds = read[side] = read_tokens(output)
        own[side] = expected(folder, side, kinds=["tokens"], vector_dtype=dtype)
        assert ids == TEXTS[side].take(range(len(TEXTS[side]))).ids
        assert vectors.dtype == dtype and bounds.dtype == np.int64
        np.testing.assert_array_equal(vectors, own[side].tokens.values)
        np.testing.assert_array_equal(bounds, own[side].tokens.cu_seqlens)
    scores, rows = exact_index(own["document"]).search(own["query"], 10)
    ours = np.take_along_axis(maxsim(read["query"][1:], read["document"][1:]), rows, 1)
    np.testing.assert_allclose(ours, scores, rtol=1e-5, atol=1e-5)
    _, vectors, bounds = read["document"]
    shifted = maxsim(read["query"][1:], (np.roll(vectors, 1, 0), bounds))
    assert not np.allclose(np.take_along_axis(shifted, rows, 1), scores, rtol=1e-3, atol=1e-3)


def maxsim(queries: tuple, documents: tuple) -> np.ndarray:
    """[Q, N], as the definition says."""
    asked, given = (
        np.split(vectors.astype(np.float32), bounds[1:-1])
        for vectors, bounds in (queries, documents)
    )
    return np.array([[(q @ d.T).max(1).sum() for d in given] for q in asked])


@pytest.mark.parametrize(("kind", "ending"), [("splade", ".jsonl"), ("colbert", ".safetensors")])
def test_parts_bound_what_is_encoded_at_once(kind, ending, model, tmp_path, monkeypatch):
    folder, sizes, real = model(kind), [], pipeline.encode_texts
    whole = export(folder, tmp_path / f"whole{ending}")

    def encode(encoder, tokenizer, texts, **options):
        sizes.append(len(texts))
        return real(encoder, tokenizer, texts, **options)

    monkeypatch.setattr(pipeline, "encode_texts", encode)
    monkeypatch.setattr(pipeline, "PART", 16)
    parts = export(folder, tmp_path / "deep" / f"parts{ending}")
    assert sizes == [16, 16, 10]
    if kind == "colbert":
        for ours, theirs in zip(read_tokens(whole), read_tokens(parts)):
            np.testing.assert_array_equal(np.array(ours).shape, np.array(theirs).shape)
        np.testing.assert_allclose(read_tokens(whole)[1], read_tokens(parts)[1], atol=1e-3)
        return
    for ours, theirs in zip(read_records(whole), read_records(parts), strict=True):
        assert ours["id"] == theirs["id"] and list(ours["vector"]) == list(theirs["vector"])
        weights = [list(each["vector"].values()) for each in (ours, theirs)]
        np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ending", [".jsonl.gz", ".safetensors"])
def test_an_interruption_leaves_nothing_and_what_was_there(ending, model, tmp_path, monkeypatch):
    folder, real, calls = model("joint"), pipeline.encode_texts, []
    monkeypatch.setattr(pipeline, "PART", 16)
    output = tmp_path / "out" / f"vectors{ending}"
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "encode_texts", stopping(real, calls))
        with pytest.raises(KeyboardInterrupt):
            export(folder, output)
    assert len(calls) == 2 and not list(output.parent.iterdir())

    content = export(folder, output).read_bytes()
    names = sorted(each.name for each in output.parent.iterdir())
    kind = TokenFile if ending == ".safetensors" else SparseFile
    with pytest.raises(ValueError, match="exists: name another path, or replace it by overwrite=T"):
        kind(output)
    again = kind(output, overwrite=True)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "encode_texts", stopping(real, []))
        with pytest.raises(KeyboardInterrupt):
            export(folder, again)
    assert output.read_bytes() == content
    assert sorted(each.name for each in output.parent.iterdir()) == names
    assert export(folder, again).read_bytes() == content


def stopping(real: Callable, calls: list[int]) -> Callable:
    """Ctrl-C in the second part."""

    def encode(encoder, tokenizer, texts, **options):
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(encoder, tokenizer, texts, **options)

    return encode


def test_ids_that_are_not_one_line_are_refused_before_encoding(model, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "encode_texts", lambda *_, **__: 1 / 0)
    output, texts = tmp_path / "out" / "x.safetensors", TextList(["dodak"], ["a\nb"])
    with pytest.raises(ValueError, match=r"the id 'a\\nb' is empty or holds a line break"):
        export_vectors(model("colbert"), texts, output, "document")
    assert not list(output.parent.iterdir())


def test_terms_have_names_of_their_own():
    def named(*names: str | None) -> list[str]:
        return term_names(
            SimpleNamespace(vocabulary_size=len(names), term_names=lambda columns: list(names))
        )

    assert named("a", "b", None) == ["a", "b", "[row 2]"]
    with pytest.raises(ValueError, match="two tokens 'b'"):
        named("a", "b", "b")


def test_a_loaded_model_gives_what_its_folder_gives(model, tmp_path):
    folder = model("splade")
    encoder, _ = load_retriever(folder)
    by_name = export(folder, tmp_path / "by-name.jsonl").read_bytes()
    assert export(encoder, tmp_path / "by-object.jsonl", length=32).read_bytes() == by_name
    assert export(encoder, tmp_path / "cut.jsonl", length=4).read_bytes() != by_name


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SparseFile("x.json"), r"path='x\.json' must end in \.jsonl or \.jsonl\.gz"),
        (lambda: TokenFile("x.jsonl"), r"path='x\.jsonl' must end in \.safetensors"),
        (lambda: SparseFile("x.jsonl", max_terms=0), "max_terms=0 must be at least 1"),
        (lambda: SparseFile("x.jsonl", quantize=-1), "quantize=-1 must be at least 1"),
        (lambda: TokenFile("x.safetensors", "int8"), "dtype='int8' must be float16 or float32"),
        (lambda: TokenFile("there.safetensors"), r"there\.ids exists: name another path"),
        (lambda: SparseFile("folder.jsonl", overwrite=True), r"folder\.jsonl is a folder"),
    ],
)
def test_files_that_cannot_be_are_refused(build, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there.ids").touch()
    Path("folder.jsonl").mkdir()
    with pytest.raises(ValueError, match=message):
        build()


def test_models_that_are_not_there_or_give_other_vectors_are_refused(model, tmp_path):
    """Before the texts are asked for."""

    def refused(source: object, output: str, **settings: object) -> None:
        export_vectors(source, lambda: 1 / 0, tmp_path / output, "document", **settings)

    with pytest.raises(ValueError, match="bm25 has no vectors to export: name a trained model"):
        refused("bm25", "x.jsonl")
    with pytest.raises(FileNotFoundError, match="no such folder; give a folder of"):
        refused(tmp_path / "none", "x.jsonl")
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        refused("a/model", "x.jsonl", length=0)
    with pytest.raises(ValueError, match="precision='int8' must be"):
        refused("a/model", "x.jsonl", precision="int8")
    with pytest.raises(
        ValueError, match=r"gives sparse vectors and no token .* output that ends in \.jsonl or"
    ):
        refused(model("splade"), "x.safetensors")
    with pytest.raises(ValueError, match=r"gives token vectors and no sparse .* in \.safetensors"):
        refused(model("colbert"), "x.jsonl")
    with pytest.raises(ZeroDivisionError):
        refused(model("colbert"), "x.safetensors")
