"""The encoder with a fused head inside what PyTorch wraps around a model: compilation, CUDA graphs,
autocast, checkpointing, inference mode, data parallelism."""

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sparton.models.backbones import tiny
from sparton.models.heads import EagerHead, HybridHead, SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.training.distributed import World
from sparton.types import TokenBatch
from tests.training.ranks import on_ranks

HEADS = [SpartonHead, HybridHead]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
TEXTS = ["the cat sat on the mat", "a dog ran far away over the hills", "some words more"]
LENGTHS = (3, 0, 7, 12, 1, 9)


def encoder(head: type, device: str | torch.device = "cpu") -> SpladeEncoder:
    backbone = tiny(TEXTS, hidden_size=64, layers=1, max_length=32, seed=0)
    return SpladeEncoder(backbone, head()).eval().to(device)


def batch(lengths: tuple[int, ...] = LENGTHS, device: str = "cpu", seed: int = 0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(5, 20, (n,), generator=generator).tolist() for n in lengths]
    return TokenBatch.from_lists(words).to(device)


def upstream_for(reps: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(reps.shape, generator=generator).to(reps)


def gradients(model: SpladeEncoder, reps: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(reps, list(named.values()), upstream_for(reps), allow_unused=True)
    return {
        name: torch.zeros_like(named[name]) if g is None else g.detach().clone()
        for name, g in zip(named, found, strict=True)
    }


def assert_equal(
    actual: dict[str, Tensor], expected: dict[str, Tensor], scale: float = 1.0
) -> None:
    """Each gradient up to rounding; ``scale`` makes the negative control."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        bound = 1e-4 * float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(actual[name] * scale, gradient, rtol=0, atol=bound, msg=name)


def assert_equal_and_a_fault_would_show(
    actual: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    assert_equal(actual, expected)
    with pytest.raises(AssertionError):
        assert_equal(actual, expected, scale=1.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", HEADS)
def test_a_tied_weight_collects_the_gradients_of_both_uses(head, device):
    model, reference = encoder(head, device), encoder(EagerHead, device)
    assert model.backbone.decoder.weight is model.backbone.model.get_input_embeddings().weight
    tokens = batch(device=device)
    reps = model(tokens)
    both = gradients(model, reps)
    assert_equal_and_a_fault_would_show(both, gradients(reference, reference(tokens)))
    hidden, decoder = model.backbone(tokens).detach(), model.backbone.decoder
    alone = model.head(hidden, decoder.weight, decoder.bias, tokens)
    (one,) = torch.autograd.grad(alone, decoder.weight, upstream_for(reps))
    name = next(name for name, p in model.named_parameters() if p is decoder.weight)
    assert (both[name] - one).abs().max() > 1e-2 * one.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_whole_encoder_is_one_graph_for_all_batches(device):
    """A break would be an error, by fullgraph=True."""
    model = encoder(SpartonHead, device)
    torch._dynamo.reset()
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for lengths in ((3, 5, 7), (10, 20), (1, 1, 1, 9), LENGTHS):
        tokens = batch(lengths, device)
        actual, expected = compiled(tokens), model(tokens)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        assert_equal(gradients(model, actual), gradients(model, expected))
    assert graphs["unique_graphs"] - before == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", HEADS)
def test_autocast_rounds_and_the_gradients_stay_in_full_precision(head, device):
    model, tokens = encoder(head, device), batch(device=device)
    full = model(tokens)
    exact = gradients(model, full)
    with torch.autocast(device, torch.bfloat16):
        reps = model(tokens)
    assert reps.dtype == torch.float32
    rounded = gradients(model, reps)
    reps, full = reps.detach(), full.detach()
    assert 1e-5 < float((reps - full).norm() / full.norm()) < 2e-2
    weight = model.backbone.decoder.weight
    name = next(name for name, p in model.named_parameters() if p is weight)
    assert rounded[name].dtype == torch.float32
    error = float((rounded[name] - exact[name]).norm() / exact[name].norm())
    assert 1e-5 < error < 0.2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", ["head", "backbone", "encoder"])
@pytest.mark.parametrize("head", HEADS)
def test_checkpointing_recomputes_and_changes_nothing(head, part, device):
    model, tokens = encoder(head, device), batch(device=device)
    plain = model(tokens)
    expected = gradients(model, plain)
    calls: list[str] = []
    module = model if part == "encoder" else getattr(model, part)
    # Before, not after: PyTorch stops the second pass once it has what it needs.
    module.register_forward_pre_hook(lambda *_: calls.append(part))

    def run(name, *arguments):
        inner = model if name == "encoder" else getattr(model, name)
        if name == part:
            return checkpoint(inner, *arguments, use_reentrant=False)
        return inner(*arguments)

    if part == "encoder":
        reps = run("encoder", tokens)
    else:
        decoder = model.backbone.decoder
        reps = run("head", run("backbone", tokens), decoder.weight, decoder.bias, tokens)
    assert torch.equal(reps, plain)
    assert len(calls) == 1
    assert_equal_and_a_fault_would_show(gradients(model, reps), expected)
    assert len(calls) == 2, "the second pass must run the part again"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", HEADS)
def test_without_a_graph_the_values_are_the_same(head, device):
    model, tokens = encoder(head, device), batch(device=device)
    expected = model(tokens)
    assert expected.requires_grad
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            reps = model(tokens)
        assert not reps.requires_grad
        torch.testing.assert_close(reps, expected.detach(), rtol=1e-6, atol=1e-7)
    assert reps.is_inference()


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_a_cuda_graph_of_the_encoder_replays_with_other_tokens(backward):
    """Same numbers of tokens and sequences, other tokens and other boundaries."""
    model = encoder(SpartonHead, "cuda").bfloat16()
    static, other = batch((3, 0, 7, 12), "cuda"), batch((9, 4, 1, 8), "cuda", seed=5)
    other = other._replace(max_seqlen=static.max_seqlen)
    parameters = [p for p in model.parameters() if p.requires_grad]
    upstream = upstream_for(model(static).detach())

    def run(tokens: TokenBatch) -> list[Tensor]:
        reps = model(tokens)
        if not backward:
            return [reps]
        return [reps, *torch.autograd.grad(reps, parameters, upstream, allow_unused=True)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(static)
    before, expected = run(static)[0].detach(), run(other)
    for mine, new in zip(static[:3], other[:3], strict=True):
        mine.copy_(new)
    graph.replay()
    for actual, truth in zip(outputs, expected, strict=True):
        if truth is not None:
            bound = 2e-2 * float(truth.detach().abs().max())
            torch.testing.assert_close(actual, truth, rtol=0, atol=bound)
    assert (before - expected[0]).abs().max() > 0.1 * expected[0].detach().abs().max()


def of_rank(world: World, head: type) -> dict[str, Tensor]:
    rank, size, device = world.rank, world.size, world.device
    model = encoder(head, device)
    with torch.no_grad():  # DDP must give every rank the weights of rank 0
        for parameter in model.parameters():
            parameter += rank
    parallel = DistributedDataParallel(model)
    rows = len(LENGTHS) // size
    tokens = batch().select(rank * rows, (rank + 1) * rows).to(device)
    reps = parallel(tokens)
    share = upstream_for(torch.zeros(len(LENGTHS), reps.shape[1]))[rank * rows : (rank + 1) * rows]
    reps.backward(size * share.to(device))
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("device", "head"),
    [
        pytest.param("cpu", SpartonHead, marks=pytest.mark.slow),
        *(
            pytest.param(
                "cuda",
                head,
                marks=[
                    pytest.mark.gpu,
                    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
                ],
            )
            for head in HEADS
        ),
    ],
)
def test_two_processes_have_the_gradients_of_one(device, head, tmp_path):
    model = encoder(EagerHead)
    expected = gradients(model, model(batch()))
    for found in on_ranks(2, tmp_path, of_rank, head, device=device):
        assert_equal_and_a_fault_would_show(found, expected)
