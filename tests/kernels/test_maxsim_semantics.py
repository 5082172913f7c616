"""What MaxSim means, on problems whose scores can be worked out by hand, as every version of it
computes them. Other libraries that score the same way state the same numbers.

Q queries, N documents, L tokens, E embedding.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparton.kernels.maxsim import (
    maxsim,
    maxsim_pairs,
    maxsim_reference,
    maxsim_topk,
    maxsim_varlen,
)
from tests.kernels.maxsim_problems import boundaries
from tests.kernels.test_maxsim_paths import use_kernels

Texts = list[list[tuple[float, ...]]]
WINS = 64.0  # what fills padding would win every maximum, were it not masked

# Queries, documents and their scores. All sums are exact in any precision.
BY_HAND: dict[str, tuple[Texts, Texts, list[list[float]]]] = {
    "several lengths": (
        [[(1, 0), (0, 1)], [(1, 1)]],
        [[(1, 0), (0, 0.5)], [(0, 1)]],
        [[1.5, 1.0], [1.0, 1.0]],
    ),
    "negative": ([[(1, 0)]], [[(-0.5, 0)], [(-0.5, 0), (-0.25, 0)]], [[-0.5, -0.25]]),
    "one token each": ([[(2, 1)], [(-1, 3)]], [[(1, 1)], [(0, -2)]], [[3, -2], [2, -6]]),
    "repeated tokens": ([[(1, 0), (1, 0)]], [[(2, 0), (2, 0)], [(2, 0)]], [[4, 4]]),
    "equal documents": ([[(1, 2)]], [[(3, 1), (0, 0)]] * 3, [[5, 5, 5]]),
    "no tokens": ([[(1, 2)], []], [[], [(3, 1)], [(-1, 0)]], [[0, 5, -1], [0, 0, 0]]),
}
named = pytest.mark.parametrize("name", BY_HAND)


@pytest.fixture(params=["pytorch", "products", "streaming"])
def place(request, device, monkeypatch) -> torch.device:
    """Where to score, by PyTorch's version or by either kernel."""
    if request.param == "pytorch":
        return torch.device("cpu")
    use_kernels(monkeypatch, 0 if request.param == "products" else 256)
    return device


def tokens_of(texts: Texts, place: torch.device | str = "cpu") -> list[Tensor]:
    return [torch.tensor(text, device=place).float().view(-1, 2) for text in texts]


def padded(texts: Texts, place: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """``[N, L, 2]`` and the mask; one place more than any text needs."""
    tokens = [*tokens_of(texts, place), torch.zeros(max(map(len, texts)) + 1, 2, device=place)]
    lengths = torch.tensor([len(text) for text in texts], device=place)
    mask = torch.arange(max(map(len, texts)) + 1, device=place) < lengths[:, None]
    values = pad_sequence(tokens, batch_first=True, padding_value=WINS)[:-1]
    return values, mask


def packed(queries: Texts, documents: Texts, place: torch.device | str = "cpu") -> tuple:
    sides = queries, documents
    bounds = (boundaries(tuple(map(len, texts)), place) for texts in sides)
    return *(torch.cat(tokens_of(texts, place)) for texts in sides), *bounds


@named
def test_scores_by_hand(name, place):
    queries, documents, expected = BY_HAND[name]
    expected = torch.tensor(expected, device=place).float()
    (asked, query_mask), (found, document_mask) = (padded(x, place) for x in (queries, documents))
    scores = maxsim(asked, found, query_mask, document_mask)
    assert torch.equal(scores, expected)
    assert (maxsim(asked, found) > expected).all(), "padding would have been seen"
    assert torch.equal(maxsim_varlen(*packed(queries, documents, place)), expected)
    pairs = min(expected.shape)
    operands = (asked[:pairs], found[:pairs], query_mask[:pairs], document_mask[:pairs])
    assert torch.equal(maxsim_pairs(*operands), expected.diagonal())


@named
def test_the_reference_and_the_ranking_by_hand(name):
    """Of equal scores the document that comes first is the better one."""
    queries, documents, expected = BY_HAND[name]
    assert maxsim_reference(*packed(queries, documents)).tolist() == expected
    best = maxsim_topk(*packed(queries, documents), len(documents), tokens_at_once=1)
    order = [sorted(range(len(row)), key=lambda n, row=row: -row[n]) for row in expected]
    assert best.documents.tolist() == order
    assert best.scores.tolist() == [sorted(row, reverse=True) for row in expected]


@named
def test_scores_by_hand_in_sentence_transformers(name):
    """A document without tokens scores 0 here, whatever the query; there it scores minus 10^9 with
    every query that has tokens, and is thereby the last one even where all others are negative."""
    pytest.importorskip("sentence_transformers", minversion="6.0")
    from sentence_transformers.util import maxsim as peer

    queries, documents, expected = BY_HAND[name]
    sides = [[x for x in tokens_of(texts) if len(x)] for texts in (queries, documents)]
    rows, columns = ([len(text) > 0 for text in texts] for texts in (queries, documents))
    expected = torch.tensor(expected).float()[rows][:, columns]
    assert torch.equal(peer(*sides), expected)
    for text, scores in ((sides[1][0][:0], -1e9), (sides[1][0], expected[0, 0].item())):
        assert peer(sides[0][:1], [text, sides[1][0]])[0, 0].item() == scores


def test_gradients_by_hand(place):
    """They reach winners alone, the first of equal ones, and add up over queries."""
    queries, documents, _ = BY_HAND["several lengths"]
    leaves = [x.requires_grad_() for x in packed(queries, documents, place)[:2]]
    bounds = packed(queries, documents, place)[2:]
    upstream = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=place)
    maxsim_varlen(*leaves, *bounds).backward(upstream)
    assert leaves[0].grad.tolist() == [[1, 2], [0, 2.5], [3, 4]]
    assert leaves[1].grad.tolist() == [[4, 3], [0, 1], [6, 6]]
    maxsim_varlen(*leaves, *bounds).backward(upstream)
    assert leaves[1].grad.tolist() == [[8, 6], [0, 2], [12, 12]], "added to what was there"
    queries, documents, _ = BY_HAND["repeated tokens"]
    asked, found, *bounds = packed(queries, documents, place)
    maxsim_varlen(asked, found.requires_grad_(), *bounds).backward(upstream[1:])
    assert found.grad.tolist() == [[6, 0], [0, 0], [8, 0]]


def test_each_mask_takes_tokens_out(place):
    """A document's best token, and a query's only similar one."""
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], device=place)
    documents = torch.tensor([[[0.75, 0.5], [5.0, 0.0]]], device=place)
    masks = [torch.tensor([x], device=place) for x in ([True, False], [False, True])]
    assert maxsim(queries, documents).item() == 5.5
    assert maxsim(queries, documents, None, masks[0]).item() == 1.25
    assert maxsim(queries, documents, masks[0], None).item() == 5.0
    assert maxsim(queries, documents, masks[1], masks[1]).item() == 0.0
    everything = torch.ones_like(masks[0])
    for options in ({}, {"normalize": True}):
        plain = maxsim(queries, documents, **options)
        assert torch.equal(maxsim(queries, documents, everything, everything, **options), plain)


def test_half_precision_neither_overflows_nor_underflows(place):
    """90,000 is beyond float16, and 2^-27 below its smallest number; scores are fp32."""
    queries = torch.tensor([[[300.0, 0.0]], [[2.0**-13, 0.0]]], device=place).half()
    documents = torch.tensor([[[300.0, 0.0]], [[2.0**-14, 0.0]]], device=place).half()
    scores = maxsim(queries, documents)
    assert scores.dtype == torch.float32
    assert scores.diagonal().tolist() == [90_000.0, 2.0**-27]


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float16, 2049), (torch.bfloat16, 257)])
def test_sums_that_half_precision_cannot_hold(dtype, tokens, device):
    queries, documents = (torch.ones(1, n, 4, device=device, dtype=dtype) / 2 for n in (tokens, 3))
    scores = maxsim(queries, documents)
    assert scores.item() == tokens != scores.to(dtype).item()


def test_tokens_of_zeros_stay_zeros_when_normalised(place):
    """They have the similarity 0 with every token: that of a document wins over negative ones."""
    queries = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]], device=place, requires_grad=True)
    documents = torch.tensor([[[0.0, 0.0], [-6.0, -8.0]], [[-3.0, -4.0], [-3.0, -4.0]]])
    documents = documents.to(place).requires_grad_()
    scores = maxsim(queries, documents, normalize=True)
    torch.testing.assert_close(scores.tolist(), [[0.0, -1.0]], rtol=0, atol=1e-6)
    gradients = torch.autograd.grad(scores[0, 1], (queries, documents))
    assert not gradients[1][0].any() and not gradients[0][0, 1].isnan().any()
    # A token of zeros counts as one of length 1e-12: its slope is as steep as that.
    expected = torch.tensor([-0.6, -0.8], device=place) * 1e12
    torch.testing.assert_close(gradients[0][0, 0], expected)


def whole_numbers(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """No order of summation rounds them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float().to(device)


def plainly(queries: Tensor, documents: Tensor) -> Tensor:
    """``[Q, N]`` of padded batches without masks."""
    return torch.einsum("qse,nte->qnst", queries, documents).max(3).values.sum(2)


@pytest.mark.parametrize("E", [1, 4, 7, 16, 33, 63, 100, 111, 250, 264, 513])
def test_embeddings_of_any_width(E, device):
    queries, documents = (whole_numbers(3, n, E, device=device) for n in (5, 9))
    assert torch.equal(maxsim(queries, documents), plainly(queries, documents))
    shorter = plainly(queries[..., 1:], documents[..., 1:])
    assert not torch.equal(maxsim(queries, documents), shorter)


def test_a_thousand_documents(device):
    queries, documents = (whole_numbers(n, 6, 8, device=device) for n in (2, 1000))
    expected = plainly(queries, documents)
    assert torch.equal(maxsim(queries, documents), expected)
    own = documents.unflatten(0, (2, 500))
    lists = torch.stack([expected[0, :500], expected[1, 500:]])
    assert torch.equal(maxsim(queries, own), lists)
    part = maxsim(queries[1:], documents[:40])
    assert torch.equal(part, expected[1:, :40]), "a score depends on its own texts alone"


def test_texts_of_8192_tokens(device):
    """The last token of a document wins all that point its way, the first one all others."""
    steps = torch.arange(8192.0, device=device)
    documents = torch.stack((steps, -steps, steps * 0, steps * 0), 1)[None].requires_grad_()
    queries = torch.eye(4, device=device)[None, :3].clone().requires_grad_()
    scores = maxsim(queries, documents)
    assert scores.item() == 8191
    scores.backward()
    rows = documents.grad[0].any(1).nonzero().flatten()
    assert rows.tolist() == [0, 8191]
    assert documents.grad[0, [0, 8191]].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert queries.grad[0, 0].tolist() == [8191, -8191, 0, 0]
    ones = torch.ones(1, 8192, 4, device=device)
    short = torch.tensor([[[0.25] * 4, [-1.0] * 4], [[-0.25] * 4, [-0.5] * 4]], device=device)
    assert maxsim(ones, short).tolist() == [[8192, -8192]]


def test_operands_that_share_their_memory(device):
    """One query for all lists, one document for all queries, and every second token."""
    queries = whole_numbers(1, 6, 8, device=device).requires_grad_()
    documents = whole_numbers(4, 10, 8, device=device, seed=1).requires_grad_()
    results = []
    for score in (maxsim, plainly):
        expanded = queries.expand(3, -1, -1)
        scores = score(expanded[:, ::2], documents[:1].expand(5, -1, -1)[:, 1::2])
        assert scores.shape == (3, 5)
        results.append((scores, *torch.autograd.grad(scores.sum(), (queries, documents))))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    assert results[0][1].any() and results[0][2][0].any()


@pytest.mark.parametrize("without_graph", [torch.no_grad, torch.inference_mode])
def test_no_graph_where_none_is_wanted(without_graph, device):
    queries, documents = (whole_numbers(2, 3, 8, device=device).requires_grad_() for _ in range(2))
    expected = maxsim(queries, documents)
    with without_graph():
        scores = maxsim(queries, documents)
    assert expected.requires_grad and not scores.requires_grad and scores.grad_fn is None
    assert torch.equal(scores, expected)


@pytest.mark.parametrize(
    ("queries", "documents", "message"),
    [
        (torch.ones(4, 3, 8), torch.ones(5, 3, 8), "4 queries need documents for each"),
        (torch.ones(4, 3, 8), torch.ones(4, 3), r"\[N, Ld, E\], got \(4, 3, 8\) and \(4, 3\)"),
        (torch.ones(4, 3, 8), torch.ones(4, 2, 3, 8), r"\[N, Ld, E\].*\(4, 2, 3, 8\)"),
        (torch.ones(4, 3, 8).char(), torch.ones(4, 3, 8).char(), "float dtype, got torch.int8"),
    ],
)
def test_pairs_that_do_not_fit(queries, documents, message):
    """Tokens of 8 bits are refused, where others convert them: what they stand for is not told."""
    with pytest.raises(ValueError, match=message):
        maxsim_pairs(queries, documents)
