"""The SPLADE head's kernels against float64, on the GPU or in Triton's interpreter.

N sequences, T packed tokens, D hidden, V vocabulary.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparton.kernels.segment_max.backward import segment_max_backward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.forward import (
    FULL_PRECISION,
    HOPPER,
    PORTABLE,
    forward_configs,
    segment_max_forward,
)
from sparton.kernels.segment_max.hopper import HopperConfig
from sparton.kernels.segment_max.portable import PortableConfig
from sparton.kernels.splade_head import splade_head_reference
from sparton.kernels.splade_head.cpu import splade_head_backward_cpu, splade_head_forward_cpu
from tests.kernels.problems import (
    DTYPES,
    LENGTHS,
    SHAPES,
    SMALL,
    Problem,
    assert_close_to_truth,
    error,
    first_of,
    make_problem,
    upstream_for,
)

# The interpreter sorts slowly: short chunks. Small shares, so that tokens are split.
CUT = (
    BackwardConfig() if torch.cuda.is_available() else BackwardConfig(chunk=16, share=32, block_e=8)
)


def launch(
    problem: Problem,
    upstream: Tensor,
    *,
    config: PortableConfig | None = None,
    cut: BackwardConfig = CUT,
) -> tuple[Tensor, ...]:
    """Representations and gradients of the Triton kernels, and the argmax."""
    if config is None and not torch.cuda.is_available():
        config = SMALL
    reps, argmax = segment_max_forward(*problem, config=config)
    gradients = segment_max_backward(
        upstream, reps, argmax, problem.hidden, problem.weight, problem.cu_seqlens,
        bias_dtype=None if problem.bias is None else problem.bias.dtype, config=cut,
    )  # fmt: skip
    return reps, *(x for x in gradients if x is not None), argmax


def winners(problem: Problem) -> Tensor:
    """First token of the largest logit in float64, -1 for empty sequences."""
    logits = problem.hidden.double() @ problem.weight.double().T
    bounds = problem.cu_seqlens.tolist()
    rows = [
        logits[start:stop].argmax(0) + start
        if start < stop
        else logits.new_full(logits.shape[1:], -1)
        for start, stop in pairwise(bounds)
    ]
    return torch.stack(rows).int()


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize(("lengths", "V", "D", "bias"), SHAPES)
def test_values_and_gradients_against_float64(lengths, V, D, bias, dtype, device):
    problem = make_problem(lengths, V, D, device, dtype=dtype, bias=bias)
    upstream = upstream_for(problem)
    *results, argmax = launch(problem, upstream)
    assert results[0].dtype == torch.float32
    assert [x.dtype for x in results[1:3]] == [dtype, dtype]
    assert_close_to_truth(tuple(results), problem, upstream)
    assert torch.equal(argmax, winners(problem))


def test_the_tolerances_notice_small_faults(device):
    problem = make_problem(LENGTHS, 37, 24, device, dtype=torch.float16)
    upstream = upstream_for(problem)
    reps, dhidden, dweight, dbias, argmax = launch(problem, upstream)
    good = (reps, dhidden, dweight, dbias)
    dropped_tile = reps.clone()
    dropped_tile[3, :16] = 0
    begins, lengths = problem.cu_seqlens[:-1, None], problem.cu_seqlens.diff()[:, None]
    neighbour = begins + (argmax - begins + 1) % lengths.clamp_min(1)
    wrong_winner = segment_max_backward(
        upstream, reps, neighbour, problem.hidden, problem.weight, problem.cu_seqlens,
        bias_dtype=torch.float32, config=CUT,
    )  # fmt: skip
    for bad in (
        (dropped_tile, *good[1:]),
        *((*good[:i], good[i] * 1.01, *good[i + 1 :]) for i in range(4)),
        (reps, *wrong_winner),
    ):
        with pytest.raises(AssertionError):
            assert_close_to_truth(bad, problem, upstream)


@pytest.mark.parametrize("config", [*HOPPER, *PORTABLE, *FULL_PRECISION])
def test_every_configuration(config, device):
    """A tile that a configuration loses shows as zeros; all tiles are in use here."""
    if isinstance(config, HopperConfig) and device.type == "cpu":
        pytest.skip("Gluon has no interpreter")
    if config.descriptors and device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    dtype = torch.float32 if config in FULL_PRECISION else DTYPES[-1]
    lengths = [300, 20, 0, 256, 1, 90, 33]
    problem = make_problem(lengths, config.block_v + 3, 72, device, dtype=dtype)
    reps, argmax = segment_max_forward(*problem, config=config._replace(group_tokens=320))
    truth = splade_head_reference(*(x.double() for x in problem[:3]), problem.cu_seqlens)
    assert error(reps, truth) < 1e-5
    active = reps > 0
    assert (argmax == winners(problem))[active].double().mean() > 0.995
    assert active.double().mean() > 0.2


def test_the_defaults():
    assert forward_configs(torch.bfloat16, (9, 0)) == HOPPER + PORTABLE
    assert isinstance(HOPPER[0], HopperConfig)
    assert forward_configs(torch.bfloat16, (8, 0)) == PORTABLE
    assert forward_configs(torch.float32, (9, 0)) == FULL_PRECISION


def test_ties_go_to_the_first_token(device):
    problem = make_problem([40, 7, 90], 21, 16, device, dtype=torch.float16, bias=1.0)
    problem.hidden[:] = problem.hidden[0].sign()
    problem.weight.mul_(8).round_()  # sums are exact in any order
    reps, argmax = segment_max_forward(*problem, config=SMALL)
    active = reps > 0
    assert active.any()
    first = problem.cu_seqlens[:-1, None].expand(3, 21)
    assert torch.equal(argmax[active], first[active])
    _, on_cpu = splade_head_forward_cpu(*(x.cpu().float() for x in problem[:3]), problem[3].cpu())
    assert torch.equal(on_cpu, first.cpu())


def test_ties_between_two_places(device):
    """The same best token twice, at every distance: the first one wins."""
    problem = make_problem([64], 5, 16, device, bias=9.0)
    problem.hidden[:] = 0
    problem.weight.mul_(8).round_()  # sums are exact in any order
    expected = []
    sequences = []
    for first in range(0, 60, 7):
        sequence = problem.hidden.clone()
        sequence[first] = sequence[first + 1 + first // 4 :: 9] = problem.weight.sum(0)
        sequences.append(sequence)
        expected.append(first + 64 * len(expected))
    cu_seqlens = torch.arange(0, 64 * len(expected) + 1, 64, dtype=torch.int32, device=device)
    hidden = torch.cat(sequences)
    _, argmax = segment_max_forward(hidden, problem.weight, problem.bias, cu_seqlens, config=SMALL)
    positive = (problem.weight @ problem.weight.sum(0)) > 0
    assert positive.any()
    assert torch.equal(
        argmax[:, positive],
        torch.tensor(expected, device=device).int()[:, None].expand(-1, int(positive.sum())),
    )


def test_without_argmax_the_values_are_the_same(device):
    problem = make_problem(LENGTHS, 37, 24, device)
    reps, argmax = segment_max_forward(*problem, config=SMALL)
    alone, nothing = segment_max_forward(*problem, argmax=False, config=SMALL)
    assert torch.equal(alone, reps)
    assert nothing.numel() == 0 < argmax.numel()


class Int32Matrices(TorchDispatchMode):
    """Counts the results of operations that are int32 of a shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            matrix = isinstance(x, Tensor) and x.dtype == torch.int32
            self.count += matrix and tuple(x.shape) == self.shape
        return result


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_inference_allocates_no_tokens(pooling, device):
    problem = make_problem(LENGTHS, 37, 24, device)
    counts = []
    for argmax in (False, True):
        with Int32Matrices(len(LENGTHS), 37) as mode:
            segment_max_forward(*problem, argmax=argmax, pooling=pooling, config=SMALL)
        counts.append(mode.count > 0)
    with Int32Matrices(len(LENGTHS), 37) as mode:
        splade_head_forward_cpu(*(x.cpu() for x in problem), argmax=False)
    assert mode.count == 0
    assert counts == [False, pooling == "max"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(16, 1, 4), (16, 100, 16), (64, 3, 2)])
def test_hot_tokens_split_over_programs(cut, device):
    """One token wins everything, the next ones nothing; another sequence is ordinary."""
    problem = make_problem([6, 9], 53, 8, device, bias=20.0)
    problem.hidden[1:6] = problem.hidden[0]
    upstream = upstream_for(problem)
    reps, *gradients, argmax = launch(problem, upstream, cut=BackwardConfig(*cut))
    assert (argmax[0] == 0).all()
    assert_close_to_truth((reps, *gradients), problem, upstream)


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_no_tokens(lengths, device):
    problem = make_problem(lengths, 9, 8, device, bias=5.0)
    upstream = upstream_for(problem)
    reps, dhidden, dweight, dbias, argmax = launch(problem, upstream)
    assert reps.shape == argmax.shape == (len(lengths), 9)
    assert not reps.any()
    assert not any(x.any() for x in (dhidden, dweight, dbias))


@pytest.mark.slow
def test_bitwise_repeatable_and_blind_to_upstream_strides(device):
    problem = make_problem([5, 0, 21, 1], 37, 24, device, dtype=torch.float16)
    upstream = upstream_for(problem)
    strided = torch.stack((upstream, torch.full_like(upstream, float("nan"))), -1)[..., 0]
    assert not strided.is_contiguous()
    expected = launch(problem, upstream)
    for again in (upstream, strided):
        assert all(torch.equal(a, b) for a, b in zip(expected, launch(problem, again), strict=True))
    everywhere = torch.ones(1, 1, device=device).expand_as(upstream)
    assert_close_to_truth(launch(problem, everywhere)[:4], problem, everywhere)


def test_rows_of_nan_stay_visible(device):
    problem = make_problem([3, 4], 8, 8, device)
    problem.hidden[3:] = float("nan")
    reps, _ = segment_max_forward(*problem, config=SMALL)
    assert reps[0].isfinite().all()
    assert reps[1].isnan().all()
    problem.bias[2] = float("nan")
    reps, _ = segment_max_forward(*problem, config=SMALL)
    assert reps[:, 2].isnan().all()


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_only_wanted_gradients(wanted, device):
    problem = make_problem([5, 3], 9, 8, device)
    reps, argmax = segment_max_forward(*problem, config=SMALL)
    arguments = (upstream_for(problem), reps, argmax, *problem[:2], problem.cu_seqlens)
    needs = {
        "bias_dtype": torch.float32 if wanted == "bias" else None,
        "need_hidden": wanted == "hidden",
        "need_weight": wanted == "weight",
    }
    for gradients in (
        segment_max_backward(*arguments, **needs, config=CUT),
        splade_head_backward_cpu(*(x.cpu() for x in arguments), **needs),
    ):
        names = ("hidden", "weight", "bias")
        assert [n for n, x in zip(names, gradients, strict=True) if x is not None] == [wanted]


def test_nothing_to_look_at_needs_no_configuration():
    """Nor a GPU, by which one is chosen."""
    problem = make_problem([0, 0], 9, 8, "cpu")
    reps, argmax = segment_max_forward(*problem)
    assert not reps.any()
    assert (argmax == -1).all()


def test_launcher_refuses_what_it_cannot_do(device):
    problem = make_problem([5, 3], 9, 8, device)
    with pytest.raises(ValueError, match="float64"):
        segment_max_forward(*(x.double() for x in problem[:3]), problem.cu_seqlens, config=SMALL)
    narrow = Problem(problem.hidden[:, :5], problem.weight[:, :5], *problem[2:])
    with pytest.raises(ValueError, match="D = 5"):
        segment_max_forward(*narrow, config=SMALL._replace(descriptors=True))
    without = Problem(problem.hidden[:, :0], problem.weight[:, :0], *problem[2:])
    with pytest.raises(ValueError, match=r"same D > 0, got \(8, 0\) and \(9, 0\)"):
        segment_max_forward(*without, config=SMALL)
    reps, argmax = segment_max_forward(*problem, config=SMALL)
    with pytest.raises(ValueError, match=r"\(2, 9\).*\(1, 9\)"):
        segment_max_backward(
            reps, reps, argmax[:1], *problem[:2], problem.cu_seqlens, bias_dtype=None
        )
