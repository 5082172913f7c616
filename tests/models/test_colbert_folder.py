"""Late-interaction folders against sentence-transformers, which reads and writes them too, and
folders that must be refused."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.backbone import Backbone
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.folders import encoder_lengths, load_encoder
from sparton.models.heads import EagerHead
from sparton.models.words import word_tokenizer
from sparton.representations import TokenVectors
from sparton.retrieval.encoding import encode_texts
from tests.models.late_interaction import LENGTHS, TEXTS, TOLERANCE, make_encoder, saved, scores
from tests.models.malformed import edit

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.0")

VARIANTS = {
    "default": {},
    "biased": {"bias": True},
    "attended": {"attend_to_expansion": True},
    "not expanded": {"query_expansion": False},
    "not marked": {"query_marker": "", "document_marker": ""},
    "one marker": {"query_marker": "[X]", "document_marker": "[X]"},
    "a word as marker": {"query_marker": "fox"},
    "other words skipped": {"skiplist": ["the", "elephant"]},
    "nothing skipped": {"skiplist": ""},
    "prompts": {"query_prompt": "a cat ", "document_prompt": "hens ! "},
    "any length": {"normalize": False},
}


def scores_elsewhere(path: Path) -> Tensor:
    model = sentence_transformers.MultiVectorEncoder(str(path), device="cpu")
    return model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS))


def resaved(path: Path) -> Path:
    """The same model as sentence-transformers writes it."""
    model = sentence_transformers.MultiVectorEncoder(str(path), device="cpu")
    model.save(str(path.with_name("newer")))
    return path.with_name("newer")


def stored_documents(encoder: ColbertEncoder) -> TokenVectors:
    tokenizer = PackedTokenizer(encoder.tokenizer, **LENGTHS, markup=encoder.markup)
    return encode_texts(encoder, tokenizer, TEXTS, "document", vector_dtype="float32").tokens


@pytest.fixture
def folder(tmp_path) -> Path:
    return saved(make_encoder(), tmp_path / "model")


def test_a_round_trip_is_exact(folder):
    expected = scores(make_encoder())
    again = load_encoder(folder)
    assert isinstance(again, ColbertEncoder)
    assert torch.equal(scores(again), expected)
    assert not torch.allclose(scores(make_encoder(seed=1)), expected, atol=1e-2)
    assert encoder_lengths(folder) == (9, 14)
    assert torch.equal(scores(load_encoder(folder, ColbertHead(8))), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sentence_transformers_gives_the_same_scores_both_ways(variant, tmp_path):
    encoder = make_encoder(**VARIANTS[variant])
    expected = scores(encoder)
    path = saved(encoder, tmp_path / "model")
    torch.testing.assert_close(scores_elsewhere(path), expected, **TOLERANCE)
    newer = resaved(path)
    assert "MultiVectorMask" in (newer / "modules.json").read_text()
    for each in (path, newer):
        again = load_encoder(each)
        torch.testing.assert_close(scores(again), expected, **TOLERANCE)
        assert encoder_lengths(each) == (9, 14)
        head = again.head
        for name, value in VARIANTS[variant].items():
            if name != "skiplist":
                assert getattr(head, name) == value
        assert head.skipped(again.tokenizer) == encoder.head.skipped(again.tokenizer)
    if variant != "default":
        assert not torch.allclose(scores(make_encoder()), expected, atol=1e-3)


def test_every_family_in_sentence_transformers(family, build_mlm, tmp_path):
    words = {word.strip(",.!?") for text in TEXTS for word in text.split()}
    tokenizer = word_tokenizer(sorted(words | {*",.!?"}), 96)
    torch.manual_seed(0)
    encoder = ColbertEncoder(Backbone(build_mlm(family), tokenizer), ColbertHead(8))
    expected = scores(encoder)
    path = saved(encoder, tmp_path / "model")
    torch.testing.assert_close(scores_elsewhere(path), expected, **TOLERANCE)
    torch.testing.assert_close(scores(load_encoder(resaved(path))), expected, **TOLERANCE)


def test_saving_leaves_no_masked_language_model_behind(build_mlm, tmp_path):
    """What is trained is saved: the body, as PyLate and sentence-transformers save it."""
    tokenizer = word_tokenizer([f"w{row}" for row in range(5, 60)], 96)
    encoder = ColbertEncoder(Backbone(build_mlm("bert"), tokenizer), ColbertHead(8))
    path = saved(encoder, tmp_path / "model")
    assert json.loads((path / "config.json").read_text())["architectures"] == ["BertModel"]
    assert not any("cls." in name for name in load_file(path / "model.safetensors"))


def test_a_narrower_model_is_the_first_part_of_the_whole(tmp_path):
    """Its folder is one of another width, for every library; widths go with this project's."""
    path = saved(make_encoder(widths=[8, 4, 2]), tmp_path / "model")
    whole, narrow = load_encoder(path), load_encoder(path)
    assert whole.head.widths == [8, 4, 2] and whole.narrower_widths == (4, 2)
    narrow.narrow(4)
    assert narrow.head.widths == [4, 2] and narrow.narrower_widths == (2,)
    expected = stored_documents(whole).first(4).values
    torch.testing.assert_close(stored_documents(narrow).values, expected, **TOLERANCE)
    assert not torch.allclose(expected, stored_documents(whole).values[:, 4:], atol=1e-2)
    cut = saved(narrow, tmp_path / "cut")
    torch.testing.assert_close(scores_elsewhere(cut), scores(narrow), **TOLERANCE)
    assert torch.equal(scores(load_encoder(cut)), scores(narrow))
    with pytest.raises(
        ValueError, match="width=3: the token vectors of this model work with the w"
    ):
        whole.narrow(3)
    silent = load_encoder(saved(make_encoder(), tmp_path / "silent"))
    with pytest.raises(ValueError, match=r"width=9: .* with the widths 1 to 8"):
        silent.narrow(9)
    silent.narrow(3)
    assert stored_documents(silent).width == 3
    edit(path / "sparton.json", widths=[9, 4])
    with pytest.raises(
        ValueError, match=r"widths is .*, and must be different numbers up to the 8"
    ):
        load_encoder(path)


POOLED = {
    "pooled": {"pool_factor": 2.0},
    "three protected": {"pool_factor": 1.5, "protected_tokens": 3},
    "pooled, any length": {"pool_factor": 2.0, "normalize": False},
}


@pytest.mark.parametrize("variant", POOLED)
def test_folders_with_token_pooling_go_both_ways(variant, tmp_path):
    """sentence-transformers pools in ``encode_document``, this project when it encodes documents to
    be searched."""
    encoder = make_encoder(**POOLED[variant])
    path = saved(encoder, tmp_path / "model")
    expected = stored_documents(encoder)
    assert len(expected.values) < len(stored_documents(make_encoder()).values)
    newer = resaved(path)
    for each in (path, newer):
        model = sentence_transformers.MultiVectorEncoder(str(each), device="cpu")
        found = model.encode_document(TEXTS)
        assert [len(text) for text in found] == expected.lengths.tolist()
        values = torch.cat([torch.as_tensor(text) for text in found])
        torch.testing.assert_close(values, expected.values, **TOLERANCE)
        again = load_encoder(each)
        assert (
            again.token_pooling == encoder.token_pooling
            and again.head.normalize == encoder.head.normalize
        )
        torch.testing.assert_close(stored_documents(again).values, expected.values, **TOLERANCE)
    assert (
        load_encoder(path, ColbertHead(8, normalize=encoder.head.normalize)).token_pooling.factor
        == 1
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["query", "document"]}, "pools tokens of query and document; only those of doc"),
        (
            {"normalize_embeddings": False},
            "says normalize_embeddings=False, but the model has norm",
        ),
        ({"normalize_embeddings": None}, "says normalize_embeddings=False, but the model has norm"),
        ({"pool_factor": 0.5}, "pool_factor is 0.5, and must be a number from 1 on"),
        ({"num_protected_tokens": -1}, "num_protected_tokens is -1, and must be a whole number"),
    ],
)
def test_token_pooling_that_is_missing_here_is_refused(changes, message, tmp_path):
    path = saved(make_encoder(pool_factor=2.0), tmp_path / "model")
    edit(path / "4_HierarchicalTokenPooling/config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_encoder(path)


@pytest.mark.parametrize("biased", [(), (1,), (2,), (3,), (1, 2, 3)])
def test_linear_maps_in_a_row_are_one(biased, folder):
    """Projections without activation, with and without biases and residual connections."""
    generator = torch.Generator().manual_seed(0)
    parts = ((32, 24, True), (24, 24, True), (24, 8, False))
    modules = json.loads((folder / "modules.json").read_text())[:1]
    for number, (width, out, residual) in enumerate(parts, start=1):
        place = folder / f"{number}_Dense"
        place.mkdir(exist_ok=True)
        weights = {"linear.weight": torch.randn(out, width, generator=generator)}
        if residual and width != out:
            weights["residual.weight"] = torch.randn(out, width, generator=generator)
        if number in biased:
            weights["linear.bias"] = 10 * torch.randn(out, generator=generator)
        save_file(weights, place / "model.safetensors")
        described = {"in_features": width, "out_features": out, "bias": number in biased}
        described["activation_function"] = "torch.nn.modules.linear.Identity"
        described["use_residual"] = residual
        (place / "config.json").write_text(json.dumps(described))
        kind = "pylate.models.Dense.Dense"
        modules.append({"idx": number, "name": f"{number}", "path": place.name, "type": kind})
    (folder / "modules.json").write_text(json.dumps(modules))
    encoder = load_encoder(folder)
    assert encoder.head.bias == bool(biased)
    actual = scores(encoder)
    torch.testing.assert_close(scores_elsewhere(folder), actual, **TOLERANCE)
    edit(folder / "2_Dense/config.json", use_residual=False)
    assert not torch.allclose(scores(load_encoder(folder)), actual, atol=1e-2)


def vectors_elsewhere(model) -> list[Tensor]:
    """Of sentence-transformers; of the texts as queries, then as documents."""
    sides = (model.encode_query(TEXTS), model.encode_document(TEXTS))
    return [torch.as_tensor(each) for side in sides for each in side]


@torch.no_grad()
def vectors(encoder: ColbertEncoder) -> list[Tensor]:
    """Those that count in MaxSim, in the same order."""
    tokenizer = PackedTokenizer(encoder.tokenizer, **LENGTHS, markup=encoder.markup)
    found = []
    for tokens, side in (
        (tokenizer.queries(TEXTS), "query"),
        (tokenizer.documents(TEXTS), "document"),
    ):
        values, cu_seqlens, mask, *_ = encoder(tokens, side)
        kept = torch.ones_like(values[:, 0], dtype=torch.bool) if mask is None else mask
        found += [values[a:b][kept[a:b]] for a, b in pairwise(cu_seqlens.tolist())]
    return found


@pytest.mark.parametrize("normalize", [True, False])
def test_a_projection_with_a_bias_goes_both_ways(normalize, tmp_path):
    """One that sentence-transformers made, read here, saved here and read there again: the same
    weights and the same vectors."""
    start = saved(make_encoder(normalize=normalize), tmp_path / "start")
    theirs = sentence_transformers.MultiVectorEncoder(str(start), device="cpu")
    place = next(row for row, module in enumerate(theirs) if type(module).__name__ == "Dense")
    torch.manual_seed(5)
    dense = type(theirs[place])(
        32, 8, bias=True, activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )  # fmt: skip
    theirs[place] = dense
    expected = vectors_elsewhere(theirs)
    theirs.save(str(tmp_path / "theirs"))
    encoder = load_encoder(tmp_path / "theirs")
    assert encoder.head.bias
    assert torch.equal(encoder.projection.bias, dense.linear.bias)
    ours = saved(encoder, tmp_path / "ours")
    again = sentence_transformers.MultiVectorEncoder(str(ours), device="cpu")
    for found in (vectors(encoder), vectors_elsewhere(again), vectors(load_encoder(ours))):
        assert [x.shape for x in found] == [x.shape for x in expected]
        torch.testing.assert_close(torch.cat(found), torch.cat(expected), **TOLERANCE)
    file, other = (path / "1_Dense" / "model.safetensors" for path in (tmp_path / "theirs", ours))
    before, after = load_file(file), load_file(other)
    assert before.keys() == after.keys() == {"linear.weight", "linear.bias"}
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert json.loads((ours / "1_Dense/config.json").read_text())["bias"] is True
    torch.nn.init.zeros_(encoder.projection.bias)
    assert not torch.allclose(torch.cat(vectors(encoder)), torch.cat(expected), atol=1e-2)


def test_lengths_stand_in_many_places(folder):
    (folder / "sparton.json").unlink()
    assert encoder_lengths(folder) == (9, 14)
    config = json.loads((folder / "config_sentence_transformers.json").read_text())
    for key in ("query_length", "document_length"):
        del config[key]
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    assert encoder_lengths(folder) == (32, 180)  # PyLate's defaults
    newer = resaved(folder)
    edit(newer / "sentence_bert_config.json", document_length=None, query_expansion=None)
    assert encoder_lengths(newer) == (14, 14)  # its one length for both


def test_words_that_are_no_tokens_are_unknown_words_to_pylate(folder):
    edit(folder / "config_sentence_transformers.json", skiplist_words=["lazy", "elephant"])
    assert load_encoder(folder).head.skiplist == ["lazy", "elephant", "[UNK]"]
    edit(folder / "config_sentence_transformers.json", skiplist_words=["lazy"])
    assert load_encoder(folder).head.skiplist == ["lazy"]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (ColbertHead(16), r"width=16 \(the folder: 8\)"),
        (ColbertHead(8, query_marker="[X]"), r"query_marker='\[X\]' \(the folder: '\[Q\] '\)"),
        (ColbertHead(8, skiplist=["the"]), r"skiplist='the'"),
        (ColbertHead(8, bias=True), r"bias=True \(the folder: False\)"),
        (
            EagerHead(),
            "holds a model with a ColbertHead, and a EagerHead cannot stand in for that: "
            r"head=ColbertHead\(\.\.\.\) goes on from it\. .* a bare one",
        ),
    ],
)
def test_heads_that_differ_from_the_folder_are_refused(folder, head, message):
    with pytest.raises(ValueError, match=message):
        load_encoder(folder, head)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("1_Dense/config.json", {"activation_function": "torch.nn.Tanh"}, "activation=Tanh"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "min", "length": 9}},
            r"strategy 'min' with the token None; only 'fixed' with '\[MASK\]'",
        ),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "fixed", "length": 9, "token": "cat"}},
            "strategy 'fixed' with the token 'cat'",
        ),
        (
            "2_MultiVectorMask/config.json",
            {"skiplist_tasks": ["query", "document"]},
            "skips tokens of query and document",
        ),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [7]}, r"only the tokens \[7\]"),
    ],
)
def test_models_with_what_is_missing_here_are_refused(folder, file, changes, message):
    newer = resaved(folder)
    edit(newer / file, **changes)
    with pytest.raises(ValueError, match=message):
        load_encoder(newer)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("1_Dense/model.safetensors", "1_Dense has no model.safetensors"),
        ("1_Dense/config.json", "1_Dense/config.json is missing"),
        ("model.safetensors", "model.safetensors"),
        ("tokenizer.json", "no tokenizer in"),
    ],
)
def test_missing_files_are_named(folder, file, message):
    (folder / file).unlink()
    with pytest.raises(OSError, match=message):
        load_encoder(folder)


def test_damaged_projections_are_named(folder):
    file = folder / "1_Dense/model.safetensors"
    save_file({"linear.bias": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"holds linear\.bias instead of linear\.weight"):
        load_encoder(folder)
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"1_Dense/model\.safetensors is damaged"):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("described", "shape", "message"),
    [
        (True, None, r"of the shape None, but bias=True .* ask for \[8\]"),
        (False, (8,), r"of the shape \[8\], but bias=False .* ask for None"),
        (True, (1,), r"of the shape \[1\], but bias=True .* ask for \[8\]"),
    ],
)
def test_a_bias_that_does_not_fit_is_named(described, shape, message, folder):
    edit(folder / "1_Dense/config.json", bias=described)
    file = folder / "1_Dense/model.safetensors"
    bias = {} if shape is None else {"linear.bias": torch.zeros(shape)}
    save_file(load_file(file) | bias, file)
    with pytest.raises(ValueError, match=rf"1_Dense/model\.safetensors .*{message}"):
        load_encoder(folder)


def test_other_kinds_of_model_are_refused(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules.append(modules[1] | {"type": "sentence_transformers.models.Pooling"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=r"composes Transformer \+ Dense \+ Pooling; a late-inter"):
        load_encoder(folder)
