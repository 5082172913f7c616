"""Folders with a sparse autoencoder against sentence-transformers, both ways; and refusals."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparton.datasets.tokenization import PackedTokenizer
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.models.backbones import bare, tiny
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.folders import Lengths, encoder_lengths, load_encoder, save_encoder
from sparton.models.folders.dense import load_dense, save_dense
from sparton.models.pooling import Pooling
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import Markup, TokenBatch, TrainBatch
from tests.models.malformed import edit

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt quick hens", ""]
LENGTHS = {"query_length": 8, "document_length": 12}
HEAD = AutoencoderHead(hidden_dim=64, k=6, k_aux=8, dead_threshold=7)


def make_encoder(**settings: object) -> AutoencoderEncoder:
    torch.manual_seed(1)
    backbone = tiny(TEXTS, hidden_size=32, layers=1)
    encoder = AutoencoderEncoder(backbone, dataclasses.replace(HEAD, **settings)).eval()
    with torch.no_grad():
        encoder.autoencoder.pre_bias.normal_()
        encoder.autoencoder.latent_bias.normal_(std=0.1)
        encoder.autoencoder.passes_since_active[:20] = 11
    return encoder


@torch.no_grad()
def encode(encoder: AutoencoderEncoder, texts: list[str] = TEXTS) -> Tensor:
    ids = encoder.tokenizer(texts, truncation=True, max_length=12)["input_ids"]
    return encoder.eval()(TokenBatch.from_lists(ids))


def save(encoder: AutoencoderEncoder, path: Path) -> Path:
    save_encoder(encoder, path, **LENGTHS)
    return path


def elsewhere(path: Path) -> "sentence_transformers.SparseEncoder":
    return sentence_transformers.SparseEncoder(str(path), device="cpu")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_both_libraries_load_the_folder_and_the_other_ones(pooling, normalize, tmp_path):
    """To sentence-transformers and, through a folder that it wrote, back."""
    settings = {"pooling": pooling, "normalize": normalize, "normalize_pooled": normalize}
    encoder = make_encoder(**settings)
    expected = encode(encoder)
    assert (expected > 0).sum(1).float().mean() > 4
    path = save(encoder, tmp_path / "own")
    model = elsewhere(path)
    torch.testing.assert_close(model.encode(TEXTS, convert_to_sparse_tensor=False), expected)
    assert model.max_seq_length == 12 and model.similarity_fn_name == "dot"
    assert model.max_active_dims == 6
    model.save(str(tmp_path / "newer"))
    for name in ("own", "newer"):
        again = load_encoder(tmp_path / name)
        torch.testing.assert_close(encode(again), expected)
        assert dataclasses.replace(again.head, freeze_backbone=True) == encoder.head
        assert torch.equal(again.autoencoder.dead, encoder.autoencoder.dead)
    assert encoder_lengths(path) == (8, 12)
    assert not torch.allclose(encode(make_encoder()), expected, atol=1e-3) or settings == {
        "pooling": "mean", "normalize": False, "normalize_pooled": False,
    }  # fmt: skip


def test_training_goes_on_elsewhere_with_the_same_loss(tmp_path):
    """What sentence-transformers reads includes the dead latents."""
    encoder = make_encoder().train()
    model = elsewhere(save(encoder, tmp_path / "own"))
    features = model.preprocess(TEXTS[:3])
    autoencoder = model[-1].eval()
    tokens = TokenBatch.from_lists(encoder.tokenizer(TEXTS[:3])["input_ids"])
    own = encoder.finish(encoder.encode(tokens, "query"), encoder.autoencoder.dead)
    own = encoder.complete(own).losses
    for module in list(model)[:-1]:
        features = module.eval()(features)
    outputs = [autoencoder(features)]
    losses = sentence_transformers.sparse_encoder.losses.csr.CSRReconstructionLoss(model, 1.0)
    expected = losses.compute_loss_from_embeddings(outputs)
    torch.testing.assert_close(own["auxiliary"].mean(), expected["reconstruction_loss_aux"])
    # Ours are relative to the embedding, theirs are not.
    errors = own["reconstruction_k"] * encoder.embed(tokens).square().mean(-1)
    torch.testing.assert_close(errors.mean(), expected["reconstruction_loss_k"])


def pairs(step: int) -> tuple[list[str], list[str]]:
    """Three queries and three documents of a few words."""
    words = " ".join(TEXTS).split()
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(len(words), (6, 3), generator=generator).tolist()
    texts = [" ".join(words[row] for row in each) for each in rows]
    return texts[:3], texts[3:]


def own_step(encoder: AutoencoderEncoder, step: int) -> Tensor:
    """The auxiliary loss of a step, in micro-batches of two pairs."""
    objective = Objective(InfoNCE(), own_losses=encoder.loss_weights)
    cpu = torch.device("cpu")
    exact = ExactStep(encoder.train(), objective, World(0, 1, cpu), Precision("fp32", cpu), 2)
    sides = [encoder.tokenizer(texts)["input_ids"] for texts in pairs(step)]
    return exact(TrainBatch(*map(TokenBatch.from_lists, sides)), step).parts["auxiliary"]


def other_step(model: "sentence_transformers.SparseEncoder", step: int) -> Tensor:
    model.eval()
    model[-1].train()
    columns = [model(model.preprocess(texts)) for texts in pairs(step)]
    losses = sentence_transformers.sparse_encoder.losses.csr.CSRReconstructionLoss(model, 1.0)
    return losses.compute_loss_from_embeddings(columns)["reconstruction_loss_aux"].detach()


def test_latents_die_after_as_many_steps_elsewhere(tmp_path):
    """From a folder of ours, and again from a folder of either that the other one goes on with."""
    encoder = make_encoder(hidden_dim=96, k=2, k_aux=16, dead_threshold=14)
    encoder.autoencoder.passes_since_active.zero_()
    with torch.no_grad():  # centred, so that texts differ in their largest latents
        queries, documents = pairs(99)
        tokens = TokenBatch.from_lists(encoder.tokenizer(queries + documents)["input_ids"])
        encoder.autoencoder.pre_bias.copy_(encoder.embed(tokens).mean(0))
        encoder.autoencoder.latent_bias.zero_()
    model = elsewhere(save(encoder, tmp_path / "first"))
    shares = []
    for step in range(12):
        torch.testing.assert_close(own_step(encoder, step), other_step(model, step))
        dead = model[-1].stats_last_nonzero > model[-1].dead_threshold
        assert torch.equal(encoder.autoencoder.dead, dead)
        shares.append(dead.float().mean().item())
        if step == 5:
            model.save(str(tmp_path / "theirs"))
            model = elsewhere(save(encoder, tmp_path / "ours"))
            encoder = load_encoder(tmp_path / "theirs", encoder.head)
    assert shares[:3] == [0.0] * 3 and min(shares[4:]) > 0.1 and len({*shares}) > 4


def test_a_dense_model_that_the_other_library_extends_loads(tmp_path):
    """Its default autoencoder on a dense folder of ours, and the dense folder itself."""
    body = tiny(TEXTS, hidden_size=32, layers=1).bare().eval()
    dense = DenseEncoder(body, Pooling("mean", True))
    (tmp_path / "dense").mkdir()
    save_dense(dense, tmp_path / "dense", Lengths(8, 12))
    tokens = TokenBatch.from_lists(body.tokenizer(TEXTS)["input_ids"])
    expected = dense.pooling(body.hidden_states(tokens), tokens)
    plain = sentence_transformers.SentenceTransformer(str(tmp_path / "dense"), device="cpu")
    embeddings = plain.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(embeddings, expected, rtol=1e-5, atol=1e-6)
    again = load_dense(tmp_path / "dense")
    assert again.pooling == dense.pooling and again.markup == Markup()
    torch.testing.assert_close(again.body.eval().hidden_states(tokens), body.hidden_states(tokens))
    model = elsewhere(tmp_path / "dense")
    model.save(str(tmp_path / "csr"))
    encoder = load_encoder(tmp_path / "csr")
    assert (encoder.head.hidden_dim, encoder.head.k, encoder.head.k_aux) == (128, 8, 16)
    torch.testing.assert_close(encode(encoder), model.encode(TEXTS, convert_to_sparse_tensor=False))
    body = bare(str(tmp_path / "csr")).eval()
    torch.testing.assert_close(body.hidden_states(tokens), again.body.hidden_states(tokens))


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_prompts_travel_both_ways(tmp_path, pooling, include_prompt):
    prompts = {"query_prompt": "quick ", "document_prompt": "lazy brown "}
    encoder = make_encoder(pooling=pooling, include_prompt=include_prompt, **prompts)
    model = elsewhere(save(encoder, tmp_path / "own"))
    model.save(str(tmp_path / "newer"))
    tokenizer = PackedTokenizer(encoder.tokenizer, 12, 12, markup=encoder.markup)
    for encode_side, tokenize in (
        (model.encode_query, tokenizer.queries),
        (model.encode_document, tokenizer.documents),
    ):
        expected = encoder(tokenize(TEXTS)).detach()
        torch.testing.assert_close(encode_side(TEXTS, convert_to_sparse_tensor=False), expected)
        assert not torch.allclose(encode(encoder), expected, atol=1e-3)
    other = encoder.markup._replace(include_prompt=not include_prompt)
    tokenizer = PackedTokenizer(encoder.tokenizer, 12, 12, markup=other)
    assert not torch.allclose(encoder(tokenizer.documents(TEXTS)), expected, atol=1e-3)
    for name in ("own", "newer"):
        assert load_encoder(tmp_path / name).markup == encoder.markup
    with pytest.raises(ValueError, match=rf"include_prompt={not include_prompt} \(the folder: "):
        load_encoder(
            tmp_path / "own", dataclasses.replace(encoder.head, include_prompt=not include_prompt)
        )


@pytest.fixture
def saved(tmp_path) -> Path:
    return save(make_encoder(), tmp_path / "model")


AUTOENCODER = "2_SparseAutoEncoder"


def test_the_matrix_is_read_by_either_of_its_names(saved):
    expected = encode(load_encoder(saved))
    weights = load_file(saved / AUTOENCODER / "model.safetensors")
    weights["encoder.weight"] = weights.pop("decoder.linear.weight")
    save_file(weights, saved / AUTOENCODER / "model.safetensors")
    assert torch.equal(encode(load_encoder(saved)), expected)


def test_a_head_with_other_settings_is_refused(tmp_path):
    dense = tiny(["the quick brown fox"], hidden_size=32, layers=1)
    save_encoder(
        AutoencoderEncoder(dense, HEAD), tmp_path / "csr", query_length=8, document_length=8
    )
    load_encoder(tmp_path / "csr", dataclasses.replace(HEAD, auxiliary_weight=0.5))
    with pytest.raises(ValueError, match=r"other settings than .*: k=5 \(the folder: 6\)"):
        load_encoder(tmp_path / "csr", dataclasses.replace(HEAD, k=5))
    encoder = DenseEncoder(dense.bare(), Pooling("mean", True))
    save_encoder(encoder, tmp_path / "dense", query_length=8, document_length=8)
    load_encoder(tmp_path / "dense", Pooling("mean", True))
    with pytest.raises(ValueError, match="mode='cls'"):
        load_encoder(tmp_path / "dense", Pooling("cls", True))


def test_other_compositions_are_refused(saved):
    modules = json.loads((saved / "modules.json").read_text())
    dense = {**modules[1], "type": "sentence_transformers.models.Dense"}
    (saved / "modules.json").write_text(json.dumps([*modules[:2], dense, modules[-1]]))
    with pytest.raises(ValueError, match=r"composes Transformer \+ Pooling \+ Dense; a dense enco"):
        load_encoder(saved)
    (saved / "modules.json").unlink()
    with pytest.raises(FileNotFoundError, match="it is no sentence-transformers model"):
        load_dense(saved)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}, "'max'"),
        ({"pooling_mode_cls_token": True}, r"'cls\+mean'"),
        ({"pooling_mode": ["mean", "max"]}, r"'mean\+max'"),
    ],
)
def test_other_poolings_are_refused(saved, changes, found):
    edit(saved / "1_Pooling/config.json", **changes)
    with pytest.raises(ValueError, match=f"1_Pooling/config.json: pooling={found} is not one of"):
        load_encoder(saved)


def test_a_transformer_for_another_task_is_refused(saved):
    edit(saved / "sentence_bert_config.json", transformer_task="fill-mask")
    with pytest.raises(ValueError, match="transformer_task is 'fill-mask'"):
        load_encoder(saved)


def test_weights_that_do_not_fit_or_are_damaged_are_named(saved):
    file = saved / AUTOENCODER / "model.safetensors"
    edit(saved / AUTOENCODER / "config.json", hidden_dim=32)
    with pytest.raises(ValueError, match=r"has the shape \(64,\) as latent_bias, .* need \(32,\)"):
        load_encoder(saved)
    edit(saved / AUTOENCODER / "config.json", hidden_dim=64)
    weights = load_file(file)
    del weights["pre_bias"]
    save_file(weights, file)
    with pytest.raises(ValueError, match="has nothing as pre_bias"):
        load_encoder(saved)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_encoder(saved)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"2_SparseAutoEncoder/model\.safetensors"):
        load_encoder(saved)
