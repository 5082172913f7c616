"""Dropout and layer normalisation; torch.compile needs a C++ compiler."""

import pytest
import torch
from torch import nn

from sparton.models.elementwise import (
    FusedDropout,
    HalfLayerNorm,
    replace_dropout,
    replace_layer_norms,
)

SIZE = 300, 768


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
