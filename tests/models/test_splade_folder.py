"""Folders against the libraries that read and write them, and folders that must be refused."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer

from sparton import packing
from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.backbone import Backbone
from sparton.models.backbones import tiny
from sparton.models.folders import encoder_lengths, load_encoder, save_encoder
from sparton.models.heads import EagerHead, SpartonHead, SpladeHead
from sparton.models.splade import SpladeEncoder
from sparton.types import Markup, TokenBatch
from tests.models.malformed import edit

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt quick hens", ""]


def make_encoder(seed: int = 0, head: SpladeHead | None = None) -> SpladeEncoder:
    backbone = tiny(TEXTS, hidden_size=32, layers=1, seed=seed)
    with torch.no_grad():
        backbone.decoder.bias.add_(2 * torch.rand(backbone.decoder.out_features))
    return SpladeEncoder(backbone, head or EagerHead()).eval()


@torch.no_grad()
def encode(encoder: SpladeEncoder, length: int = 12) -> Tensor:
    ids = encoder.tokenizer(TEXTS, truncation=True, max_length=length)["input_ids"]
    return encoder.eval()(TokenBatch.from_lists(ids))


def encode_elsewhere(path: Path) -> Tensor:
    model = sentence_transformers.SparseEncoder(str(path), device="cpu")
    return model.encode(TEXTS, convert_to_sparse_tensor=False)


@pytest.fixture
def saved(tmp_path) -> tuple[Path, Tensor]:
    """A folder, and the representations that it must give."""
    encoder = make_encoder()
    save_encoder(encoder, tmp_path / "model", query_length=8, document_length=12)
    return tmp_path / "model", encode(encoder)


def test_a_round_trip_is_exact(saved):
    path, expected = saved
    assert torch.equal(encode(load_encoder(path, EagerHead())), expected)
    assert not torch.allclose(encode(make_encoder(seed=1)), expected, atol=1e-3)
    assert encoder_lengths(path) == (8, 12)


def test_saving_leaves_the_encoder_as_it_was(tmp_path):
    encoder = make_encoder()
    before = encode(encoder)
    save_encoder(encoder, tmp_path / "model", query_length=8, document_length=12)
    assert torch.equal(encode(encoder), before)


def test_every_family_round_trips(family, build_mlm, tokenizer, tmp_path):
    encoder = SpladeEncoder(Backbone(build_mlm(family), tokenizer), EagerHead()).eval()
    save_encoder(encoder, tmp_path / "model", query_length=8, document_length=12)
    again = load_encoder(tmp_path / "model", EagerHead()).eval()
    tokens = TokenBatch.from_lists([[5, 6, 7], list(range(8, 40))])
    assert torch.equal(again(tokens), encoder(tokens))
    stock = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    assert stock.config._attn_implementation == "sdpa"
    padded = stock(
        input_ids=tokens.pad(tokens.input_ids, fill=stock.config.pad_token_id),
        attention_mask=tokens.padding_mask().long(),
    ).logits
    logits = packing.unpad(padded, tokens.cu_seqlens, tokens.num_tokens)
    expected = torch.log1p(torch.relu(torch.stack([logits[:3].amax(0), logits[3:].amax(0)])))
    torch.testing.assert_close(again(tokens), expected, rtol=1e-4, atol=1e-4)


def test_sentence_transformers_loads_the_folder_with_equal_representations(saved):
    path, expected = saved
    torch.testing.assert_close(encode_elsewhere(path), expected)
    model = sentence_transformers.SparseEncoder(str(path), device="cpu")
    assert model.max_seq_length == 12
    assert model.similarity_fn_name == "dot"
    assert len(AutoTokenizer.from_pretrained(path)) == expected.shape[1]


def test_a_folder_written_by_sentence_transformers_loads(saved, tmp_path):
    path, expected = saved
    sentence_transformers.SparseEncoder(str(path), device="cpu").save(str(tmp_path / "newer"))
    modules = (tmp_path / "newer/modules.json").read_text()
    assert "sparse_encoder.modules" in modules  # not the class paths that this project writes
    assert torch.equal(encode(load_encoder(tmp_path / "newer", EagerHead())), expected)
    assert encoder_lengths(tmp_path / "newer") == (12, 12)


def test_prompts_travel_both_ways(tmp_path):
    encoder = make_encoder()
    encoder.markup = Markup(query_prompt="a cat ", document_prompt="hens ")
    save_encoder(encoder, tmp_path / "model", query_length=20, document_length=20)
    model = sentence_transformers.SparseEncoder(str(tmp_path / "model"), device="cpu")
    model.save(str(tmp_path / "newer"))
    for name in ("model", "newer"):
        again = load_encoder(tmp_path / name).eval()
        tokenizer = PackedTokenizer(again.tokenizer, 20, 20, markup=again.markup)
        expected = model.encode_query(TEXTS, convert_to_sparse_tensor=False)
        torch.testing.assert_close(again(tokenizer.queries(TEXTS)), expected)
        assert not torch.allclose(again(tokenizer.documents(TEXTS)), expected, atol=1e-3)


def test_the_general_transformer_class_needs_its_task(saved):
    path, expected = saved
    modules = json.loads((path / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.base.modules.transformer.Transformer"
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="transformer_task is None; only fill-mask and"):
        load_encoder(path)
    edit(path / "sentence_bert_config.json", transformer_task="fill-mask")
    assert torch.equal(encode(load_encoder(path, EagerHead())), expected)


def test_a_plain_masked_lm_checkpoint_loads(saved):
    path, expected = saved
    shutil.rmtree(path / "1_SpladePooling")
    for name in ("modules", "config_sentence_transformers", "sentence_bert_config", "sparton"):
        (path / f"{name}.json").unlink()
    assert torch.equal(encode(load_encoder(path, EagerHead())), expected)


@pytest.mark.parametrize("head", [EagerHead, SpartonHead])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_pooling_and_activation_travel_both_ways(pooling, activation, head, tmp_path):
    """To sentence-transformers and, through a folder that it wrote, back."""
    encoder = make_encoder(head=head(pooling, activation))
    save_encoder(encoder, tmp_path / "model", query_length=8, document_length=12)
    expected = encode(encoder)
    torch.testing.assert_close(encode_elsewhere(tmp_path / "model"), expected)
    model = sentence_transformers.SparseEncoder(str(tmp_path / "model"), device="cpu")
    model.save(str(tmp_path / "newer"))
    for name in ("model", "newer"):
        again = load_encoder(tmp_path / name)
        assert isinstance(again.head, SpartonHead)
        assert (again.head.pooling, again.head.activation) == (pooling, activation)
        torch.testing.assert_close(encode(again), expected)
    encoder.head = EagerHead()
    same = torch.allclose(encode(encoder), expected, atol=1e-3)
    assert same == ((pooling, activation) == ("max", "relu"))


def test_a_head_that_differs_from_the_folder_is_refused(saved, tmp_path):
    path, _ = saved
    message = r"pooling='sum' \(the folder: 'max'\); set the head's"
    with pytest.raises(ValueError, match=message):
        load_encoder(path, EagerHead("sum"))
    (path / "modules.json").unlink()  # a plain checkpoint does not say
    assert load_encoder(path, EagerHead("sum")).head.pooling == "sum"
    assert load_encoder(path).head.pooling == "max"


class Halved(EagerHead):
    """A head of a user's own, which computes what no settings say."""

    def forward(self, *given: object) -> Tensor:
        return super().forward(*given) / 2


class Other(Halved):
    pass


def test_a_head_of_ones_own_is_never_taken_for_its_settings(saved, tmp_path):
    plain, expected = saved
    encoder = make_encoder(head=Halved())
    path = tmp_path / "own"
    save_encoder(encoder, path, query_length=8, document_length=12)
    assert torch.equal(2 * encode(encoder), encode(SpladeEncoder(encoder.backbone, EagerHead())))
    for head in (None, SpartonHead(), Other()):
        with pytest.raises(ValueError, match=rf"own was trained with the head {__name__}\.Halved"):
            load_encoder(path, head)
    with pytest.raises(TypeError, match="head"):
        encode_elsewhere(path)
    again = load_encoder(path, Halved())
    assert torch.equal(encode(again), encode(encoder))
    # Its largest entries are those of its own representations, and a plain folder may be its start.
    tokens = TokenBatch.from_lists(again.tokenizer(TEXTS)["input_ids"])
    assert torch.equal(again.topk(tokens, "document", 3).values, again(tokens).topk(3).values)
    assert torch.equal(encode(load_encoder(plain, Halved())), expected / 2)


@pytest.mark.parametrize(
    ("key", "value"), [("pooling_strategy", "mean"), ("activation_function", "gelu")]
)
def test_unknown_poolings_are_refused(saved, key, value):
    path, _ = saved
    edit(path / "1_SpladePooling/config.json", **{key: value})
    with pytest.raises(ValueError, match=f"1_SpladePooling/config.json: .* got '{value}'"):
        load_encoder(path)


def test_other_kinds_of_model_are_refused(saved):
    path, _ = saved
    modules = json.loads((path / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.models.Pooling"
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=r"modules.json composes MLMTransformer \+ Pooling"):
        load_encoder(path)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("tokenizer.json", "no tokenizer in"),
        ("model.safetensors", "model.safetensors"),
        ("config.json", "config.json"),
        ("1_SpladePooling/config.json", "1_SpladePooling/config.json is missing"),
    ],
)
def test_missing_files_are_named(saved, missing, message):
    path, _ = saved
    (path / missing).unlink()
    with pytest.raises(OSError, match=message):
        load_encoder(path)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_truncated_checkpoint_is_named(saved, share):
    path, _ = saved
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_encoder(path)


def test_broken_json_is_named(saved):
    path, _ = saved
    (path / "modules.json").write_text("[{")
    with pytest.raises(ValueError, match=r"modules\.json is not valid JSON"):
        load_encoder(path)


def test_a_module_that_is_no_object_is_named(saved):
    path, _ = saved
    (path / "1_SpladePooling/config.json").write_text('["max"]')
    with pytest.raises(
        ValueError, match=r"1_SpladePooling/config\.json must hold a JSON object, not"
    ):
        load_encoder(path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        load_encoder(tmp_path / "nowhere")


def test_saving_again_replaces_the_folder(saved):
    path, expected = saved
    (path / "stale.txt").write_text("from an earlier model")
    other = make_encoder(seed=1)
    save_encoder(other, path, query_length=4, document_length=6)
    assert not torch.allclose(encode(load_encoder(path, EagerHead())), expected)
    assert encoder_lengths(path) == (4, 6)
    assert not (path / "stale.txt").exists()
    assert [entry.name for entry in path.parent.iterdir()] == ["model"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing more than ``size`` bytes to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("size", "cause"),
    [(100, "OSError"), (10_000, "SafetensorError"), (200_000, "Exception")],
    ids=["config", "weights", "tokenizer"],
)
def test_a_failing_write_is_one_clear_error_and_touches_nothing(saved, size, cause):
    path, expected = saved
    backbone = tiny([*TEXTS, "long" * 100_000], hidden_size=32, layers=1)
    encoder = SpladeEncoder(backbone, EagerHead())
    why = rf"[\d,.]+ MiB are free in {path.parent}\. Make"
    if cause == "OSError":  # which alone says that it is a limit
        why = r"files may not be so large here\. Raise that limit \(ulimit -f\)"
    message = f"folder {path} could not be written; {why}"
    with largest_file(size), pytest.raises(OSError, match=message) as caught:
        save_encoder(encoder, path, query_length=4, document_length=6)
    assert type(caught.value.__cause__).__name__ == cause
    assert "before is untouched. (" in str(caught.value)
    assert "File too large" in str(caught.value)
    assert [entry.name for entry in path.parent.iterdir()] == ["model"]
    assert torch.equal(encode(load_encoder(path, EagerHead())), expected)
    save_encoder(encoder, path, query_length=4, document_length=6)  # room again: nothing in the way
    assert encoder_lengths(path) == (4, 6)


@pytest.mark.parametrize("place", ["fsync", "rename"])
def test_a_disk_that_fails_late_leaves_the_old_folder_untouched(saved, monkeypatch, place):
    path, expected = saved

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rename = Path.rename
    if place == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(
            Path, "rename", lambda own, to: (full if own.suffix == ".tmp" else rename)(own, to)
        )
    with pytest.raises(OSError, match="No space left"):
        save_encoder(make_encoder(seed=1), path, query_length=4, document_length=6)
    assert [entry.name for entry in path.parent.iterdir()] == ["model"]
    assert torch.equal(encode(load_encoder(path, EagerHead())), expected)


def test_a_fault_of_the_program_is_not_called_a_full_disk(tmp_path, monkeypatch):
    encoder = make_encoder()
    monkeypatch.setattr(encoder.tokenizer, "save_pretrained", None)
    with pytest.raises(TypeError):
        save_encoder(encoder, tmp_path / "model", query_length=4, document_length=6)
    assert list(tmp_path.iterdir()) == []
