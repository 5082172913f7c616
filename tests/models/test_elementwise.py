"""Dropout by hashing and layer normalisation in 16 bits; torch.compile needs a C++ compiler."""

import pytest
import torch
from torch import Tensor, nn

from sparton.models.elementwise import (
    FusedDropout,
    HalfLayerNorm,
    hashed,
    hashed_dropout,
    replace_dropout,
    replace_layer_norms,
)

SIZE = 300, 768


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


@pytest.mark.slow
def test_compiled_gradients_follow_the_mask_and_seeds_repeat():
    torch._dynamo.reset()
    dropout = FusedDropout(0.1)
    compiled = torch.compile(lambda x: dropout(x) + 1.0, dynamic=True)
    for rows in (7, 300):
        x = torch.ones(rows, 64, requires_grad=True)
        torch.manual_seed(3)
        with torch.no_grad():
            first = compiled(x)
        torch.manual_seed(3)
        second = compiled(x)
        assert torch.equal(first, second)
        second.sum().backward()
        assert torch.equal(x.grad == 0, second == 1.0)
        assert 0.02 < (x.grad == 0).double().mean().item() < 0.25
    dropout.eval()
    assert torch.equal(compiled(x), x + 1.0)


def test_in_eager_mode_it_is_the_dropout_of_pytorch():
    x = torch.ones(SIZE)
    torch.manual_seed(1)
    own = FusedDropout(0.3)(x)
    torch.manual_seed(1)
    assert torch.equal(own, nn.Dropout(0.3)(x))


def test_norms_are_half_precision_only_under_bfloat16_autocast():
    norm, x = HalfLayerNorm(16), torch.randn(5, 16)
    plain = nn.LayerNorm(16)(x)
    assert torch.equal(norm(x), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), plain.to(torch.bfloat16))
        assert norm(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert norm(x).dtype == nn.LayerNorm(16)(x).dtype


def test_replacing_keeps_parameters_and_their_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.2))
    model.append(nn.Sequential(nn.LayerNorm(4, bias=False), nn.Dropout(0.0)))
    before, x = dict(model.named_parameters()), torch.randn(3, 4)
    model.eval()
    expected = model(x)
    replace_dropout(model)
    replace_layer_norms(model)
    assert {type(part) for part in model.modules() if not list(part.children())} == {
        nn.Linear,
        HalfLayerNorm,
        FusedDropout,
    }
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert torch.equal(model(x), expected)
    assert model[2].p == 0.2
