"""What is searched for MaxSim: right results pass, wrong ones do not, winners are used."""

import re

import pytest
import torch

from sparton.kernels.maxsim import cross, maxsim_varlen, streaming, streaming_backward, tuning
from sparton.kernels.maxsim.cross import cross_backward, cross_forward
from sparton.kernels.maxsim.tuning import (
    example_operands,
    maxsim_problems,
    one_query,
    own_documents,
)
from sparton.kernels.segment_max import forward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.portable import PortableConfig
from sparton.kernels.tuning import tune

SMALL = PortableConfig(False, 16, 16, 16, num_warps=4, num_stages=2, segment=16, group_tokens=64)


@pytest.fixture(autouse=True)
def few_queries(own_cache, monkeypatch):
    monkeypatch.setattr(forward, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(tuning, "BATCH", 5)
    monkeypatch.setattr(tuning, "OWN", 2)


@pytest.fixture
def problems(device, monkeypatch):
    """By kernel, with few configurations: the interpreter takes its time."""
    monkeypatch.setattr(tuning, "forward_candidates", lambda *_: [SMALL, SMALL._replace(band=8)])
    options = {"dtype": torch.float32, "tokens": 60, "device": device.type}
    found = list(maxsim_problems(16, 3, 9, **options))
    return {problem.regime.kernel: problem for problem in found}


KERNELS = (
    "maxsim_product",
    "maxsim_product_backward",
    "maxsim_own_forward",
    "maxsim_shared_forward",
    "maxsim_own_lowmem",
    "maxsim_own_unified",
)


def test_defaults_and_their_neighbours_are_right(problems):
    assert tuple(problems) == KERNELS
    for problem in problems.values():
        assert len(problem.configs) >= 2
        for config in problem.configs[:2]:
            assert problem.fault(config) is None, (problem.regime.kernel, config)


def test_the_problems_are_those_of_a_batch_of_own_documents_and_of_one_query(device):
    batch = example_operands(16, 3, 9, torch.float32, 60, device.type)
    assert batch.scores_shape == (5, 6)
    assert 0 in batch.document_cu_seqlens.diff()
    assert own_documents(batch).scores_shape == (3, 2)
    assert one_query(batch).scores_shape == (1, 6)


def scaled(scores, winners):
    return scores * 1.01, winners


def another_winner(scores, winners):
    if winners is not None:
        winners[0, 0] += 1 if winners[0, 0] == 0 else -1
    return scores, winners


def foreign_winner(scores, winners):
    if winners is not None:
        winners[0, 0] = winners.max()
    return scores, winners


def unwritten(scores, winners):
    scores[-1, -1] = float("nan")
    return scores, winners


def without_winners(scores, winners):
    return (scores if winners is not None else scores * 0), winners


@pytest.mark.parametrize("kernel", ["maxsim_product", "maxsim_own_forward"])
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (scaled, "scores are wrong by up to"),
        (another_winner, "winners miss the maximum"),
        (foreign_winner, "1 of .* winners lie outside"),
        (unwritten, "not written"),
        (without_winners, "scores are wrong"),
        (lambda scores, winners: (scores[:, 1:], winners), "scores are"),
        (lambda scores, winners: (scores, None if winners is None else winners[1:]), "winners are"),
    ],
)
def test_wrong_scores_and_winners_are_refused(kernel, change, fault, device):
    batch = example_operands(16, 3, 9, torch.float32, 60, device.type)
    score, operands, config = cross_forward, batch, SMALL
    if kernel == "maxsim_own_forward":
        score, operands, config = streaming.streaming_forward, own_documents(batch), None
    right = tuning._forward(None, score, operands, [])
    assert right.fault(config) is None
    wrong = tuning._forward(None, lambda *a, **k: change(*score(*a, **k)), operands, [])
    assert re.search(fault, wrong.fault(config))


def test_wrong_gradients_are_refused(device):
    batch = example_operands(16, 3, 9, torch.float32, 60, device.type)

    def damaged(*arguments, **options):
        dqueries, ddocuments = cross_backward(*arguments, **options)
        ddocuments[ddocuments.norm(dim=1).argmax()] = 0
        return dqueries, ddocuments

    for backward, fault in ((cross_backward, None), (damaged, "of gradient 1 are wrong")):
        problem = tuning._backward(None, backward, batch, cross_forward, [])
        found = problem.fault(BackwardConfig())
        assert found is None if fault is None else fault in found


@pytest.mark.slow
def test_a_launch_uses_the_winners_of_its_regime(problems, device, monkeypatch):
    """In the functions that everyone calls."""
    used = []

    def watch(module, name, kind):
        plan = getattr(module, name)

        def planned(*arguments):
            used.extend(x for x in arguments if isinstance(x, kind))
            return plan(*arguments)

        monkeypatch.setattr(module, name, planned)

    watch(cross, "_plan_equal_queries", PortableConfig)
    watch(streaming, "_plan", streaming.StreamingConfig)
    watch(streaming_backward, "_plan_ddocuments", streaming_backward.StreamingBackwardConfig)
    winners = {}
    for kernel, problem in problems.items():
        wanted = problem.configs[-1]
        chosen = problem._replace(configs=[problem.configs[0], wanted])
        times = iter((2.0, 1.0))
        trials = tune(chosen, timer=lambda run: run() and next(times))  # noqa: B023
        winners[kernel] = trials[0].config
        assert winners[kernel] == wanted
    batch = example_operands(16, 3, 9, torch.float32, 60, device.type)
    own = own_documents(batch)
    used.clear()
    cross_forward(batch, normalize=False, argmax=True)
    assert used == [winners["maxsim_product"]]
    used.clear()
    leaves = [x.clone().requires_grad_() for x in own[:2]]
    if device.type == "cuda":
        maxsim_varlen(*leaves, *own[2:4], pairing=2).sum().backward()
    else:  # CPU tensors do not reach the kernels by the public functions
        _, found = streaming.streaming_forward(own, normalize=False, argmax=True)
        grad = torch.ones(own.scores_shape)
        streaming_backward.streaming_backward_lowmem(grad, found, own, normalize=False)
    assert used == [winners["maxsim_own_forward"], winners["maxsim_own_lowmem"]]


@pytest.mark.gpu
def test_on_a_gpu_defaults_are_right():
    for problem in maxsim_problems(128, 32, 64, tokens=4096):
        assert problem.fault(problem.configs[0]) is None, problem.regime
