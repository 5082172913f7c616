"""Maxima over the k largest terms of each token: the fused head on this device, and the kernels."""

from itertools import pairwise

import pytest
import torch

from sparton.kernels.splade_head import HeadMemory, function, splade_head, token_topk
from sparton.kernels.splade_head.token_topk import first_maxima, largest_of_rows
from sparton.kernels.splade_head.token_topk_kernels import largest_of_logits
from tests.kernels.problems import error, make_problem, upstream_for

LENGTHS = [5, 0, 17, 64, 1, 3]
V, D = 700, 8


def reference(hidden, weight, bias, cu_seqlens, k, activation="relu"):
    """Row by row in the dtype of the operands, by a stable sort."""
    rows = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        best = hidden.new_zeros(weight.shape[0])
        for state in hidden[start:stop]:
            logits = state @ weight.T + (0 if bias is None else bias)
            value, term = logits.relu().sort(descending=True, stable=True)
            kept = torch.zeros_like(best).scatter(0, term[:k], value[:k])
            best = torch.where(kept > best, kept, best)
        values = best.log1p()
        rows.append(values.log1p() if activation == "log1p_relu" else values)
    return torch.stack(rows)


def with_gradients(call, problem, upstream, dtype):
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in problem[:3]]
    reps = call(*leaves, problem.cu_seqlens)
    wanted = [x for x in leaves if x is not None]
    return reps.detach(), *torch.autograd.grad(reps, wanted, upstream.to(reps.dtype))


@pytest.mark.parametrize("k", [1, 12, 300])
@pytest.mark.parametrize(("bias", "activation"), [(1.0, "relu"), (None, "log1p_relu")])
def test_near_float64(k, bias, activation, device, monkeypatch):
    """In tiles of seven tokens; as they are k = 12 looks at groups and k = 300 sorts keys."""
    monkeypatch.setattr(token_topk, "LOGITS_AT_ONCE", dict.fromkeys(("cpu", "cuda"), 7 * V))
    problem = make_problem(LENGTHS, V, D, device, bias=bias)
    upstream = upstream_for(problem)

    def fused(*operands):
        return splade_head(*operands, token_topk=k, activation=activation)

    def true(*operands, k=k):
        return reference(*operands, k, activation)

    actual = with_gradients(fused, problem, upstream, torch.float32)
    truth = with_gradients(true, problem, upstream, torch.float64)
    assert actual[0].dtype == torch.float32
    one_less = with_gradients(lambda *x: true(*x, k=k - 1), problem, upstream, torch.float64)
    for a, b, other in zip(actual, truth, one_less, strict=True):
        assert error(a, b) < 1e-5 < error(a, other)


def test_gradients_are_finite_differences():
    """In float64, at entries that stay where they are."""
    problem = make_problem([3, 4], 90, D, torch.device("cpu"), bias=-1.0)
    operands = [x.double() for x in problem[:3]]
    upstream = upstream_for(problem).double()

    def value(*operands):
        return float((reference(*operands, problem.cu_seqlens, 5) * upstream).sum())

    def fused(*operands):
        return splade_head(*operands, token_topk=5)

    gradients = with_gradients(fused, problem, upstream, torch.float64)[1:]
    generator = torch.Generator().manual_seed(11)
    for place, gradient in enumerate(gradients):
        step = torch.randn(gradient.shape, generator=generator, dtype=torch.float64) * 1e-6
        ahead, behind = (
            value(*(x + sign * step if i == place else x for i, x in enumerate(operands)))
            for sign in (1, -1)
        )
        assert (ahead - behind) / 2 == pytest.approx(float((gradient * step).sum()), rel=1e-4)
        assert (ahead - behind) / 2 != pytest.approx(
            1.01 * float((gradient * step).sum()), rel=1e-4
        )


def test_all_terms_are_the_plain_head(device):
    problem = make_problem(LENGTHS, V, D, device)
    plain = splade_head(*problem)
    torch.testing.assert_close(splade_head(*problem, token_topk=V + 5), plain)
    assert not torch.allclose(splade_head(*problem, token_topk=3), plain)


def ties(T, V, device, dtype=torch.float32):
    """Few different values, among them zeros, infinity and NaN."""
    generator = torch.Generator().manual_seed(T * V)
    values = torch.randint(0, 4, (T, V), generator=generator).to(device, dtype)
    values[0, V // 2], values[-1, V // 3] = float("inf"), float("nan")
    values[T // 2] = 0
    return values


@pytest.mark.parametrize(("V", "k"), [(1, 1), (63, 2), (64, 1), (65, 65), (700, 3), (700, 12)])
def test_equal_values_go_by_term(V, k, device):
    values = ties(5, V, device)
    best, terms = largest_of_rows(values, k)
    expected = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(terms, expected.indices[:, :k])
    assert torch.equal(best.nan_to_num(-1), expected.values[:, :k].nan_to_num(-1))


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("V", "k"), [(1, 1), (63, 2), (65, 65), (700, 3), (3000, 12)])
def test_the_kernels_are_the_torch_version_to_the_bit(V, k, bias, device):
    logits = ties(5, V, device) - 1
    shift = None if bias is None else ties(1, V, device)[0].nan_to_num(7, 7).sub(1).to(bias)
    values = torch.empty(5, k, device=device)
    terms = torch.empty(5, k, dtype=torch.int64, device=device)
    largest_of_logits(logits, shift, values, terms)
    moved = logits if shift is None else logits + shift.float()
    expected = largest_of_rows(moved.relu(), k)
    assert torch.equal(values.nan_to_num(-1), expected[0].nan_to_num(-1))
    assert torch.equal(terms, expected[1])


def test_first_maxima_by_hand(device):
    values = torch.tensor([2.0, 3, 3, 0, 9, float("nan"), 9], device=device)
    places = torch.tensor([4, 1, 1, 0, 2, 2, 2], device=device)
    best, entries = first_maxima(values, places, 6)
    assert best.nan_to_num(-1).tolist() == [0, 3, -1, 0, 2, 0]
    assert entries.tolist() == [3, 1, 5, 7, 0, 7]
    assert first_maxima(values, places, 6, first=False)[1].numel() == 0


def test_the_first_of_equal_tokens_gets_the_gradient(device):
    hidden = torch.ones(3, 2, device=device, requires_grad=True)
    weight = torch.eye(2, device=device)
    bounds = torch.tensor([0, 3], dtype=torch.int32, device=device)
    reps = splade_head(hidden, weight, None, bounds, token_topk=1)
    assert reps.tolist() == [[pytest.approx(0.6931472), 0]]
    reps.sum().backward()
    assert hidden.grad.tolist() == [[0.5, 0], [0, 0], [0, 0]]


def test_a_memory_repeats_it(device):
    problem = make_problem(LENGTHS, V, D, device)
    upstream = upstream_for(problem)
    memory = HeadMemory()
    with torch.no_grad():
        first = splade_head(*problem, token_topk=2, memory=memory)
    memory.rewind()

    def again(*operands):
        return splade_head(*operands, token_topk=2, memory=memory)

    def anew(*operands):
        return splade_head(*operands, token_topk=2)

    repeated = with_gradients(again, problem, upstream, torch.float32)
    assert torch.equal(repeated[0], first)
    for a, b in zip(repeated, with_gradients(anew, problem, upstream, torch.float32), strict=True):
        assert torch.equal(a, b)


def test_it_compiles_to_one_graph(device):
    problem = make_problem(LENGTHS, V, D, device)
    upstream = upstream_for(problem)

    def fused(*operands):
        return splade_head(*operands, token_topk=4)

    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    expected = with_gradients(fused, problem, upstream, torch.float32)
    for a, b in zip(
        with_gradients(compiled, problem, upstream, torch.float32), expected, strict=True
    ):
        assert torch.equal(a, b)


def test_operators_are_what_they_say():
    problem = make_problem([3, 0, 4], 90, D, torch.device("cpu"))
    operands = [x.requires_grad_() for x in problem[:3]]
    arguments = (*operands, problem.cu_seqlens, "relu", 4, True)
    torch.library.opcheck(function._token_topk_head.registered, arguments)


def test_under_autocast(device):
    """A token's last terms may be others when logits are rounded, but its largest stay."""
    problem = make_problem(LENGTHS, V, D, device)
    exact, fewer = (splade_head(*problem, token_topk=k).double() for k in (12, 6))
    with torch.autocast(device.type, torch.bfloat16):
        reps = splade_head(*problem, token_topk=12)
    assert reps.dtype == torch.float32
    assert 1e-4 < error(reps, exact) < 0.1 < error(fewer, exact)
    torch.testing.assert_close(reps.amax(1).double(), exact.amax(1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("lengths", "V"), [([], 9), ([0, 0], 9), ([1], 1), ([2, 3], 1)])
def test_small_shapes(lengths, V, device):
    problem = make_problem(lengths, V, D, device, bias=1.0)
    hidden = problem.hidden.requires_grad_()
    reps = splade_head(*problem, token_topk=1)
    assert reps.shape == (len(lengths), V)
    reps.sum().backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("k", [0, -1, 2.5, "many"])
def test_it_is_a_number_of_terms(k, device):
    with pytest.raises(ValueError, match=f"token_topk must be a whole number.*got {k!r}"):
        splade_head(*make_problem([3], 9, D, device), token_topk=k)


@pytest.mark.parametrize("other", [{"pooling": "sum"}, {"fp8": True}])
def test_it_is_for_the_exact_maximum(other, device):
    with pytest.raises(ValueError, match=r"fp8 serves max|token_topk=3 for max pooling"):
        splade_head(*make_problem([3], 9, D, device), token_topk=3, **other)
