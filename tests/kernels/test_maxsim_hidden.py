"""MaxSim from hidden states: the operator, and its kernel in the interpreter or on a GPU."""

from itertools import accumulate

import pytest
import torch

from sparton.kernels.maxsim import hidden_function, maxsim_from_hidden, maxsim_reference
from sparton.kernels.maxsim.hidden import (
    MANY_QUERY_TOKENS,
    HiddenConfig,
    search_hidden,
    search_serves,
)
from sparton.kernels.maxsim.paths import maxsim_backward_cuda
from sparton.kernels.maxsim.projection import project_tokens, project_tokens_backward
from sparton.kernels.maxsim.projection_cpu import project_tokens_backward_cpu, project_tokens_cpu
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("E", [48, 64, 96, 320, 512, 1024, 2500])
def test_embeddings_of_any_width_on_a_gpu(E, dtype):
    """2,500 units are too wide for the search: they are projected first."""
    operands, *masks = make_problem(torch.device("cuda"), Lq=40, Ld=150, H=200, E=E, dtype=dtype)
    exact = [x.double().cpu().requires_grad_() for x in operands]
    expected = truth(exact, *(x.cpu() for x in masks), normalize=True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    leaves = [x.clone().requires_grad_() for x in operands]
    for inputs in (operands, leaves):
        scores = maxsim_from_hidden(*inputs, *masks)
        assert error(scores.detach().cpu(), expected.detach()) < tolerance
        assert error(scores.detach().cpu().roll(1, 1), expected.detach()) > 10 * tolerance
    gradients = torch.autograd.grad(scores.sum(), leaves)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert error(actual.cpu(), wanted) < 10 * tolerance
        assert error(actual.cpu().roll(1, -1), wanted) > 20 * tolerance
    assert search_serves(operands[0], True) == (E < 2500)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("Q", [2, 5, 40, MANY_QUERY_TOKENS // 32])
def test_numbers_of_queries_on_a_gpu(Q, normalize):
    """Different kernels serve few query tokens and many, with and without a gradient."""
    shape = {"Q": Q, "Lq": 32, "N": 9, "Ld": 70, "H": 96, "E": 64}
    operands, *masks = make_problem(torch.device("cuda"), dtype=torch.bfloat16, **shape)
    leaves = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().cpu().requires_grad_() for x in operands]
    expected = truth(exact, *(mask.cpu() for mask in masks), normalize=normalize)
    scores, alone = (
        maxsim_from_hidden(*x, *masks, normalize=normalize) for x in (leaves, operands)
    )
    for found in (scores.detach(), alone):
        assert error(found.cpu(), expected.detach()) < 1e-2
        assert error(1.1 * found.cpu(), expected.detach()) > 1e-2
    assert search_serves(operands[0], False)
    assert search_serves(operands[0], True) == (Q * 32 < MANY_QUERY_TOKENS)
    gradients = torch.autograd.grad(scores.sum(), leaves)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected.sum(), exact), strict=True):
        # Of few query tokens a single near-tie that falls differently shows.
        assert error(actual.cpu(), wanted) < 0.3 < error(actual.cpu().roll(1, -1), wanted)


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
    """Each query is one token, so that scores are maxima."""
    (queries, hidden, projection), _, mask = make_problem(device, H=H, E=E, dtype=dtype, Lq=7)
    rows, tokens = queries.flatten(0, 1), hidden.flatten(0, 1)
    cu_seqlens = torch.arange(5, dtype=torch.int32, device=device) * 37
    operands = (rows[:, None], tokens, projection, cu_seqlens, None, mask.flatten())
    options = {"normalize": True, "config": config}
    scores, winners, projected, norms = search_hidden(*operands, argmax=True, **options)
    maxima = scores.T
    raw = tokens.double() @ projection.double().T
    embeddings = torch.nn.functional.normalize(raw, dim=-1)
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
    assert error(projected, embeddings) < tolerance
    assert error(norms, raw.norm(dim=1)) < 1e-6 < error(norms.roll(1), raw.norm(dim=1))
    alone, *nothing = search_hidden(*operands, argmax=False, **options)
    assert torch.equal(alone, scores)
    assert nothing == [None] * 3


@pytest.mark.parametrize("config", [SMALL, SHARED])
@pytest.mark.parametrize("longest", [None, 37])
def test_tiles_without_tokens(config, longest, device):
    """The first tile of every document is masked, and some shares of the last one have no tile."""
    (queries, hidden, projection), _, mask = make_problem(device, Lq=7, H=20, E=12)
    mask[:, :16] = False
    mask[2] = torch.arange(37, device=device) >= 33
    cu_seqlens = torch.tensor([0, 37, 74, 111, 116], dtype=torch.int32, device=device)
    tokens, taken = hidden.flatten(0, 1)[:116], mask.flatten()[:116]
    operands = (queries, tokens, projection, cu_seqlens, None, taken)
    scores, winners, projected, _ = search_hidden(
        *operands, normalize=True, argmax=True, longest=longest, config=config
    )
    expected, first = on_cpu(operands, normalize=True)
    assert error(scores.cpu(), expected.double()) < 1e-6
    assert error(scores.cpu().roll(1, 1), expected.double()) > 1e-2
    assert torch.equal(winners.cpu(), first)
    assert (winners[3] == -1).all()
    assert (winners[2] >= 74 + 33).all()
    assert projected.isfinite().all(), "masked tokens are projected too"


def on_cpu(operands, *, normalize):
    """Scores and winners in PyTorch."""
    operands = [None if x is None else x.cpu() for x in operands]
    return hidden_function._score(*operands, None, normalize, True)[:2]


@pytest.mark.parametrize(
    ("normalize", "config", "masked"),
    [
        pytest.param(True, SMALL, True, marks=pytest.mark.slow),
        (True, SHARED, False),
        pytest.param(False, SHARED, True, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_agree_with_the_cpu_version(normalize, config, masked, device):
    """Scores, winners and gradients, of operands with any strides; document 1 has no tokens, query
    2 neither."""
    operands, query_mask, mask = make_problem(device, Lq=18, H=20, E=12)
    masks = (query_mask.flatten(), mask.flatten()) if masked else (None, None)
    cu_seqlens = torch.arange(5, dtype=torch.int32, device=device) * 37
    inputs = (*operands, cu_seqlens, *masks)
    strided = [None if x is None else x.repeat_interleave(2, -1)[..., ::2] for x in inputs]
    scores, winners, tokens, norms = search_hidden(
        *strided, normalize=normalize, argmax=True, config=config
    )
    expected, first = on_cpu(inputs, normalize=normalize)
    assert error(scores.cpu(), expected.double()) < 1e-6
    assert error(scores.cpu().roll(1, 1), expected.double()) > 1e-2
    assert torch.equal(winners.cpu(), first)
    if masked:
        assert (winners[:, ~masks[0]] == -1).all()
        assert (winners[1] == -1).all()
    queries, hidden, projection = operands
    projected = project_tokens_cpu(hidden.cpu(), projection.cpu(), normalize=normalize)
    for actual, wanted in zip((tokens, norms), projected, strict=True):
        assert actual.shape == wanted.shape
        torch.testing.assert_close(actual.cpu(), wanted, atol=1e-6, rtol=1e-5)
    grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)).T
    dqueries, dtokens = maxsim_backward_cuda(
        grad.to(device), winners, hidden_function._operands(queries, tokens, cu_seqlens, 37),
        normalize=False, backward="auto",
    )  # fmt: skip
    found = project_tokens_backward(
        dtokens, tokens, norms, hidden, projection,
        normalize=normalize, need_hidden=True, need_projection=True,
    )  # fmt: skip
    leaves = [x.cpu().requires_grad_() for x in operands]
    own_masks = (query_mask.cpu(), mask.cpu()) if masked else (None, None)
    scores = maxsim_from_hidden(*leaves, *own_masks, normalize=normalize)
    gradients = torch.autograd.grad(scores, leaves, grad)
    for actual, wanted in zip((dqueries, *found), gradients, strict=True):
        assert error(actual.cpu(), wanted.double()) < 2e-6
        assert error(actual.cpu().roll(1, 0), wanted.double()) > 0.1


@pytest.mark.parametrize("need_hidden", [True, False])
@pytest.mark.parametrize(("T", "H", "E"), [(70, 50, 24), (5, 100, 1), (1, 1, 33), (0, 8, 8)])
def test_projection_to_unit_length(T, H, E, need_hidden, device):
    """Also of a token that is zero, and of one that is nearly so."""
    generator = torch.Generator().manual_seed(T + H)
    hidden, projection, grad = (
        torch.randn(*size, generator=generator).to(device) for size in ((T, H), (E, H), (T, E))
    )
    hidden[3:4] = 0
    hidden[4:5] *= 1e-14
    unit, norms = project_tokens(hidden, projection, normalize=True)
    exact = [x.double().requires_grad_() for x in (hidden, projection)]
    projected = exact[0] @ exact[1].T
    expected = projected / projected.norm(dim=1, keepdim=True).clamp_min(1e-12)
    torch.testing.assert_close(unit.double(), expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(norms.double(), projected.detach().norm(dim=1), atol=0, rtol=1e-5)
    dprojected, dexact = torch.autograd.grad((expected * grad).sum(), (projected, exact[0]))
    # The way back of E = 1 is 0 but for rounding, which is relative to grad / norm.
    scale = (grad.double() / projected.detach().norm(dim=1, keepdim=True).clamp_min(1e-12)).abs()
    dhidden, dprojection = project_tokens_backward(
        grad, unit, norms, hidden, projection,
        normalize=True, need_hidden=need_hidden, need_projection=True,
    )  # fmt: skip
    assert ((grad - dprojected).abs() <= 1e-5 * scale.amax(1, keepdim=True)).all()
    assert T < 2 or not ((grad.roll(1, 0) - dprojected).abs() <= 0.1 * scale).all()
    torch.testing.assert_close(dprojection, grad.T @ hidden)
    assert (dhidden is None) != need_hidden
    if dhidden is not None:
        sizes = scale.amax(1, keepdim=True) * projection.abs().sum(0)
        assert ((dhidden - dexact).abs() <= 1e-5 * sizes).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
@pytest.mark.parametrize("E", [12, 130])
@pytest.mark.parametrize("normalize", [True, False])
def test_projection_agrees_with_the_cpu_version(normalize, E, dtype, tolerance, device):
    """By one kernel where embeddings are narrow and of 16 bits, by PyTorch's products elsewhere;
    tokens along one axis or two."""
    generator = torch.Generator().manual_seed(E)
    hidden, projection, grad = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((3, 30, 50), (E, 50), (3, 30, E))
    )
    wanted = {"normalize": normalize, "need_hidden": True, "need_projection": True}
    expected = project_tokens_cpu(hidden, projection, normalize=normalize)
    expected += project_tokens_backward_cpu(grad, *expected, hidden, projection, **wanted)
    for axes in (2, 3):
        own = [
            x.to(device) if axes == 3 else x.flatten(0, -2).to(device)
            for x in (hidden, projection, grad)
        ]
        found = project_tokens(*own[:2], normalize=normalize)
        found += project_tokens_backward(own[2].clone(), *found, *own[:2], **wanted)
        for actual, truth_ in zip(found, expected, strict=True):
            actual = actual.cpu().view(truth_.shape)
            assert actual.dtype == truth_.dtype
            assert error(actual, truth_.double()) < tolerance
            assert not truth_.numel() or error(1.01 * actual, truth_.double()) > 5 * tolerance
    for need in ("need_hidden", "need_projection"):
        fewer = project_tokens_backward(
            own[2].clone(), *found[:2], *own[:2], **{**wanted, need: False}
        )
        assert [x is None for x in fewer] == [need == "need_hidden", need == "need_projection"]
        assert all(x is None or torch.equal(x, y) for x, y in zip(fewer, found[2:], strict=True))


def test_nothing_of_a_radial_gradient_is_left(device):
    """Although tokens of 16 bits are not of unit length."""
    generator = torch.Generator().manual_seed(0)
    operands = (torch.randn(*x, generator=generator) for x in ((40, 64), (16, 64)))
    hidden, projection = (x.to(device, torch.float16) for x in operands)
    unit, norms = project_tokens(hidden, projection, normalize=True)
    assert ((unit.float().norm(dim=1) - 1).abs() > 1e-5).any()
    for grad, most in ((unit.clone(), 1e-6), (unit.roll(1, 1), float("inf"))):
        project_tokens_backward(
            grad, unit, norms, hidden, projection,
            normalize=True, need_hidden=True, need_projection=False,
        )  # fmt: skip
        assert grad.abs().amax() * norms.amin() < most
    assert grad.abs().amax() * norms.amin() > 0.1


def test_nothing_to_search(device):
    projection = torch.ones(4, 6, device=device)
    for Q, Lq, N, Ld in ((0, 3, 2, 5), (2, 0, 2, 5), (2, 3, 0, 5), (2, 3, 2, 0)):
        queries, hidden = (torch.ones(*x, device=device) for x in ((Q, Lq, 4), (N, Ld, 6)))
        scores = maxsim_from_hidden(queries.requires_grad_(), hidden, projection)
        assert torch.equal(scores, torch.zeros(Q, N, device=device))
        scores.sum().backward()
        assert (queries.grad == 0).all()
        cu_seqlens = torch.arange(N + 1, dtype=torch.int32, device=device) * Ld
        packed = (queries.detach(), hidden.flatten(0, 1), projection, cu_seqlens, None, None)
        scores, winners, tokens, norms = search_hidden(*packed, normalize=True, argmax=True)
        assert torch.equal(scores, torch.zeros(Q, N, device=device))
        assert torch.equal(winners, torch.full((N, Q * Lq), -1, device=device).int())
        assert tokens.isfinite().all()
        assert norms.isfinite().all()


def test_eager_and_registered_agree(monkeypatch):
    """The same bits with and without the dispatcher; only wanted gradients; once only."""
    operands, *masks = make_problem(torch.device("cpu"))
    results = []
    for registered in (False, True):
        monkeypatch.setattr(hidden_function, "needs_operators", lambda value=registered: value)
        leaves = [x.clone().requires_grad_() for x in operands]
        scores = maxsim_from_hidden(*leaves, *masks)
        assert ("MaxSimFromHidden" in scores.grad_fn.name()) is not registered
        upstream = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)).T
        gradients = torch.autograd.grad(scores, leaves, upstream)
        for i, leaf in enumerate(leaves):
            alone = [x.detach() for x in leaves]
            alone[i] = leaf
            scores = maxsim_from_hidden(*alone, *masks)
            assert torch.equal(torch.autograd.grad(scores, leaf, upstream)[0], gradients[i])
        results.append((scores.detach(), *gradients))
        again = torch.autograd.grad(
            maxsim_from_hidden(*leaves, *masks).sum(), leaves, create_graph=True
        )
        with pytest.raises(RuntimeError):
            sum(x.sum() for x in again).backward()
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    assert not maxsim_from_hidden(*operands, *masks).requires_grad
    assert not torch.equal(results[0][1], results[0][1].roll(1, 0))


@pytest.mark.parametrize("packed", [True, False])
def test_compiled_once_for_all_sizes(packed):
    """With gradients, without another graph for another number of tokens."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (queries, _, projection), *_ = make_problem(torch.device("cpu"))
    score = torch.compile(maxsim_from_hidden, backend="aot_eager", fullgraph=True, dynamic=True)
    for T in (12, 15, 18):
        leaves = [x.clone().requires_grad_() for x in (queries, torch.ones(4, T, 50), projection)]
        bounds = {"document_cu_seqlens": torch.tensor([0, 5, 4 * T]).int()} if packed else {}
        operands = (leaves[0], leaves[1].flatten(0, 1) if packed else leaves[1], leaves[2])
        scores, expected = (f(*operands, **bounds) for f in (score, maxsim_from_hidden))
        assert torch.equal(scores, expected)
        for x, y in zip(
            torch.autograd.grad(scores.sum(), leaves),
            torch.autograd.grad(expected.sum(), leaves),
            strict=True,
        ):
            assert torch.equal(x, y)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled():
    operands, *masks = make_problem(torch.device("cpu"))
    score = torch.compile(maxsim_from_hidden, backend="aot_eager", fullgraph=True)
    results = []
    for function in (score, maxsim_from_hidden):
        leaves = [x.clone().requires_grad_() for x in operands]
        scores = function(*leaves, *masks)
        results.append((scores.detach(), *torch.autograd.grad(scores.sum(), leaves)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_what_masked_query_tokens_hold_does_not_matter(device):
    (queries, *others), query_mask, _ = make_problem(device)
    dirty = torch.where(query_mask[..., None], queries, float("nan"))
    scores = maxsim_from_hidden(dirty, *others, query_mask)
    assert torch.equal(scores, maxsim_from_hidden(queries, *others, query_mask))
    assert scores.any()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("config", [SMALL, SHARED])
def test_a_token_that_is_not_a_number_is_seen(config, normalize, device):
    """In its own document alone, wherever it lies, and not where a mask leaves it out."""
    (queries, hidden, projection), *_ = make_problem(device)
    clean = hidden.clone()
    hidden[2, 20, 3] = hidden[3, 36, 1] = float("nan")
    mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=device)
    mask[3, 36] = False
    cu_seqlens = torch.arange(5, dtype=torch.int32, device=device) * 37

    def search(tokens):
        return search_hidden(
            queries, tokens, projection, cu_seqlens, None, mask.flatten(),
            normalize=normalize, argmax=False, config=config,
        )[0]  # fmt: skip

    scores, expected = search(hidden), search(clean)
    assert scores[:, 2].isnan().all()
    assert torch.equal(scores[:, [0, 1, 3]], expected[:, [0, 1, 3]])
    on_cpu = maxsim_from_hidden(*(x.cpu() for x in (queries, hidden, projection)), None, mask.cpu())
    assert on_cpu.isnan().tolist() == scores.isnan().tolist()


@pytest.mark.parametrize("config", [SMALL, SHARED])
@pytest.mark.parametrize("masked", [True, False])
def test_a_query_that_is_not_a_number_is_seen(config, masked, device):
    """Its winners are tokens of the document, or none."""
    (queries, hidden, projection), _, mask = make_problem(device)
    mask[2:, ::16] = False
    queries[1, 2, 3] = float("nan")
    cu_seqlens = torch.arange(5, dtype=torch.int32, device=device) * 37
    scores, winners, *_ = search_hidden(
        queries, hidden, projection, cu_seqlens, None, mask.flatten() if masked else None,
        normalize=True, argmax=True, config=config,
    )  # fmt: skip
    empty = torch.arange(4, device=device) == 1
    assert torch.equal(scores[1].isnan(), ~empty if masked else torch.full_like(empty, True))
    assert not scores[[0, 2]].isnan().any()
    inside = (winners >= cu_seqlens[:-1, None]) & (winners < cu_seqlens[1:, None])
    assert (inside | (winners == -1)).all()
    if masked:
        assert mask.flatten()[winners[winners >= 0].long()].all()


def test_a_backward_under_autocast_is_that_of_the_forward(device):
    operands, *masks = make_problem(device)
    found = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_() for x in operands]
        scores = maxsim_from_hidden(*leaves, *masks)
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(scores.sum(), leaves))
    for plain, under in zip(*found, strict=True):
        assert torch.equal(plain, under)


def test_autocast_rounds_the_operands_alone(device):
    """Similarities and sums stay in fp32."""
    operands, *masks = make_problem(device)
    with torch.autocast(device.type, torch.bfloat16):
        scores = maxsim_from_hidden(*operands, *masks)
    rounded = [x.bfloat16() for x in operands]
    assert torch.equal(scores, maxsim_from_hidden(*rounded, *masks))
    assert not torch.equal(scores, maxsim_from_hidden(*operands, *masks))


def test_ties_go_to_the_first_token(device):
    queries = torch.ones(1, 3, 4, device=device)
    hidden = torch.ones(70, 4, device=device)
    cu_seqlens = torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
    for config in (SMALL, SHARED):
        _, winners, tokens, norms = search_hidden(
            queries, hidden, torch.eye(4, device=device), cu_seqlens, None, None,
            normalize=False, argmax=True, config=config,
        )  # fmt: skip
        assert winners.tolist() == [[0] * 3, [30] * 3]
        assert torch.equal(tokens, hidden), "not normalised, so that there are no norms"
        assert norms.numel() == 0


@pytest.mark.parametrize("normalize", [True, False])
def test_registration(normalize):
    (queries, hidden, projection), _, mask = make_problem(torch.device("cpu"), N=2, Ld=3)
    leaves = [x.requires_grad_() for x in (queries, hidden, projection)]
    cu_seqlens = torch.tensor([0, 3, 6], dtype=torch.int32)
    rest = (cu_seqlens, None, mask.flatten(), 3, normalize)
    score, backward = hidden_function._score_op, hidden_function._backward_op
    torch.library.opcheck(score, (*leaves, *rest, True))
    torch.library.opcheck(score, (*(x.detach() for x in leaves), *rest, False))
    halves = [x.detach().half() for x in leaves]
    _, winners, tokens, norms = score(*halves, *rest, True)
    for needs in ((True, False, False), (False, True, True)):
        sizes = (cu_seqlens, 3, normalize)
        arguments = (torch.ones(3, 2), winners, tokens, norms, *halves, *sizes, *needs)
        torch.library.opcheck(backward, arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queries": (5, 24)}, r"\[Q, Lq, E\]"),
        ({"hidden": (4, 50)}, r"document_cu_seqlens"),
        ({"projection": (50, 24)}, r"\[24, 50\]"),
        ({"queries": (3, 5, 0), "projection": (0, 50)}, r"\[0, 50\] with E > 0"),
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
