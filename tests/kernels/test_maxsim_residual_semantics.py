"""Late interaction with compressed documents on problems that can be worked out by hand."""

import pytest
import torch

from sparton.kernels.maxsim import maxsim, maxsim_residual, maxsim_residual_varlen
from sparton.kernels.maxsim.codec import CompressedTokens, ResidualCodec
from tests.kernels.test_maxsim_residual import VERSIONS, Problem, boundaries, run

E = 8
# Of each token its centroid, and a byte of which the highest bit belongs to the first dimension.
TOKENS = [(0, 0b1000_0000), (1, 0b0000_0001), (0, 0b1111_1111)]
RESTORED = torch.tensor(
    [
        [1.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5],
        [-0.5, 0.5, -0.5, -0.5, -0.5, -0.5, -0.5, 0.5],
        [1.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
    ]
)
SCORES = [[2.0, 0.0, 2.0], [1.0, 0.0, -1.0]]


def by_hand(device: torch.device) -> Problem:
    """The queries (e0, e7) and (e1 - e0) against documents of the tokens 0 and 1, none, and 2."""
    axes = torch.eye(E)
    codes, residuals = (torch.tensor(x) for x in zip(*TOKENS, strict=True))
    codec = ResidualCodec(axes[:2], torch.tensor([0.0]), torch.tensor([-0.5, 0.5]))
    documents = CompressedTokens(codes.int(), residuals.byte()[:, None])
    queries = torch.stack((axes[0], axes[7], axes[1] - axes[0]))
    return Problem(queries, documents, codec, boundaries([2, 1]), boundaries([2, 0, 1])).to(device)


@pytest.mark.parametrize(("forward", "backward"), VERSIONS)
def test_by_hand(forward, backward, device):
    """A document without tokens scores 0 and gives no gradient, where others refuse to
    differentiate."""
    problem = by_hand(device)
    scores, winners = run(forward, problem)
    assert scores.tolist() == SCORES
    assert winners.tolist() == [[0, 1, 1], [-1] * 3, [0] * 3]
    upstream = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=device)
    dqueries = backward(upstream, winners, problem.operands, dtype=torch.float32)
    first, second, third = RESTORED
    expected = torch.stack((first + 3 * third, second + 3 * third, 4 * second + 6 * third))
    assert torch.equal(dqueries.cpu(), expected)


def test_masks_by_hand(device):
    problem = by_hand(device)
    query_mask = torch.tensor([True, False, True], device=device)
    document_mask = torch.tensor([False, True, True], device=device)
    scores = maxsim_residual_varlen(*problem[:5], query_mask, document_mask, normalize=False)
    assert scores.tolist() == [[-0.5, 0.0, 1.5], [1.0, 0.0, -1.0]]


def test_normalised_by_hand(device):
    """Both sides; restored tokens have the squared lengths 4, 2 and 4."""
    scores = maxsim_residual_varlen(*by_hand(device)[:5])
    half = 0.5**0.5
    expected = torch.tensor([[0.75 + half / 2, 0.0, 1.0], [half * half, 0.0, -half / 2]])
    torch.testing.assert_close(scores.cpu(), expected)


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_residuals_of_zero_leave_the_centroids(nbits, device):
    """The scores of the centroids alone, as a first stage of retrieval uses them; what codes and
    residuals hold at padding does not matter."""
    generator = torch.Generator().manual_seed(nbits)
    centroids = torch.randint(-3, 4, (5, 16), generator=generator).float()
    codes = torch.randint(0, 5, (3, 7), generator=generator)
    residuals = torch.randint(0, 256, (3, 7, 2 * nbits), generator=generator).byte()
    queries = torch.randint(-3, 4, (2, 4, 16), generator=generator).float()
    mask = torch.arange(7) < torch.tensor([7, 3, 0])[:, None]
    expected = maxsim(queries, centroids[codes], None, mask)
    products = queries @ centroids.T
    best = products[..., codes[1, :3]].max(2).values.sum(1)
    assert torch.equal(expected[:, 1], best)

    def scores(weights: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        codec = ResidualCodec(centroids, torch.zeros(2**nbits - 1), weights)
        codec = ResidualCodec(*(x.to(device) for x in codec))
        documents = CompressedTokens(codes.to(device), residuals.to(device))
        sides = queries.to(device), documents, codec
        return maxsim_residual(*sides, None, mask.to(device), normalize=False).cpu()

    nothing = torch.zeros(2**nbits)
    assert torch.equal(scores(nothing, codes), expected)
    assert torch.equal(scores(nothing, codes.where(mask, 4 - codes)), expected)
    assert not torch.equal(scores(nothing + 1, codes), expected)
