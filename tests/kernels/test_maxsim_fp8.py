"""MaxSim with FP8 products: an emulation on the CPU, the tensor cores on a GPU."""

from functools import partial

import pytest
import torch

from sparton.kernels.maxsim import maxsim, maxsim_fp8
from tests.kernels.problems import error

FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def make_problem(device="cpu", dtype=torch.bfloat16, *, spread=0.0, E=72, Lq=9):
    """``spread`` is the standard deviation of the logarithm of the tokens' norms."""
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(*s, E, generator=generator) for s in ((5, Lq), (7, 40)))
    queries, documents = (
        torch.nn.functional.normalize(x, dim=-1)
        * torch.exp(spread * torch.randn(*x.shape[:2], 1, generator=generator))
        for x in (queries, documents)
    )
    masks = [torch.rand(x.shape[:2], generator=generator) > 0.3 for x in (queries, documents)]
    masks[1][2] = False
    return [x.to(device, dtype) for x in (queries, documents)], [x.to(device) for x in masks]


@pytest.mark.parametrize("scales", ["token", "tensor"])
def test_close_to_full_products(scales):
    operands, masks = make_problem()
    exact = maxsim(*(x.double() for x in operands), *masks).double()
    scores = maxsim_fp8(*operands, *masks, scales=scales)
    assert error(scores, exact) < 2e-2
    assert (scores[:, 2] == 0).all()
    assert error(maxsim_fp8(operands[0] * 1.1, operands[1], *masks, scales=scales), exact) > 5e-2


@pytest.mark.parametrize("broken", [1e6, float("nan")])
def test_masked_tokens_have_no_say_in_a_scale(broken, device):
    if device.type == "cuda" and not FP8:
        pytest.skip("needs FP8 tensor cores")
    operands, masks = make_problem(device)
    expected = maxsim_fp8(*operands, *masks, scales="tensor")
    assert expected.any()
    for x, mask in zip(operands, masks, strict=True):
        x[~mask] = broken
    # The last document's last token too: what is left out must not come back as padding.
    masks[1][-1, -1] = False
    operands[1][-1, -1] = broken
    again = maxsim_fp8(*operands, *masks, scales="tensor")
    assert error(again[:, :-1], expected[:, :-1].double()) < 1e-2
    assert again.isfinite().all()


def test_autocast_changes_nothing():
    operands, masks = make_problem()
    expected = maxsim_fp8(*operands, *masks)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(maxsim_fp8(*operands, *masks), expected)


def test_a_scale_for_each_token_keeps_short_ones():
    operands, masks = make_problem(spread=8.0, dtype=torch.float16)
    operands[1] = operands[1].clamp(-100, 100)
    query = operands[0].abs().amax(-1).flatten().argsort()[:3]
    short = operands[0].flatten(0, 1)[query][:, None]
    exact = maxsim(short.double(), operands[1].double(), None, masks[1]).double()
    both = (torch.cat([short, operands[0].flatten(0, 1)[:, None]]), operands[1])
    by_token, by_tensor = (
        maxsim_fp8(*both, None, masks[1], scales=scales)[:3] for scales in ("token", "tensor")
    )
    assert error(by_token, exact) < 5e-2
    assert error(by_tensor, exact) > 0.5


@pytest.mark.parametrize("scales", ["token", "tensor"])
@pytest.mark.parametrize(("a", "b"), [(1e-30, 1e-12), (1e30, 1e15), (1e30, 1e30)])
def test_products_of_extreme_scales(scales, a, b):
    (queries, documents), _ = make_problem()
    scores = maxsim_fp8(queries * a, documents * b, scales=scales)
    assert (scores == torch.inf).all() if a > 1 else (scores > 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": "row"}, "token or tensor, got 'row'"),
        ({"queries": torch.zeros(2, 3, 4)}, "float16 or bfloat16, got torch.float32"),
        ({"documents": torch.zeros(2, 3, 4, 72, dtype=torch.bfloat16)}, r"\[N, Ld, E\]"),
        ({"documents": torch.zeros(2, 3, 64, dtype=torch.bfloat16)}, "same embedding size"),
    ],
)
def test_refused(change, words):
    (queries, documents), _ = make_problem()
    with pytest.raises(ValueError, match=words):
        maxsim_fp8(**{"queries": queries, "documents": documents, **change})


@pytest.mark.gpu
@pytest.mark.skipif(not FP8, reason="needs a GPU with FP8 tensor cores")
@pytest.mark.parametrize("scales", ["token", "tensor"])
@pytest.mark.parametrize(
    ("E", "Lq", "masked"), [(72, 9, True), (128, 9, True), (128, 9, False), (128, 32, False)]
)
def test_the_tensor_cores_agree_with_the_emulation(scales, E, Lq, masked):
    operands, masks = make_problem(E=E, Lq=Lq)
    masks = masks if masked else []
    expected = maxsim_fp8(*operands, *masks, scales=scales)
    scores = maxsim_fp8(*(x.cuda() for x in operands), *(x.cuda() for x in masks), scales=scales)
    assert error(scores.cpu(), expected.double()) < 2e-3


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scales", ["token", "tensor"])
def test_what_the_tensor_cores_are_given(scales, masked, monkeypatch):
    """The path of GPUs, with stand-ins for its kernels."""
    from sparton.kernels.maxsim import cross, fp8
    from sparton.kernels.segment_max import forward, quantize
    from sparton.kernels.segment_max.quantize_cpu import quantize_operands_cpu

    def segment_max(hidden, weight, bias, cu_seqlens, *, activation, argmax, scales):
        rows, columns = (x.float() for x in (hidden, weight))
        if scales[0] is not None:
            rows = rows * scales[0][:, None]
        assert scales[1].shape == weight.shape[:1] and scales[1].is_contiguous()
        products = rows @ (columns * scales[1][:, None]).T
        parts = products[: cu_seqlens[-1]].split(cu_seqlens.diff().tolist())
        zero = products.new_zeros(products.shape[1])
        return torch.stack([x.amax(0) if len(x) else zero for x in parts]), None

    def equal_queries(hidden, weight, cu_seqlens, length, **options):
        maxima, _ = segment_max(hidden, weight, None, cu_seqlens, activation="none", **options)
        return maxima.T.reshape(-1, length, maxima.shape[0]).sum(1), None

    def quantize_flat(hidden, weight, by):
        return quantize_operands_cpu(hidden.flatten(0, -2), weight.flatten(0, -2), by=by)

    monkeypatch.setattr(forward, "segment_max_forward", segment_max)
    monkeypatch.setattr(cross, "equal_queries_forward", equal_queries)
    monkeypatch.setattr(quantize, "quantize_operands", quantize_flat)
    emulated = partial(maxsim_fp8, scales=scales)
    by = {"token": "row", "tensor": "matrix"}[scales]
    operands, masks = make_problem(spread=1.0)
    masks = masks if masked else [None, None]
    expected = maxsim_fp8(*operands, *masks, scales=scales).double()
    scores = fp8._cross_fp8(*operands, *masks, by)
    assert scores.is_contiguous()
    assert error(scores, expected) < 1e-6 < error(scores * 1.001, expected)
    if masked and scales == "token":
        operands[0][~masks[0]] = float("nan")
        assert error(fp8._cross_fp8(*operands, *masks, by), expected) < 1e-6
    for score in (lambda *x: fp8._cross_fp8(*x, None, None, by), emulated):
        assert torch.equal(score(operands[0], operands[1][:, :0]), torch.zeros(5, 7))
        assert score(operands[0][:0], operands[1]).shape == (0, 7)
