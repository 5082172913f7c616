"""The search for a configuration refuses what is wrong, however fast, and its winner is launched.

On a CPU the kernels run in Triton's interpreter and a fake clock times them.
"""

import re

import pytest
import torch

from sparton.kernels import tuned
from sparton.kernels.segment_max import backward, forward
from sparton.kernels.segment_max.backward_plan import BackwardConfig
from sparton.kernels.segment_max.forward import CONFIG_KINDS, segment_max_forward
from sparton.kernels.segment_max.portable import PortableConfig
from sparton.kernels.segment_max.tuning import FORWARD_CHANGES, regime
from sparton.kernels.splade_head.tuning import (
    backward_problem,
    example_operands,
    forward_problem,
    head_problems,
    launch_forward,
)
from sparton.kernels.tuned import (
    Winner,
    cache_file,
    read_winners,
    regime_of,
    tuned_configs,
    use_tuned_configs,
)
from sparton.kernels.tuning import cuda_milliseconds, neighbours, search, tune, wrong_gradients

pytestmark = pytest.mark.usefixtures("own_cache")
GOOD = PortableConfig(False, 16, 32, 16, num_warps=4, num_stages=2, segment=16, group_tokens=64)
OTHER = GOOD._replace(block_v=32)
THIRD = GOOD._replace(block_t=16)
TIMES = {GOOD: 3.0, OTHER: 2.0, THIRD: 4.0}


@pytest.fixture
def operands(device):
    return example_operands(24, 37, 9, torch.float32, 60, device.type)


def zeros(config, operands, argmax):
    shape = (operands.cu_seqlens.numel() - 1, operands.weight.shape[0])
    return torch.zeros(shape, device=operands.hidden.device), torch.full(
        shape, -1, dtype=torch.int32, device=operands.hidden.device
    )


def unwritten_tile(config, operands, argmax):
    """The last rows of the vocabulary are left as they were allocated."""
    reps, winners = launch_forward(GOOD, operands, argmax)
    result = torch.empty_like(reps)
    result[:, :-3] = reps[:, :-3]
    return result, winners


def wrong_without_winners(config, operands, argmax):
    reps, winners = launch_forward(GOOD, operands, argmax)
    return reps if argmax else torch.zeros_like(reps), winners


def changed(change):
    def launch(config, operands, _):
        reps, argmax = (x.clone() for x in launch_forward(GOOD, operands, True))
        return change(reps, argmax, operands.cu_seqlens)

    return launch


def another_token(reps, argmax, cu_seqlens):
    argmax[0, 0] = cu_seqlens[0] + (argmax[0, 0] + 1) % cu_seqlens[1]
    return reps, argmax


def foreign_token(reps, argmax, cu_seqlens):
    argmax[0, 0] = cu_seqlens[1]
    return reps, argmax


def one_value(reps, argmax, cu_seqlens):
    reps[0, 0] += 0.01
    return reps, argmax


def crash(config, operands, argmax):
    raise RuntimeError("PassManager::run failed")


class Clock:
    """Counts what it is asked to time; wrong results take no time at all."""

    def __init__(self, times):
        self.times, self.asked = times, []

    def __call__(self, run):
        run()
        self.asked.append(LAUNCHED[-1])
        return self.times.get(LAUNCHED[-1], 1e-6)


LAUNCHED = []


def launcher(wrong=None):
    """Launches ``GOOD`` and its relatives truly, and whatever else as ``wrong`` says."""

    def launch(config, operands, argmax):
        LAUNCHED.append(config)
        return (launch_forward if config in TIMES else wrong)(config, operands, argmax)

    return launch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (zeros, "representations are wrong by up to"),
        (unwritten_tile, "not written"),
        (wrong_without_winners, "wrong by up to"),
        (changed(one_value), "wrong by up to 0.01"),
        (changed(another_token), "winners miss the maximum"),
        (changed(foreign_token), "1 of .* winners lie outside"),
        (changed(lambda reps, argmax, _: (reps, argmax - 1)), "outside|miss"),
        (changed(lambda reps, argmax, _: (reps[1:], argmax)), "representations are"),
        (changed(lambda reps, argmax, _: (reps, argmax[:, 1:])), "winners are"),
        (crash, "RuntimeError: PassManager"),
    ],
)
def test_wrong_results_are_refused_at_any_speed(operands, wrong, fault):
    clock = Clock(TIMES)
    operands.bias[0] = 9.0  # the entry that the faults change is active
    problem = forward_problem(None, operands, [GOOD, "wrong", OTHER], launcher(wrong))
    trials = search(problem, timer=clock)
    assert [trial.config for trial in trials] == [GOOD, "wrong", OTHER]
    assert re.search(fault, trials[1].fault)
    assert trials[1].milliseconds == float("inf")
    assert [trial.fault for trial in trials if trial.config != "wrong"] == [None, None]
    assert clock.asked == [GOOD, OTHER], "nothing is timed before it was verified"


def tuning(device, configs, *, wrong=None, times=TIMES, mean_length=9, tokens=60):
    operands = example_operands(24, 37, mean_length, torch.float32, tokens, device.type)
    own = regime("splade_head", operands.hidden, operands.weight, mean_length)
    problem = forward_problem(own, operands, configs, launcher(wrong))
    return tune(problem, timer=Clock(times))


def regime_at(device, mean_length=9):
    return regime_of("splade_head", device, torch.float32, 24, 37, mean_length)


def winner(config):
    return Winner(type(config).__name__, config._asdict())


def test_the_fastest_right_configuration_wins_and_is_remembered(device):
    trials = tuning(device, ["wrong", GOOD, OTHER, THIRD], wrong=zeros)
    assert [trial.config for trial in trials] == [OTHER, GOOD, THIRD, "wrong"]
    regime = regime_at(device)
    assert tuned_configs() == read_winners() == {regime: winner(OTHER)}
    assert tuned.tuned(CONFIG_KINDS, regime) == OTHER
    assert tuned.tuned((BackwardConfig,), regime) is None
    assert regime[4:] == ("float32", 24, 64, 8)
    tuning(device, [GOOD])
    tuning(device, [THIRD], mean_length=30)
    longer = regime._replace(mean_length=32)
    assert read_winners() == {regime: winner(GOOD), longer: winner(THIRD)}
    assert [path.name for path in cache_file().parent.iterdir()] == ["tuned.json"]


def test_nothing_is_remembered_where_nothing_is_right(device):
    with pytest.raises(RuntimeError, match=r"wrong: representations are wrong"):
        tuning(device, ["wrong"], wrong=zeros)
    with pytest.raises(RuntimeError, match="none was given"):
        tuning(device, [])
    assert not cache_file().exists()
    assert not tuned_configs()


def test_poison_is_gone_after_the_search(operands):
    problem = forward_problem(None, operands, [GOOD, "wrong"], launcher(crash))
    search(problem, timer=Clock(TIMES))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_launch_uses_the_winner_of_its_regime(device, operands, monkeypatch):
    """Whatever the number of sequences; another mean length has its own."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def selected(num_sequences, tokens):
        hidden = torch.zeros(tokens, 24, device=device)
        return forward.select_config(hidden, operands.weight, num_sequences)

    default = forward.FULL_PRECISION[0]
    assert selected(6, 60) == default
    tuning(device, [GOOD])
    assert selected(6, 60) == selected(600, 6000) == selected(7, 61) == GOOD
    assert selected(60, 6000) == default
    plain = torch.zeros(60, 24, device=device)
    assert forward.select_config(plain, operands.weight, 6, activation="log1p_relu") == default
    tuned_configs.cache_clear()
    assert selected(6, 60) == default, "a new process asks for earlier winners explicitly"
    use_tuned_configs()
    assert selected(6, 60) == GOOD
    tuned_configs.cache_clear()
    monkeypatch.setenv("SPARTON_TUNED", "1")
    assert selected(6, 60) == GOOD
    cache_file().unlink()
    assert selected(6, 60) == GOOD, "the file is read once"


def test_a_winner_that_cannot_address_the_operands_is_passed_over(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    odd = torch.zeros(60, 23, device=device)
    regime = regime_of("splade_head", device, torch.float32, 23, 60, 10)
    tuned_configs()[regime] = winner(GOOD._replace(descriptors=True))
    assert forward.select_config(odd, odd, 6) == forward.FULL_PRECISION[0]


def test_rows_that_descriptors_cannot_address(device, monkeypatch):
    """Rows of 200 bytes, one to a sequence: their strides say nothing of where they lie."""
    monkeypatch.setattr(forward, "_capability", lambda device: (9, 0))
    long = torch.zeros(1, 40, 104, dtype=torch.float16, device=device).transpose(0, 1)
    short = torch.zeros(1, 40, 100, dtype=torch.float16, device=device).transpose(0, 1)
    assert short.is_contiguous()
    assert short.stride(1) % 8 == 0
    assert forward.select_config(long, long, 40, activation="none").descriptors
    for operands in ((short, short), (short.view(40, 100), short)):
        config = forward.select_config(*operands, 40, activation="none")
        assert isinstance(config, PortableConfig)
        assert not config.descriptors
    cu_seqlens = torch.arange(41, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="16-byte aligned rows"):
        forward.forward_of_checked(
            short, short, None, cu_seqlens, argmax=False, activation="none",
            config=GOOD._replace(descriptors=True),
        )  # fmt: skip


def test_neighbours_differ_in_one_setting():
    found = neighbours(GOOD, FORWARD_CHANGES)
    assert found[0] == GOOD
    assert len(set(found)) == len(found) > 8
    for near in found[1:]:
        assert sum(a != b for a, b in zip(near, GOOD, strict=True)) == 1


def test_gradients_may_differ_by_their_rounding_alone():
    truth = torch.linspace(-3, 3, 99)
    rounded = truth.bfloat16()
    assert wrong_gradients([truth], [rounded]) is None
    for change, fault in (
        (lambda x: x.index_fill(0, torch.tensor(3), float("nan")), "1 of 99 .* not written"),
        (lambda x: x.index_fill(0, torch.tensor(3), 0.0), "1 of 99 elements of gradient 0 are"),
        (lambda x: x * 1.02, "wrong, by up to 0.0"),
        (lambda x: x[1:], "gradient 0 is missing, or not"),
        (lambda x: None, "gradient 0 is missing"),
    ):
        assert re.search(fault, wrong_gradients([truth], [change(rounded)]))


@pytest.mark.slow
def test_a_backward_is_verified_and_its_winner_launched(device, monkeypatch):
    """A configuration that leaves a gradient out, or adds where it should not, is refused."""
    monkeypatch.setattr(forward, "_capability", lambda device: (9, 0))
    operands = example_operands(24, 37, 9, torch.float32, 60, device.type)
    tokens, sequences = len(operands.hidden), len(operands.cu_seqlens) - 1
    own = regime("splade_head", operands.hidden, operands.weight, tokens / sequences)
    problem = backward_problem(own, operands)
    default, *others = problem.configs
    assert default == BackwardConfig()
    assert problem.regime.kernel == "splade_head_backward"
    chosen = others[0]
    assert [problem.fault(config) for config in (default, chosen)] == [None, None]

    def damaged(*arguments, **options):
        dhidden, dweight, dbias = backward.segment_max_backward(*arguments, **options)
        dweight *= 1.01
        return dhidden, dweight, dbias

    with monkeypatch.context() as patch:
        patch.setattr("sparton.kernels.splade_head.tuning.segment_max_backward", damaged)
        assert "elements of gradient 1 are wrong" in problem.fault(default)
    launched = []
    plan = backward.plan_backward
    monkeypatch.setattr(
        backward, "plan_backward", lambda sizes: launched.append(sizes.config) or plan(sizes)
    )
    hidden, weight, _, cu_seqlens = operands
    reps, argmax = launch_forward(GOOD, operands, True)

    def run():
        backward.segment_max_backward(
            reps, reps, argmax, hidden, weight, cu_seqlens, bias_dtype=None
        )
        return launched[-1]

    assert run() == default
    tuned.write_winner(problem.regime, chosen, 1.0)
    assert run() == chosen


@pytest.mark.gpu
def test_a_search_on_a_gpu_beats_no_default_by_being_wrong():
    for problem in head_problems(384, 3001, 64, tokens=4096):
        trials = tune(problem)
        assert all(trial.fault is None for trial in trials[:3])
    operands = example_operands(384, 3001, 64, torch.bfloat16, 4096, "cuda")
    fastest = segment_max_forward(*operands)[0]
    listed = segment_max_forward(*operands, config=forward.PORTABLE[0])[0]
    torch.testing.assert_close(fastest, listed, rtol=1e-4, atol=1e-5)
    assert cuda_milliseconds(lambda: segment_max_forward(*operands)) > 0
