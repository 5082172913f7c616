"""The public kernels: padded batches, masks of all kinds, packing, and what they import."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from sparton import kernels, ops
from sparton.kernels.maxsim import maxsim_reference
from sparton.kernels.splade_head import splade_head_reference
from tests.devices import nothing_waits

MASKS = {
    "right": [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]],
    "left": [[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 1]],
    "empty": [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]],
}
N, S, D, V, E = 3, 4, 6, 11, 8


@pytest.fixture(params=MASKS)
def mask(request: pytest.FixtureRequest) -> Tensor:
    return torch.tensor(MASKS[request.param])


@pytest.fixture
def head() -> tuple[Tensor, Tensor, Tensor]:
    """Padded hidden states, a weight and a bias; float64."""
    shapes = ((N, S, D), (V, D), (V,))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8])
def test_unpack_puts_every_token_back(mask, dtype):
    values = torch.randn(N, S, 2, 3)
    packed = ops.pack(values, mask.to(dtype))
    assert torch.equal(packed.values, values[mask.bool()])
    assert packed.cu_seqlens.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == mask.sum(1).max()
    again = ops.unpack(packed, fill=7)
    assert torch.equal(again[mask.bool()], packed.values)
    assert bool((again[~mask.bool()] == 7).all())
    assert torch.equal(ops.unpack(packed), values * mask[..., None, None])


def test_a_known_total_saves_the_wait_and_changes_nothing(mask):
    values, total = torch.randn(N, S, 2), int(mask.sum())
    expected, packed = ops.pack(values, mask), ops.pack(values, mask, total=total)
    for name in ("values", "cu_seqlens", "slots", "length"):
        assert torch.equal(*(torch.as_tensor(getattr(x, name)) for x in (packed, expected)))
    assert packed.max_seqlen == S
    # Nothing can be read on this device.
    meta = values.to("meta"), mask.to("meta")
    assert ops.pack(*meta, total=total).values.shape == (total, 2)
    with pytest.raises(RuntimeError, match="meta"):
        ops.pack(*meta)


def test_a_wrong_total_is_refused():
    with pytest.raises(ValueError, match="total=3, but attention_mask selects 2 tokens"):
        ops.pack(torch.zeros(1, 4), torch.tensor([[1, 1, 0, 0]]), total=3)


def test_packing_and_back_has_the_gradient_of_masking(mask):
    values = torch.randn(N, S, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.unpack(ops.pack(x, mask)), values)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_batches_without_tokens(shape):
    packed = ops.pack(torch.zeros(*shape, 3), torch.ones(shape, dtype=torch.int64))
    assert packed.values.shape == (0, 3)
    assert packed.cu_seqlens.tolist() == [0] * (shape[0] + 1)
    assert ops.unpack(packed).shape == (*shape, 3)


@pytest.mark.parametrize(
    ("values", "mask", "message"),
    [
        (torch.zeros(2, 3, 4), torch.ones(2, 4), r"must hold booleans or integers.*float32"),
        (torch.zeros(2, 3, 4), torch.ones(2, 4).long(), r"\[N, S\], got \(2, 3, 4\) and \(2, 4\)"),
        (torch.zeros(3), torch.ones(3).long(), r"needs an attention_mask \[N, S\], got \(3,\)"),
    ],
)
def test_masks_that_do_not_fit_are_refused(values, mask, message):
    with pytest.raises(ValueError, match=message):
        ops.pack(values, mask)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_the_head_of_a_padded_batch(mask, head, pooling, activation):
    logits = (head[0] @ head[1].T + head[2]).relu().log1p() * mask[..., None]
    if activation == "log1p_relu":
        logits = logits.log1p()
    expected = logits.amax(1) if pooling == "max" else logits.sum(1)
    options = {"pooling": pooling, "activation": activation}
    actual = ops.splade_head(*head, attention_mask=mask, **options)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-6, atol=1e-6)
    cotangent = torch.randn(N, V)
    wanted, found = (
        torch.autograd.grad((reps * cotangent).sum(), head) for reps in (expected, actual)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    packed = ops.pack(head[0], mask)
    again = ops.splade_head(packed.values, *head[1:], packed.cu_seqlens, **options)
    assert torch.equal(again, actual)
    everything = ops.splade_head(*head, attention_mask=torch.ones_like(mask), **options)
    assert not torch.allclose(everything, actual, atol=1e-3)


def test_padding_is_never_read(mask, head):
    hidden, weight, bias = (x.detach() for x in head)
    expected = ops.splade_head(hidden, weight, bias, attention_mask=mask)
    poisoned = hidden.masked_fill(mask[..., None] == 0, torch.nan)
    assert torch.equal(ops.splade_head(poisoned, weight, bias, attention_mask=mask), expected)


def test_the_largest_entries_of_a_padded_batch(mask, head):
    with torch.no_grad():
        reps = ops.splade_head(*head, attention_mask=mask)
        found = ops.splade_head_topk(*head, k=3, attention_mask=mask)
    assert torch.equal(found.values, reps.sort(descending=True, stable=True).values[:, :3])
    assert torch.equal(reps.gather(1, found.indices), found.values)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 3, 4), (), "with neither"),
        ((2, 3, 4), ("cu_seqlens",), r"got \(2, 3, 4\) with cu_seqlens"),
        ((6, 4), ("attention_mask",), r"packed \[T, D\] with cu_seqlens.*with attention_mask"),
        ((2, 3, 4), ("cu_seqlens", "attention_mask"), "with cu_seqlens and attention_mask"),
    ],
)
def test_the_head_says_what_it_takes(shape, names, message):
    given = {
        "cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32),
        "attention_mask": torch.ones(2, 3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        ops.splade_head(torch.randn(shape), torch.randn(V, 4), **{n: given[n] for n in names})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_late_interaction_takes_masks_of_integers(mask, dtype):
    queries, documents = torch.randn(N, S, E), torch.randn(N, S, E)
    masks = {"query_mask": mask.to(dtype), "document_mask": mask.flip(0).to(dtype)}
    bounds = torch.arange(N + 1, dtype=torch.int32) * S
    flat = (queries.flatten(0, 1), documents.flatten(0, 1), bounds, bounds)
    expected = maxsim_reference(*flat, *(x.bool().flatten() for x in masks.values()))
    torch.testing.assert_close(ops.maxsim(queries, documents, **masks), expected)
    assert torch.equal(
        ops.maxsim(queries, documents, *masks.values()), ops.maxsim(queries, documents, **masks)
    )
    torch.testing.assert_close(ops.maxsim_pairs(queries, documents, **masks), expected.diag())
    assert not torch.allclose(ops.maxsim(queries, documents), expected, atol=1e-3)
    of_queries, of_documents = ops.pack(queries, mask), ops.pack(documents, mask.flip(0))
    scores = ops.maxsim_varlen(
        of_queries.values, of_documents.values, of_queries.cu_seqlens, of_documents.cu_seqlens
    )
    torch.testing.assert_close(scores, expected)
    projection = torch.eye(E)
    hidden = ops.maxsim_from_hidden(queries, documents, projection, **masks, normalize=False)
    torch.testing.assert_close(hidden, expected)


def test_every_kernel_of_late_interaction_is_here():
    theirs = {name for name in kernels.maxsim.__all__ if not name.endswith("_reference")}
    assert theirs <= set(ops.__all__)
    assert all(hasattr(ops, name) and getattr(ops, name).__doc__ for name in ops.__all__)


PADDED, PACKED = torch.zeros(2, 3, 16), torch.zeros(6, 16)
BOUNDS = torch.tensor([0, 3, 6], dtype=torch.int32)
HEADS = torch.zeros(2, 3, 2, 16, dtype=torch.bfloat16)
CODEC = ops.ResidualCodec(torch.zeros(2, 16), torch.zeros(3), torch.zeros(4))
COMPRESSED = ops.CompressedTokens(
    torch.zeros(6, dtype=torch.int32), torch.zeros(6, 4, dtype=torch.uint8)
)


@pytest.mark.parametrize(
    ("function", "arguments", "remedy"),
    [
        ("maxsim", (PACKED, PACKED), "maxsim_varlen with their boundaries"),
        ("maxsim_pairs", (PACKED, PACKED), "maxsim_varlen"),
        ("maxsim_fp8", (PACKED, PACKED), "ops.unpack makes a padded batch"),
        ("maxsim_from_hidden", (PACKED, PACKED, PACKED), "hidden may be packed"),
        ("maxsim_varlen", (PADDED, PADDED, BOUNDS, BOUNDS), r"ops.maxsim .*ops.pack\(queries,"),
        ("maxsim_topk", (PADDED, PADDED, BOUNDS, BOUNDS, 1), r"ops.pack\(queries, attention_mask"),
        ("maxsim_residual", (PACKED, COMPRESSED, CODEC), "maxsim_residual_varlen"),
        (
            "maxsim_residual_varlen",
            (PADDED, COMPRESSED, CODEC, BOUNDS, BOUNDS),
            r"ops.maxsim_residual .*ops.pack\(queries,",
        ),
        ("train_codec", (PADDED, 2, 2), r"ops.pack\(embeddings, attention_mask\)"),
        ("compress", (CODEC, PADDED), r"ops.pack\(embeddings, attention_mask\)"),
        (
            "varlen_attention",
            (HEADS, HEADS, HEADS, BOUNDS, BOUNDS, 3, 3),
            r"ops.pack\(query, attention_mask\)",
        ),
        (
            "varlen_self_attention",
            (HEADS[:, :, None], BOUNDS, 3),
            r"ops.pack\(states, attention_mask\)",
        ),
    ],
)
def test_batches_of_the_other_form_are_told_where_to_go(function, arguments, remedy):
    with pytest.raises(ValueError, match=remedy):
        getattr(ops, function)(*arguments)


def test_what_is_no_tensor_is_named():
    array, weight = np.zeros((N, S, D), np.float32), torch.zeros(V, D)
    with pytest.raises(ValueError, match="hidden is a ndarray: make a tensor"):
        ops.splade_head(array, weight, attention_mask=torch.ones(N, S))
    with pytest.raises(ValueError, match="queries is a list: make a tensor"):
        ops.maxsim([[1.0]], torch.zeros(N, S, E))
    hidden, bounds = torch.zeros(N, D), torch.arange(N + 1)
    padded, packed = torch.zeros(N, S, E), torch.zeros(N, E)
    for name, kind, call in (
        ("weight", "NoneType", lambda: ops.splade_head(hidden, None, None, bounds)),
        ("bias", "float", lambda: ops.splade_head(hidden, weight, 0.0, bounds)),
        ("cu_seqlens", "list", lambda: ops.splade_head_topk(hidden, weight, None, [0, N], k=1)),
        ("documents", "list", lambda: ops.maxsim(padded, padded.tolist())),
        ("documents", "NoneType", lambda: ops.maxsim(padded, documents=None)),
        ("document_mask", "list", lambda: ops.maxsim(padded, padded, document_mask=[[1]])),
        ("query_cu_seqlens", "list", lambda: ops.maxsim_varlen(packed, packed, [0, N], bounds)),
    ):
        with pytest.raises(ValueError, match=f"^{name} is a {kind}: make a tensor"):
            call()


def test_true_is_no_number():
    hidden, weight, bounds = torch.zeros(N, D), torch.zeros(V, D), torch.arange(N + 1)
    packed = torch.zeros(N, E)
    for call in (
        lambda: ops.splade_head_topk(hidden, weight, None, bounds, k=True),
        lambda: ops.splade_head(hidden, weight, None, bounds, token_topk=True),
        lambda: ops.maxsim_topk(packed, packed, bounds, bounds, True),
    ):
        with pytest.raises(ValueError, match="must be a whole number"):
            call()


def test_a_mask_that_is_added_to_scores_is_refused():
    with pytest.raises(ValueError, match="query_mask must hold booleans or integers"):
        ops.maxsim(PADDED, PADDED, torch.zeros(2, 3))


def test_the_example_of_the_module_runs():
    hidden, attention_mask = torch.randn(N, S, D), torch.tensor(MASKS["right"])
    weight, bias = torch.randn(V, D), torch.randn(V)
    tokens = ops.pack(hidden, attention_mask)
    reps = ops.splade_head(tokens.values, weight, bias, tokens.cu_seqlens)
    assert torch.equal(reps, ops.splade_head(hidden, weight, bias, attention_mask=attention_mask))
    expected = splade_head_reference(tokens.values, weight, bias, tokens.cu_seqlens)
    torch.testing.assert_close(reps, expected)


@pytest.mark.parametrize("module", ["sparton.ops", "sparton.integrations.pylate"])
def test_they_import_torch_alone(module):
    """Triton is imported with the first tensor on a GPU: a CPU has no need of it."""
    others = ("transformers", "hydra", "omegaconf", "datasets", "pandas", "pyarrow", "triton")
    code = (
        f"import sys, torch; before = set(sys.modules); import {module};"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        f"print(sorted(new & {set(others)!r}), 'sparton' in new)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[] True\n", result.stderr


@pytest.mark.gpu
def test_nothing_but_packing_without_a_total_waits_for_the_device():
    mask = torch.tensor(MASKS["holes"], device="cuda")
    hidden, weight = torch.randn(N, S, 16, device="cuda"), torch.randn(V, 16, device="cuda")
    tokens = ops.pack(hidden, mask)
    ops.splade_head(tokens.values, weight, None, tokens.cu_seqlens)  # compiled, tuned
    with nothing_waits():
        tokens = ops.pack(hidden, mask, total=len(tokens.values))
        ops.unpack(tokens)
        ops.splade_head(tokens.values, weight, None, tokens.cu_seqlens)
        with pytest.raises(RuntimeError, match="synchroniz"):
            ops.pack(hidden, mask)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_a_search_for_the_fastest_kernel_needs_a_gpu():
    for search in (ops.tune_splade_head, ops.tune_maxsim):
        with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
            search(8, 16, 4)
