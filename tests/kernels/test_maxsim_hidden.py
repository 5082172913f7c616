"""MaxSim from hidden states: the operator, and its kernel in the interpreter or on a GPU."""

from itertools import accumulate

import pytest
import torch

from sparton.kernels.maxsim import maxsim_from_hidden, maxsim_reference
from sparton.kernels.maxsim.hidden import HiddenConfig, search_hidden
from tests.kernels.problems import error

SMALL = HiddenConfig(block_t=16, block_r=16, block_h=16, programs=1)
SHARED = SMALL._replace(programs=20)


def make_problem(device, *, Q=3, Lq=5, N=4, Ld=37, H=50, E=24, dtype=torch.float32, seed=0):
    """Masks with holes; document 1 has no tokens, query 2 neither."""
    generator = torch.Generator().manual_seed(seed)
    queries, hidden, projection = (
        torch.randn(*shape, generator=generator) for shape in ((Q, Lq, E), (N, Ld, H), (E, H))
    )
    query_mask = torch.rand(Q, Lq, generator=generator) > 0.3
    document_mask = torch.rand(N, Ld, generator=generator) > 0.3
    query_mask[0], document_mask[0] = True, True
    query_mask[-1], document_mask[1] = False, False
    operands = (queries, hidden, projection / H**0.5)
    return (
        tuple(x.to(device, dtype) for x in operands),
        query_mask.to(device),
        document_mask.to(device),
    )


def truth(operands, query_mask, document_mask, *, normalize):
    """Project, normalise, then the reference; in float64."""
    queries, hidden, projection = operands
    embeddings = hidden @ projection.T
    if normalize:
        embeddings = torch.nn.functional.normalize(embeddings, dim=-1, eps=1e-12)
    bounds = [
        torch.tensor([0, *accumulate([x.shape[1]] * x.shape[0])], dtype=torch.int32)
        for x in (queries, embeddings)
    ]
    return maxsim_reference(
        queries.flatten(0, 1),
        embeddings.flatten(0, 1),
        *bounds,
        query_mask.flatten(),
        document_mask.flatten(),
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_values_and_gradients(normalize):
    operands, *masks = make_problem(torch.device("cpu"))
    leaves = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().requires_grad_() for x in operands]
    scores = maxsim_from_hidden(*leaves, *masks, normalize=normalize)
    expected = truth(exact, *masks, normalize=normalize)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = torch.autograd.grad(scores, leaves, upstream.float())
    expected_gradients = torch.autograd.grad(expected, exact, upstream)
    assert error(scores, expected.detach()) < 1e-6
    assert (scores[:, 1] == 0).all()
    assert (scores[-1] == 0).all()
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert error(actual, wanted) < 2e-6
        assert error(actual * 1.01, wanted) > 5e-3
    masked = gradients[1][~masks[1]]
    assert (masked == 0).all()
    other = truth(exact, *masks, normalize=not normalize).detach()
    assert error(scores, other) > 0.1, "whether tokens are normalised shows"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)]
)
def test_values_and_gradients_on_a_gpu(dtype, tolerance):
    shape = {"Q": 9, "Lq": 32, "N": 13, "Ld": 300, "H": 768, "E": 128}
    operands, *masks = make_problem(torch.device("cuda"), dtype=dtype, **shape)
    leaves = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().cpu().requires_grad_() for x in operands]
    scores = maxsim_from_hidden(*leaves, *masks)
    expected = truth(exact, *(mask.cpu() for mask in masks), normalize=True)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = torch.autograd.grad(scores, leaves, upstream.float().cuda(), retain_graph=True)
    expected_gradients = torch.autograd.grad(expected, exact, upstream)
    assert error(scores.cpu(), expected.detach()) < tolerance
    # Where operands are rounded, near-ties may fall differently.
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert error(actual.cpu(), wanted) < 10 * tolerance
    again = torch.autograd.grad(scores, leaves, upstream.float().cuda())
    assert all(torch.equal(x, y) for x, y in zip(gradients, again, strict=True))


def test_packed_documents_equal_padded_ones():
    (queries, hidden, projection), query_mask, _ = make_problem(torch.device("cpu"))
    lengths = [37, 0, 5, 20]
    mask = torch.arange(37) < torch.tensor(lengths)[:, None]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    padded = maxsim_from_hidden(queries, hidden, projection, query_mask, mask)
    packed = maxsim_from_hidden(
        queries, hidden[mask], projection, query_mask, document_cu_seqlens=cu_seqlens
    )
    torch.testing.assert_close(packed, padded, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(padded, maxsim_from_hidden(queries, hidden, projection, query_mask))


def test_similarities_that_are_all_negative_beat_no_padding():
    hidden = -torch.rand(2, 6, 8) - 0.1
    mask = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])
    scores = maxsim_from_hidden(torch.rand(1, 4, 8), hidden, torch.eye(8), None, mask)
    assert (scores < 0).all()


@pytest.mark.parametrize("config", [SMALL, SHARED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("H", "E"), [(50, 24), (32, 48), (16, 1)])
def test_the_kernel(config, dtype, H, E, device):
    (queries, hidden, projection), _, mask = make_problem(device, H=H, E=E, dtype=dtype, Lq=7)
    rows, tokens = queries.flatten(0, 1), hidden.flatten(0, 1)
    cu_seqlens = torch.arange(5, dtype=torch.int32, device=device) * 37
    maxima, winners = search_hidden(
        rows, tokens, projection, cu_seqlens, mask.flatten(),
        normalize=True, argmax=True, config=config,
    )  # fmt: skip
    embeddings = torch.nn.functional.normalize(tokens.double() @ projection.double().T, dim=-1)
    similarities = (rows.double() @ embeddings.T).view(len(rows), 4, 37)
    similarities = similarities.masked_fill(~mask, float("-inf"))
    expected = similarities.amax(2).T.clone()
    assert (maxima[1] == 0).all()
    assert (winners[1] == -1).all()
    expected[1] = 0
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert error(maxima, expected) < tolerance
    assert error(maxima.roll(1, 1), expected) > 10 * tolerance
    documents = torch.tensor([0, 2, 3], device=device)
    won = (rows.double() @ embeddings.T).T[winners[documents].long(), torch.arange(len(rows))]
    assert error(won, expected[documents]) < tolerance
    assert mask.flatten()[winners[documents].long()].all()
    alone, nothing = search_hidden(
        rows, tokens, projection, cu_seqlens, mask.flatten(),
        normalize=True, argmax=False, config=config,
    )  # fmt: skip
    assert torch.equal(alone, maxima)
    assert nothing.numel() == 0


def test_ties_go_to_the_first_token(device):
    queries = torch.ones(3, 4, device=device)
    hidden = torch.ones(70, 4, device=device)
    cu_seqlens = torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
    for config in (SMALL, SHARED):
        _, winners = search_hidden(
            queries, hidden, torch.eye(4, device=device), cu_seqlens, None,
            normalize=False, argmax=True, config=config,
        )  # fmt: skip
        assert winners.tolist() == [[0] * 3, [30] * 3]


def test_registration():
    operands, _, mask = make_problem(torch.device("cpu"), N=2, Ld=3)
    rows, tokens = operands[0].flatten(0, 1), operands[1].flatten(0, 1)
    leaves = [x.requires_grad_() for x in (rows, tokens, operands[2])]
    cu_seqlens = torch.tensor([0, 3, 6], dtype=torch.int32)
    arguments = (*leaves, cu_seqlens, mask.flatten(), True, True)
    torch.library.opcheck(torch.ops.sparton.maxsim_from_hidden.default, arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queries": (5, 24)}, r"\[Q, Lq, E\]"),
        ({"hidden": (4, 50)}, r"document_cu_seqlens"),
        ({"projection": (50, 24)}, r"\[24, 50\]"),
        ({"query_mask": (3, 4)}, r"query_mask must be bool \(3, 5\)"),
        ({"document_mask": (4, 36)}, r"document_mask must be bool \(4, 37\)"),
    ],
)
def test_refused(change, words):
    (queries, hidden, projection), query_mask, document_mask = make_problem(torch.device("cpu"))
    arguments = {
        "queries": queries, "hidden": hidden, "projection": projection,
        "query_mask": query_mask, "document_mask": document_mask,
    }  # fmt: skip
    for name, shape in change.items():
        arguments[name] = torch.zeros(shape, dtype=arguments[name].dtype)
    with pytest.raises(ValueError, match=words):
        maxsim_from_hidden(**arguments)


def test_dtypes_must_agree():
    (queries, hidden, projection), *_ = make_problem(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"float16.*torch\.autocast"):
        maxsim_from_hidden(queries.half(), hidden, projection)
