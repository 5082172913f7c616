"""Results are fp32 whatever torch's default dtype."""

import pytest
import torch

from sparton.kernels.maxsim import compress, train_codec
from sparton.kernels.maxsim.batches import packed_operands
from sparton.kernels.maxsim.cross import cross_forward
from sparton.kernels.maxsim.hidden import search_hidden
from sparton.kernels.maxsim.hidden_operands import HiddenOperands
from sparton.kernels.maxsim.residual.cpu import residual_forward_cpu
from sparton.kernels.maxsim.residual.forward import residual_forward
from sparton.kernels.maxsim.residual.operands import ResidualOperands
from sparton.kernels.segment_max.forward import segment_max_forward
from sparton.kernels.segment_max.portable import PortableConfig
from sparton.kernels.sparse_search import function, invert, search_postings
from sparton.kernels.sparse_vectors import SparseVectors

TILES = PortableConfig(False, 16, 32, 16, num_warps=4, num_stages=2, segment=16)


def with_kept(scores, kept):
    return scores, *kept


def operators(device):
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(n, 16, generator=generator).to(device) for n in (15, 24))
    query_cu, cu = (torch.tensor(x, device=device).int() for x in ([0, 5, 15], [0, 10, 24]))
    operands = packed_operands(queries, documents, query_cu, cu, None, None, "cross")
    codec = train_codec(documents.cpu(), num_centroids=4, nbits=2)
    codec = type(codec)(*(x.to(device) for x in codec))
    stored, weights = compress(codec, documents), (codec.centroids, codec.bucket_weights)
    compressed = ResidualOperands(queries, *stored, *weights, query_cu, cu)
    vectors = SparseVectors.from_dense(torch.ones(2, 5))
    postings, unasked = invert([vectors]).to(device), torch.tensor([-1, -1])
    hidden = HiddenOperands(queries[None], documents, torch.eye(16, device=device), None, cu)
    return {
        "segment_max": lambda: segment_max_forward(
            queries, documents, None, query_cu, config=TILES
        ),
        "cross": lambda: cross_forward(operands, normalize=True, argmax=True, config=TILES),
        "hidden": lambda: with_kept(*search_hidden(hidden, argmax=True)),
        "residual": lambda: residual_forward(compressed, normalize=True),
        "sparse_search": lambda: search_postings(postings, vectors, 2, unasked),
        "residual_cpu": lambda: residual_forward_cpu(compressed, normalize=True),
    }


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_results_are_fp32(default, device, monkeypatch):
    monkeypatch.setattr(function, "_search_cpu", function._search_gpu)
    calls = operators(device)
    if device.type == "cuda":
        del calls["residual_cpu"]
    for name, call in calls.items():
        expected = call()
        try:
            torch.set_default_dtype(default)
            actual = call()
        finally:
            torch.set_default_dtype(torch.float32)
        assert actual[0].dtype == torch.float32, name
        assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True)), name
