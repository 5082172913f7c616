"""Compressed late interaction where only a GPU can tell: size, memory, CUDA graphs, bfloat16.

N documents, L tokens, E embedding, P bytes of a token's residual.
"""

import pytest
import torch
import torch.nn.functional as F

from sparton.kernels.maxsim import (
    maxsim_centroids,
    maxsim_residual,
    maxsim_residual_varlen,
)
from sparton.kernels.maxsim.codec import CompressedTokens, ResidualCodec, decompress
from sparton.kernels.maxsim.residual.forward import DEFAULT, ResidualConfig, residual_forward
from sparton.kernels.maxsim.residual.operands import ResidualOperands
from tests.devices import nothing_waits
from tests.kernels.problems import error

pytestmark = pytest.mark.gpu
E, C = 128, 257
CONFIGS = [
    DEFAULT,
    DEFAULT._replace(unpack="table"),
    ResidualConfig(128, 64, 128, num_warps=8),
]


def make_codec(nbits):
    generator = torch.Generator("cuda").manual_seed(nbits)
    centroids = torch.randn(C, E, generator=generator, device="cuda")
    weights = torch.linspace(-0.1, 0.12, 2**nbits, device="cuda")
    return ResidualCodec(F.normalize(centroids, dim=1), weights[:-1], weights)


def make_documents(N, L, nbits):
    generator = torch.Generator("cuda").manual_seed(N)
    codes = torch.randint(C, (N, L), generator=generator, device="cuda", dtype=torch.int32)
    shape = (N, L, E * nbits // 8)
    residuals = torch.randint(256, shape, generator=generator, device="cuda", dtype=torch.uint8)
    return CompressedTokens(codes, residuals)


def make_queries(Q, L, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(Q)
    return F.normalize(torch.randn(Q, L, E, generator=generator, device="cuda"), dim=2).to(dtype)


def exact(queries, documents, codec):
    x = decompress(codec, documents).double()
    queries = F.normalize(queries.double(), dim=2)
    return torch.einsum("qse,nte->qnst", queries, x).amax(3).sum(2)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_every_configuration(nbits, dtype, config):
    codec, documents = make_codec(nbits), make_documents(40, 150, nbits)
    queries = make_queries(3, 32, dtype)
    plain = decompress(codec, documents, normalize=False).double()
    truth = torch.einsum("qse,nte->qnst", queries.double(), plain).amax(3).sum(2)
    flat = CompressedTokens(*(x.flatten(0, 1) for x in documents[:2]))
    bounds = [torch.arange(n + 1, device="cuda") * length for n, length in ((3, 32), (40, 150))]
    weights = codec.centroids, codec.bucket_weights
    operands = ResidualOperands(queries.flatten(0, 1), *flat, *weights, *bounds)
    scores, _ = residual_forward(operands, config=config)
    allowed = 2.4e-3 if dtype == torch.bfloat16 else 3e-4
    assert error(scores, truth) <= allowed < error(scores * (1 + 3 * allowed), truth)


@pytest.mark.alone
def test_more_than_2_to_the_31_bytes():
    """The last documents of a collection whose residuals int32 cannot address."""
    nbits, L = 8, 512
    N = 2**31 // (L * E) + 8
    codec = make_codec(nbits)
    residuals = torch.zeros(N, L, E, dtype=torch.uint8, device="cuda")
    codes = torch.zeros(N, L, dtype=torch.int32, device="cuda")
    last = make_documents(4, L, nbits)
    codes[-4:], residuals[-4:] = last.codes, last.residuals
    queries = make_queries(1, 32)
    scores = maxsim_residual(queries, CompressedTokens(codes, residuals), codec)
    assert error(scores[:, -4:], exact(queries, last, codec)) <= 2.4e-3


def test_no_dense_embeddings_in_memory():
    nbits = 2
    codec, documents = make_codec(nbits), make_documents(2000, 300, nbits)
    documents = documents._replace(inverse_norms=torch.ones(2000, 300, device="cuda").half())
    queries = make_queries(1, 32)
    maxsim_residual(queries, documents, codec)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    maxsim_residual(queries, documents, codec)
    assert torch.cuda.max_memory_allocated() - before < 2000 * 300 * E * 2 / 50


def test_cuda_graph():
    codec, documents = make_codec(2), make_documents(50, 64, 2)
    flat = CompressedTokens(*(x.flatten(0, 1) for x in documents[:2]))
    query_cu = torch.tensor([0, 32], device="cuda")
    document_cu = torch.arange(51, device="cuda") * 64
    queries = make_queries(1, 32)[0].clone()
    score = lambda: maxsim_residual_varlen(queries, flat, codec, query_cu, document_cu)  # noqa: E731
    score()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = score()
    queries.copy_(make_queries(2, 32)[1])
    graph.replay()
    assert torch.equal(scores, score())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("Q", "L"), [(1, 32), (9, 70)])
def test_centroids_alone(Q, L, dtype):
    """Against float64, at a real size; nothing waits for the device."""
    codec, codes = make_codec(2), make_documents(700, 150, 2).codes
    queries = make_queries(Q, L, dtype)
    bounds = [torch.arange(n + 1, device="cuda") * m for n, m in ((Q, L), (700, 150))]
    operands = (queries.flatten(0, 1), codes.flatten(), codec.centroids, *bounds)
    maxsim_centroids(*operands, normalize=False)
    with nothing_waits():
        scores = maxsim_centroids(*operands, normalize=False)
    similarity = queries.double() @ codec.centroids.double().T
    truth = similarity[:, :, codes.long()].amax(3).sum(1)
    assert error(scores, truth) <= 1e-6 < error(scores * 1.00001, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("Q", [1, 5])
def test_pairs(Q, nbits, dtype):
    """At a real size, one query and several, against float64; nothing waits for the device."""
    codec, documents = make_codec(nbits), make_documents(700, 150, nbits)
    flat = CompressedTokens(*(x.flatten(0, 1) for x in documents[:2]))
    inverse = decompress(codec, flat, normalize=False).norm(dim=1).reciprocal()
    flat = flat._replace(inverse_norms=inverse)
    queries = make_queries(Q, 32, dtype)
    bounds = [torch.arange(n + 1, device="cuda") * m for n, m in ((Q, 32), (700, 150))]
    generator = torch.Generator("cuda").manual_seed(0)
    numbers = [torch.randint(n, (999,), generator=generator, device="cuda") for n in (Q, 700)]
    pairs = torch.stack(numbers, 1).int()
    operands = (queries.flatten(0, 1), flat, codec, *bounds)
    maxsim_residual_varlen(*operands, pairing=pairs)
    with nothing_waits():
        scores = maxsim_residual_varlen(*operands, pairing=pairs)
    truth = exact(queries, documents, codec)[tuple(numbers)]
    allowed = {torch.bfloat16: 2.4e-3, torch.float16: 3e-4, torch.float32: 1e-5}[dtype]
    assert error(scores, truth) <= allowed < error(scores * (1 + 3 * allowed), truth)
    assert torch.equal(maxsim_residual_varlen(*operands, pairing=pairs), scores)


def test_pairs_of_centroids_alone():
    codec, codes = make_codec(2), make_documents(700, 150, 2).codes
    queries = make_queries(1, 32)
    bounds = [torch.arange(n + 1, device="cuda") * m for n, m in ((1, 32), (700, 150))]
    operands = (queries[0], codes.flatten(), codec.centroids, *bounds)
    pairs = torch.stack((torch.zeros(700), torch.arange(700).flip(0)), 1).int().cuda()
    scores = maxsim_centroids(*operands, pairing=pairs, normalize=False)
    truth = maxsim_centroids(*operands, normalize=False)[0].flip(0).double()
    assert error(scores, truth) <= 1e-6 < error(scores.flip(0), truth)
