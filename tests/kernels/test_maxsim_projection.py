"""Hidden states projected to unit length, and their gradients' way back: the kernels in the
interpreter or on a GPU, and PyTorch's version for CPU tensors."""

import pytest
import torch
import torch.nn.functional as F

from sparton.kernels.maxsim.projection import project_tokens, project_tokens_backward
from sparton.kernels.maxsim.projection_cpu import project_tokens_backward_cpu, project_tokens_cpu
from tests.kernels.problems import DTYPES, error


@pytest.mark.parametrize("need_hidden", [True, False])
@pytest.mark.parametrize(
    ("T", "H", "E", "biased"),
    [
        (70, 50, 24, False),
        (70, 50, 24, True),
        (5, 100, 1, False),
        (1, 1, 33, True),
        (0, 8, 8, True),
    ],
)
def test_projection_to_unit_length(T, H, E, biased, need_hidden, device):
    """Also, without a bias, of a token that is zero, and of one that is nearly so."""
    generator = torch.Generator().manual_seed(T + H)
    hidden, projection, grad = (
        torch.randn(*size, generator=generator).to(device) for size in ((T, H), (E, H), (T, E))
    )
    hidden[3:4] = 0
    hidden[4:5] *= 1e-14
    bias = torch.randn(E, generator=generator).to(device) if biased else None
    unit, norms = project_tokens(hidden, projection, bias, normalize=True)
    exact = [x.double().requires_grad_() for x in (hidden, projection)]
    projected = F.linear(*exact, bias.double() if biased else None)
    expected = projected / projected.norm(dim=1, keepdim=True).clamp_min(1e-12)
    torch.testing.assert_close(unit.double(), expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(norms.double(), projected.detach().norm(dim=1), atol=0, rtol=1e-5)
    dprojected, dexact = torch.autograd.grad((expected * grad).sum(), (projected, exact[0]))
    # The way back of E = 1 is 0 but for rounding, which is relative to grad / norm.
    scale = (grad.double() / projected.detach().norm(dim=1, keepdim=True).clamp_min(1e-12)).abs()
    dhidden, dprojection, dbias = project_tokens_backward(
        grad, unit, norms, hidden, projection, need_hidden, True, True
    )
    assert ((grad - dprojected).abs() <= 1e-5 * scale.amax(1, keepdim=True)).all()
    assert T < 2 or not ((grad.roll(1, 0) - dprojected).abs() <= 0.1 * scale).all()
    torch.testing.assert_close(dprojection, grad.T @ hidden)
    torch.testing.assert_close(dbias, grad.sum(0))
    assert (dhidden is None) != need_hidden
    if dhidden is not None:
        sizes = scale.amax(1, keepdim=True) * projection.abs().sum(0)
        assert ((dhidden - dexact).abs() <= 1e-5 * sizes).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
@pytest.mark.parametrize("E", [12, 130])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normalize", [True, False])
def test_projection_agrees_with_the_cpu_version(normalize, biased, E, dtype, tolerance, device):
    """By one kernel where embeddings are narrow and of 16 bits, by PyTorch's products elsewhere;
    tokens along one axis or two."""
    generator = torch.Generator().manual_seed(E)
    hidden, projection, grad, bias = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((3, 30, 50), (E, 50), (3, 30, E), (E,))
    )
    layer = (projection, 10 * bias if biased else None)
    expected = project_tokens_cpu(hidden, *layer, normalize=normalize)
    expected += project_tokens_backward_cpu(grad, *expected, hidden, projection, True, True, True)
    layer = [None if x is None else x.to(device) for x in layer]
    for axes in (2, 3):
        states, upstream = (
            x.to(device) if axes == 3 else x.flatten(0, -2).to(device) for x in (hidden, grad)
        )
        found = project_tokens(states, *layer, normalize=normalize)
        kept = (*found, states, layer[0])
        found += project_tokens_backward(upstream.clone(), *kept, True, True, True)
        for actual, truth_ in zip(found, expected, strict=True):
            actual = actual.cpu().view(truth_.shape)
            assert actual.dtype == truth_.dtype
            assert error(actual, truth_.double()) < tolerance
            assert not truth_.numel() or error(1.01 * actual, truth_.double()) > 5 * tolerance
    for number in range(3):
        needs = [i != number for i in range(3)]
        fewer = project_tokens_backward(upstream.clone(), *kept, *needs)
        assert [x is not None for x in fewer] == needs
        assert all(x is None or torch.equal(x, y) for x, y in zip(fewer, found[2:], strict=True))


def test_nothing_of_a_radial_gradient_is_left(device):
    """Although tokens of 16 bits are not of unit length."""
    generator = torch.Generator().manual_seed(0)
    operands = (torch.randn(*x, generator=generator) for x in ((40, 64), (16, 64)))
    hidden, projection = (x.to(device, torch.float16) for x in operands)
    unit, norms = project_tokens(hidden, projection, None, normalize=True)
    assert ((unit.float().norm(dim=1) - 1).abs() > 1e-5).any()
    for grad, most in ((unit.clone(), 1e-6), (unit.roll(1, 1), float("inf"))):
        project_tokens_backward(grad, unit, norms, hidden, projection, True, False, False)
        assert grad.abs().amax() * norms.amin() < most
    assert grad.abs().amax() * norms.amin() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "H", "E"), [(300, 50, 12), (70, 300, 130), (64, 128, 64), (0, 8, 4)])
def test_tokens_that_take_no_part_may_be_no_numbers(T, H, E, dtype, device):
    """Not those of the projection's gradient, of all shares of the tokens."""
    generator = torch.Generator().manual_seed(T)
    hidden, projection, grad = (
        torch.randn(*size, generator=generator).to(device, dtype)
        for size in ((T, H), (E, H), (T, E))
    )
    mask = (torch.rand(2 * T, generator=generator) < 0.7).to(device)[::2]  # not contiguous
    grad[~mask] = 0
    hidden[~mask] = 1
    tokens, norms = project_tokens(hidden, projection, None, normalize=False)
    wanted = grad.double().T @ hidden.double()
    hidden[~mask] = float("nan")
    needs = (False, True, False)
    found = [
        project_tokens_backward(grad, tokens, norms, hidden, projection, *needs, mask)[1]
        for _ in range(2)
    ]
    assert torch.equal(*found) and found[0].dtype == dtype
    if T:
        tolerance = max(torch.finfo(dtype).eps / 2, 2e-6)
        assert error(found[0].cpu(), wanted.cpu()) < tolerance
        assert error(1.02 * found[0].float().cpu(), wanted.cpu()) > 4 * tolerance
    unmasked = project_tokens_backward(grad, tokens, norms, hidden, projection, *needs)[1]
    assert not T or unmasked.isnan().all()
