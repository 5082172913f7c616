"""Scores of centroids alone: on the GPU or in the interpreter, and on the CPU.

Q queries, N documents, T document tokens, W query tokens, E embedding, C centroids.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from sparton.kernels.maxsim import maxsim_centroids, maxsim_residual_varlen
from sparton.kernels.maxsim.residual import centroid_forward as kernel
from sparton.kernels.maxsim.residual import cpu, operators
from sparton.kernels.maxsim.residual.centroid_forward import centroid_forward
from sparton.kernels.maxsim.residual.cpu import centroid_forward_cpu
from sparton.kernels.maxsim.residual.operands import ResidualOperands
from tests.kernels.maxsim_problems import boundaries
from tests.kernels.problems import error

QUERIES, DOCUMENTS = (3, 0, 19, 1), (5, 0, 70, 1, 17, 64, 2, 0)
VERSIONS = [
    pytest.param(centroid_forward, id="kernel"),
    pytest.param(
        centroid_forward_cpu,
        id="cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has no GPU version"),
    ),
]


def make_problem(device, *, E=24, C=11, dtype=torch.float32, masked=False, shift=0.0):
    """``shift`` < 0 makes all similarities negative. The first document has no token that a mask
    leaves."""
    generator = torch.Generator().manual_seed(E)
    W, T = sum(QUERIES), sum(DOCUMENTS)
    queries = torch.randn(W, E, generator=generator) + 3
    centroids = torch.randn(C, E, generator=generator) + shift
    codes = torch.randint(0, C, (T,), generator=generator, dtype=torch.int32)
    masks = [torch.rand(x, generator=generator) > 0.4 for x in (W, T)] if masked else [None, None]
    if masked:
        masks[1][:5] = False
    bounds = [boundaries(x) for x in (QUERIES, DOCUMENTS)]
    tensors = (queries.to(dtype), codes, centroids, *bounds, *masks)
    return [x if x is None else x.to(device) for x in tensors]


def operands(queries, codes, centroids, *others):
    return ResidualOperands(queries, codes, None, None, centroids, None, *others)


def reference(queries, codes, centroids, query_bounds, bounds, query_mask, mask, normalize=False):
    queries, centroids = queries.double(), centroids.double()
    if normalize:
        queries = F.normalize(queries, dim=1)
    similarity = queries @ centroids[codes.long()].T
    if query_mask is None:
        query_mask = torch.ones(len(queries), dtype=torch.bool, device=queries.device)
    scores = torch.zeros(len(query_bounds) - 1, len(bounds) - 1, dtype=torch.float64)
    for n, (start, stop) in enumerate(pairwise(bounds.tolist())):
        own = similarity[:, start:stop]
        if mask is not None:
            own = own[:, mask[start:stop]]
        if own.shape[1]:
            best = own.amax(1) * query_mask
            scores[:, n] = torch.stack(
                [best[a:b].sum() for a, b in pairwise(query_bounds.tolist())]
            )
    return scores


@pytest.mark.parametrize("forward", VERSIONS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shift", [0.0, -9.0])
def test_against_float64(shift, masked, normalize, forward, device):
    problem = make_problem(device, masked=masked, shift=shift)
    truth = reference(*problem, normalize)
    scores = forward(operands(*problem), normalize)
    assert (scores.shape, scores.dtype) == ((4, 8), torch.float32)
    assert error(scores.cpu(), truth) <= 1e-6 < error(scores.cpu() * 1.00001, truth)
    assert (truth[0, 2] < 0) == (shift < 0)
    assert not scores[:, [1, 7]].any() and not scores[1].any()
    assert not (masked and scores[:, 0].any())
    problem[1] = problem[1].roll(1)
    assert error(forward(operands(*problem), normalize).cpu(), truth) > 1e-3


@pytest.mark.parametrize("forward", VERSIONS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, normalize, forward, device):
    """Everything is computed in fp32, whatever the dtype of the queries and of the centroids."""
    problem = make_problem(device, dtype=dtype, E=128)
    problem[2] = problem[2].to(dtype)
    scores = forward(operands(*problem), normalize)
    assert error(scores.cpu(), reference(*problem, normalize)) <= 1e-6


@pytest.mark.parametrize("forward", VERSIONS)
def test_parts(forward, device, monkeypatch):
    """Columns and documents in several rounds."""
    problem = make_problem(device, masked=True)
    expected = forward(operands(*problem), True)
    monkeypatch.setattr(kernel, "PRODUCTS_AT_ONCE", 16 * 11)
    monkeypatch.setattr(kernel, "DEFAULT", kernel.DEFAULT._replace(block_w=16, block_t=16))
    monkeypatch.setattr(cpu, "SIMILARITIES_AT_ONCE", 40)
    monkeypatch.setattr(cpu, "TOKENS_AT_ONCE", 8)
    torch.testing.assert_close(forward(operands(*problem), True), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("forward", VERSIONS)
def test_nothing_to_score(forward, device):
    queries, codes, table, *_ = make_problem(device)
    none = boundaries((), device)
    for query_bounds, bounds, shape in (
        (none, boundaries(DOCUMENTS, device), (0, 8)),
        (boundaries(QUERIES, device), none, (4, 0)),
        (boundaries((0, 0), device), boundaries(DOCUMENTS, device), (2, 8)),
    ):
        W, T = int(query_bounds[-1]), int(bounds[-1])
        arguments = (queries[:W], codes[:T], table, query_bounds, bounds, None, None)
        assert torch.equal(forward(operands(*arguments), True), torch.zeros(shape, device=device))


def test_what_residuals_refine(device):
    """Where all residuals are 0, the scores of the codec; and the candidates' order is near."""
    from sparton.kernels.maxsim import compress, train_codec

    generator = torch.Generator().manual_seed(0)
    tokens = F.normalize(torch.randn(400, 16, generator=generator), dim=1).to(device)
    codec = train_codec(tokens, 32, 2)
    documents = compress(codec, tokens)
    bounds = boundaries((20,) * 20, device)
    queries, query_bounds = tokens[:10] + 0.1, boundaries((4, 6), device)
    plain = codec._replace(bucket_weights=torch.zeros_like(codec.bucket_weights))
    unscaled = documents._replace(inverse_norms=torch.ones_like(documents.inverse_norms))
    expected = maxsim_residual_varlen(queries, unscaled, plain, query_bounds, bounds)
    arguments = (queries, documents.codes, codec.centroids, query_bounds, bounds)
    scores = maxsim_centroids(*arguments)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    refined = maxsim_residual_varlen(queries, documents, codec, query_bounds, bounds)
    assert torch.corrcoef(torch.stack((scores[0], refined[0])))[0, 1] > 0.5


def test_as_pytorch_sees_it(device):
    problem = make_problem(device, masked=True)
    problem[0].requires_grad_()
    expected = maxsim_centroids(*problem)
    assert not expected.requires_grad
    assert torch.equal(
        maxsim_centroids(*problem[:3], *(x.long() for x in problem[3:5]), *problem[5:]), expected
    )
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(maxsim_centroids(*problem), expected)
    compiled = torch.compile(maxsim_centroids, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*problem), expected)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in problem]
    torch.library.opcheck(operators._centroids.registered, (*operands(*arguments), True))
    wide = [
        x
        if x is None or (x.is_floating_point() and x.dim() < 2)
        else torch.stack((x, x), -1)[..., 0]
        for x in arguments
    ]
    assert not wide[0].is_contiguous()
    assert torch.equal(maxsim_centroids(*wide), expected)


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (0, torch.zeros(2, 3, 24), r"packed \[W, E\] and codes \[T\], got \(2, 3, 24\)"),
        (0, torch.zeros(23, 24).int(), "queries must be float16"),
        (1, torch.zeros(159), "codes must be int32 or int64, got torch.float32"),
        (2, torch.zeros(11, 25), "queries have E = 24, centroids 25"),
        (2, torch.zeros(24), r"centroids must be \[C, E\]"),
        (3, torch.zeros(5), "query_cu_seqlens must be int32 or int64"),
        (4, torch.zeros(9, device="meta").int(), "must be on one device"),
        (5, torch.ones(22).bool(), r"query_mask must be bool \(23,\)"),
        (6, torch.ones(159), r"document_mask must be bool \(159,\)"),
    ],
)
def test_refusals(place, wrong, words, device):
    problem = make_problem(device)
    problem[place] = wrong if wrong.device.type == "meta" else wrong.to(device)
    with pytest.raises(ValueError, match=words):
        maxsim_centroids(*problem)
