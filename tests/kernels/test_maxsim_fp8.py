"""MaxSim with FP8 products: an emulation on the CPU, the tensor cores on a GPU."""

from functools import partial

import pytest
import torch

from sparton.kernels.maxsim import (
    Fp8Tokens,
    fp8,
    fp8_tokens,
    maxsim,
    maxsim_fp8,
    quantize_fp8,
)
from sparton.kernels.segment_max.quantize_cpu import rounded
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
        ({"queries": torch.zeros(2, 3, 4)}, "must be float16 or bfloat16, .* got torch.float32"),
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


@pytest.fixture
def given_to_tensor_cores(monkeypatch):
    """The path of GPUs, with stand-ins for its kernels."""
    from sparton.kernels.maxsim import cross, fp8
    from sparton.kernels.segment_max import forward, quantize
    from sparton.kernels.segment_max.quantize_cpu import quantize_operands_cpu

    def segment_max(hidden, weight, bias, cu_seqlens, *, activation, argmax, scales):
        assert hidden.dtype == weight.dtype == torch.float8_e4m3fn
        assert hidden.is_contiguous() and hidden.shape[1] % 16 == 0
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

    def quantize_flat(hidden, weight, by="row"):
        return quantize_operands_cpu(hidden.flatten(0, -2), weight.flatten(0, -2), by=by)

    def score(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(forward, "segment_max_forward", segment_max)
            patch.setattr(cross, "equal_queries_forward", equal_queries)
            patch.setattr(quantize, "quantize_operands", quantize_flat)
            patch.setattr(fp8, "has_fp8", lambda device: True)
            return maxsim_fp8(*arguments, **options)

    return score


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scales", ["token", "tensor"])
def test_what_the_tensor_cores_are_given(scales, masked, given_to_tensor_cores):
    operands, masks = make_problem(spread=1.0)
    masks = masks if masked else [None, None]
    given, emulated = (partial(x, scales=scales) for x in (given_to_tensor_cores, maxsim_fp8))
    expected = emulated(*operands, *masks).double()
    scores = given(*operands, *masks)
    assert scores.is_contiguous()
    assert error(scores, expected) < 1e-6 < error(scores * 1.001, expected)
    if masked and scales == "token":
        operands[0][~masks[0]] = float("nan")
        assert error(given(*operands, *masks), expected) < 1e-6
    for score in (given, emulated):
        assert torch.equal(score(operands[0], operands[1][:, :0]), torch.zeros(5, 7))
        assert score(operands[0][:0], operands[1]).shape == (0, 7)
        assert torch.equal(score(operands[0][:, :0], operands[1]), torch.zeros(5, 7))


def packed(documents, mask):
    """The first tokens of each document, what is left of their mask, boundaries, and the mask that
    leaves the same tokens of the padded documents."""
    lengths = torch.tensor([40, 3, 17, 0, 40, 1, 25], device=mask.device)
    taken = torch.arange(40, device=mask.device) < lengths[:, None]
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return documents[taken], mask[taken], bounds, mask & taken


@pytest.mark.parametrize("E", [72, 128])
@pytest.mark.parametrize("masked", [True, False])
def test_stored_documents_score_like_those_rounded_on_the_fly(masked, E, given_to_tensor_cores):
    (queries, documents), (query_mask, mask) = make_problem(spread=1.0, E=E)
    if not masked:
        query_mask, mask = None, torch.ones_like(mask)
    rows, row_mask, bounds, both = packed(documents, mask)
    for score in (maxsim_fp8, given_to_tensor_cores):
        expected = score(queries, documents, query_mask, mask)
        assert torch.equal(score(queries, quantize_fp8(documents), query_mask, mask), expected)
        shorter = score(queries, documents, query_mask, both)
        assert (shorter[:, 3] == 0).all()
        stored, masks = quantize_fp8(rows), (query_mask, row_mask if masked else None)
        for given in (rows, stored):
            scores = score(queries, given, *masks, document_cu_seqlens=bounds)
            assert error(scores, shorter.double()) < 1e-6
        assert torch.equal(scores, score(queries, rows, *masks, document_cu_seqlens=bounds))
        wrong = stored._replace(scales=stored.scales.flip(0))
        assert error(score(queries, wrong, *masks, document_cu_seqlens=bounds), shorter) > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not FP8, reason="needs a GPU with FP8 tensor cores")
@pytest.mark.parametrize("E", [72, 128])
@pytest.mark.parametrize("masked", [True, False])
def test_stored_documents_on_the_tensor_cores(masked, E):
    """Rounded on the GPU or on the CPU, padded or packed: the same bits of scores."""
    (queries, documents), (query_mask, mask) = make_problem("cuda", E=E, Lq=32)
    rows, row_mask, bounds, _ = packed(documents, mask)
    masks, row_masks = ((query_mask, mask), (query_mask, row_mask)) if masked else ([], [])
    options = {"document_cu_seqlens": bounds}
    for given, own, kind in ((documents, masks, {}), (rows, row_masks, options)):
        expected = maxsim_fp8(queries, given, *own, **kind)
        elsewhere = Fp8Tokens(*(x.cuda() for x in quantize_fp8(given.cpu())))
        for stored in (quantize_fp8(given), elsewhere):
            assert torch.equal(maxsim_fp8(queries, stored, *own, **kind), expected)
    exact = maxsim(queries, documents, *masks)
    assert error(maxsim_fp8(queries, quantize_fp8(documents), *masks), exact.double()) < 5e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_stored_tokens(dtype, device, monkeypatch):
    """A byte for each unit, and what the emulation of the products rounds to."""
    monkeypatch.setattr(fp8_tokens, "TOKENS_AT_ONCE", 7)
    (_, documents), _ = make_problem(device, dtype, spread=3.0)
    stored = quantize_fp8(documents)
    assert stored.values.shape == documents.shape and stored.values.element_size() == 1
    assert (stored.scales.shape, stored.scales.dtype) == (documents.shape[:2], torch.float32)
    expected = rounded(documents.flatten(0, 1).cpu()).view(documents.shape)
    assert torch.equal(fp8_tokens.restore_fp8(stored).cpu(), expected)
    flat = quantize_fp8(documents.flatten(0, 1))
    assert torch.equal(flat.values.float(), stored.values.flatten(0, 1).float())
    nothing = quantize_fp8(documents[:0])
    assert (nothing.values.shape, nothing.scales.shape) == ((0, 40, 72), (0, 40))
    for wrong in (documents.double(), documents[0, 0]):
        with pytest.raises(ValueError, match=r"must be .* float16, bfloat16 or float32, got"):
            quantize_fp8(wrong)


def test_a_gpu_without_fp8_restores_stored_tokens(monkeypatch, caplog):
    """In the dtype of the queries."""
    (queries, documents), masks = make_problem()
    stored = quantize_fp8(documents)
    expected = maxsim(queries, fp8_tokens.restore_fp8(stored).bfloat16(), *masks)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self is queries))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    monkeypatch.setattr(fp8, "maxsim", lambda *x: given.append(x))
    given: list = []
    maxsim_fp8(queries, stored, *masks)
    monkeypatch.undo()
    assert "an older GPU has no FP8 tensor cores" in caplog.text
    assert torch.equal(maxsim(*given[0]), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": "tensor"}, "have a scale for each token: scales must be token, got 'tensor'"),
        ({"values": torch.float16}, "Fp8Tokens of float8_e4m3fn, got torch.bfloat16 and torch.flo"),
        ({"stored_scales": (7, 39)}, r"must be float32 \(7, 40\), .* got torch.float32 \(7, 39\)"),
        ({"stored_scales": (7, 40, 1)}, r"got torch.float32 \(7, 40, 1\)"),
        ({"elsewhere": True}, "must be on one device, got cpu and meta"),
        ({"bounds": [0, 3]}, r"documents \[T, E\] with document_cu_seqlens, got"),
    ],
)
def test_stored_documents_that_are_refused(change, words):
    (queries, documents), _ = make_problem()
    stored, options = quantize_fp8(documents), {"scales": change.get("scales", "token")}
    if "values" in change:
        stored = stored._replace(values=documents.half())
    if "stored_scales" in change:
        stored = stored._replace(scales=torch.ones(change["stored_scales"]))
    if "elsewhere" in change:
        stored = stored._replace(scales=stored.scales.to("meta"))
    if "bounds" in change:
        options["document_cu_seqlens"] = torch.tensor(change["bounds"])
    with pytest.raises(ValueError, match=words):
        maxsim_fp8(queries, stored, **options)
