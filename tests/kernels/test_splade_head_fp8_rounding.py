"""Rounding to FP8, on the GPU or in Triton's interpreter, and its emulation.

R rows, D hidden. The interpreter's conversion to e4m3 loses NaN, and the carry of a rounding that
reaches the next power of two: there the kernel is tested on numbers that e4m3 holds.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparton.kernels.segment_max import quantize as quantize_module
from sparton.kernels.segment_max.quantize import quantize_operands
from sparton.kernels.segment_max.quantize_cpu import quantize_operands_cpu

SERVED = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not SERVED, reason="this GPU has no FP8 tensor cores"
)
needs_gpu = pytest.mark.skipif(not SERVED, reason="needs a GPU with FP8 tensor cores")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: few enough parts for some to look at several blocks, some at none."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(quantize_module, "PARTS", 4)


def e4m3_rows(R: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows whose largest element is 448 * 2^k, all others being e4m3 numbers * 2^k."""
    generator = torch.Generator().manual_seed(R * D)
    codes = torch.randint(0, 0x7F, (R, D), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (R, D), generator=generator, dtype=torch.uint8) << 7
    codes[torch.arange(R), torch.arange(R) % D] = 0x7E
    rounded = codes.view(torch.float8_e4m3fn)
    scale = torch.exp2(torch.arange(R) % 5 - 2.0)
    return (rounded.float() * scale[:, None]).to(dtype), scale


def many_scales(R: int, D: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(R * D)
    x = torch.randn(R, D, generator=generator) * torch.logspace(-4, 3, R)[:, None]
    return x.to(dtype)


def on(device: torch.device, quantize, *operands: Tensor, **options: Any):
    """Rounded operands and their scales, on the CPU."""
    if quantize is quantize_operands:
        operands = tuple(x.to(device) for x in operands)
    *rounded, scales = quantize(*operands, **options)
    return [x.cpu() for x in rounded], [None if x is None else x.cpu() for x in scales]


both = pytest.mark.parametrize("quantize", [quantize_operands, quantize_operands_cpu])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("T", "V", "D"), [(7, 200, 48), (3, 3, 1), (150, 5, 31), (2, 1, 1040), (0, 4, 8), (4, 0, 8)]
)
@both
def test_rounding_keeps_what_e4m3_holds(quantize, T, V, D, dtype, device):
    operands = [e4m3_rows(R, D, dtype) for R in (T, V)]
    results = on(device, quantize, *(x for x, _ in operands))
    for (x, scale), rounded, actual_scale in zip(operands, *results, strict=True):
        assert rounded.dtype == torch.float8_e4m3fn
        assert rounded.shape[0] == x.shape[0]
        assert rounded.shape[1] % 16 == 0 <= rounded.shape[1] - D < 16
        assert torch.equal(actual_scale, scale)
        assert torch.equal(rounded[:, :D].float() * scale[:, None], x.float())
        assert not rounded[:, D:].float().any()


@pytest.mark.parametrize(("R", "D"), [(7, 48), (1, 1), (300, 31), (500, 48)])
@pytest.mark.parametrize("place", [0, -1])
@both
def test_one_scale_for_each_matrix(quantize, R, D, place, device, monkeypatch):
    # Few enough parts for one to look at several blocks.
    monkeypatch.setattr(quantize_module, "PARTS", 2)
    x, _ = e4m3_rows(R, D, torch.bfloat16)
    x *= (x.abs() <= 448) & (torch.arange(R) % 5 == 2)[:, None]
    x[place, place] = 448
    for factor, other in ((1, 1), (4, 1), (1, 2), (4, 2)):
        operands = (factor * x, other * x[:1] if place == 0 else other * x)
        (tokens, rows), scales = on(device, quantize, *operands, by="matrix")
        assert scales[0] is None
        assert scales[1].tolist() == [factor * other] * len(rows)
        for rounded, exact in ((tokens, x), (rows, operands[1] / other)):
            assert torch.equal(rounded[:, :D].float(), exact.float())
            assert not rounded[:, D:].float().any()
    wrong = x.clone()
    wrong[place, place] = float("nan")
    for operands in ((x, wrong), (wrong, x)):
        assert on(device, quantize, *operands, by="matrix")[1][1].isnan().all(), "seen, not hidden"


@both
def test_one_scale_for_all_tokens(quantize, device):
    x, row_scales = e4m3_rows(9, 40, torch.bfloat16)
    tokens = x * ((x.abs() <= 448) & (torch.arange(9) % 5 == 2)[:, None])
    tokens[3, 5] = 448
    (hidden, weight), scales = on(device, quantize, 4 * tokens, x, by="weight_row")
    assert scales[0] is None
    assert torch.equal(scales[1], 4 * row_scales)
    assert torch.equal(hidden[:, :40].float(), tokens.float())
    assert torch.equal(weight[:, :40].float() * scales[1][:, None], 4 * x.float())
    for wrong in (float("nan"), float("inf"), float("-inf")):
        odd = tokens.clone()
        odd[1, 2] = wrong
        (found, _), others = on(device, quantize, 4 * odd, x, by="weight_row")
        assert torch.equal(others[1], scales[1]), "one text does not change what others are worth"
        expected = hidden.float()
        if wrong == wrong or SERVED or quantize is quantize_operands_cpu:
            expected[1, 2] = torch.tensor(wrong).clamp(-448, 448)
        else:
            expected[1, 2] = found[1, 2].float()
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=0, equal_nan=True)


@both
def test_norms_of_rows(quantize, device):
    operands = [many_scales(R, 40, torch.bfloat16) for R in (33, 7)]
    where = device if quantize is quantize_operands else torch.device("cpu")
    norms = tuple(torch.full((len(x),), -1.0, device=where) for x in operands)
    on(device, quantize, *operands, by="weight_row", norms=norms)
    for x, found in zip(operands, norms, strict=True):
        exact = x.double().square().sum(1).sqrt()
        torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("T", "V"), [(0, 3), (3, 0), (0, 0), (3, 5)])
@pytest.mark.parametrize("value", [0.0, 3e38, float("inf")])
def test_scales_of_unusual_matrices(value, T, V, device):
    """Bounded each, then multiplied."""
    hidden, weight = torch.full((T, 20), value), torch.ones(V, 20)
    for operands in ((hidden, weight), (weight, hidden)):
        rounded = [x.bfloat16() for x in operands]
        tokens, expected = on(device, quantize_operands_cpu, *rounded, by="matrix")
        actual_tokens, actual = on(device, quantize_operands, *rounded, by="matrix")
        assert torch.equal(actual[1], expected[1])
        assert actual[1].isfinite().all()
        for x, y in zip(actual_tokens, tokens, strict=True):
            assert torch.equal(x.float(), y.float())


@pytest.mark.parametrize("by", ["row", "weight_row", "matrix"])
def test_rows_along_several_axes(by, device):
    x, _ = e4m3_rows(24, 40, torch.bfloat16)
    flat = on(device, quantize_operands, x, x[:12], by=by)
    apart = on(device, quantize_operands, x.view(2, 3, 4, 40), x[:12].view(3, 4, 40), by=by)
    strided = x.repeat_interleave(2, 1)[:, ::2]
    for other in (apart, on(device, quantize_operands, strided, strided[:12], by=by)):
        for expected, actual in zip(flat, other, strict=True):
            for a, b in zip(expected, actual, strict=True):
                assert a is b is None or torch.equal(a.float(), b.float())


@needs_gpu
@pytest.mark.parametrize("by", ["row", "weight_row", "matrix"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [768, 100, 31, 17, 8, 2])
def test_the_kernel_rounds_as_pytorch_does(D, dtype, by, device):
    operands = [many_scales(R, D, dtype) for R in (333, 70)]
    expected, actual = (
        on(device, f, *operands, by=by) for f in (quantize_operands_cpu, quantize_operands)
    )
    for a, b in zip(expected[0] + expected[1], actual[0] + actual[1], strict=True):
        assert a is b is None or torch.equal(a.float(), b.float())


def test_the_quotient_of_the_emulation_is_rounded_once():
    """As the kernel's. One that is rounded twice moves numbers halfway between two of e4m3."""
    x = many_scales(333, 256, torch.bfloat16)
    actual, *_ = quantize_operands_cpu(x, x[:1])
    amax = x.float().abs().amax(1, keepdim=True)
    once = torch.from_numpy(np.float32(448) / amax.numpy())
    twice = amax.reciprocal() * 448

    def rounded(factor: Tensor) -> Tensor:
        return (x.float() * factor).clamp(-448, 448).to(torch.float8_e4m3fn).float()

    assert torch.equal(actual.float(), rounded(once))
    assert not torch.equal(rounded(twice), rounded(once))


@both
def test_rounding_of_unusual_rows(quantize, device):
    x = torch.full((6, 20), 1.0, dtype=torch.bfloat16)
    x[0] = 0
    x[1, 3] = float("nan")
    x[2, 4], x[2, 5] = float("inf"), -float("inf")
    x[3] = 3e38
    x[4] = 1e-38
    for rounded, scale in zip(*on(device, quantize, x, x), strict=True):
        rounded = rounded.float()
        assert scale.isfinite().all()
        assert (scale > 0).all()
        assert not rounded[0].any()
        if SERVED or quantize is quantize_operands_cpu:
            assert rounded[1, :20].isnan().sum() == 1
        assert rounded[1, 0] == rounded[5, 0] == 448
        assert rounded[2, 4] == 448 == -rounded[2, 5]
        assert not rounded[2, [0, 6, 19]].any()
        assert (rounded[3, :20] == 448).all()
        assert not rounded[4].any()


def test_the_rounding_error_is_that_of_three_bits():
    x = torch.randn(200, 96).bfloat16()
    rounded, _, (scale, _) = quantize_operands_cpu(x, x[:1])
    restored = rounded[:, :96].float() * scale[:, None]
    normal = x.float().abs() >= scale[:, None] * 2**-6
    relative = ((restored - x.float()) / x.float()).abs()[normal]
    assert relative.max() <= 2**-4 * 1.001
    assert relative.max() > 2**-4 * 0.9
    assert normal.float().mean() > 0.99
