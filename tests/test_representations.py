"""Representations of several batches as one, and back."""

import torch

from sparton.representations import Extent, Representations, TokenVectors

LENGTHS = (2, 3), (1,)


def vectors_in_fp8(lengths: tuple[int, ...]) -> TokenVectors:
    values = torch.randn(sum(lengths), 16)
    scales = values.abs().amax(1) / 448
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    values = (values / scales[:, None]).to(torch.float8_e4m3fn)
    return TokenVectors(values, bounds, torch.rand(sum(lengths)) < 0.5, max(lengths), scales)


def test_what_is_concatenated_is_split_again():
    torch.manual_seed(0)
    weights = {"sparse": 0.5, "tokens": 2.0}
    parts = [
        Representations(
            torch.rand(len(lengths), 7),
            vectors_in_fp8(lengths),
            TokenVectors.of_texts(torch.randn(len(lengths), 4)),
            {"error": torch.rand(len(lengths))},
            score_weights=weights,
        )
        for lengths in LENGTHS
    ]
    extents = [Extent(len(lengths), 0, sum(lengths), max(lengths)) for lengths in LENGTHS]
    found = Representations.concatenate(parts).split(extents)
    for part, each in zip(parts, found, strict=True):
        assert each.score_weights == weights
        assert torch.equal(each.sparse, part.sparse)
        assert torch.equal(each.losses["error"], part.losses["error"])
        assert torch.equal(each.dense.values, part.dense.values)
        for name in ("cu_seqlens", "mask", "scales"):
            assert torch.equal(getattr(each.tokens, name), getattr(part.tokens, name)), name
        assert torch.equal(each.tokens.restored().values, part.tokens.restored().values)


def test_first_components_have_length_1_again():
    torch.manual_seed(0)
    vectors = vectors_in_fp8((5, 4))
    for each in (vectors, vectors.restored(), vectors.restored(torch.bfloat16)):
        first = each.first(8)
        assert first.scales is None
        expected = each.restored(torch.float32).values[:, :8].float()
        expected = torch.nn.functional.normalize(expected, dim=1)
        torch.testing.assert_close(first.values.float(), expected, rtol=1e-2, atol=1e-2)
