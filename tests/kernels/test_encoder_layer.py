"""What an encoder layer computes between its products against float64, on the GPU or in Triton's
interpreter.

T tokens, D columns. The judge of rounding is the reference in the same dtypes.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sparton.kernels.encoder_layer import (
    bias_gelu,
    bias_gelu_reference,
    embedding_norm,
    gelu,
    hashed_dropout,
    normalization,
    post_norm,
    post_norm_and_copy,
    post_norm_reference,
)
from sparton.kernels.encoder_layer.dropout import hashed
from sparton.kernels.encoder_layer.gelu import gelu_backward
from sparton.kernels.encoder_layer.normalization import norm_backward, norm_forward

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
SIZE = 300, 768
# The interpreter cuts what it stores in bfloat16 off, instead of rounding it.
HALVES = [torch.float16, torch.bfloat16] if on_gpu else [torch.float16]
# x and residual: with a half residual, with autocast's, and in full.
DTYPES = [
    *((dtype, residual) for dtype in HALVES for residual in (dtype, torch.float32)),
    (torch.float32, torch.float32),
]
EPS = 1e-12
# Errors may be this many times those of the reference in the same dtypes, and this much more.
TIMES, BESIDE = 1.1, 1e-6


def seed_of(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32, device=DEVICE)


def norm_problem(
    T: int, D: int, dtype: torch.dtype, residual: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Operands of post_norm, and an upstream gradient."""
    generator = torch.Generator().manual_seed(T + D)
    x, other, grad = (torch.randn(1, T, D, generator=generator).to(DEVICE) for _ in range(3))
    bias, gain, shift = (torch.randn(D, generator=generator).to(DEVICE) for _ in range(3))
    wider = torch.promote_types(dtype, residual)
    return [x.to(dtype), bias, (other + 1).to(residual), gain, shift], grad.to(wider)


def with_gradients(
    function: Callable[..., Tensor], operands: list[Tensor], grad: Tensor, dtype: torch.dtype | None
) -> list[Tensor]:
    """The result and the gradient of every operand, of operands in ``dtype``, in float64."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in operands]
    result = function(*leaves)
    result.backward(grad.to(result.dtype))
    return [x.double() for x in (result.detach(), *(leaf.grad for leaf in leaves))]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((x - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True)]


def check_rounding(
    own: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    operands: list[Tensor],
    grad: Tensor,
) -> None:
    """Result and gradients are at most as far from float64 as the reference: in the operands' own
    dtypes where the result is fp32, else all in that of the result."""
    truth = with_gradients(reference, operands, grad, torch.float64)
    narrow = None if grad.dtype == torch.float32 else grad.dtype
    allowed = errors(with_gradients(reference, operands, grad, narrow), truth)
    found = errors(with_gradients(own, operands, grad, None), truth)
    for error, limit in zip(found, allowed, strict=True):
        assert error <= TIMES * limit + BESIDE


@pytest.mark.parametrize(("dtype", "residual"), DTYPES)
@pytest.mark.parametrize(("T", "D", "p"), [(37, 96, 0.1), (5, 768, 0.0), (1, 33, 0.5)])
def test_post_norm(T, D, p, dtype, residual):
    operands, grad = norm_problem(T, D, dtype, residual)
    options = {"p": p, "eps": EPS, "seed": seed_of(-(T**4)) if p else None}
    check_rounding(
        lambda *x: post_norm(*x, **options),
        lambda *x: post_norm_reference(*x, **options),
        operands,
        grad,
    )


def embedding_problem(dtype: torch.dtype, D: int) -> dict[str, Tensor]:
    """Operands of embedding_norm in their order, for two times nine tokens."""
    generator = torch.Generator().manual_seed(D)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    ids = torch.randint(50, (2, 9), generator=generator).to(DEVICE)
    positions = torch.arange(9, device=DEVICE).expand(2, -1)
    words, places = drawn(50, D), drawn(12, D)
    tables = {"words": words, "ids": ids, "added": drawn(D), "places": places}
    return tables | {"positions": positions, "gain": drawn(D), "shift": drawn(D)}


def embedded(operands: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    return embedding_norm(*operands.values(), eps=EPS, dtype=dtype)


@pytest.mark.parametrize("result", [*HALVES, torch.float32])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("D", [768, 33])
def test_embedding_norm(D, dtype, result):
    operands = embedding_problem(dtype, D)
    words, ids, added, places, positions, *vectors = operands.values()
    found = embedded(operands, result)
    assert found.dtype == result

    def distance(positions: Tensor) -> float:
        states = words.double()[ids] + added.double() + places.double()[positions]
        truth = F.layer_norm(states, (D,), *(x.double() for x in vectors), EPS)
        return float((found - truth).abs().max())

    # The sum is rounded as that of the tables is.
    assert distance(positions) < 16 * max(torch.finfo(x).eps for x in (dtype, result))
    assert distance(positions + 1) > 0.5
    none = dict.fromkeys(("ids", "positions"), ids[:, :0])
    assert embedded(operands | none, result).shape == (2, 0, D)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ids", lambda x: x.int()),
        ("positions", lambda x: x[:, :8]),
        ("added", lambda x: x[:-1]),
        ("places", lambda x: x[:, :-1]),
    ],
)
def test_embedding_norm_refuses_what_does_not_fit(name, wrong):
    operands = embedding_problem(torch.float32, 32)
    with pytest.raises(ValueError, match="must be"):
        embedded(operands | {name: wrong(operands[name])}, torch.float32)


@pytest.mark.parametrize("gradients", ["bias_gelu", "post_norm"])
def test_a_program_adds_up_many_rows(gradients, monkeypatch):
    for kernels in (gelu, normalization):
        monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 1)
    operands, grad = norm_problem(37, 96, torch.float32, torch.float32)
    if gradients == "bias_gelu":
        check_rounding(bias_gelu, bias_gelu_reference, operands[:2], grad)
    else:
        own, reference = (partial(each, eps=EPS) for each in (post_norm, post_norm_reference))
        check_rounding(own, reference, operands, grad)


def test_another_mask_is_not_within_the_tolerance():
    operands, grad = norm_problem(37, 96, torch.float16, torch.float32)

    def masked(function: Callable[..., Tensor], number: int) -> Callable[..., Tensor]:
        return lambda *x: function(*x, p=0.1, eps=EPS, seed=seed_of(number))

    with pytest.raises(AssertionError):
        check_rounding(masked(post_norm, 3), masked(post_norm_reference, 4), operands, grad)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(("T", "D"), [(37, 96), (9, 3072), (1, 33)])
def test_bias_gelu(T, D, dtype):
    generator = torch.Generator().manual_seed(T + D)
    x, grad = (3 * torch.randn(T, D, generator=generator).to(DEVICE, dtype) for _ in range(2))
    bias = torch.randn(D, generator=generator).to(DEVICE)
    check_rounding(bias_gelu, bias_gelu_reference, [x, bias], grad)


def test_gelu_is_the_exact_one_everywhere():
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, 1e4, 0.0])]).to(DEVICE)
    leaf, bias = x[None].clone().requires_grad_(), torch.zeros_like(x)
    found = bias_gelu(leaf, bias)
    found.sum().backward()
    wide = x.double().requires_grad_()
    truth = F.gelu(wide)
    truth.sum().backward()
    assert (found[0] - truth).abs().max().item() < 1e-6
    assert (leaf.grad[0] - wide.grad).abs().max().item() < 1e-6
    approximation = F.gelu(wide, approximate="tanh")
    assert (approximation - truth).abs().max().item() > 1e-4


def test_gelu_far_out_is_its_limit():
    infinity = float("inf")
    x = torch.tensor([[infinity, -infinity, 1e30, -1e30, float("nan")]], device=DEVICE)
    *found, last = bias_gelu(x, torch.zeros(5, device=DEVICE))[0].tolist()
    assert found == [infinity, 0.0, torch.tensor(1e30).item(), 0.0]
    assert last != last


def test_gradients_have_the_same_bits_every_time():
    operands, grad = norm_problem(60, 96, torch.float16, torch.float16)
    x, bias, residual, gain, shift = (tensor.squeeze(0) for tensor in operands)
    options = {"p": 0.1, "eps": EPS, "dtype": torch.float16, "copy": None, "save": True}
    _, _, *saved = norm_forward(x, bias, residual, gain, shift, seed_of(1), **options)
    operands = (grad[0], None, grad[0], *saved, gain, seed_of(1))
    options = {"vectors": 3, "p": 0.1, "dtypes": (torch.float16, torch.float16)}
    for gradients in (
        lambda: norm_backward(*operands, **options),
        lambda: gelu_backward(grad[0], x, bias),
    ):
        for first, second in zip(gradients(), gradients(), strict=True):
            assert torch.equal(first, second)


def test_seeds_come_from_the_global_generator():
    operands, _ = norm_problem(37, 96, torch.float32, torch.float32)
    torch.manual_seed(0)
    first, second = (post_norm(*operands, p=0.1, eps=EPS) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, post_norm(*operands, p=0.1, eps=EPS))


def test_nothing_is_nothing():
    operands, grad = norm_problem(0, 8, torch.float32, torch.float32)
    found = with_gradients(lambda *x: post_norm(*x, eps=EPS), operands, grad, None)
    assert [x.shape for x in found] == [(1, 0, 8), (1, 0, 8), (8,), (1, 0, 8), (8,), (8,)]
    assert all(not x.any() for x in found)
    x, bias, *_ = operands
    found = with_gradients(bias_gelu, [x, bias], grad, None)
    assert found[0].shape == (1, 0, 8)
    assert not found[2].any()


def test_results_may_be_narrower_than_sums():
    operands, _ = norm_problem(37, 96, torch.float16, torch.float32)
    wide = post_norm(*operands, eps=EPS)
    assert wide.dtype == torch.float32
    assert torch.equal(post_norm(*operands, eps=EPS, dtype=torch.float16), wide.to(torch.float16))


def in_two(weights: tuple[float, float], **options: object) -> Callable[..., Tensor]:
    """A weighted sum of both results of post_norm_and_copy, 0 for one that is not used."""

    def function(*operands: Tensor) -> Tensor:
        results = post_norm_and_copy(*operands, eps=EPS, copy=torch.float16, **options)
        return sum(w * x.float() for w, x in zip(weights, results, strict=True) if w)

    return function


@pytest.mark.quick(1)
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.25, 0.75)])
def test_a_copy_and_its_gradient(weights):
    """Rounding to 16 bits is what a copy adds to result and gradients; weights that sum to 1 give
    what one result gives."""
    operands, grad = norm_problem(37, 96, torch.float16, torch.float32)
    options = {"p": 0.1, "seed": seed_of(3)}
    single = with_gradients(lambda *x: post_norm(*x, eps=EPS, **options), operands, grad, None)
    found = with_gradients(in_two(weights, **options), operands, grad, None)
    assert max(errors(found, single)) < 1e-3
    other = with_gradients(in_two((weights[0], weights[1] + 0.01), **options), operands, grad, None)
    assert min(errors(other, single)) > 5e-3
    first, second = post_norm_and_copy(*operands, eps=EPS, copy=torch.float16, **options)
    assert torch.equal(second, first.to(torch.float16))


@pytest.mark.quick(1)
@pytest.mark.parametrize("half", [True, False])
def test_compiled_they_are_one_graph_for_all_lengths(half):
    """A break would be an error, by fullgraph=True."""
    residual = torch.float16 if half else torch.float32

    def layer(x: Tensor, *others: Tensor) -> Tensor:
        options = {"p": 0.1, "eps": EPS, "seed": seed_of(5)}
        x = bias_gelu(x, others[0])
        if half:
            return post_norm(x, *others, **options)
        return sum(post_norm_and_copy(x, *others, copy=torch.float16, **options))

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for T in (7, 5, 12):
        operands, grad = norm_problem(T, 96, torch.float16, residual)
        expected = with_gradients(layer, operands, grad, None)
        found = with_gradients(compiled, operands, grad, None)
        graphs.append(counter.frame_count)
        for first, second in zip(found, expected, strict=True):
            assert torch.equal(first, second)
    assert graphs[0] == graphs[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({0: torch.float64}, "x must be"),
        ({1: (5,)}, r"\[D\] = \[96\]"),
        ({3: torch.int32}, "bias, gain and shift"),
        ({2: (1, 36, 96)}, "residual must be"),
    ],
)
def test_what_does_not_fit_is_said(change, said):
    operands, _ = norm_problem(37, 96, torch.float32, torch.float32)
    for place, wrong in change.items():
        given = operands[place]
        operands[place] = given.new_zeros(wrong) if isinstance(wrong, tuple) else given.to(wrong)
    with pytest.raises(ValueError, match=said):
        post_norm(*operands, eps=EPS)


def test_a_seed_of_another_kind_is_refused():
    operands, _ = norm_problem(3, 8, torch.float32, torch.float32)
    with pytest.raises(ValueError, match=r"seed must be int32 \[\] on .*, got torch.int64"):
        post_norm(*operands, eps=EPS, p=0.1, seed=seed_of(1).long())


def test_a_share_of_one_is_refused():
    operands, _ = norm_problem(3, 8, torch.float32, torch.float32)
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\), got 1"):
        post_norm(*operands, eps=EPS, p=1.0)


def correlation(x: Tensor, y: Tensor) -> float:
    return torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1].item()


def test_a_share_is_dropped_and_the_mean_stays():
    torch.manual_seed(0)
    for p in (0.1, 0.5, 0.9):
        dropped = hashed_dropout(torch.ones(SIZE), p)
        noise = (p * (1 - p) / dropped.numel()) ** 0.5
        assert (dropped == 0).double().mean().item() == pytest.approx(p, abs=4 * noise)
        assert dropped.max().item() == pytest.approx(1 / (1 - p))


def test_neighbours_and_calls_are_independent():
    torch.manual_seed(0)
    first, second = ((hashed_dropout(torch.ones(SIZE), 0.1) == 0).double() for _ in range(2))
    noise = first.numel() ** -0.5
    assert abs(correlation(first, second)) < 4 * noise
    for rows, columns in ((0, 1), (0, 2), (0, 32), (1, 0), (2, 0), (128, 0), (1, 1)):
        moved = first.roll((rows, columns), dims=(0, 1))
        assert abs(correlation(first, moved)) < 4 * noise
    # The same seed is the same mask, which this test would see.
    torch.manual_seed(0)
    assert correlation(first, (hashed_dropout(torch.ones(SIZE), 0.1) == 0).double()) > 0.999


@pytest.mark.parametrize("seed", [0, -1, 2**31 - 1, 123456789])
def test_the_hash_is_a_permutation_with_even_bits(seed):
    places = torch.arange(-(2**18), 2**18, dtype=torch.int32)
    found = hashed(places, torch.tensor(seed, dtype=torch.int32))
    assert found.dtype == torch.int32
    assert found.unique().numel() == places.numel()
    bits = torch.stack([(found >> bit) & 1 for bit in range(32)]).double().mean(1)
    assert (bits - 0.5).abs().max().item() < 4 * 0.5 / places.numel() ** 0.5
