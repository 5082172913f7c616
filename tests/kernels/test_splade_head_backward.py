"""How the backward of the SPLADE head cuts its work: slabs, shares, buckets and slices.

N sequences, T packed tokens, D hidden, V vocabulary. Representations and winners are drawn at
random, so that every kind of list occurs without a forward.
"""

from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sparton.kernels.segment_max import backward_plan
from sparton.kernels.segment_max.backward import segment_max_backward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.ordering import vocabulary_rows
from sparton.kernels.segment_max.token_lists import plan_token_lists
from tests.kernels.problems import DTYPES, error

CUT = BackwardConfig(chunk=32, share=8, block_e=2, block_t=2)
LENGTHS = [5, 0, 17, 64, 1, 0, 33, 0]


class Case(NamedTuple):
    grad: Tensor
    reps: Tensor
    argmax: Tensor
    hidden: Tensor
    weight: Tensor
    cu_seqlens: Tensor


def make_case(
    lengths: list[int],
    V: int,
    D: int,
    device: torch.device,
    *,
    active: float = 0.5,
    hot: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A share ``active`` of the entries is active; the second token wins a share ``hot`` of these,
    the others are spread evenly."""
    generator = torch.Generator().manual_seed(len(lengths) * V + D)
    shape, size = (len(lengths), V), torch.tensor(lengths)[:, None]
    draw = [torch.rand(shape, generator=generator) for _ in range(4)]
    reps = torch.where((draw[0] < active) & (size > 0), 3 * draw[1] + 1e-3, 0.0)
    position = torch.where(draw[3] < hot, 1, (draw[2] * size).int()).clamp_max(size - 1)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    argmax = torch.where(reps > 0, bounds[:-1, None] + position, -1).int()
    rows = (torch.randn(n, D, generator=generator).to(dtype) for n in (sum(lengths), V))
    grad = torch.randn(shape, generator=generator)
    return Case(*(x.to(device) for x in (grad, reps, argmax, *rows, bounds)))


def truth(case: Case, activation: str = "relu") -> tuple[Tensor, Tensor, Tensor]:
    """float64 gradients through a dense matrix of the gradients of all logits."""
    reps = case.reps.double()
    exponent = reps + torch.expm1(reps) if activation == "log1p_relu" else reps
    g = case.grad.double() * torch.exp(-exponent) * (reps > 0)
    logits = g.new_zeros(case.hidden.shape[0], g.shape[1])
    if logits.numel():
        columns = torch.arange(g.shape[1], device=g.device).expand_as(g)
        logits.index_put_((case.argmax.clamp_min(0).long(), columns), g, accumulate=True)
    return logits @ case.weight.double(), logits.T @ case.hidden.double(), g.sum(0)


def run(case: Case, config: BackwardConfig = CUT, **options) -> tuple[Tensor | None, ...]:
    return segment_max_backward(*case, **{"bias_dtype": torch.float32, "config": config, **options})


def assert_close(actual: tuple[Tensor | None, ...], exact: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, exact, strict=True):
        assert a is not None
        allowed = torch.finfo(a.dtype).eps / 2 + 1e-5
        assert error(a, b) <= allowed < error(a * 1.01, b) or not b.any()
        assert b.any() or not a.any()


@pytest.mark.quick(2)
@pytest.mark.parametrize("activation", ["relu", pytest.param("log1p_relu", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("active", "hot", "dtype"),
    [
        (1.0, 0.0, torch.float32),
        (1.0, 1.0, torch.float32),
        *((0.5, 0.6, dtype) for dtype in DTYPES),
        (0.02, 0.0, torch.float32),
        (0.0, 0.0, torch.float16),
    ],
)
def test_gradients_against_float64(active, hot, dtype, activation, device):
    case = make_case(LENGTHS, 83, 40, device, active=active, hot=hot, dtype=dtype)
    assert_close(run(case, activation=activation), truth(case, activation))


@pytest.mark.quick(1)
@pytest.mark.parametrize("D", [1, 31, 64, 130, 256])
def test_slices_of_the_hidden_units(D, device):
    case = make_case([9, 3], 37, D, device, dtype=torch.float16)
    for slice_bytes in (0, 2**30):
        assert_close(run(case, CUT._replace(slice_bytes=slice_bytes)), truth(case))


def test_narrow_slices_only_where_wide_ones_leave_the_cache():
    config = BackwardConfig(slice_bytes=2**20)
    widths = {
        (rows, D, dtype): backward_plan._cut_units(rows, D, dtype.itemsize, config)[1]
        for rows, D, dtype in (
            (2048, 768, torch.float16),
            (2049, 768, torch.float16),
            (9000, 768, torch.float16),
            (2048, 384, torch.float16),
            (2048, 768, torch.float32),
        )
    }
    assert [(cut["BLOCK_D"], cut["LANES"]) for cut in widths.values()] == [
        (256, 1), (128, 2), (64, 4), (128, 2), (128, 1),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("hot", [0.0, 0.7])
def test_slabs_of_any_size_give_the_same_bits(hot, device):
    """Whether the lists by token lie in the workspace or in the memory of the weight's gradient."""
    case = make_case(LENGTHS, 51, 24, device, hot=hot, dtype=torch.float16)
    expected = run(case)
    assert_close(expected, truth(case))
    for workspace in (0, 6000):
        config = CUT._replace(workspace=workspace)
        actual = run(case, config)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        dhidden, _, _ = run(case, config, need_weight=False)
        assert torch.equal(dhidden, expected[0])


@pytest.mark.parametrize(("N", "V", "D"), [(320, 30522, 768), (32, 250_002, 768), (9, 100, 16)])
@pytest.mark.parametrize("lent", [False, True])
def test_the_lists_fill_their_workspace(N, V, D, lent):
    """Or the memory that is lent, if that is larger."""
    config, dweight = BackwardConfig(), 2 * V * D
    lists = plan_token_lists(
        N, V, D, chunk=config.chunk, share=config.share, buckets=config.buckets,
        workspace=config.workspace, lent=dweight if lent else 0,
    )  # fmt: skip
    held = lists.rows * lists.size
    assert lists.lent == (lent and dweight > config.workspace)
    room = dweight if lists.lent else config.workspace
    assert held <= room
    assert lists.rows == N or held > 0.7 * room

    R = vocabulary_rows(N, V, config.workspace)
    held = R * (8 * N + 4)
    assert held <= config.workspace
    assert R == V or held > 0.7 * config.workspace


@pytest.mark.parametrize(
    ("T", "N", "longest", "buckets"),
    [
        (320 * 512, 320, None, 512),
        (320 * 1000, 320, None, 1024),
        (87_000, 1024, None, 512),
        (34 * 8, 8, None, 256),
        (3, 1, None, 32),
        (300 * 128, 128, 300, 512),
        (8192, 2, 4096, 1024),
        (0, 5, 0, 32),
    ],
)
def test_buckets_follow_the_lengths(T, N, longest, buckets):
    assert backward_plan._num_buckets(T, N, longest, 1024) == buckets


@pytest.mark.gpu
@pytest.mark.parametrize("active", [1.0, 0.01])
def test_peak_memory_beyond_the_results(active, device):
    case = make_case([100] * 64, 30522, 384, device, active=active, dtype=torch.bfloat16)
    run(case, BackwardConfig())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run(case, BackwardConfig())
    extra = torch.cuda.max_memory_allocated() - before
    assert extra - sum(x.numel() * x.element_size() for x in results) <= 2**24


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [32, 64])
@pytest.mark.parametrize("hot", [0.0, 0.6])
def test_long_sequences_share_buckets(hot, buckets, device):
    """64 tokens are two per bucket or one, 150 tokens 8 or 4; hot tokens are not split there."""
    case = make_case([64, 20, 150, 0, 33], 70, 24, device, active=0.9, hot=hot)
    assert_close(run(case, CUT._replace(buckets=buckets)), truth(case))


@pytest.mark.quick(1)
@pytest.mark.parametrize("share", [1, 4, 2**10])
def test_one_token_wins_everything(share, device):
    case = make_case([6, 9, 1], 101, 24, device, active=1.0, hot=1.0)
    assert_close(run(case, CUT._replace(share=share)), truth(case))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_every_size_of_sort(chunk, device):
    """Chunks with many, few and no active entries, in order and in part."""
    case = make_case([40, 7], 200, 24, device, active=1.0)
    case.reps[0, 16:40] = 0
    case.reps[1, torch.arange(200, device=device) % 16 != 3] = 0
    assert_close(run(case, CUT._replace(chunk=chunk)), truth(case))


def test_a_lost_entry_is_noticed(device):
    """Negative control: one entry of a hundred in one sequence."""
    case = make_case(LENGTHS, 83, 40, device, dtype=torch.float16)
    exact = truth(case)
    first = case.reps[3].nonzero()[0]
    case.reps[3, first] = 0
    lost = run(case)
    for i in range(3):
        mixed = tuple(lost[j] if i == j else exact[j].to(lost[j].dtype) for j in range(3))
        with pytest.raises(AssertionError):
            assert_close(mixed, exact)


@pytest.mark.parametrize(
    "unwanted", [{"need_hidden": False}, {"need_weight": False}, {"bias_dtype": None}]
)
def test_unwanted_gradients_cost_nothing(unwanted, device, monkeypatch):
    """And leave the bits of the others alone."""
    case = make_case([5, 3], 37, 24, device)
    expected = run(case)
    unused = {
        "need_hidden": ["_plan_dhidden"],
        "need_weight": ["_plan_dweight"],
        "bias_dtype": ["_plan_dbias"],
    }
    for name in unused[next(iter(unwanted))]:
        monkeypatch.setattr(backward_plan, name, None)
    for a, b in zip(run(case, **unwanted), expected, strict=True):
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bias_gradient_comes_in_its_dtype(dtype, device):
    case = make_case([5, 3], 37, 24, device)
    dbias = run(case, bias_dtype=dtype)[2]
    assert dbias is not None
    assert dbias.dtype == dtype
    assert error(dbias, truth(case)[2]) < torch.finfo(dtype).eps


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_representations_that_are_nan_have_no_gradient(activation, device):
    case = make_case(LENGTHS, 37, 24, device)
    case.reps[2, 5:9] = case.reps[4] = float("nan")
    case.argmax[case.reps.isnan()] = -1
    expected = truth(case._replace(reps=case.reps.nan_to_num(nan=0.0)), activation)
    assert_close(run(case, activation=activation), expected)


@pytest.mark.slow
@pytest.mark.parametrize("stride", ["transposed", "expanded", "half"])
def test_any_upstream_gradient(stride, device):
    case = make_case(LENGTHS, 83, 24, device)
    grad = {
        "transposed": case.grad.T.contiguous().T,
        "expanded": case.grad[:1, :1].expand_as(case.grad),
        "half": case.grad.half(),
    }[stride]
    assert stride == "half" or not grad.is_contiguous()
    other = case._replace(grad=grad)
    assert_close(run(other), truth(other))


def test_weights_that_no_entry_reads_do_not_matter(device):
    """Slots of a list beyond its end read nothing, not even to multiply it with 0."""
    case = make_case([5, 3], 37, 24, device, active=0.3)
    case.reps[:, 0] = 0
    case.argmax[case.argmax == 0] = 1
    expected = run(case)
    case.weight[0] = case.hidden[0] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(run(case), expected, strict=True))
