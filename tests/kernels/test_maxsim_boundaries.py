"""Boundaries that are kept from call to call: right for every size, safe to share."""

import pytest
import torch

from sparton.kernels.maxsim import boundaries, maxsim
from sparton.kernels.maxsim.boundaries import equal_cu_seqlens

SIZES = [(3, 5), (5, 3), (1, 7), (0, 4), (4, 0), (0, 0), (3, 5)]


@pytest.fixture
def device(device):
    """As tensors name theirs: with its number."""
    return torch.empty(0, device=device).device


@pytest.fixture(autouse=True)
def nothing_kept():
    boundaries._kept.cache_clear()
    yield
    boundaries._kept.cache_clear()


def test_repeated_and_changing_sizes(device):
    for count, length in SIZES * 2:
        made = equal_cu_seqlens(count, length, device)
        assert made.tolist() == [length * i for i in range(count + 1)]
        assert made.dtype == torch.int32
        assert made.device.type == device.type


def test_the_same_sizes_are_made_once(device):
    first = equal_cu_seqlens(3, 5, device)
    assert equal_cu_seqlens(3, 5, device) is first
    assert equal_cu_seqlens(3, 6, device) is not first


def test_what_is_kept_is_bounded(device, monkeypatch):
    for count in range(2 * boundaries.KEPT):
        equal_cu_seqlens(count, 1, device)
    assert boundaries._kept.cache_info().currsize == boundaries.KEPT
    monkeypatch.setattr(boundaries, "LARGEST", 4)
    assert equal_cu_seqlens(3, 5, device) is equal_cu_seqlens(3, 5, device)
    assert equal_cu_seqlens(4, 5, device) is not equal_cu_seqlens(4, 5, device)


def test_nothing_is_kept_that_a_tracer_made(device):
    with torch._subclasses.FakeTensorMode():
        equal_cu_seqlens(3, 5, device)
        assert boundaries._kept.cache_info().currsize == 0
    assert type(equal_cu_seqlens(3, 5, device)) is torch.Tensor


def test_only_the_default_stream_keeps_what_it_made(monkeypatch):
    """Warming up and capturing a graph happen on others."""
    stream = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: stream[0], raising=False)
    made = []
    monkeypatch.setattr(boundaries, "_make", lambda *sizes: made.append(sizes))
    gpu = torch.device("cuda", 0)
    for stream[0], expected in ((0, 1), (0, 1), (7, 2), (7, 3), (0, 3)):
        equal_cu_seqlens(3, 5, gpu)
        assert len(made) == expected


@pytest.mark.gpu
def test_streams_and_captured_graphs_have_their_own(device):
    here = equal_cu_seqlens(3, 5, device)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert equal_cu_seqlens(3, 5, device) is not here
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = equal_cu_seqlens(3, 5, device)
        assert captured is not equal_cu_seqlens(3, 5, device)
    graph.replay()
    assert torch.equal(captured, here)


def test_training_after_inference_mode(device):
    """What inference mode left behind can be saved for a backward."""
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        torch.randn(n, length, 16, generator=generator).to(device).requires_grad_()
        for n, length in ((3, 5), (4, 6))
    )
    with torch.inference_mode():
        alone = maxsim(queries, documents)
    assert boundaries._kept.cache_info().currsize == 2
    scores = maxsim(queries, documents)
    scores.sum().backward()
    # On a CPU without a backward another product, of other sizes, which may be rounded otherwise.
    assert torch.allclose(scores, alone, rtol=0 if scores.is_cuda else 1e-5, atol=0)
    assert not torch.allclose(scores, alone.roll(1, 0), rtol=1e-2)
    assert boundaries._kept.cache_info().hits >= 2
    assert queries.grad.any()
    assert documents.grad.any()
