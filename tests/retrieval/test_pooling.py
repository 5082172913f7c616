"""Token pooling against sentence-transformers' own, and what it leaves of a text. T tokens."""

import pytest
import torch
import torch.nn.functional as F

from sparton.datasets.tokenization import PackedTokenizer
from sparton.kernels.boundaries import cu_seqlens_of
from sparton.representations import TokenVectors
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.pooling import pool_tokens
from sparton.types import TokenPooling
from tests.models.late_interaction import LENGTHS, TEXTS, make_encoder

LENGTHS_OF_TEXTS = [1, 0, 2, 3, 17, 40, 5]


def vectors(seed: int = 0) -> TokenVectors:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(6, 16, generator=generator)
    lengths = torch.tensor(LENGTHS_OF_TEXTS)
    chosen = torch.randint(6, (int(lengths.sum()),), generator=generator)
    noise = torch.randn(len(chosen), 16, generator=generator)
    return TokenVectors(F.normalize(words[chosen] + noise, dim=1), cu_seqlens_of(lengths))


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 3.0, 100.0])
@pytest.mark.parametrize("protected", [0, 1, 4])
@pytest.mark.parametrize("normalize", [True, False])
def test_clusters_are_those_of_sentence_transformers(factor, protected, normalize):
    modules = pytest.importorskip(
        "sentence_transformers.multi_vector_encoder.modules.token_pooling"
    )
    theirs = modules.HierarchicalTokenPooling(
        factor, num_protected_tokens=protected, normalize_embeddings=normalize
    )
    given = vectors()
    texts = list(given.values.split(LENGTHS_OF_TEXTS))
    expected = [theirs.pool_one(text) if len(text) else text for text in texts]
    values, bounds, *_ = pool_tokens(given, TokenPooling(factor, protected, normalize))
    assert bounds.diff().tolist() == [len(text) for text in expected]
    torch.testing.assert_close(values, torch.cat(expected), rtol=0, atol=1e-6)
    if factor > 1:
        assert len(values) < len(given.values)
        other = pool_tokens(given, TokenPooling(factor, protected, not normalize)).values
        assert not torch.allclose(other, values, atol=1e-3), "negative control"


def test_tokens_that_are_equal_become_one():
    tokens = F.normalize(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    given = TokenVectors(tokens[[2, 0, 0, 1, 1, 0, 1]], torch.tensor([0, 7]))
    values, bounds, *_ = pool_tokens(given, TokenPooling(3.0))
    assert bounds.tolist() == [0, 3] and torch.allclose(values[0], tokens[2])
    found = (values[1:] @ tokens[:2].T).argmax(1)
    torch.testing.assert_close(values[1:], tokens[found])
    assert sorted(found.tolist()) == [0, 1]


def tokenizer_of(encoder) -> PackedTokenizer:
    return PackedTokenizer(encoder.tokenizer, **LENGTHS, markup=encoder.markup)


def test_documents_are_pooled_and_queries_are_not():
    encoder = make_encoder(pool_factor=2.0)
    tokenizer = tokenizer_of(encoder)

    def stored(side, **options):
        return encode_texts(encoder, tokenizer, TEXTS, side, **options).tokens

    whole, half = stored("document", pool_factor=1), stored("document")
    expected = [1 + max((n - 1) // 2, 1) if n > 2 else n for n in whole.lengths.tolist()]
    assert half.lengths.tolist() == expected != whole.lengths.tolist()
    assert half.values.dtype == torch.float16
    lengths = half.values.float().norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), atol=1e-3, rtol=0)
    assert len(stored("document", pool_factor=3).values) < len(half.values)
    assert torch.equal(stored("query").values, stored("query", pool_factor=1).values)
    with pytest.raises(ValueError, match=r"pool_factor=0\.5 must be at least 1"):
        stored("document", pool_factor=0.5)


def test_vectors_that_are_not_finite_are_refused_as_without_pooling():
    encoder = make_encoder(pool_factor=2.0)
    encoder.projection.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="of a batch has a token vector with the component"):
        encode_texts(encoder, tokenizer_of(encoder), TEXTS, "document")
