"""Late interaction with compressed documents: on the GPU or in the interpreter, and on the CPU.

Q queries, N documents, T document tokens, W query tokens, E embedding. The reference is float64 on
embeddings that the test restores itself.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.maxsim.codec import (
    CompressedTokens,
    ResidualCodec,
    compress,
    mirrored_numbers,
    train_codec,
    with_inverse_norms,
)
from sparton.kernels.maxsim.residual import cpu
from sparton.kernels.maxsim.residual import forward as kernel
from sparton.kernels.maxsim.residual.backward import residual_backward, residual_inverse_norms
from sparton.kernels.maxsim.residual.cpu import (
    residual_backward_cpu,
    residual_forward_cpu,
    residual_inverse_norms_cpu,
)
from sparton.kernels.maxsim.residual.forward import ResidualConfig, residual_forward
from sparton.kernels.maxsim.residual.function import maxsim_residual, maxsim_residual_varlen
from sparton.kernels.maxsim.residual.operands import ResidualOperands
from sparton.kernels.maxsim.residual.prepare import prepare
from tests.kernels.problems import error

SMALL = ResidualConfig(block_t=16, block_w=16, block_p=16, num_warps=1)
VERSIONS = [
    pytest.param(residual_forward, residual_backward, id="kernel"),
    pytest.param(
        residual_forward_cpu,
        residual_backward_cpu,
        id="cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has no GPU version"),
    ),
]


class Problem(NamedTuple):
    queries: Tensor
    documents: CompressedTokens
    codec: ResidualCodec
    query_cu_seqlens: Tensor
    document_cu_seqlens: Tensor
    query_mask: Tensor | None = None
    document_mask: Tensor | None = None

    @property
    def operands(self):
        weights = self.codec.centroids, self.codec.bucket_weights
        return ResidualOperands(self.queries, *self.documents, *weights, *self[3:])

    def to(self, device):
        move = lambda x: x.to(device) if isinstance(x, Tensor) else x  # noqa: E731
        groups = (type(x)(*map(move, x)) if isinstance(x, tuple) else move(x) for x in self)
        return Problem(*groups)


def inverse_norms(compute, documents, codec):
    return compute(documents.codes, documents.residuals, codec.centroids, codec.bucket_weights)


def boundaries(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def make_problem(
    query_lengths, document_lengths, E, nbits, device,
    *, C=11, dtype=torch.float32, masks=False, inverse="float32", shift=0.0, seed=0,
):  # fmt: skip
    """``shift`` < 0 makes all similarities negative. Norms differ from 1 by design."""
    generator = torch.Generator().manual_seed(seed + 31 * E + nbits)
    W, T = sum(query_lengths), sum(document_lengths)
    tokens = F.normalize(torch.randn(max(T, 4 * C), E, generator=generator), dim=1)
    direction = F.normalize(torch.randn(E, generator=generator), dim=0)
    codec = train_codec(tokens - shift * direction, C, nbits)
    codec = codec._replace(centroids=codec.centroids * 1.5)
    documents = compress(codec, tokens[:T] - shift * direction)
    if inverse == "float32":
        exact = inverse_norms(residual_inverse_norms_cpu, documents, codec)
        documents = documents._replace(inverse_norms=exact)
    elif inverse is None:
        documents = documents._replace(inverse_norms=None)
    queries = torch.randn(W, E, generator=generator) * 0.5 + 3 * shift * direction
    query_mask = document_mask = None
    if masks:
        query_mask = torch.rand(W, generator=generator) > 0.3
        document_mask = torch.rand(T, generator=generator) > 0.4
    return Problem(
        queries.to(dtype), documents, codec, boundaries(query_lengths),
        boundaries(document_lengths), query_mask, document_mask,
    ).to(device)  # fmt: skip


def restored(problem: Problem) -> Tensor:
    """float64 ``[T, E]`` from the bytes, read one bit at a time in the published order."""
    nbits, packed = problem.codec.nbits, problem.documents.residuals.cpu().long()
    bits = torch.stack([packed >> place & 1 for place in range(7, -1, -1)], dim=-1)
    bits = bits.view(packed.shape[0], -1, nbits)
    buckets = sum(bits[..., power] << power for power in range(nbits))
    weights, centroids = (
        x.cpu().double() for x in (problem.codec.bucket_weights, problem.codec.centroids)
    )
    x = centroids[problem.documents.codes.cpu().long()] + weights[buckets]
    if problem.documents.inverse_norms is not None:
        x = F.normalize(x, dim=1)
    return x


def reference(problem: Problem, x: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """float64 scores ``[Q, N]``, winners ``[N, W]``, and the winning embeddings ``[N, W, E]``."""
    x = restored(problem) if x is None else x
    queries, query_mask, document_mask = (
        None if t is None else t.cpu() for t in (problem.queries, *problem[5:])
    )
    similarity = queries.double() @ x.T
    W, E = queries.shape
    maxima, winners, tokens = [], [], []
    for start, stop in pairwise(problem.document_cu_seqlens.tolist()):
        part = similarity[:, start:stop]
        if document_mask is not None:
            part = part.masked_fill(~document_mask[start:stop], float("-inf"))
        if start == stop or part.isinf().all():
            maxima.append(torch.zeros(W).double())
            winners.append(torch.full((W,), -1))
            tokens.append(torch.zeros(W, E).double())
            continue
        best, winner = part.max(1)
        maxima.append(best)
        winners.append(winner)
        tokens.append(x[start + winner])
    maxima, winners, tokens = (torch.stack(rows) for rows in (maxima, winners, tokens))
    if query_mask is not None:
        maxima = maxima * query_mask
    bounds = list(pairwise(problem.query_cu_seqlens.tolist()))
    scores = torch.stack([maxima[:, start:stop].sum(1) for start, stop in bounds])
    return scores, winners, tokens


def gradient(problem: Problem, grad: Tensor) -> Tensor:
    """float64 ``[W, E]``."""
    query = torch.repeat_interleave(problem.query_cu_seqlens.diff().cpu().long())
    mask = torch.ones(query.numel()) if problem.query_mask is None else problem.query_mask.cpu()
    weights = grad.cpu().double()[query] * mask.double()[:, None]
    return torch.einsum("wn,nwe->we", weights, reference(problem)[2])


def run(forward, problem: Problem, **options):
    if forward is residual_forward:
        options.setdefault("config", SMALL)
    else:
        options.pop("config", None)
    return forward(problem.operands, **options)


LENGTHS = [5, 0, 33, 1, 17, 32, 2, 0]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("forward", "backward"), VERSIONS)
@pytest.mark.parametrize(("masks", "inverse"), [(False, "float32"), (True, None)])
@pytest.mark.parametrize(("E", "nbits"), [(24, 1), (48, 2), (20, 2), (34, 4), (17, 8), (320, 2)])
def test_against_float64(forward, backward, masks, inverse, E, nbits, device):
    problem = make_problem([3, 0, 19, 1], LENGTHS, E, nbits, device, masks=masks, inverse=inverse)
    scores, winners = run(forward, problem)
    truth, expected, _ = reference(problem)
    assert scores.shape == (4, len(LENGTHS)) and scores.dtype == torch.float32
    assert error(scores.cpu(), truth) <= 1e-6 < error(scores.cpu() * 1.00001, truth)
    assert torch.equal(winners.cpu().long(), expected)
    alone, nothing = run(forward, problem, argmax=False)
    assert torch.equal(alone, scores) and nothing.numel() == 0
    grad = torch.randn(len(LENGTHS), 4, generator=torch.Generator().manual_seed(5)).to(device).T
    dqueries = backward(grad, winners, problem.operands, dtype=torch.float32)
    assert error(dqueries.cpu(), gradient(problem, grad)) <= 1e-6
    assert error(dqueries.cpu() * 1.01, gradient(problem, grad)) > 1e-3
    again = backward(grad, winners, problem.operands, dtype=torch.float32)
    assert torch.equal(again, dqueries)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_half_precision(nbits, dtype, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 wrongly")
    problem = make_problem([7, 30], LENGTHS, 64, nbits, device, dtype=dtype)
    truth = reference(problem)[0]
    allowed = 3e-4 if dtype == torch.float16 else 2.4e-3
    for config in (SMALL, None):
        scores, _ = residual_forward(problem.operands, config=config)
        assert (
            error(scores.cpu(), truth) <= allowed < error(scores.cpu() * (1 + 3 * allowed), truth)
        )


@pytest.mark.parametrize("nbits", [2, 4, 8])
def test_the_wrong_order_of_bits_fails(nbits, device):
    problem = make_problem([7, 30], LENGTHS, 64, nbits, device)
    packed = problem.documents.residuals.int()
    per_byte = 8 // nbits
    numbers = [packed >> nbits * j & 2**nbits - 1 for j in range(per_byte)]
    swapped = sum(x << 8 - nbits * (j + 1) for j, x in enumerate(numbers)).byte()
    mirrored = sum((packed >> j & 1) << 7 - j for j in range(8)).byte()
    truth = reference(problem)[0]
    for wrong in {1: [], 2: [swapped, mirrored], 4: [swapped, mirrored], 8: [mirrored]}[nbits]:
        documents = problem.documents._replace(residuals=wrong)
        scores, _ = run(residual_forward, problem._replace(documents=documents))
        assert error(scores.cpu(), truth) > 3e-3


def test_dropped_tokens_fail(device):
    """The tolerance sees one token more or less."""
    problem = make_problem([40], [33, 64], 32, 2, device)
    truth = reference(problem)[0]
    shorter = problem._replace(document_cu_seqlens=problem.document_cu_seqlens - 1)
    shorter.document_cu_seqlens[0] = 0
    scores, _ = run(residual_forward, shorter)
    assert error(scores.cpu(), truth) > 1e-5


@pytest.mark.parametrize(("forward", "backward"), VERSIONS)
def test_negative_similarities_and_masks(forward, backward, device):
    """A masked or padded token must not win with a zero."""
    problem = make_problem([6], [7, 20, 18], 16, 4, device, masks=True, shift=-3.0)
    problem.document_mask[7:27] = False
    scores, winners = run(forward, problem)
    truth, expected, _ = reference(problem)
    assert truth[0, 0] < 0 and truth[0, 2] < 0
    assert scores[0, 1] == 0 and (winners[1] == -1).all()
    assert error(scores.cpu(), truth) <= 1e-6
    assert torch.equal(winners.cpu().long(), expected)
    dqueries = backward(torch.ones_like(scores), winners, problem.operands, dtype=torch.float32)
    assert (dqueries[~problem.query_mask] == 0).all()
    assert error(dqueries.cpu(), gradient(problem, torch.ones_like(scores))) <= 1e-6


@pytest.mark.parametrize(("forward", "backward"), VERSIONS)
def test_ties_go_to_the_first_token(forward, backward, device):
    """Numbers that no order of summation rounds."""
    problem = make_problem([5], [50], 16, 2, device, inverse=None)
    centroids, _, weights = problem.codec
    codec = ResidualCodec((centroids * 8).round(), weights, torch.arange(4.0, device=device))
    codes, residuals = (x[:1].repeat(50, *[1] * (x.dim() - 1)) for x in problem.documents[:2])
    problem = problem._replace(
        queries=(problem.queries * 8).round(),
        documents=CompressedTokens(codes, residuals),
        codec=codec,
        document_mask=torch.arange(50, device=device) >= 18,
    )
    _, winners = run(forward, problem)
    assert (winners == 18).all()


@pytest.mark.parametrize(("forward", "backward"), VERSIONS)
def test_pieces_change_nothing(forward, backward, device, monkeypatch):
    problem = make_problem([9, 40, 20], LENGTHS, 32, 2, device, masks=True)
    scores, winners = run(forward, problem)
    monkeypatch.setattr(kernel, "PRODUCTS_AT_ONCE", 11 * 16)
    monkeypatch.setattr(kernel, "MAXIMA_AT_ONCE", 48)
    monkeypatch.setattr(cpu, "TOKENS_AT_ONCE", 7)
    pieces, piece_winners = run(forward, problem)
    assert torch.allclose(pieces, scores, rtol=1e-6, atol=1e-6)
    assert torch.equal(piece_winners, winners)


@pytest.mark.parametrize("unpack", ["table", "permute"])
@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_ways_of_unpacking_agree(nbits, unpack, device):
    if unpack == "permute" and device.type == "cpu":
        pytest.skip("the interpreter has no inline PTX")
    problem = make_problem([9], LENGTHS, 32, nbits, device, dtype=torch.float16)
    config = SMALL._replace(unpack=unpack, block_t=32, block_w=32)
    scores, _ = run(residual_forward, problem, config=config)
    assert error(scores.cpu(), reference(problem)[0]) <= 3e-4


def prepared_table(weights, unpack, dtype, device):
    codec = ResidualCodec(torch.ones(3, 32, device=device), weights[1:], weights)
    queries = torch.ones(2, 32, device=device)
    options = {"normalize": False, "block_w": 16, "block_p": 16}
    return prepare(queries, codec, 0, 2, dtype=dtype, unpack=unpack, **options)[2]


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_bytes_of_bucket_weights(nbits, device):
    weights = torch.randn(2**nbits, generator=torch.Generator().manual_seed(0)).to(device)
    for dtype in (torch.float16, torch.float32):
        expected = weights[torch.tensor(mirrored_numbers(nbits), device=device)].to(dtype)
        table = prepared_table(weights, "table", dtype, device)
        assert table.dtype == dtype and torch.equal(table, expected)
    expected = weights[torch.tensor(mirrored_numbers(nbits), device=device)].half()
    packed = prepared_table(weights, "permute", torch.float16, device)
    assert packed.dtype == torch.int64
    if nbits == 4:
        low, high = packed.view(torch.uint8).view(2, 16)
        assert torch.equal(torch.stack((low, high), 1), expected.view(torch.uint8).view(16, 2))
    else:
        assert torch.equal(packed.view(torch.float16)[: 2**nbits], expected)


def test_default_configuration(device):
    problem = make_problem([32], [70, 3], 128, 2, device)
    scores, _ = residual_forward(problem.operands)
    assert error(scores.cpu(), reference(problem)[0]) <= 1e-6


def test_inverse_norms(device):
    problem = make_problem([1], [77], 136, 4, device, inverse=None)
    exact = restored(problem).norm(dim=1).reciprocal()
    for compute in (residual_inverse_norms, residual_inverse_norms_cpu):
        if compute is residual_inverse_norms or device.type == "cpu":
            inverse = inverse_norms(compute, problem.documents, problem.codec)
            assert inverse.dtype == torch.float32
            assert error(inverse.cpu(), exact) <= 1e-6
    stored = with_inverse_norms(problem.codec, problem.documents).inverse_norms
    assert stored.dtype == torch.float16 and error(stored.cpu(), exact) <= 2**-11


@pytest.mark.parametrize("inverse", ["float16", None])
@pytest.mark.parametrize("normalize", [True, False])
def test_functions_differentiate(normalize, inverse, device):
    """Padded and packed, against float64 with autograd through both normalisations."""
    lengths, Ld = [9, 0, 20], 20
    problem = make_problem([6, 6], lengths, 32, 2, device, inverse=inverse)
    plain = problem._replace(documents=problem.documents._replace(inverse_norms=None))
    x = restored(plain)
    leaf = problem.queries.cpu().double().requires_grad_()
    side = F.normalize(leaf, dim=1) if normalize else leaf
    x = F.normalize(x, dim=1) if normalize else x
    parts = [side @ part.T for part in x.split(lengths)]
    maxima = [p.max(1).values if p.numel() else side.new_zeros(12) for p in parts]
    truth = torch.stack(maxima).view(3, 2, 6).sum(2).T
    grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(5))
    expected = torch.autograd.grad(truth, leaf, grad.double())[0]
    allowed = 1e-6 if inverse is None or not normalize else 2**-11

    queries = problem.queries.clone().requires_grad_()
    scores = maxsim_residual_varlen(queries, *problem[1:5], normalize=normalize)
    scores.backward(grad.to(device))
    assert error(scores.detach().cpu(), truth.detach()) <= allowed
    assert error(queries.grad.cpu(), expected) <= 2 * allowed

    rows = torch.arange(sum(lengths), device=device).split(lengths)
    at = torch.stack([F.pad(row, (0, Ld - row.numel())) for row in rows])
    mask = torch.arange(Ld, device=device) < torch.tensor(lengths, device=device)[:, None]
    padded = CompressedTokens(*(None if t is None else t[at] for t in problem.documents))
    leaf = problem.queries.view(2, 6, 32).clone().requires_grad_()
    same = maxsim_residual(leaf, padded, problem.codec, None, mask, normalize=normalize)
    assert torch.allclose(same, scores, rtol=1e-6, atol=1e-6)
    same.backward(grad.to(device))
    assert torch.allclose(leaf.grad.view(12, 32), queries.grad, rtol=1e-5, atol=1e-6)


def test_nothing_to_score(device):
    problem = make_problem([4], [8], 16, 2, device)
    nothing = CompressedTokens(*(x[:0] for x in problem.documents))
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    queries, codec = problem.queries, problem.codec
    assert maxsim_residual_varlen(queries, nothing, codec, *problem[3:4], zero).shape == (1, 0)
    empty = torch.zeros(4, dtype=torch.int32, device=device)
    leaf = queries.clone().requires_grad_()
    scores = maxsim_residual_varlen(leaf, nothing, codec, problem.query_cu_seqlens, empty)
    assert scores.tolist() == [[0.0, 0.0, 0.0]]
    scores.sum().backward()
    assert (leaf.grad == 0).all()
    scores = maxsim_residual_varlen(
        queries[:0], problem.documents, codec, empty, problem.document_cu_seqlens
    )
    assert scores.tolist() == [[0.0]] * 3


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(("forward", "backward"), VERSIONS)
def test_a_query_token_that_is_not_a_number_is_seen(forward, backward, masks, device):
    """Under masks and at the edge of a tile, too; documents without tokens still score 0."""
    problem = make_problem([3, 4], [5, 0, 33], 16, 2, device, masks=masks)
    if masks:
        problem.query_mask[:] = True
        problem.document_mask[:5] = False
    problem.queries[1] = torch.nan
    for argmax in (False, True):
        scores, winners = forward(
            problem.operands, normalize=False, argmax=argmax,
            **({"config": SMALL} if forward is residual_forward else {}),
        )  # fmt: skip
        empty = [masks, True, False]
        assert scores[0].isnan().tolist() == [not x for x in empty]
        assert scores[1].isfinite().all()
    lengths = problem.document_cu_seqlens.diff()
    assert (winners[:, 1] >= 0).tolist() == [not x for x in empty]
    assert (winners < lengths[:, None]).all()


def test_operators_are_registered_properly(device):
    problem = make_problem([3, 4], [5, 9], 16, 2, device)
    from sparton.kernels.maxsim.residual import operators

    queries = problem.queries.clone().requires_grad_()
    operands = problem.operands._replace(queries=queries)
    for normalize in (True, False):
        arguments = (*operands, normalize, torch.float32, True)
        torch.library.opcheck(operators._scores.registered, arguments)
    restoring = (*operands[1:3], *operands[4:6])
    torch.library.opcheck(operators._inverse_norms.registered, restoring)


def test_compiles_without_graph_breaks(device):
    problem = make_problem([5, 5], [7, 7, 7], 32, 2, device)
    documents = CompressedTokens(*(x.view(3, 7, *x.shape[1:]) for x in problem.documents))
    queries = problem.queries.view(2, 5, 32)

    def score(queries):
        return maxsim_residual(queries * 2, documents, problem.codec, normalize=False).sum()

    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    leaves = [queries.clone().requires_grad_() for _ in range(2)]
    results = [f(leaf) for f, leaf in zip((score, compiled), leaves, strict=True)]
    assert torch.equal(*results)
    for result in results:
        result.backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_bad_operands_are_refused(device):
    problem = make_problem([4], [8], 16, 2, device)
    queries, documents, codec, *bounds = problem[:5]
    score = maxsim_residual_varlen
    with pytest.raises(ValueError, match="maxsim_residual_varlen"):
        maxsim_residual(queries, documents, codec)
    with pytest.raises(ValueError, match="there is maxsim_residual"):
        score(queries[None], documents, codec, *bounds)
    with pytest.raises(ValueError, match=r"queries have E = 12, codec\.centroids 16"):
        score(queries[:, :12], documents, codec, *bounds)
    with pytest.raises(ValueError, match="queries must be float16"):
        score(queries.int(), documents, codec, *bounds)
    with pytest.raises(ValueError, match=r"residuals must be uint8 \(8, 4\)"):
        wrong = documents._replace(residuals=documents.residuals[:, :2])
        score(queries, wrong, codec, *bounds)
    with pytest.raises(ValueError, match="codes must be int32"):
        score(queries, documents._replace(codes=documents.codes.float()), codec, *bounds)
    with pytest.raises(ValueError, match="inverse_norms must be"):
        wrong = documents._replace(inverse_norms=documents.inverse_norms[:3])
        score(queries, wrong, codec, *bounds)
    with pytest.raises(ValueError, match=r"bucket_weights must be \[2"):
        score(queries, documents, codec._replace(bucket_weights=torch.zeros(5)), *bounds)
    with pytest.raises(ValueError, match="document_mask must be bool"):
        score(queries, documents, codec, *bounds, None, torch.ones(8, device=device))
    with pytest.raises(ValueError, match="query_cu_seqlens must be int32 or int64"):
        score(queries, documents, codec, bounds[0].float(), bounds[1])
    with pytest.raises(ValueError, match="on one device"):
        score(queries, documents, codec, bounds[0].to("meta"), bounds[1])
    for field in ("residuals", "inverse_norms"):
        elsewhere = documents._replace(**{field: getattr(documents, field).to("meta")})
        with pytest.raises(ValueError, match=f"on one device.*{field} on meta"):
            score(queries, elsewhere, codec, *bounds)
    elsewhere = codec._replace(bucket_weights=codec.bucket_weights.to("meta"))
    with pytest.raises(ValueError, match="bucket_weights on meta"):
        score(queries, documents, elsewhere, *bounds)


def test_eager_and_registered_agree(device, monkeypatch):
    """The same bits with and without the dispatcher; differentiable once."""
    from sparton.kernels import operator

    problem = make_problem([3, 4], [5, 0, 9], 16, 2, device, masks=True, inverse=None)
    grad = torch.randn(3, 2, generator=torch.Generator().manual_seed(5)).to(device).T
    results = []
    for registered in (False, True):
        monkeypatch.setattr(operator, "needs_operators", lambda value=registered: value)
        for normalize in (True, False):
            queries = problem.queries.clone().requires_grad_()
            scores = maxsim_residual_varlen(queries, *problem[1:], normalize=normalize)
            assert (scores.grad_fn.name() == "_GraphBackward") is not registered
            results += [scores.detach(), *torch.autograd.grad(scores, queries, grad)]
            scores = maxsim_residual_varlen(queries, *problem[1:], normalize=normalize)
            (first,) = torch.autograd.grad(scores.square().sum(), queries, create_graph=True)
            with pytest.raises(RuntimeError):
                first.sum().backward()
    for x, y in zip(results[:4], results[4:], strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(results[1], results[3])


def test_autocast_rounds_once(device):
    """Normalised in the given dtype, then rounded; gradients come in the given dtype."""
    problem = make_problem([5], [20, 9], 32, 2, device)
    queries = problem.queries.clone().requires_grad_()
    with torch.autocast(device.type, torch.float16):
        scores = maxsim_residual_varlen(queries, *problem[1:])
    forward = residual_forward_cpu if device.type == "cpu" else residual_forward
    expected, _ = forward(problem.operands, normalize=True, dtype=torch.float16)
    assert torch.equal(scores.detach(), expected)
    exact = maxsim_residual_varlen(*problem)
    assert error(expected.cpu(), exact.double().cpu()) > 1e-5
    scores.sum().backward()
    assert queries.grad.dtype == torch.float32


@pytest.mark.parametrize("inverse", ["float32", None])
def test_compiled(inverse):
    problem = make_problem([3, 3], [9, 9], 16, 2, torch.device("cpu"), inverse=inverse)
    documents = CompressedTokens(
        *(None if x is None else x.view(2, 9, *x.shape[1:]) for x in problem.documents)
    )
    compiled = torch.compile(maxsim_residual, backend="aot_eager", fullgraph=True)
    results = []
    for function in (compiled, maxsim_residual):
        queries = problem.queries.view(2, 3, 16).clone().requires_grad_()
        scores = function(queries, documents, problem.codec)
        results.append((scores.detach(), *torch.autograd.grad(scores.square().sum(), queries)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
