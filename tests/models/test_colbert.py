"""Vectors of tokens against the operations written out; what is marked, filled up and skipped."""

import pytest
import torch
import torch.nn.functional as F

from sparton.datasets.tokenization import PackedTokenizer
from sparton.kernels.maxsim import maxsim_reference, maxsim_varlen
from sparton.models.backbone import Backbone
from sparton.models.backbones import tiny
from sparton.models.body import EncoderBody
from sparton.models.colbert import ColbertEncoder, ColbertHead, new_projection
from sparton.models.words import word_tokenizer
from sparton.representations import TokenVectors
from sparton.types import TokenBatch

TEXTS = ["the cat, the dog", "a dog.", "", "what is a cat?"]
QUERY, DOCUMENT = 10, 16


def encoder(**settings) -> ColbertEncoder:
    torch.manual_seed(0)
    backbone = tiny(TEXTS, hidden_size=32, layers=1, max_length=DOCUMENT)
    return ColbertEncoder(backbone, ColbertHead(8, **settings)).eval()


def tokenizer_of(model: ColbertEncoder) -> PackedTokenizer:
    return PackedTokenizer(
        model.tokenizer, QUERY, DOCUMENT, max_length=model.max_length, markup=model.markup
    )


def test_the_longest_length_stays_known_to_the_host():
    model = encoder()
    tokenizer = tokenizer_of(model)
    sides = [tokenizer.queries(TEXTS), tokenizer.documents(TEXTS[:3])]
    parts = [model.encode(sides[0], "query").tokens, model.encode(sides[1], "document").tokens]
    longest = [int(tokens.cu_seqlens.diff().max()) for tokens in sides]
    assert [part.max_seqlen for part in parts] == longest
    assert QUERY == longest[0] > longest[1] > 1
    parts = [part._replace(mask=None) for part in parts]
    together = TokenVectors.concatenate(parts)
    assert together.max_seqlen == max(longest)
    sizes = [part.values.shape[0] for part in parts]
    for piece, part in zip(together.split([4, 3], sizes), parts, strict=True):
        assert piece.max_seqlen >= part.max_seqlen
    unknown = TokenVectors.concatenate([parts[0], parts[1]._replace(max_seqlen=None)])
    assert unknown.max_seqlen is None


def test_vectors_are_projected_states_of_length_one(family, build_mlm, tokenizer):
    head = ColbertHead(8, query_marker="", document_marker="")
    model = ColbertEncoder(Backbone(build_mlm(family), tokenizer), head).eval()
    tokens = TokenBatch.from_lists([[5, 6, 7], [], [8, 9]])
    vectors = model.encode(tokens, "document").tokens
    states = model.backbone.hidden_states(tokens) @ model.projection.weight.T
    expected = states / states.norm(dim=1, keepdim=True)
    torch.testing.assert_close(vectors.values, expected)
    assert not torch.allclose(vectors.values, states, atol=1e-2)
    assert vectors.cu_seqlens is tokens.cu_seqlens
    assert vectors.mask is None  # none of the words is punctuation
    model.head.normalize = False
    torch.testing.assert_close(model(tokens, "query").values, states)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_bias_is_added_before_vectors_get_their_length(normalize):
    model, plain = encoder(bias=True, normalize=normalize), encoder(normalize=normalize)
    assert {*model.state_dict()} - {*plain.state_dict()} == {"projection.bias"}
    tokens = tokenizer_of(model).documents(TEXTS)
    states = model.backbone.hidden_states(tokens) @ model.projection.weight.T
    shifted = states + model.projection.bias
    expected = F.normalize(shifted, dim=1) if normalize else shifted
    torch.testing.assert_close(model(tokens, "document").values, expected)
    assert not torch.allclose(plain(tokens, "document").values, expected, atol=1e-2)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_reach_projection_and_body(bias):
    model = encoder(bias=bias)
    vectors = model(tokenizer_of(model).documents(TEXTS), "document").values
    upstream = torch.randn_like(vectors)
    vectors.backward(upstream)
    assert all(parameter.grad is not None for parameter in model.parameters())
    hidden = model.backbone.hidden_states(tokenizer_of(model).documents(TEXTS)).detach()
    layer = [x.detach().requires_grad_() for x in model.projection.parameters()]
    values = F.normalize(F.linear(hidden, *layer), dim=1)
    expected = torch.autograd.grad(values, layer, upstream)
    for parameter, wanted in zip(model.projection.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
        assert not torch.allclose(parameter.grad * 1.01, wanted, rtol=1e-4)


def test_under_autocast_vectors_are_rounded_once():
    model = encoder()
    tokens = tokenizer_of(model).documents(TEXTS)
    exact = model(tokens, "document").values
    with torch.autocast("cpu", torch.bfloat16):
        values = model(tokens, "document").values
    assert values.dtype == torch.bfloat16
    lengths = values.detach().float().norm(dim=1)
    assert float((lengths - 1).abs().max()) < 3e-3
    assert 1e-4 < float((values - exact).detach().abs().max()) < 0.05
    values.float().sum().backward()
    assert model.projection.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("width", [8, 32])
def test_the_projection_starts_with_orthonormal_rows(width):
    projection = new_projection(32, ColbertHead(width))
    products = projection.weight @ projection.weight.t()
    torch.testing.assert_close(products, torch.eye(width))
    states = torch.randn(5, 32)
    kept = projection(states).norm(dim=1) / states.norm(dim=1)
    assert torch.allclose(kept, torch.ones(5)) == (width == 32)


def test_markers_expansion_and_skiplist():
    model = encoder()
    tokenizer = tokenizer_of(model)
    queries = tokenizer.queries(TEXTS)
    words = model.tokenizer.convert_ids_to_tokens(queries.input_ids[:10].tolist())
    assert words == ["[CLS]", "[Q] ", "the", "cat", ",", "the", "dog", "[SEP]", "[MASK]", "[MASK]"]
    encoded = model.encode(queries, "query")
    assert encoded.tokens.mask is None and encoded.num_texts == 4
    assert encoded.tokens.values.shape == (4 * QUERY, 8)
    documents = tokenizer.documents(TEXTS)
    tokens = model.tokenizer.convert_ids_to_tokens(documents.input_ids.tolist())
    mask = model.encode(documents, "document").tokens.mask
    assert tokens[:2] == ["[CLS]", "[D] "]
    assert [word for word, counts in zip(tokens, mask.tolist()) if not counts] == [",", ".", "?"]
    plain = encoder(skiplist="", query_expansion=False, document_marker="")
    assert plain.encode(tokenizer_of(plain).documents(TEXTS), "document").tokens.mask is None
    assert plain.markup.expansion is None and plain.markup.document_marker is None
    own = encoder(skiplist=["cat", "the", "elephant"])
    mask = own.encode(documents, "document").tokens.mask
    assert {word for word, counts in zip(tokens, mask.tolist()) if not counts} == {"cat", "the"}


def test_expansion_is_seen_only_where_that_is_asked_for():
    seen, unseen = (encoder(attend_to_expansion=attend) for attend in (True, False))
    unseen.load_state_dict(seen.state_dict())
    values = []
    for model in (seen, unseen):
        full, short = (
            PackedTokenizer(model.tokenizer, length, DOCUMENT, markup=model.markup).queries(TEXTS)
            for length in (QUERY, 8)
        )
        pair = [model(tokens, "query").values for tokens in (full, short)]
        values.append([pair[0].view(4, QUERY, 8)[:, :8], pair[1].view(4, 8, 8)])
    assert not torch.allclose(*values[0], atol=1e-4)
    torch.testing.assert_close(*values[1])


def test_only_the_body_of_a_masked_language_model_is_kept(build_mlm):
    words = [f"w{row}" for row in range(5, 60)]
    whole = Backbone(build_mlm("bert"), word_tokenizer(words, 96))
    torch.manual_seed(0)
    model = ColbertEncoder(whole, ColbertHead(8)).eval()
    assert model.backbone.model is whole.model.base_model
    assert len(model.tokenizer) == model.backbone.num_embeddings == 62
    assert set(model.state_dict()) == {
        "projection.weight",
        *(f"backbone.model.{name}" for name in whole.model.base_model.state_dict()),
    }
    body = EncoderBody(build_mlm("bert").base_model, word_tokenizer(words, 96))
    torch.manual_seed(0)
    bare = ColbertEncoder(body, ColbertHead(8)).eval()
    tokens = TokenBatch.from_lists([[2, 60, 5, 6, 3], [2, 61, 3]])
    assert torch.equal(bare(tokens, "query").values, model(tokens, "query").values)
    assert bare.flops_per_token(20) == bare.backbone.flops_per_token(20) + 6 * 32 * 8


def test_one_word_may_mark_both_sides():
    model = encoder(query_marker="[X]", document_marker="[X]")
    assert model.markup.query_marker == model.markup.document_marker == len(model.tokenizer) - 1


def test_a_tokenizer_without_mask_fills_up_with_its_last_token():
    model = encoder()
    model.tokenizer.mask_token = None
    with pytest.raises(ValueError, match=r"neither a mask token.*query_expansion=False"):
        model.head.markup(model.tokenizer)
    model.tokenizer.eos_token = "[SEP]"
    assert model.head.markup(model.tokenizer).expansion == model.tokenizer.eos_token_id


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="width=0 must be a whole number of at least 1"):
        ColbertHead(0)
    with pytest.raises(ValueError, match="attend_to_expansion needs query_expansion"):
        ColbertHead(query_expansion=False, attend_to_expansion=True)
    for widths in ([8, 4], [16, 4, 4], [16, 0], []):
        with pytest.raises(ValueError, match="must be different numbers from 1 up to 16"):
            ColbertHead(16, widths=widths)
    with pytest.raises(ValueError, match=r"train the first components .*: set normalize=True"):
        ColbertHead(16, widths=[16, 4], normalize=False)
    with pytest.raises(ValueError, match=r"pool_factor=0\.5 must be at least 1"):
        ColbertHead(16, pool_factor=0.5)
    with pytest.raises(
        ValueError, match="protected_tokens=-1 must be a whole number of at least 0"
    ):
        ColbertHead(16, protected_tokens=-1)


def test_the_kernels_score_what_the_encoder_gives():
    model = encoder()
    tokenizer = tokenizer_of(model)
    queries = model.encode(tokenizer.queries(TEXTS), "query").tokens
    documents = model.encode(tokenizer.documents(TEXTS), "document").tokens
    sides = (queries.values, documents.values, queries.cu_seqlens, documents.cu_seqlens)
    masks = {"query_mask": queries.mask, "document_mask": documents.mask}
    expected = maxsim_reference(*sides, **masks)
    torch.testing.assert_close(maxsim_varlen(*sides, **masks), expected)
    assert not torch.allclose(maxsim_reference(*sides), expected)


def test_a_short_training_finds_associations_that_share_no_word():
    pairs = [(f"q{n} ask", f"d{n} tell , .") for n in range(12)]
    torch.manual_seed(0)
    backbone = tiny([text for pair in pairs for text in pair], hidden_size=32, layers=1)
    model = ColbertEncoder(backbone, ColbertHead(16))
    tokenizer = PackedTokenizer(model.tokenizer, 8, 8, markup=model.markup)
    sides = (("query", tokenizer.queries), ("document", tokenizer.documents))
    texts = [tokenize(side) for (_, tokenize), side in zip(sides, zip(*pairs))]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    right = []
    for _ in range(60):
        queries, documents = (
            model.encode(tokens, side).tokens for tokens, (side, _) in zip(texts, sides)
        )
        scores = maxsim_varlen(
            queries.values,
            documents.values,
            queries.cu_seqlens,
            documents.cu_seqlens,
            queries.mask,
            documents.mask,
        )
        right.append(int((scores.argmax(1) == torch.arange(12)).sum()))
        optimizer.zero_grad()
        F.cross_entropy(scores, torch.arange(12)).backward()
        optimizer.step()
    assert right[0] < 6 and right[-1] == 12
