"""The encoder with a sparse autoencoder: what it makes of texts, counts and freezes."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

from sparton.models.autoencoder import residual_variance
from sparton.models.backbones import tiny
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.representations import Representations
from sparton.types import Markup, Side, TokenBatch
from tests.devices import nothing_waits

TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt hens", ""]
HEAD = AutoencoderHead(hidden_dim=64, k=6, k_aux=8, dead_threshold=12)
LOSSES = ("reconstruction_k", "reconstruction_4k", "auxiliary")


def make_encoder(**settings: object) -> AutoencoderEncoder:
    torch.manual_seed(0)
    backbone = tiny(TEXTS, hidden_size=32, layers=1)
    return AutoencoderEncoder(backbone, dataclasses.replace(HEAD, **settings))


def tokenise(encoder: AutoencoderEncoder, texts: list[str] = TEXTS) -> TokenBatch:
    return TokenBatch.from_lists(encoder.tokenizer(texts)["input_ids"])


def finished(encoder: AutoencoderEncoder, texts: list[str], side: Side) -> Representations:
    """With all losses, in which what is dead now is dead."""
    reps = encoder.encode(tokenise(encoder, texts), side)
    return encoder.finish(reps, encoder.autoencoder.dead)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [False, True])
def test_texts_become_latents_of_their_pooled_states(pooling, normalize):
    encoder = make_encoder(pooling=pooling, normalize_pooled=normalize).eval()
    tokens = tokenise(encoder)
    states = encoder.backbone.hidden_states(tokens).split(tokens.cu_seqlens.diff().tolist())
    pooled = torch.stack([each.mean(0) if pooling == "mean" else each[0] for each in states])
    pooled = pooled / pooled.norm(dim=1, keepdim=True) if normalize else pooled
    expected = encoder.autoencoder(pooled)
    for side in ("query", "document"):
        reps = encoder.encode(tokens, side)
        torch.testing.assert_close(reps.sparse, expected)
        assert not reps.losses and reps.tokens is None and reps.used is None
    torch.testing.assert_close(encoder(tokens), expected)
    assert not torch.allclose(encoder.autoencoder(states[0][-1:]), expected[:1])
    values, indices = encoder.topk(tokens, "query", 3)
    torch.testing.assert_close(values, expected.topk(3).values)
    assert expected.shape == (4, encoder.vocabulary_size) and indices.max() < 64


def test_losses_come_with_training_and_are_complete_on_the_whole_batch():
    encoder = make_encoder().train()
    encoder.autoencoder.passes_since_active[::2] = 13
    assert encoder.loss_weights == {
        "reconstruction_k": 1.0, "reconstruction_4k": 0.125, "auxiliary": 0.1,
    }  # fmt: skip
    whole = encoder.complete(finished(encoder, TEXTS, "document"))
    parts = [finished(encoder, part, "document") for part in (TEXTS[:1], TEXTS[1:])]
    joined = encoder.complete(Representations.concatenate(parts))
    assert set(whole.losses) == set(LOSSES)
    for name, loss in whole.losses.items():
        assert loss.shape == (4,) and loss.dtype == torch.float32
        torch.testing.assert_close(joined.losses[name], loss)
    raw = finished(encoder, TEXTS, "document").losses
    scale = residual_variance(raw["residual"])
    torch.testing.assert_close(whole.losses["auxiliary"], raw["auxiliary"] / scale)
    assert not 0.9 < scale < 1.1


def test_without_an_auxiliary_loss_there_is_none_to_weigh():
    encoder = make_encoder(k_aux=0, reconstruction_weight=2.0).train()
    reps = encoder.complete(finished(encoder, TEXTS, "query"))
    assert set(reps.losses) == set(encoder.loss_weights) == set(LOSSES[:2])
    assert encoder.loss_weights["reconstruction_4k"] == 0.25


def test_a_step_is_four_passes_and_a_side_revives_latents_for_itself_and_the_next():
    encoder = make_encoder().train()
    queries, documents = (
        encoder.encode(tokenise(encoder, part), "query").used for part in (TEXTS[:1], TEXTS[1:])
    )
    assert not encoder.autoencoder.passes_since_active.any()
    for used in (queries, documents):
        assert 0 < used[0].sum() < used[1].sum() < 64 and (used[0] <= used[1]).all()
    for _ in range(4):
        dead = encoder.observe(queries, documents)
    assert torch.equal(dead[0], ~(queries[1] | documents[1]))
    assert torch.equal(dead[1], dead[0]) and torch.equal(encoder.autoencoder.dead, dead[0])
    share = encoder.figures()["dead_latents"]
    torch.testing.assert_close(share, dead[0].float().mean())
    revived = dead[0].nonzero().flatten()[:3]
    queries, documents = queries.clone(), documents.clone()
    queries[1, revived[0]] = documents[0, revived[1]] = documents[1, revived[1:]] = True
    dead = encoder.observe(queries, documents)
    assert [dead[0][revived].tolist(), dead[1][revived].tolist()] == [
        [True, True, True], [False, False, True],
    ]  # fmt: skip
    assert not encoder.autoencoder.dead[revived].any()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_backbone_learns_nothing_and_drops_nothing(frozen):
    encoder = make_encoder(freeze_backbone=frozen, learning_rate=1e-3).train()
    assert encoder.backbone.training == (not frozen)
    assert encoder.autoencoder.training
    reps = encoder.encode(tokenise(encoder), "query")
    (reps.sparse.sum() + reps.losses["reconstruction_k"].sum()).backward()
    assert encoder.autoencoder.encoder.weight.grad.any()
    learning = [p.grad is not None for p in encoder.backbone.parameters()]
    assert any(learning) == (not frozen)
    assert encoder.learning_rates() == {"autoencoder": 1e-3}
    assert make_encoder().learning_rates() == {}
    learns = make_encoder(freeze_backbone=False).backbone
    ours, backbones = encoder.flops_per_token(10.0), learns.flops_per_token(10.0)
    text = 3 * 8 * 64 * 32 / 10
    assert ours == pytest.approx(backbones / (3 if frozen else 1) + text)
    encoder.eval().train()
    assert encoder.backbone.training == (not frozen)


def test_the_masked_lm_head_is_left_out():
    names = [name for name, _ in make_encoder().named_parameters()]
    assert not any("predictions" in name or "decoder" in name for name in names)
    assert sum(name.startswith("autoencoder.") for name in names) == 3


def test_counters_are_saved_and_loaded_with_the_weights():
    encoder = make_encoder().train()
    used = encoder.encode(tokenise(encoder), "query").used
    for _ in range(5):
        encoder.observe(used, used)
    again = make_encoder()
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(again.autoencoder.dead, encoder.autoencoder.dead)
    assert again.autoencoder.dead.any()


def test_prompts_are_markup():
    encoder = make_encoder(query_prompt="query: ", document_prompt="passage: ")
    assert encoder.markup == Markup(query_prompt="query: ", document_prompt="passage: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 65}, "k=65 latents cannot be kept of hidden_dim=64"),
        ({"pooling": "max"}, "pooling='max' is not one of mean, cls"),
        ({"dead_threshold": 0}, "dead_threshold=0 must be a whole number of at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_encoder(**settings)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_on_a_gpu_as_on_the_cpu_from_call_to_call_and_without_waiting(pooling):
    """From the hidden states on: what is below them is the backbone's."""
    results = []
    below = make_encoder()
    below = below.backbone.hidden_states(tokenise(below)).detach()
    for device in ("cpu", "cuda", "cuda"):
        encoder = make_encoder(pooling=pooling).train().to(device)
        tokens = tokenise(encoder).to(device)
        states = below.to(device, copy=True).requires_grad_()
        encoder.backbone.hidden_states = lambda _, states=states: states
        with nothing_waits() if device == "cuda" else nullcontext():
            reps = encoder.encode(tokens, "query")
            seen, _ = encoder.observe(reps.used, reps.used)
            reps = encoder.complete(encoder.finish(reps, seen))
            encoder.figures()
            losses = torch.stack(list(reps.losses.values())).sum()
            (losses + reps.sparse.square().sum()).backward()
        gradients = states.grad, *(p.grad for p in encoder.autoencoder.parameters())
        counters = encoder.autoencoder.passes_since_active
        results.append([each.cpu() for each in (reps.sparse, *gradients, counters)])
    for expected, actual, again in zip(*results, strict=True):
        # Some gradients are a millionth of the largest: errors are relative to the tensor.
        largest = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5 * largest)
        assert torch.equal(actual, again)
