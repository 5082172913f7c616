"""MaxSim as PyTorch sees it: pairings, masks, autograd, autocast, torch.compile, errors.

Q queries, N documents, K documents per query, L tokens, E embedding. On the GPU where there is one.
"""

import pytest
import torch

from sparton.kernels import operator
from sparton.kernels.maxsim import (
    maxsim,
    maxsim_pairs,
    maxsim_reference,
    maxsim_varlen,
    operators,
)
from sparton.kernels.maxsim.batches import packed_operands
from tests.kernels.maxsim_problems import (
    DOCUMENT_LENGTHS,
    QUERY_LENGTHS,
    boundaries,
    make_problem,
    upstream_for,
)

Q, K, LQ, LD, E = 4, 3, 7, 13, 24


@pytest.fixture
def batch(device):
    """Queries, documents ``[Q, K, Ld, E]`` and their masks with holes."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(Q, LQ, E, generator=generator).to(device).requires_grad_()
    documents = torch.randn(Q, K, LD, E, generator=generator).to(device).requires_grad_()
    query_mask = (torch.rand(Q, LQ, generator=generator) > 0.3).to(device)
    document_mask = (torch.rand(Q, K, LD, generator=generator) > 0.3).to(device)
    return queries, documents, query_mask, document_mask


def shared(batch):
    """The same documents for all queries, ``[Q * K, Ld, E]``."""
    queries, documents, query_mask, document_mask = batch
    return queries, documents.flatten(0, 1), query_mask, document_mask.flatten(0, 1)


def packed(batch, device):
    """Without the masked tokens."""
    queries, documents, query_mask, document_mask = batch
    lengths = [tuple(mask.sum(-1).flatten().tolist()) for mask in (query_mask, document_mask)]
    bounds = [boundaries(x, device) for x in lengths]
    return queries[query_mask], documents[document_mask], *bounds


def gradients(scores, leaves, *, retain=False):
    upstream = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(scores, leaves, upstream.to(scores), retain_graph=retain)


def assert_same(actual, expected, leaves):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    results = (gradients(x, leaves, retain=True) for x in (actual, expected))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(a * 1.01, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("length", [1, 31, 64])
@pytest.mark.parametrize("E", [48, 64, 96, 128, 320])
def test_padded_against_float64(E, length, normalize, device):
    """The tolerances the field publishes for MaxSim kernels in full precision, a tenth of them."""
    generator = torch.Generator().manual_seed(E)
    leaves, truth = [], []
    for count, tokens in ((3, 9), (5, length)):
        x = torch.randn(count, tokens, E, generator=generator)
        leaves.append(x.to(device).requires_grad_())
        truth.append(x.double().flatten(0, 1).requires_grad_())
    masks = [torch.rand(x.shape[:2], generator=generator) > 0.3 for x in leaves]
    bounds = boundaries((9,) * 3), boundaries((length,) * 5)
    exact = maxsim_reference(*truth, *bounds, *(x.flatten() for x in masks), normalize=normalize)
    scores = maxsim(*leaves, *(x.to(device) for x in masks), normalize=normalize)
    results = (scores.detach(), *gradients(scores, leaves))
    exact_results = (exact.detach(), *gradients(exact, truth))
    for actual, expected in zip(results, exact_results, strict=True):
        expected = expected.view(actual.shape)
        worst = (actual.double().cpu() - expected).abs().max() / expected.abs().max()
        assert worst < 3e-4
        assert (actual.double().cpu() * 1.01 - expected).abs().max() > 3e-4 * expected.abs().max()


@pytest.mark.parametrize("normalize", [False, True])
def test_pairings_agree(batch, normalize, device):
    """Lists of K are the gathered cross product, and so are pairs and packed batches."""
    leaves = batch[:2]
    cross = maxsim(*shared(batch), normalize=normalize).unflatten(1, (Q, K))
    own = cross.diagonal(dim1=0, dim2=1).T
    assert_same(maxsim(*batch, normalize=normalize), own, leaves)
    first = (batch[0], batch[1][:, 0], batch[2], batch[3][:, 0])
    assert_same(maxsim_pairs(*first, normalize=normalize), own[:, 0], leaves)
    tokens = packed(batch, device)
    for pairing, expected in (("cross", cross.flatten(1)), (K, own)):
        assert_same(maxsim_varlen(*tokens, pairing=pairing, normalize=normalize), expected, leaves)
    expanded = batch[0][:, None].expand(-1, K, -1, -1).flatten(0, 1)
    mask = batch[2][:, None].expand(-1, K, -1).flatten(0, 1)
    pairs = maxsim_pairs(expanded, shared(batch)[1], mask, shared(batch)[3], normalize=normalize)
    assert_same(pairs.view(Q, K), own, leaves)
    tokens = packed((expanded, batch[1], mask, batch[3]), device)
    pairs = maxsim_varlen(*tokens, pairing="pairs", normalize=normalize)
    assert_same(pairs.view(Q, K), own, leaves)


def test_packed_batches_with_masks(batch, device):
    """Masks leave tokens out of packed batches as they do out of padded ones."""
    flat = [x.flatten(0, -2) for x in batch[:2]]
    bounds = boundaries((LQ,) * Q, device), boundaries((LD,) * Q * K, device)
    masks = [x.flatten() for x in batch[2:]]
    assert_same(maxsim_varlen(*flat, *bounds, *masks, pairing=K), maxsim(*batch), batch[:2])


@pytest.mark.parametrize("lengths", [(4, 4, 4), (4, 1, 0)])
def test_longest_sequences_that_the_host_knows(lengths, device):
    """They change nothing but the way."""
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(size, 16, generator=generator).to(device).requires_grad_()
        for size in (sum(lengths), 12)
    ]
    bounds = boundaries(lengths, device), boundaries((5, 0, 7), device)
    longest = {"query_max_seqlen": 4, "document_max_seqlen": 9}
    operands = packed_operands(*leaves, *bounds, None, None, "cross", *longest.values())
    assert operands.query_length == (4 if sum(lengths) == 12 else None)
    assert operands.longest_document == 9
    assert_same(maxsim_varlen(*leaves, *bounds, **longest), maxsim_varlen(*leaves, *bounds), leaves)
    for name, least, most in (("query", 1, 3), ("document", 3, 9)):
        message = f"{name}_max_seqlen={least} allows 3 sequences {most} tokens at most, got"
        with pytest.raises(ValueError, match=message):
            maxsim_varlen(*leaves, *bounds, **(longest | {f"{name}_max_seqlen": least}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU asserts: test_assertions_gpu.py")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("pairing", ["cross", 1])
@pytest.mark.parametrize(("side", "place"), [("query", 1), ("document", 2)])
def test_longer_sequences_than_stated(side, place, pairing, compiled):
    """As many tokens fit, but one sequence has more than its share."""
    queries, documents = torch.randn(10, 16), torch.randn(12, 16)
    bounds = boundaries((3, 6, 1)), boundaries((2, 3, 7))
    score = maxsim_varlen
    if compiled:
        score = torch.compile(maxsim_varlen, backend="aot_eager", fullgraph=True)
    expected = maxsim_varlen(queries, documents, *bounds, pairing=pairing)
    longest = {"query_max_seqlen": 6, "document_max_seqlen": 7}
    actual = score(queries, documents, *bounds, pairing=pairing, **longest)
    assert torch.equal(actual, expected)
    most = longest[f"{side}_max_seqlen"]
    longest[f"{side}_max_seqlen"] = most - 1
    message = f"{side}_max_seqlen={most - 1}, but {side} {place} has {most} tokens"
    with pytest.raises(ValueError, match=message):
        score(queries, documents, *bounds, pairing=pairing, **longest)


def test_padding_does_not_win_over_negative_similarities(batch):
    queries, documents, query_mask, _ = batch
    queries, documents = queries.detach().abs(), -documents.detach().abs()
    document_mask = torch.ones(documents.shape[:3], dtype=torch.bool, device=documents.device)
    document_mask[..., ::2] = False
    documents[..., ::2, :] = 0
    expected = maxsim(queries, documents[..., 1::2, :], query_mask)
    assert (expected < 0).all()
    scores = maxsim(queries, documents, query_mask, document_mask)
    torch.testing.assert_close(scores, expected)
    assert (maxsim(queries, documents, query_mask) == 0).all()


def test_masked_tokens_may_hold_anything_and_get_no_gradient(batch):
    *leaves, query_mask, document_mask = batch
    expected = maxsim(*batch)
    dirty = [
        torch.where(mask[..., None], x, 1e4).detach().requires_grad_()
        for x, mask in zip(leaves, batch[2:], strict=True)
    ]
    scores = maxsim(*dirty, query_mask, document_mask)
    assert torch.equal(scores, expected)
    dqueries, ddocuments = gradients(scores, dirty)
    assert not dqueries[~query_mask].any()
    assert not ddocuments[~document_mask].any()
    assert dqueries[query_mask].any(-1).all()


def test_everything_masked(batch):
    queries, documents, query_mask, document_mask = shared(batch)
    query_mask[1], document_mask[2] = False, False
    scores = maxsim(queries, documents, query_mask, document_mask)
    empty = torch.zeros_like(scores, dtype=torch.bool)
    empty[1], empty[:, 2] = True, True
    assert torch.equal(scores == 0, empty)
    dqueries, ddocuments = gradients(scores, (queries, batch[1]))
    assert dqueries.isfinite().all()
    assert not dqueries[1].any()
    assert not ddocuments.flatten(0, 1)[2].any()


@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_hot_and_empty_destinations(backward, device):
    """One document token wins everything, no other wins anything."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.rand(6, n, 48, generator=generator).to(device) for n in (40, 9)]
    leaves[1][:, 4] += 2
    for x in leaves:
        x.requires_grad_()
    scores = maxsim(*leaves, backward=backward)
    _, ddocuments = torch.autograd.grad(scores.sum(), leaves)
    everything = leaves[0].detach().sum((0, 1))
    torch.testing.assert_close(ddocuments[:, 4], everything.expand(6, -1))
    assert not ddocuments[:, [0, 1, 2, 3, 5, 6, 7, 8]].any()


def test_ties_go_to_the_first_token(device):
    queries = torch.ones(2, 3, 16, device=device, requires_grad=True)
    documents = torch.ones(5, 7, 16, device=device, requires_grad=True)
    mask = torch.ones(5, 7, dtype=torch.bool, device=device)
    mask[1:, 0], mask[3, :4] = False, False
    maxsim(queries, documents, None, mask).sum().backward()
    first = torch.tensor([0, 1, 1, 4, 1], device=device)
    expected = torch.zeros_like(documents)
    expected[torch.arange(5), first] = 6
    assert torch.equal(documents.grad, expected)


@pytest.mark.parametrize("backward", ["auto", "lowmem"])
@pytest.mark.parametrize("normalize", [False, True])
def test_bitwise_repeatable_and_blind_to_upstream_strides(batch, normalize, backward):
    runs = []
    for stride in (1, 1, 2):
        for arguments in (batch, shared(batch)):
            scores = maxsim(*arguments, normalize=normalize, backward=backward)
            upstream = torch.rand(scores.shape, generator=torch.Generator().manual_seed(3))
            wide = upstream.to(scores)[..., None].repeat(1, 1, stride)
            runs += [scores, *torch.autograd.grad(scores, batch[:2], wide[..., 0])]
    for i in range(6):
        assert torch.equal(runs[i], runs[6 + i])
        assert torch.equal(runs[i], runs[12 + i])
    everywhere = torch.ones((), device=runs[0].device).expand(Q, K)
    leaves = batch[:2]
    expanded = torch.autograd.grad(maxsim(*batch), leaves, everywhere)
    plain = torch.autograd.grad(maxsim(*batch), leaves, everywhere.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(expanded, plain, strict=True))


def test_operands_of_any_strides(batch):
    queries, documents, query_mask, document_mask = batch
    strided = [
        torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0] for x in (queries, documents)
    ]
    wide = [torch.stack((x, ~x), -1)[..., 0] for x in (query_mask, document_mask)]
    assert not any(x.is_contiguous() for x in (*strided, *wide))
    assert_same(maxsim(*strided, *wide), maxsim(*batch), batch[:2])


@pytest.mark.parametrize(
    ("queries", "documents", "shape"),
    [
        ((0, 3), (2, 4), (0, 2)),
        ((2, 3), (0, 4), (2, 0)),
        ((2, 0), (3, 4), (2, 3)),
        ((2, 3), (3, 0), (2, 3)),
        ((2, 3), (2, 0, 4), (2, 0)),
        ((0, 3), (0, 2, 4), (0, 2)),
    ],
)
def test_nothing_to_score(queries, documents, shape, device):
    leaves = [torch.ones(*x, E, device=device, requires_grad=True) for x in (queries, documents)]
    scores = maxsim(*leaves)
    assert scores.shape == shape
    assert not scores.any()
    assert not any(x.any() for x in torch.autograd.grad(scores.sum(), leaves))


@pytest.mark.quick(1)
@pytest.mark.parametrize("per_query", [None, 2])
@pytest.mark.parametrize("normalize", [False, True])
def test_registration(per_query, normalize, device):
    registered = operators._operator
    forward, backward = registered.registered, registered.registered_backward
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, E, device, per_query=per_query)
    leaves = [x.requires_grad_() for x in problem[:2]]
    for masks in (problem[4:6], (None, None)):
        arguments = (*leaves, *problem[2:4], *masks, *problem[6:], normalize, "auto", True)
        torch.library.opcheck(forward, arguments)
    transposed = [x.detach().T.contiguous().T for x in leaves]
    _, winners = forward(*transposed, *problem[2:], normalize, "auto", True)
    arguments = (upstream_for(problem), winners, *transposed, *problem[2:], normalize, "auto")
    for needs in ([True, True], [False, True]):
        torch.library.opcheck(backward, (*arguments, needs))
        assert len(backward(*arguments, needs)) == sum(needs)
    arguments = (*leaves, *problem[2:], normalize, "auto", False)
    with torch.no_grad():
        torch.library.opcheck(forward, arguments)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(batch, dynamic, device):
    def padded(queries, documents, *masks):
        return 3 * maxsim(queries * 2, documents, *masks, normalize=True)

    def pairs(queries, documents, query_mask, document_mask):
        return maxsim_pairs(queries, documents[:, 1], query_mask, document_mask[:, 1]) * 2

    def varlen(queries, documents, *masks):
        rows = [x.flatten(0, -2) for x in (queries, documents)]
        bounds = boundaries((LQ,) * Q, device), boundaries((LD,) * Q * K, device)
        return maxsim_varlen(*rows, *bounds, *(x.flatten() for x in masks)) * 2

    for loss in (padded, pairs, varlen):
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for autocast in (False, True):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                expected, actual = loss(*batch), compiled(*batch)
            assert torch.equal(actual, expected)
            both = zip(gradients(actual, batch[:2]), gradients(expected, batch[:2]), strict=True)
            assert all(torch.equal(a, b) for a, b in both)


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("normalize", [False, True])
def test_eager_calls_and_operators_agree(batch, normalize, needed, monkeypatch, device):
    """Every pairing, masked and not; upstream gradients contiguous, strided and expanded."""
    batch = [*(x.detach().requires_grad_(n) for x, n in zip(batch, needed)), *batch[2:]]
    leaves = [x for x in batch[:2] if x.requires_grad]
    bounds = boundaries((LQ,) * Q, device), boundaries((LD,) * Q * K, device)

    def results():
        flat = [x.flatten(0, -2) for x in batch[:2]]
        first = (batch[0], batch[1][:, 0], batch[2], batch[3][:, 0])
        for scores in (
            maxsim(*batch, normalize=normalize),
            maxsim(*shared(batch), normalize=normalize),
            maxsim(*shared(batch)[:2], normalize=normalize),
            maxsim_pairs(*first, normalize=normalize),
            maxsim_varlen(*flat, *bounds, normalize=normalize, pairing=K),
        ):
            ascending = torch.arange(2.0 * scores.numel(), device=device)[::2]
            for upstream in (torch.ones((), device=device), ascending.view(scores.shape)):
                upstream = upstream.expand(scores.shape)
                yield (
                    scores.detach(),
                    *torch.autograd.grad(scores, leaves, upstream, retain_graph=True),
                )

    eager = list(results())
    calls = []
    monkeypatch.setattr(operator, "needs_operators", lambda: calls.append(0) or True)
    compared = list(zip(eager, results(), strict=True))
    assert calls
    for ours, theirs in compared:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))


def test_eager_graphs(batch):
    """Gradients twice from a graph that is kept, not from one that is gone, none of gradients; the
    operands as they were in the forward, or an error."""
    queries, documents, *masks = batch
    queries = queries.clone()
    scores = maxsim(queries, documents, *masks)
    scores = scores.mul_(1)
    first, again = (gradients(scores, (queries, documents), retain=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (once,) = torch.autograd.grad(scores.sum(), documents, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        once.sum().backward()
    with torch.no_grad():
        queries.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(scores, (documents,))
    scores = maxsim(*batch)
    gradients(scores, batch[:2])
    with pytest.raises(RuntimeError, match="second time"):
        gradients(scores, batch[:2])


def test_fake_tensors_see_the_operator(batch):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        scores = maxsim(*batch)
    assert (scores.shape, scores.dtype) == ((Q, K), torch.float32)
    assert scores.is_cuda == batch[0].is_cuda
    assert type(scores) is not torch.Tensor


def test_compiled_autograd_of_eager_calls(batch):
    expected = gradients(maxsim(*batch), batch[:2])
    scores = maxsim(*batch)
    compiler = torch.compile(backend="aot_eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        actual = gradients(scores, batch[:2])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("normalize", [False, True])
def test_what_masked_tokens_hold_does_not_matter(normalize, batch):
    """Padding may be NaN: what attention leaves where nothing was attended to."""
    *sides, query_mask, mask = (x.detach() for x in batch)
    dirty = [x.masked_fill(~y[..., None], torch.nan) for x, y in zip(sides, (query_mask, mask))]
    results = []
    for leaves in ([x.clone().requires_grad_() for x in pair] for pair in (dirty, sides)):
        scores = maxsim(*leaves, query_mask, mask, normalize=normalize)
        results.append((scores.detach(), *gradients(scores, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert maxsim(dirty[0], sides[1], None, mask, normalize=normalize).isnan().any()


def test_autocast_rounds_the_operands_and_returns_full_precision(batch):
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        scores = maxsim(*batch)
    rounded = maxsim(*(x.detach().bfloat16().float() for x in batch[:2]), *batch[2:])
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, rounded, rtol=1e-5, atol=1e-5)
    assert (scores - maxsim(*batch)).abs().max() > 1e-3
    assert all(x.dtype == torch.float32 for x in gradients(scores, batch[:2]))


def test_gradients_only_where_needed(batch):
    queries, documents, *masks = batch
    maxsim(queries, documents.detach(), *masks).sum().backward()
    assert queries.grad is not None
    maxsim(queries.detach(), documents, *masks, normalize=True).sum().backward()
    assert documents.grad is not None


def test_masks_may_change_before_the_backward(batch, device):
    expected = gradients(maxsim(*batch), batch[:2])
    scores = maxsim(*batch)
    for mask in batch[2:]:
        mask.logical_not_()
    assert all(torch.equal(x, y) for x, y in zip(gradients(scores, batch[:2]), expected))
    assert not torch.equal(maxsim(*batch), scores)


def test_winners_only_when_a_gradient_can_follow(batch, monkeypatch):
    asked = []

    def spy(*args):
        asked.append(args[-1])
        return original(*args)

    original = operators.run_forward
    monkeypatch.setattr(operators._operator._function, "run", spy)
    maxsim(*batch)
    with torch.no_grad():
        maxsim(*batch)
    maxsim(*(x.detach() for x in batch))
    assert asked == [True, False, False]


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (0, torch.zeros(Q, LQ, E + 1), r"\(4, 7, 25\) and \(4, 3, 13, 24\)"),
        (0, torch.zeros(LQ, E), r"\(7, 24\)"),
        (0, torch.zeros(Q + 1, LQ, E), r"5 queries"),
        (1, torch.zeros(Q, K, LD, E, dtype=torch.float16), "torch.float16"),
        (1, torch.zeros(E), r"\(24,\)"),
        (2, torch.ones(Q, LQ), r"query_mask must be bool \(4, 7\).*\.bool\(\)"),
        (2, torch.ones(Q, LQ + 1, dtype=torch.bool), r"\(4, 8\)"),
        (3, torch.ones(Q * K, LD, dtype=torch.bool), r"document_mask .*\(12, 13\)"),
        (3, torch.ones(Q, K, LD, dtype=torch.bool, device="meta"), "meta"),
    ],
)
def test_padded_operands_that_do_not_fit(batch, index, replacement, message):
    wrong = list(batch)
    if replacement.device.type != "meta":
        replacement = replacement.to(batch[0].device)
    wrong[index] = replacement
    with pytest.raises(ValueError, match=message):
        maxsim(*wrong)


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (0, torch.zeros(2, 3, 48), r"\[Tq, E\].*\(2, 3, 48\)"),
        (2, torch.zeros(5, dtype=torch.int16), "query_cu_seqlens .* torch.int16"),
        (3, torch.zeros(0, dtype=torch.int32), r"document_cu_seqlens .* \(0,\)"),
        (4, torch.ones(3, dtype=torch.bool), r"query_mask .* \(3,\)"),
        (5, torch.ones(102, dtype=torch.int32), "document_mask .* torch.int32"),
    ],
)
def test_packed_operands_that_do_not_fit(index, replacement, message, device):
    wrong = list(make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device)[:6])
    wrong[index] = replacement.to(device)
    with pytest.raises(ValueError, match=message):
        maxsim_varlen(*wrong)


def test_pairings_and_backwards_that_do_not_exist(batch, device):
    problem = make_problem(QUERY_LENGTHS, DOCUMENT_LENGTHS, 48, device)[:6]
    for pairing, message in (
        ("all", "'all'"),
        ("pairs", "needs 4 documents, got 8"),
        (3, "needs 12 documents, got 8"),
        (-1, "-1"),
    ):
        with pytest.raises(ValueError, match=message):
            maxsim_varlen(*problem, pairing=pairing)
    with pytest.raises(ValueError, match="auto, lowmem, unified, got 'atomic'"):
        maxsim(*batch, backward="atomic")
