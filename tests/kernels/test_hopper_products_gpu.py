"""Products that end with a bias, and GELU, in one kernel on Hopper.

T rows of x, K columns of x and of the weight, N rows of the weight.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.encoder_layer import linear as layers
from sparton.kernels.encoder_layer.hopper_products import hopper_linear, suits_hopper
from tests.kernels.problems import error
from tests.kernels.test_encoder_layer import HALVES

SHAPES = [  # T, K, N
    (300, 64, 256),
    (1, 8, 8),
    (129, 200, 264),
    (4000, 768, 3072),
    (20_000, 768, 2304),
]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")


def operands(T: int, K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    return drawn(T, K).to(dtype), (drawn(N, K) * K**-0.5).to(dtype), drawn(N)


@pytest.mark.gpu
@pytest.mark.parametrize("bias_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_as_exact_as_their_dtype(shape, dtype, bias_dtype):
    x, weight, bias = operands(*shape, dtype)
    bias = bias.to(bias_dtype or dtype)
    product = x.double() @ weight.double().t()
    truth = product + bias.double()
    # Rounded once: half a unit in the last place at most, in the mean less.
    bound = torch.finfo(dtype).eps / 2
    plain, nothing = hopper_linear(x, weight, bias)
    activated, alone = hopper_linear(x, weight, bias, gelu=True)
    both, saved = hopper_linear(x, weight, bias, gelu=True, save=True)
    assert nothing is alone is None and saved is not None
    assert {y.dtype for y in (plain, activated, both, saved)} == {dtype}
    assert error(plain, truth) < bound
    assert error(saved, product) < bound
    assert torch.equal(activated, both)
    assert error(activated, F.gelu(truth)) < bound
    # What the bounds would see: the bias left out, and a product rounded before the bias.
    assert error(plain, product) > bound
    assert error(activated, F.gelu(product)) > bound


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gelu_of_small_and_large_numbers(dtype):
    """One unit in, one out: what is added is the bias alone."""
    edges = torch.tensor([0.0, -0.0, 1e-3, -1e-3, 6.0, -6.0, 9.0, -9.0, 6e4, -6e4], device="cuda")
    bias = torch.cat([torch.linspace(-8, 8, 502, device="cuda"), edges])
    x, weight = (
        torch.zeros(130, 64, dtype=dtype, device="cuda"),
        bias.new_zeros(512, 64, dtype=dtype),
    )
    out, _ = hopper_linear(x, weight, bias, gelu=True)
    truth = F.gelu(bias.double())
    # The hardware's tanh is off by 2^-11 of itself, of which half of the number is the factor.
    allowed = bias.abs().double() * 2.0**-12 + 3e-5 + truth.abs() * torch.finfo(dtype).eps / 2
    assert ((out.double() - truth).abs() <= allowed).all()
    assert (out[:, bias < -8.5] == 0).all()


@pytest.mark.gpu
def test_not_a_number_stays_in_its_row():
    x, weight, bias = operands(300, 64, 256, torch.float16)
    x[7, 3], x[200, 9] = float("nan"), float("inf")
    for gelu in (False, True):
        out, _ = hopper_linear(x, weight, bias, gelu=gelu)
        broken = ~out.isfinite().all(1)
        assert broken.nonzero().flatten().tolist() == [7, 200]


@pytest.mark.gpu
def test_large_products_are_our_own_and_small_ones_the_librarys(monkeypatch):
    called: list[int] = []

    def counted(x: Tensor, *others: Tensor, **options: bool):
        called.append(len(x))
        return hopper_linear(x, *others, **options)

    monkeypatch.setattr(layers, "_hopper", lambda: counted)
    x, weight, bias = operands(40_000, 768, 3072, torch.float16)
    bias = bias.half()
    assert suits_hopper(x, weight) and not suits_hopper(x[:500], weight)
    for few in (x, x[:500], x[:, :-1].contiguous(), x.float()):
        matching = weight[:, : few.shape[1]].contiguous().to(few.dtype)
        given = few, matching, bias.to(few.dtype)
        truth = few.double() @ matching.double().t() + bias.double()
        assert error(layers.linear(*given), truth) < 1e-3
        assert error(layers.linear_gelu(*given), F.gelu(truth)) < 2e-3
        activated, product = layers.linear_gelu_and_product(*given)
        assert error(activated, F.gelu(truth)) < 1e-3
        assert error(product, truth - bias.double()) < 1e-3
    assert called == [len(x)] * 3
