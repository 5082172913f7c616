"""MaxSim from hidden states: the operator, and its kernel in the interpreter or on a GPU."""

from itertools import accumulate

import pytest
import torch

from sparton.kernels import operator
from sparton.kernels.maxsim import hidden_function, maxsim_from_hidden
from sparton.kernels.maxsim.hidden import (
    MANY_QUERY_TOKENS,
    HiddenConfig,
    search_hidden,
    search_serves,
)
from sparton.kernels.maxsim.paths import maxsim_backward_cuda
from sparton.kernels.maxsim.projection import project_tokens_backward
from sparton.kernels.maxsim.projection_cpu import project_tokens_cpu
from tests.kernels.hidden_problems import from_hidden, make_problem, packed, truth
from tests.kernels.problems import error

SMALL = HiddenConfig(block_t=16, block_r=16, block_h=16, programs=1)
SHARED = SMALL._replace(programs=20)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normalize", [True, False])
def test_values_and_gradients(normalize, bias):
    operands, *masks = make_problem(torch.device("cpu"), bias=bias)
    leaves = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().requires_grad_() for x in operands]
    scores = from_hidden(leaves, *masks, normalize=normalize)
    expected = truth(exact, *masks, normalize=normalize)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = torch.autograd.grad(scores, leaves, upstream.float())
    expected_gradients = torch.autograd.grad(expected, exact, upstream)
    assert error(scores.detach(), expected.detach()) < 1e-6
    assert (scores[:, 1] == 0).all()
    assert (scores[-1] == 0).all()
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert error(actual, wanted) < 2e-6
        assert error(actual * 1.01, wanted) > 5e-3
    masked = gradients[1][~masks[1]]
    assert (masked == 0).all()
    other = truth(exact, *masks, normalize=not normalize).detach()
    assert error(scores.detach(), other) > 0.1, "whether tokens are normalised shows"
    assert_a_bias_shows(scores, gradients, exact, masks, upstream, normalize)


def assert_a_bias_shows(scores, gradients, exact, masks, upstream, normalize=True):
    """Scores and gradients are far from those without it, where operands have one. (Where tokens
    are not normalised, neither winners nor the gradients of hidden and projection change.)"""
    queries, hidden, projection, *bias = exact
    without = (queries, hidden, projection)
    expected = truth(without, *masks, normalize=normalize)
    others = torch.autograd.grad(expected, without if normalize else without[:1], upstream)
    if bias:
        assert error(scores.detach().cpu(), expected.detach()) > 0.05
        assert all(error(x.cpu(), other) > 0.3 for x, other in zip(gradients, others))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_bias_in_16_bits_is_as_near_to_the_truth_as_in_eager_pytorch(normalize, dtype):
    """Of queries of one token, whose winners are the same at every precision."""
    operands, *masks = make_problem(torch.device("cpu"), Lq=1, dtype=dtype, bias=True)
    found = {}
    for version, score, precision in (
        ("ours", from_hidden, dtype), ("eager", truth, dtype), ("exact", truth, torch.float64)
    ):  # fmt: skip
        leaves = [x.to(precision).requires_grad_() for x in operands]
        scores = score(leaves, *masks, normalize=normalize)
        found[version] = (scores.detach(), *torch.autograd.grad(scores.sum(), leaves))
    for ours, eager, exact in zip(*found.values(), strict=True):
        most = error(eager, exact) + torch.finfo(dtype).eps
        assert error(ours, exact) < most < 0.03 < error(1.05 * ours, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)]
)
def test_values_and_gradients_on_a_gpu(dtype, tolerance, bias):
    shape = {"Q": 9, "Lq": 32, "N": 13, "Ld": 300, "H": 768, "E": 128, "bias": bias}
    operands, *masks = make_problem(torch.device("cuda"), dtype=dtype, **shape)
    leaves = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().cpu().requires_grad_() for x in operands]
    scores = from_hidden(leaves, *masks)
    on_host = [mask.cpu() for mask in masks]
    expected = truth(exact, *on_host, normalize=True)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = torch.autograd.grad(scores, leaves, upstream.float().cuda(), retain_graph=True)
    expected_gradients = torch.autograd.grad(expected, exact, upstream)
    assert error(scores.cpu(), expected.detach()) < tolerance
    # Where operands are rounded, near-ties may fall differently.
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert error(actual.cpu(), wanted) < 10 * tolerance
    assert_a_bias_shows(scores, gradients, exact, on_host, upstream)
    again = torch.autograd.grad(scores, leaves, upstream.float().cuda())
    assert all(torch.equal(x, y) for x, y in zip(gradients, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("E", [48, 64, 96, 320, 512, 1024, 2500])
def test_embeddings_of_any_width_on_a_gpu(E, bias, dtype):
    """2,500 units are too wide for the search: they are projected first."""
    shape = {"Lq": 40, "Ld": 150, "H": 200, "E": E, "bias": bias}
    operands, *masks = make_problem(torch.device("cuda"), dtype=dtype, **shape)
    exact = [x.double().cpu().requires_grad_() for x in operands]
    on_host = [x.cpu() for x in masks]
    expected = truth(exact, *on_host, normalize=True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    leaves = [x.clone().requires_grad_() for x in operands]
    for inputs in (operands, leaves):
        scores = from_hidden(inputs, *masks)
        assert error(scores.detach().cpu(), expected.detach()) < tolerance
        assert error(scores.detach().cpu().roll(1, 1), expected.detach()) > 10 * tolerance
    gradients = torch.autograd.grad(scores.sum(), leaves)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert error(actual.cpu(), wanted) < 10 * tolerance
        assert error(actual.cpu().roll(1, -1), wanted) > 20 * tolerance
    assert_a_bias_shows(scores, gradients, exact, on_host, torch.ones_like(expected))
    assert search_serves(operands[0], True) == (E < 2500)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("Q", [2, 5, 40, MANY_QUERY_TOKENS // 32])
def test_numbers_of_queries_on_a_gpu(Q, normalize, bias):
    """Different kernels serve few query tokens and many, with and without a gradient."""
    shape = {"Q": Q, "Lq": 32, "N": 9, "Ld": 70, "H": 96, "E": 64, "bias": bias}
    operands, *masks = make_problem(torch.device("cuda"), dtype=torch.bfloat16, **shape)
    leaves = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().cpu().requires_grad_() for x in operands]
    on_host = [mask.cpu() for mask in masks]
    expected = truth(exact, *on_host, normalize=normalize)
    scores, alone = (from_hidden(x, *masks, normalize=normalize) for x in (leaves, operands))
    for found in (scores.detach(), alone):
        assert error(found.cpu(), expected.detach()) < 1e-2
        assert error(1.1 * found.cpu(), expected.detach()) > 1e-2
    assert search_serves(operands[0], False)
    assert search_serves(operands[0], True) == (Q * 32 < MANY_QUERY_TOKENS)
    gradients = torch.autograd.grad(scores.sum(), leaves)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected.sum(), exact), strict=True):
        # Of few query tokens a single near-tie that falls differently shows.
        assert error(actual.cpu(), wanted) < 0.3 < error(actual.cpu().roll(1, -1), wanted)
    upstream = torch.ones_like(expected)
    assert_a_bias_shows(scores, gradients, exact, on_host, upstream, normalize)


def test_packed_documents_equal_padded_ones():
    (queries, hidden, *layer), query_mask, _ = make_problem(torch.device("cpu"), bias=True)
    lengths = [37, 0, 5, 20]
    mask = torch.arange(37) < torch.tensor(lengths)[:, None]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    padded = from_hidden((queries, hidden, *layer), query_mask, mask)
    rows = (queries, hidden[mask], *layer)
    actual = from_hidden(rows, query_mask, document_cu_seqlens=cu_seqlens)
    torch.testing.assert_close(actual, padded, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(padded, from_hidden((queries, hidden, *layer), query_mask))


def test_similarities_that_are_all_negative_beat_no_padding():
    hidden = -torch.rand(2, 6, 8) - 0.1
    mask = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])
    scores = maxsim_from_hidden(torch.rand(1, 4, 8), hidden, torch.eye(8), None, mask)
    assert (scores < 0).all()


@pytest.mark.parametrize("config", [SMALL, SHARED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("H", "E", "bias"), [(50, 24, True), (32, 48, True), (17, 1, False)])
def test_the_kernel(config, dtype, H, E, bias, device):
    """Each query is one token, so that scores are maxima."""
    shape = {"H": H, "E": E, "Lq": 7, "bias": bias}
    (queries, hidden, *layer), _, mask = make_problem(device, dtype=dtype, **shape)
    rows, tokens = queries.flatten(0, 1), hidden.flatten(0, 1)
    cu_seqlens = torch.arange(5, dtype=torch.int32, device=device) * 37
    operands = packed((rows[:, None], tokens, *layer), cu_seqlens, None, mask.flatten())
    scores, kept = search_hidden(operands, argmax=True, config=config)
    winners, projected, norms = kept
    maxima = scores.T
    raw = torch.nn.functional.linear(tokens.double(), *(x.double() for x in layer))
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
    alone, nothing = search_hidden(operands, argmax=False, config=config)
    assert torch.equal(alone, scores)
    assert nothing is None


@pytest.mark.parametrize("config", [SMALL, SHARED])
@pytest.mark.parametrize("longest", [None, 37])
def test_tiles_without_tokens(config, longest, device):
    """The first tile of every document is masked, and some shares of the last one have no tile."""
    (queries, hidden, projection), _, mask = make_problem(device, Lq=7, H=20, E=12)
    mask[:, :16] = False
    mask[2] = torch.arange(37, device=device) >= 33
    cu_seqlens = torch.tensor([0, 37, 74, 111, 116], dtype=torch.int32, device=device)
    tokens, taken = hidden.flatten(0, 1)[:116], mask.flatten()[:116]
    operands = packed((queries, tokens, projection), cu_seqlens, None, taken, longest=longest)
    scores, (winners, projected, _) = search_hidden(operands, argmax=True, config=config)
    expected, first = on_cpu(operands)
    assert error(scores.cpu(), expected.double()) < 1e-6
    assert error(scores.cpu().roll(1, 1), expected.double()) > 1e-2
    assert torch.equal(winners.cpu(), first)
    assert (winners[3] == -1).all()
    assert (winners[2] >= 74 + 33).all()
    assert projected.isfinite().all(), "masked tokens are projected too"


def on_cpu(operands):
    """Scores and winners in PyTorch."""
    return hidden_function._score(of_each(operands, lambda x: x.cpu()), True)[:2]


def of_each(operands, function):
    """The same operands with every tensor made into another."""
    return operands._make(function(x) if torch.is_tensor(x) else x for x in operands)


@pytest.mark.parametrize(
    ("normalize", "config", "masked", "bias"),
    [
        pytest.param(True, SMALL, True, False, marks=pytest.mark.slow),
        (True, SHARED, False, True),
        pytest.param(False, SHARED, True, True, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_agree_with_the_cpu_version(normalize, config, masked, bias, device):
    """Scores, winners and gradients, of operands with any strides; document 1 has no tokens, query
    2 neither."""
    operands, query_mask, mask = make_problem(device, Lq=18, H=20, E=12, bias=bias)
    masks = (query_mask.flatten(), mask.flatten()) if masked else (None, None)
    cu_seqlens = torch.arange(5, dtype=torch.int32, device=device) * 37
    inputs = packed(operands, cu_seqlens, *masks, normalize=normalize)
    strided = of_each(inputs, lambda x: x.repeat_interleave(2, -1)[..., ::2])
    scores, (winners, tokens, norms) = search_hidden(strided, argmax=True, config=config)
    expected, first = on_cpu(inputs)
    assert error(scores.cpu(), expected.double()) < 1e-6
    assert error(scores.cpu().roll(1, 1), expected.double()) > 1e-2
    assert torch.equal(winners.cpu(), first)
    if masked:
        assert (winners[:, ~masks[0]] == -1).all()
        assert (winners[1] == -1).all()
    layer = (x.cpu() if torch.is_tensor(x) else x for x in inputs[1:4])
    projected = project_tokens_cpu(*layer, normalize=normalize)
    for actual, wanted in zip((tokens, norms), projected, strict=True):
        assert actual.shape == wanted.shape
        torch.testing.assert_close(actual.cpu(), wanted, atol=1e-6, rtol=1e-5)
    grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)).T
    dqueries, dtokens = maxsim_backward_cuda(
        grad.to(device), winners, inputs.projected(tokens), normalize=False, backward="auto"
    )
    found = project_tokens_backward(dtokens, tokens, norms, *inputs[1:3], True, True, bias)
    leaves = [x.cpu().requires_grad_() for x in operands]
    own_masks = (query_mask.cpu(), mask.cpu()) if masked else (None, None)
    scores = from_hidden(leaves, *own_masks, normalize=normalize)
    gradients = torch.autograd.grad(scores, leaves, grad)
    for actual, wanted in zip((dqueries, *found), gradients):
        assert error(actual.cpu(), wanted.double()) < 2e-6
        assert error(actual.cpu().roll(1, 0), wanted.double()) > 0.1


def test_nothing_to_search(device):
    projection = torch.ones(4, 6, device=device)
    for Q, Lq, N, Ld in ((0, 3, 2, 5), (2, 0, 2, 5), (2, 3, 0, 5), (2, 3, 2, 0)):
        queries, hidden = (torch.ones(*x, device=device) for x in ((Q, Lq, 4), (N, Ld, 6)))
        scores = maxsim_from_hidden(queries.requires_grad_(), hidden, projection)
        assert torch.equal(scores, torch.zeros(Q, N, device=device))
        scores.sum().backward()
        assert (queries.grad == 0).all()
        cu_seqlens = torch.arange(N + 1, dtype=torch.int32, device=device) * Ld
        operands = packed((queries.detach(), hidden.flatten(0, 1), projection), cu_seqlens)
        scores, (winners, tokens, norms) = search_hidden(operands, argmax=True)
        assert torch.equal(scores, torch.zeros(Q, N, device=device))
        assert torch.equal(winners, torch.full((N, Q * Lq), -1, device=device).int())
        assert tokens.isfinite().all()
        assert norms.isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_eager_and_registered_agree(monkeypatch, bias):
    """The same bits with and without the dispatcher; only wanted gradients; once only."""
    operands, *masks = make_problem(torch.device("cpu"), bias=bias)
    results = []
    for registered in (False, True):
        monkeypatch.setattr(operator, "needs_operators", lambda value=registered: value)
        leaves = [x.clone().requires_grad_() for x in operands]
        scores = from_hidden(leaves, *masks)
        assert (scores.grad_fn.name() == "_GraphBackward") is not registered
        upstream = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)).T
        gradients = torch.autograd.grad(scores, leaves, upstream)
        for i, leaf in enumerate(leaves):
            alone = [x.detach() for x in leaves]
            alone[i] = leaf
            scores = from_hidden(alone, *masks)
            assert torch.equal(torch.autograd.grad(scores, leaf, upstream)[0], gradients[i])
        results.append((scores.detach(), *gradients))
        again = torch.autograd.grad(from_hidden(leaves, *masks).sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError):
            sum(x.sum() for x in again).backward()
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    assert not from_hidden(operands, *masks).requires_grad
    assert not torch.equal(results[0][1], results[0][1].roll(1, 0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [True, False])
def test_compiled_once_for_all_sizes(rows, bias):
    """With gradients, without another graph for another number of tokens."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (queries, _, *layer), *_ = make_problem(torch.device("cpu"), bias=bias)
    score = torch.compile(from_hidden, backend="aot_eager", fullgraph=True, dynamic=True)
    for T in (12, 15, 18):
        leaves = [x.clone().requires_grad_() for x in (queries, torch.ones(4, T, 50), *layer)]
        bounds = {"document_cu_seqlens": torch.tensor([0, 5, 4 * T]).int()} if rows else {}
        operands = (leaves[0], leaves[1].flatten(0, 1) if rows else leaves[1], *leaves[2:])
        scores, expected = (f(operands, **bounds) for f in (score, from_hidden))
        assert torch.equal(scores, expected)
        for x, y in zip(
            torch.autograd.grad(scores.sum(), leaves),
            torch.autograd.grad(expected.sum(), leaves),
            strict=True,
        ):
            assert torch.equal(x, y)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("bias", [False, True])
def test_compiled(bias):
    operands, *masks = make_problem(torch.device("cpu"), bias=bias)
    score = torch.compile(from_hidden, backend="aot_eager", fullgraph=True)
    results = []
    for function in (score, from_hidden):
        leaves = [x.clone().requires_grad_() for x in operands]
        scores = function(leaves, *masks)
        results.append((scores.detach(), *torch.autograd.grad(scores.sum(), leaves)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_masked_tokens_hold_does_not_matter(dtype, normalize, device):
    (queries, hidden, projection), *masks = make_problem(device)
    masks[1][2, ::3] = False
    results = []
    for fill in (float("nan"), float("inf"), 1.0):
        sides = [torch.where(m[..., None], x, fill) for x, m in zip((queries, hidden), masks)]
        leaves = [x.to(dtype).requires_grad_() for x in (*sides, projection)]
        scores = maxsim_from_hidden(*leaves, *masks, normalize=normalize)
        results.append((scores.detach(), *torch.autograd.grad(scores.square().sum(), leaves)))
    assert all(x.any() for x in results[0])
    for found in zip(*results, strict=True):
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


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
        operands = (queries, tokens, projection)
        inputs = packed(operands, cu_seqlens, None, mask.flatten(), normalize=normalize)
        return search_hidden(inputs, argmax=False, config=config)[0]

    scores, expected = search(hidden), search(clean)
    assert scores[:, 2].isnan().all()
    assert torch.equal(scores[:, [0, 1, 3]], expected[:, [0, 1, 3]])
    on_cpu = maxsim_from_hidden(*(x.cpu() for x in (queries, hidden, projection)), None, mask.cpu())
    assert on_cpu.isnan().tolist() == scores.isnan().tolist()


@pytest.mark.parametrize("config", [SMALL, SHARED])
@pytest.mark.parametrize("masked", [True, False])
def test_a_query_that_is_not_a_number_is_seen(config, masked, device):
    """Its winners are tokens of the document, or none."""
    operands, _, mask = make_problem(device)
    mask[2:, ::16] = False
    operands[0][1, 2, 3] = float("nan")
    cu_seqlens = torch.arange(5, dtype=torch.int32, device=device) * 37
    inputs = packed(operands, cu_seqlens, None, mask.flatten() if masked else None)
    scores, (winners, *_) = search_hidden(inputs, argmax=True, config=config)
    empty = torch.arange(4, device=device) == 1
    assert torch.equal(scores[1].isnan(), ~empty if masked else torch.full_like(empty, True))
    assert not scores[[0, 2]].isnan().any()
    inside = (winners >= cu_seqlens[:-1, None]) & (winners < cu_seqlens[1:, None])
    assert (inside | (winners == -1)).all()
    if masked:
        assert mask.flatten()[winners[winners >= 0].long()].all()


def test_a_backward_under_autocast_is_that_of_the_forward(device):
    operands, *masks = make_problem(device, bias=True)
    found = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_() for x in operands]
        scores = from_hidden(leaves, *masks)
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(scores.sum(), leaves))
    for plain, under in zip(*found, strict=True):
        assert torch.equal(plain, under)


def test_autocast_rounds_the_operands_alone(device):
    """Similarities and sums stay in fp32."""
    operands, *masks = make_problem(device, bias=True)
    with torch.autocast(device.type, torch.bfloat16):
        scores = from_hidden(operands, *masks)
    rounded = [x.bfloat16() for x in operands]
    assert torch.equal(scores, from_hidden(rounded, *masks))
    assert not torch.equal(scores, from_hidden(operands, *masks))


def test_ties_go_to_the_first_token(device):
    hidden = torch.ones(70, 4, device=device)
    operands = (hidden[None, :3], hidden, torch.eye(4, device=device))
    cu_seqlens = torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
    for config in (SMALL, SHARED):
        inputs = packed(operands, cu_seqlens, normalize=False)
        _, (winners, tokens, norms) = search_hidden(inputs, argmax=True, config=config)
        assert winners.tolist() == [[0] * 3, [30] * 3]
        assert torch.equal(tokens, hidden), "not normalised, so that there are no norms"
        assert norms.numel() == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normalize", [True, False])
def test_registration(normalize, bias):
    operands, _, mask = make_problem(torch.device("cpu"), N=2, Ld=3, bias=bias)
    cu_seqlens = torch.tensor([0, 3, 6], dtype=torch.int32)
    inputs = packed(operands, cu_seqlens, None, mask.flatten(), longest=3, normalize=normalize)
    registered = hidden_function._operator
    score, backward = registered.registered, registered.registered_backward
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs[:4]]
    torch.library.opcheck(score, (*leaves, *inputs[4:], True))
    torch.library.opcheck(score, (*inputs, False))
    halves = of_each(inputs, lambda x: x.half() if x.is_floating_point() else x)
    _, *kept = score(*halves, True)
    for needs in ([True, False, False, bias], [False, True, True, False]):
        arguments = (torch.ones(3, 2), *kept, *halves, needs)
        torch.library.opcheck(backward, arguments)
        assert len(backward(*arguments)) == sum(needs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queries": (5, 24)}, r"\[Q, Lq, E\]"),
        ({"hidden": (4, 50)}, r"document_cu_seqlens"),
        ({"projection": (50, 24)}, r"\[24, 50\]"),
        ({"queries": (3, 5, 0), "projection": (0, 50)}, r"\[0, 50\] with E > 0"),
        ({"bias": (50,)}, r"bias must be \[E\] = \[24\] or None, got \(50,\)"),
        ({"bias": (1, 24)}, r"bias must be \[E\] = \[24\] or None, got \(1, 24\)"),
        ({"query_mask": (3, 4)}, r"query_mask must be bool \(3, 5\)"),
        ({"document_mask": (4, 36)}, r"document_mask must be bool \(4, 37\)"),
    ],
)
def test_refused(change, words):
    operands, *masks = make_problem(torch.device("cpu"), bias=True)
    names = ("queries", "hidden", "projection", "bias", "query_mask", "document_mask")
    arguments = dict(zip(names, (*operands, *masks), strict=True))
    maxsim_from_hidden(**arguments)
    for name, shape in change.items():
        arguments[name] = torch.zeros(shape, dtype=arguments[name].dtype)
    with pytest.raises(ValueError, match=words):
        maxsim_from_hidden(**arguments)


@pytest.mark.parametrize("number", range(4))
def test_dtypes_must_agree(number):
    operands, *_ = make_problem(torch.device("cpu"), bias=True)
    mixed = [x.half() if i == number else x for i, x in enumerate(operands)]
    with pytest.raises(ValueError, match=r"float16.*torch\.autocast"):
        from_hidden(mixed)
