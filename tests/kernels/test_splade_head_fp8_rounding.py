"""Rounding to FP8 with one scale per row, on the GPU or in Triton's interpreter, and its emulation.

R rows, D hidden. The interpreter's conversion to e4m3 loses NaN, and the carry of a rounding that
reaches the next power of two: there the kernel is tested on numbers that e4m3 holds.
"""

import pytest
import torch
from torch import Tensor

from sparton.kernels.segment_max import quantize
from sparton.kernels.segment_max.quantize import quantize_matrix, quantize_rows
from sparton.kernels.segment_max.quantize_cpu import quantize_rows_cpu

SERVED = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not SERVED, reason="this GPU has no FP8 tensor cores"
)
needs_gpu = pytest.mark.skipif(not SERVED, reason="needs a GPU with FP8 tensor cores")


def e4m3_rows(R: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows whose largest element is 448 * 2^k, all others being e4m3 numbers * 2^k."""
    generator = torch.Generator().manual_seed(R * D)
    codes = torch.randint(0, 0x7F, (R, D), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (R, D), generator=generator, dtype=torch.uint8) << 7
    codes[torch.arange(R), torch.arange(R) % D] = 0x7E
    rounded = codes.view(torch.float8_e4m3fn)
    scale = torch.exp2(torch.arange(R) % 5 - 2.0)
    return (rounded.float() * scale[:, None]).to(dtype), scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("R", "D"), [(7, 48), (3, 1), (5, 31), (2, 1040), (0, 8)])
@pytest.mark.parametrize("quantize", [quantize_rows, quantize_rows_cpu])
def test_rounding_keeps_what_e4m3_holds(quantize, R, D, dtype, device):
    x, scale = e4m3_rows(R, D, dtype)
    rounded, actual_scale = quantize(x.to(device if quantize is quantize_rows else "cpu"))
    assert rounded.dtype == torch.float8_e4m3fn
    assert rounded.shape[0] == R
    assert rounded.shape[1] % 16 == 0 <= rounded.shape[1] - D < 16
    assert torch.equal(actual_scale.cpu(), scale)
    assert torch.equal(rounded[:, :D].float().cpu() * scale[:, None], x.float())
    assert not rounded[:, D:].float().any()


@pytest.mark.parametrize(("R", "D"), [(7, 48), (1, 1), (300, 31), (500, 48)])
@pytest.mark.parametrize("place", [0, -1])
def test_one_scale_for_all_rows(R, D, place, device, monkeypatch):
    # Few enough parts for one to look at several blocks.
    monkeypatch.setattr(quantize, "PARTS", 2)
    x, _ = e4m3_rows(R, D, torch.bfloat16)
    x *= (x.abs() <= 448) & (torch.arange(R) % 5 == 2)[:, None]
    x[place, place] = 448
    rounded, scale = quantize_matrix(x.to(device))
    assert scale.tolist() == [1.0]
    assert torch.equal(rounded[:, :D].float().cpu(), x.float())
    assert not rounded[:, D:].float().any()
    assert quantize_matrix((4 * x).to(device))[1].tolist() == [4.0]
    x[place, place] = float("nan")
    assert quantize_matrix(x.to(device))[1].isnan(), "seen, not hidden"


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [768, 100, 31])
def test_the_kernel_rounds_as_pytorch_does(D, dtype, device):
    x = (torch.randn(333, D) * torch.logspace(-4, 3, 333)[:, None]).to(dtype)
    rounded, scale = quantize_rows(x.to(device))
    expected, expected_scale = quantize_rows_cpu(x)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(rounded.float().cpu(), expected.float())


@pytest.mark.parametrize("quantize", [quantize_rows, quantize_rows_cpu])
def test_rounding_of_unusual_rows(quantize, device):
    x = torch.full((6, 20), 1.0, dtype=torch.bfloat16)
    x[0] = 0
    x[1, 3] = float("nan")
    x[2, 4], x[2, 5] = float("inf"), -float("inf")
    x[3] = 3e38
    x[4] = 1e-38
    rounded, scale = (
        y.float().cpu() for y in quantize(x.to(device if quantize is quantize_rows else "cpu"))
    )
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert not rounded[0].any()
    if SERVED or quantize is quantize_rows_cpu:
        assert rounded[1, :20].isnan().sum() == 1
    assert rounded[1, 0] == rounded[5, 0] == 448
    assert rounded[2, 4] == 448 == -rounded[2, 5]
    assert not rounded[2, [0, 6, 19]].any()
    assert (rounded[3, :20] == 448).all()
    assert not rounded[4].any()


def test_the_rounding_error_is_that_of_three_bits():
    x = torch.randn(200, 96).bfloat16()
    rounded, scale = quantize_rows_cpu(x)
    restored = rounded[:, :96].float() * scale[:, None]
    normal = x.float().abs() >= scale[:, None] * 2**-6
    relative = ((restored - x.float()) / x.float()).abs()[normal]
    assert relative.max() <= 2**-4 * 1.001
    assert relative.max() > 2**-4 * 0.9
    assert normal.float().mean() > 0.99
