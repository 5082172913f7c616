"""What only a GPU can show of MaxSim: bfloat16, real sizes, CUDA graphs, no waiting for the device,
more than 2^31 elements. Q queries, N documents, K documents per query, L tokens, E embedding."""

import pytest
import torch

from sparton.kernels.maxsim import maxsim, maxsim_pairs, maxsim_varlen
from sparton.kernels.maxsim.cross import cross_backward, cross_forward
from tests.devices import nothing_waits
from tests.kernels.maxsim_problems import gradients_at, make_problem, tolerances
from tests.kernels.problems import error

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The tolerances the field publishes for forwards, as largest error over largest score.
PUBLISHED = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 5e-3}


def batch(Q, N, Lq, Ld, E, dtype, *, K=None, seed=0):
    """Queries, documents of these or ``[Q, K, Ld, E]``, masks with holes and padding."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (Q, Lq), (N, Ld) if K is None else (Q, K, Ld)
    tokens = [
        torch.nn.functional.normalize(
            torch.randn(*shape, E, device="cuda", generator=generator), dim=-1
        ).to(dtype)
        for shape in shapes
    ]
    masks = []
    for shape in shapes:
        lengths = torch.randint(1, shape[-1] + 1, shape[:-1], device="cuda", generator=generator)
        real = torch.arange(shape[-1], device="cuda") < lengths[..., None]
        masks.append(real & (torch.rand(shape, device="cuda", generator=generator) > 0.1))
    return *tokens, *masks


def exact_scores(queries, documents, query_mask, document_mask):
    """float64, one query at a time."""
    rows = []
    for q in range(queries.shape[0]):
        own, mask = documents, document_mask
        if documents.dim() == 4:
            own, mask = documents[q], document_mask[q]
        similarities = torch.einsum("se,nte->nst", queries[q].double(), own.double())
        similarities.masked_fill_(~mask[:, None], float("-inf"))
        maxima = similarities.amax(-1).masked_fill_(~mask.any(-1, keepdim=True), 0)
        rows.append((maxima * query_mask[q]).sum(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("Q", "N", "Lq", "Ld", "E", "K"),
    [
        (24, 50, 32, 180, 128, None),
        (3, 40, 32, 300, 96, None),
        (4, 6, 1030, 1000, 128, None),
        (5, 0, 32, 300, 128, 7),
        (3, 0, 70, 129, 48, 2),
        (9, 33, 31, 61, 320, None),
    ],
)
def test_real_sizes_against_float64(Q, N, Lq, Ld, E, K, dtype):
    arguments = batch(Q, N, Lq, Ld, E, dtype, K=K)
    scores, exact = maxsim(*arguments), exact_scores(*arguments)
    assert error(scores, exact) < 2e-5 < error(scores * 1.001, exact)
    worst = (scores - exact).abs().max() / exact.abs().max()
    assert worst < PUBLISHED[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Lq", [1, 2, 32, 48, 64, 128, 256])
def test_queries_without_masks(Lq, dtype):
    """Whole queries fit into a tile, or do not; with winners and without."""
    queries, documents, _, mask = batch(600 // Lq + 3, 40, Lq, 70, 128, dtype)
    everything = torch.ones(queries.shape[:2], dtype=torch.bool, device="cuda")
    for document_mask in (mask, None):
        exact = exact_scores(
            queries, documents, everything, torch.ones_like(mask) if document_mask is None else mask
        )
        scores = maxsim(queries, documents, None, document_mask)
        assert error(scores, exact) < 2e-5 < error(scores * 1.001, exact)
        again = maxsim(queries.clone().requires_grad_(), documents, None, document_mask)
        assert error(again.detach(), exact) < 2e-5


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_gradients_at_real_sizes(dtype, normalize):
    generator = torch.Generator().manual_seed(0)
    lengths = [
        tuple(torch.randint(0, most, (30,), generator=generator).tolist()) for most in (48, 260)
    ]
    problem = make_problem(*lengths, 128, "cuda", dtype=dtype)
    upstream = torch.randn(30, 30, device="cuda")
    _, argmax = cross_forward(problem, normalize=normalize, argmax=True)
    gradients = cross_backward(upstream, argmax, problem, normalize=normalize)
    truth = gradients_at(problem, argmax, upstream, normalize=normalize)
    allowed = tolerances(problem, normalize)[1:]
    for actual, exact, most in zip(gradients, truth, allowed, strict=True):
        assert error(actual, exact) <= most < error(actual * 1.02, exact)
    again = cross_backward(upstream, argmax, problem, normalize=normalize)
    assert all(torch.equal(a, b) for a, b in zip(again, gradients, strict=True))


def operators(normalize=False):
    """Every pairing, as functions of padded leaves and masks."""

    def varlen(queries, documents, query_mask, document_mask):
        rows = [x.flatten(0, -2) for x in (queries, documents)]
        bounds = [
            torch.arange(0, x.numel() + 1, x.shape[-1], dtype=torch.int32, device="cuda")
            for x in (query_mask, document_mask)
        ]
        masks = (query_mask.flatten(), document_mask.flatten())
        return maxsim_varlen(*rows, *bounds, *masks, normalize=normalize)

    def cross(queries, documents, query_mask, document_mask):
        shared = documents.flatten(0, 1), query_mask, document_mask.flatten(0, 1)
        return maxsim(queries, *shared, normalize=normalize)

    def pairs(queries, documents, query_mask, document_mask):
        first = (queries, documents[:, 0], query_mask, document_mask[:, 0])
        return maxsim_pairs(*first, normalize=normalize)

    def lists(*arguments):
        return maxsim(*arguments, normalize=normalize)

    return [cross, lists, pairs, varlen]


@pytest.mark.parametrize("normalize", [False, True])
def test_nothing_waits_for_the_device(normalize):
    *leaves, query_mask, document_mask = batch(20, 0, 32, 100, 128, torch.bfloat16, K=3)
    leaves = [x.requires_grad_() for x in leaves]
    for score in operators(normalize):
        score(*leaves, query_mask, document_mask).sum().backward()  # compiles
        with nothing_waits():
            score(*leaves, query_mask, document_mask).sum().backward()


def test_cuda_graphs():
    *tokens, query_mask, document_mask = batch(20, 0, 32, 100, 128, torch.bfloat16, K=3)
    leaves = [x.requires_grad_() for x in tokens]
    for score in operators():

        def step(score=score):
            scores = score(*leaves, query_mask, document_mask)
            return scores, *torch.autograd.grad(scores.sum(), leaves)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in (1, 2):
            *fresh, new_query_mask, new_document_mask = batch(
                20, 0, 32, 100, 128, torch.bfloat16, K=3, seed=seed
            )
            with torch.no_grad():
                for x, y in zip(leaves, fresh, strict=True):
                    x.copy_(y)
                query_mask.copy_(new_query_mask)
                document_mask.copy_(new_document_mask)
            graph.replay()
            for actual, expected in zip(captured, step(), strict=True):
                assert torch.equal(actual, expected)


@pytest.mark.alone
@pytest.mark.parametrize("Q", [2, 40])
def test_more_than_2_to_the_31_elements(Q):
    """Few query tokens and many take different kernels; the last documents lie beyond 2^31."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    N, Ld, E = 16500, 1024, 128
    generator = torch.Generator("cuda").manual_seed(0)
    documents = torch.empty(N, Ld, E, dtype=torch.float16, device="cuda")
    documents.normal_(generator=generator).requires_grad_()
    assert documents.numel() > 2**31
    queries = torch.randn(Q, 32, E, device="cuda", generator=generator).half().requires_grad_()
    scores = maxsim(queries, documents)
    scores[:, -3:].sum().backward()
    last = documents.detach()[-3:].clone().requires_grad_()
    expected = maxsim(queries.detach(), last)
    expected.sum().backward()
    torch.testing.assert_close(scores[:, -3:], expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(documents.grad[-3:], last.grad, rtol=1e-3, atol=1e-3)
    assert not documents.grad[:-3].any()
