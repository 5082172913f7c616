"""Exported vectors: what is read back gives the project's own scores; formats, refusals."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from safetensors import safe_open

import export_vectors as program
from sparton.datasets.collection import beir_file, read_texts
from sparton.evaluation import load_retriever
from sparton.models.assembly import build_encoder
from sparton.models.asymmetric import static_queries
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.csr import AutoencoderHead
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointHead
from sparton.models.pooling import Pooling
from sparton.retrieval.encoding import EncodedTexts, encode_texts
from sparton.retrieval.index import TextIndex
from sparton.retrieval.sparse import SparseRows, boundaries_of
from sparton.types import Side
from tests.scripts.mining_problems import generate, write
from vector_export.arguments import parser
from vector_export.files import quantized

DOCUMENTS = [*(each["positive"] for each in generate()), "", 'Ünïcode "quoted" \\ \u2028 line']
QUERIES = [each["query"] for each in generate(20)]
SIDES: dict[str, Side] = {"documents": "document", "queries": "query"}
HEADS = {
    "splade": EagerHead(),
    "static": EagerHead(),
    "csr": AutoencoderHead(hidden_dim=64, k=6, k_aux=8, dead_threshold=3),
    "colbert": ColbertHead(16),
    "joint": JointHead(EagerHead(), ColbertHead(16)),
    "dense": Pooling("mean", True),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def beir(tmp_path) -> Path:
    for name, texts in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        records = [{"_id": f"{name}-{row}", "text": text} for row, text in enumerate(texts)]
        write(tmp_path / "beir" / f"{name}.jsonl", records)
    return tmp_path / "beir"


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


def export(*arguments: object) -> Path:
    """Run the program here; gives its output."""
    parsed = parser(None).parse_args([*map(str, arguments)])
    program.export(parsed)
    return parsed.output


def expected(model: Path, beir: Path, side: str, **options: object) -> EncodedTexts:
    """What evaluation makes of the same texts."""
    file = "corpus.jsonl" if side == "documents" else "queries.jsonl"
    texts = [text for _, _, text in read_texts(beir_file(beir, file))]
    return encode_texts(*load_retriever(model), texts, SIDES[side], **options)


def read_records(file: Path) -> list[dict]:
    content = file.read_bytes()
    text = gzip.decompress(content) if file.suffix == ".gz" else content
    return [json.loads(line) for line in text.decode().removesuffix("\n").split("\n")]


def read_sparse(file: Path, names: list[str]) -> SparseRows:
    """As a search engine does that knows nothing but the file."""
    columns = {name: column for column, name in enumerate(names)}
    vectors = [record["vector"] for record in read_records(file)]
    indices = [columns[term] for vector in vectors for term in vector]
    values = [weight for vector in vectors for weight in vector.values()]
    return SparseRows(
        boundaries_of(np.array([len(vector) for vector in vectors])),
        np.array(indices, np.int32),
        np.array(values, np.float32),
        len(names),
    )


def read_tokens(file: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Ids, vectors and boundaries, by the library of the format."""
    with safe_open(file, "np") as tensors:
        assert set(tensors.keys()) == {"vectors", "cu_seqlens"}
        vectors, bounds = tensors.get_tensor("vectors"), tensors.get_tensor("cu_seqlens")
    return file.with_suffix(".ids").read_text().splitlines(), vectors, bounds


@pytest.mark.parametrize("kind", ["splade", "static", "csr", "joint"])
def test_sparse_vectors_rank_as_the_projects_own(kind, model, beir, tmp_path):
    folder = model(kind)
    encoder, _ = load_retriever(folder)
    if kind == "csr":
        names = [str(column) for column in range(64)]
    else:
        names = encoder.tokenizer.convert_ids_to_tokens(list(range(encoder.vocabulary_size)))
    read, own = {}, {}
    for side in SIDES:
        output = tmp_path / f"{side}.jsonl"
        export(folder, "--beir", beir, "--side", side, "--output", output)
        read[side] = read_sparse(output, names)
        own[side] = expected(folder, beir, side, kinds=["sparse"])
        assert len(own[side].sparse.values)
        for ours, theirs in zip(own[side].sparse, read[side]):
            np.testing.assert_array_equal(ours, theirs)
    ranked = TextIndex(own["documents"]).search(own["queries"], 10)
    again = TextIndex(EncodedTexts(read["documents"])).search(EncodedTexts(read["queries"]), 10)
    for ours, theirs in zip(ranked, again):
        np.testing.assert_array_equal(ours, theirs)
    rounded = read["documents"]._replace(values=read["documents"].values.round(2))
    assert not np.array_equal(rounded.values, own["documents"].sparse.values)
    other, _ = TextIndex(EncodedTexts(rounded)).search(EncodedTexts(read["queries"]), 10)
    assert not np.array_equal(other, ranked[0]), "digits are there for a reason"


def test_bounded_terms_are_those_of_evaluation(model, beir, tmp_path):
    folder, output = model("splade"), tmp_path / "bounded.jsonl"
    export(folder, "--beir", beir, "--side", "documents", "--output", output, "--max-terms", 3)
    own = expected(folder, beir, "documents", max_terms=3).sparse
    lengths = [len(record["vector"]) for record in read_records(output)]
    assert lengths == own.row_lengths.tolist() and max(lengths) == 3
    names = load_retriever(folder)[0].term_names(range(own.width))
    np.testing.assert_array_equal(read_sparse(output, names).values, own.values)


def test_quantised_weights_are_rounded(model, beir, tmp_path):
    factor, folder, output = 20, model("splade"), tmp_path / "vectors.jsonl.gz"
    arguments = ["--beir", beir, "--side", "documents", "--output", output]
    export(folder, *arguments, "--quantize", factor, "--contents")
    records = read_records(output)
    assert list(records[0]) == ["id", "contents", "vector"]
    assert [record["contents"] for record in records] == DOCUMENTS
    assert [record["id"] for record in records] == [f"corpus-{row}" for row in range(42)]
    weights = [weight for record in records for weight in record["vector"].values()]
    assert all(type(weight) is int and weight > 0 for weight in weights)

    own = expected(folder, beir, "documents").sparse
    assert len(weights) < len(own.values), "some are rounded to nothing"
    read = read_sparse(output, load_retriever(folder)[0].term_names(range(own.width)))
    assert within_half(dense(read), factor * dense(own))
    assert within_half(dense(quantized(own, factor)), factor * dense(own))
    assert not within_half(np.floor(factor * dense(own)), factor * dense(own))
    queries = dense(expected(folder, beir, "queries").sparse)
    bound = 0.5 / factor * queries.sum(1, keepdims=True) + 1e-4
    error = np.abs(queries @ (dense(read) / factor - dense(own)).T)
    assert (error <= bound).all()
    wrong = np.abs(queries @ (np.floor(factor * dense(own)) / factor - dense(own)).T)
    assert (wrong > bound).any()


def dense(rows: SparseRows) -> np.ndarray:
    matrix = np.zeros((rows.num_rows, rows.width))
    matrix[np.repeat(np.arange(rows.num_rows), rows.row_lengths), rows.indices] = rows.values
    return matrix


def within_half(whole: np.ndarray, exact: np.ndarray) -> bool:
    return bool((np.abs(whole - exact) <= 0.5 + 1e-5).all())


@pytest.mark.parametrize("kind", ["colbert", "joint", "dense"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_token_vectors_give_the_projects_own_maxsim(kind, dtype, model, beir, tmp_path):
    folder, read, own = model(kind), {}, {}
    for side in SIDES:
        output = tmp_path / f"{side}.safetensors"
        arguments = ["--kind", "tokens", *(["--dtype", dtype] if dtype == "float32" else [])]
        export(folder, "--beir", beir, "--side", side, "--output", output, *arguments)
        ids, vectors, bounds = read[side] = read_tokens(output)
        own[side] = expected(folder, beir, side, kinds=["tokens"], vector_dtype=dtype)
        assert ids == [identifier for _, identifier, _ in read_texts(beir_file(beir, FILES[side]))]
        assert vectors.dtype == dtype and bounds.dtype == np.int64
        np.testing.assert_array_equal(vectors, own[side].tokens.values)
        np.testing.assert_array_equal(bounds, own[side].tokens.boundaries)
    scores, rows = TextIndex(own["documents"]).search(own["queries"], 10)
    ours = np.take_along_axis(maxsim(read["queries"][1:], read["documents"][1:]), rows, 1)
    np.testing.assert_allclose(ours, scores, rtol=1e-5, atol=1e-5)
    _, vectors, bounds = read["documents"]
    shifted = maxsim(read["queries"][1:], (np.roll(vectors, 1, 0), bounds))
    assert not np.allclose(np.take_along_axis(shifted, rows, 1), scores, rtol=1e-3, atol=1e-3)


FILES = {"documents": "corpus.jsonl", "queries": "queries.jsonl"}


def maxsim(queries: tuple, documents: tuple) -> np.ndarray:
    """[Q, N], as the definition says."""
    asked, given = (
        np.split(vectors.astype(np.float32), bounds[1:-1])
        for vectors, bounds in (queries, documents)
    )
    return np.array([[(q @ d.T).max(1).sum() for d in given] for q in asked])


@pytest.mark.parametrize(("kind", "ending"), [("splade", ".jsonl"), ("colbert", ".safetensors")])
def test_parts_bound_what_is_encoded_at_once(kind, ending, model, beir, tmp_path, monkeypatch):
    folder, sizes, real = model(kind), [], program.encode_texts
    corpus = ["--files", beir / "corpus.jsonl", "--side", "documents"]
    whole = export(folder, *corpus, "--output", tmp_path / f"whole{ending}")

    def encode(encoder, tokenizer, texts, side, **options):
        sizes.append(len(texts))
        return real(encoder, tokenizer, texts, side, **options)

    monkeypatch.setattr(program, "encode_texts", encode)
    monkeypatch.setattr(program, "PART", 16)
    parts = export(folder, *corpus, "--output", tmp_path / "deep" / f"parts{ending}")
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
def test_an_interruption_leaves_nothing_and_what_was_there(
    ending, model, beir, tmp_path, monkeypatch, capsys
):
    folder, real, calls = model("joint"), program.encode_texts, []
    monkeypatch.setattr(program, "PART", 16)
    output = tmp_path / "out" / f"vectors{ending}"
    arguments = [folder, "--beir", beir, "--side", "documents", "--output", output]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["export_vectors.py", *map(str, arguments)])
        patched.setattr(program, "encode_texts", stopping(real, calls))
        with pytest.raises(SystemExit) as stopped:
            program.main()
    assert stopped.value.code == 130 and "the same command starts again" in capsys.readouterr().err
    assert len(calls) == 2 and not list(output.parent.iterdir())

    content = export(*arguments).read_bytes()
    names = sorted(each.name for each in output.parent.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(program, "encode_texts", stopping(real, []))
        with pytest.raises(KeyboardInterrupt):
            export(*arguments, "--overwrite")
    assert output.read_bytes() == content
    assert sorted(each.name for each in output.parent.iterdir()) == names
    assert export(*arguments, "--overwrite").read_bytes() == content


def stopping(real: Callable, calls: list[int]) -> Callable:
    """Ctrl-C in the second part."""

    def encode(encoder, tokenizer, texts, side, **options):
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(encoder, tokenizer, texts, side, **options)

    return encode


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--output", "x.json"],
            r"x\.json must end in \.jsonl or \.jsonl\.gz for sparse vectors, ",
        ),
        (
            ["--output", "x.jsonl", "--kind", "tokens"],
            r"--kind tokens it must end in \.safetensors",
        ),
        (["--output", "x.jsonl", "--dtype", "float32"], "sparse vectors ignores --dtype: leave"),
        (
            ["--output", "x.safetensors", "--max-terms", 3, "--quantize", 9, "--contents"],
            "token vectors ignores --max-terms, --quantize, --contents: leave",
        ),
        (["--output", "x.jsonl", "--max-terms", 0], "--max-terms=0: must be a whole number"),
        (["--output", "x.jsonl", "--quantize", -1], "--quantize -1 must be at least 1"),
        (["--output", "x.jsonl", "--length", 0], "--length 0 must be at least 1"),
        (["--output", "there.jsonl"], r"there\.jsonl exists: name another --output, or .*--overwr"),
        (["--output", "there.safetensors"], r"there\.ids exists: name another"),
        (["--output", "folder.jsonl", "--overwrite"], r"folder\.jsonl is a folder: name another"),
        (["--output", "x.jsonl", "--device", "tpu9"], "device=tpu9 cannot be used"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(more, message, tmp_path, monkeypatch, beir):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "load_retriever", lambda *_, **__: 1 / 0)
    for name in ("there.jsonl", "there.ids"):
        Path(name).touch()
    Path("folder.jsonl").mkdir()
    Path("model").mkdir()
    with pytest.raises(ValueError, match=message):
        export("model", "--beir", beir, "--side", "documents", *more)


def test_models_texts_and_sides_that_are_not_there_are_refused(
    model, beir, tmp_path, monkeypatch, capsys
):
    arguments = ["--side", "documents", "--output", tmp_path / "x.jsonl"]
    with pytest.raises(ValueError, match="bm25 has no vectors to export: name a trained model"):
        export("bm25", "--beir", beir, *arguments)
    with pytest.raises(FileNotFoundError, match="no such folder; give a folder of"):
        export(tmp_path / "none", "--beir", beir, *arguments)
    folder = model("splade")
    with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl.* does not exist"):
        export(folder, "--beir", tmp_path, *arguments)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file"):
        export(folder, "--files", tmp_path / "none.jsonl", *arguments)
    with pytest.raises(SystemExit):
        export(folder, "--beir", beir, "--side", "both", "--output", tmp_path / "x.jsonl")
    assert "invalid choice: 'both' (choose from" in capsys.readouterr().err
    monkeypatch.setattr(program, "text_table", lambda *_: 1 / 0)
    with pytest.raises(
        ValueError, match=r"gives sparse vectors and no token .* ends in \.jsonl or"
    ):
        export(folder, "--beir", beir, *arguments[:3], tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"gives token vectors and no sparse .* in \.safetensors"):
        export(model("colbert"), "--beir", beir, *arguments)


def test_ids_that_are_not_one_line_are_refused_before_encoding(model, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "encode_texts", lambda *_, **__: 1 / 0)
    file = write(tmp_path / "texts.jsonl", [{"id": "a\nb", "text": "dodak"}])
    output = tmp_path / "out" / "x.safetensors"
    with pytest.raises(ValueError, match=r"the id 'a\\nb' holds a line break"):
        export(model("colbert"), "--files", file, "--side", "documents", "--output", output)
    assert not list(output.parent.iterdir())


def test_malformed_records_stop_or_are_skipped(model, tmp_path, monkeypatch):
    file = write(tmp_path / "texts.jsonl", [{"id": "a", "text": "dodak"}, {"id": "b"}])
    arguments = [model("splade"), "--files", file, "--side", "documents", "--output"]
    argv = ["export_vectors.py", *map(str, arguments), str(tmp_path / "x.jsonl")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match=r"texts\.jsonl, line 2: .* set --on-error skip"):
        program.main()
    records = read_records(export(*arguments, tmp_path / "x.jsonl", "--on-error", "skip"))
    assert [record["id"] for record in records] == ["a"]


def test_terms_have_names_of_their_own():
    def named(*names: str | None) -> list[str]:
        return program.term_names(
            SimpleNamespace(vocabulary_size=len(names), term_names=lambda columns: list(names))
        )

    assert named("a", "b", None) == ["a", "b", "[row 2]"]
    with pytest.raises(ValueError, match="two tokens 'b'"):
        named("a", "b", "b")
