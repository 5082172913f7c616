"""The study of heads: its cells, what its judge lets through and what it must not, its problems."""

from itertools import product

import pytest
import torch

from benchmarks.gate import passes
from benchmarks.head import encoders, judge, problems, suites
from benchmarks.head.heads import HEADS
from benchmarks.head.study import STUDY
from benchmarks.head.suites import SUITES, Cell, Shape
from benchmarks.study import Settings
from sparton.kernels.segment_max import forward
from sparton.kernels.segment_max.hopper import HopperConfig
from sparton.kernels.segment_max.portable import PortableConfig
from sparton.models.heads import EagerHead, SpartonHead, TiledHead

SETTINGS = Settings("cpu", 0.01, "", True, {})
SHAPE = Shape(((4, 3, 9), (3, 20, 40), (1, 1, 1)), 700, 32)


@pytest.mark.parametrize("suite", SUITES)
def test_suites_name_things_that_exist(suite):
    for cell in SUITES[suite]:
        assert cell.head in {*HEADS, suites.GEMM, suites.GEMM_AS_IS, suites.NO_HEAD}
        assert cell.mode in (*suites.MODES, suites.COUNTERS)
        assert cell.pattern in suites.PATTERNS
        assert cell.backbone in ("", "eager", "compiled")
        assert suites.shape_of(cell.shape).V


def test_shapes_are_read_from_their_names():
    assert suites.shape_of("3x17x101") == suites.Shape(((3, 17, 17),), 101)
    with pytest.raises(ValueError, match="3x17"):
        suites.shape_of("3x17")


@pytest.fixture(scope="module")
def judged():
    problem = problems.random_problem(SHAPE, "random", "cpu")
    truth, eager, _ = judge.make_truth(problem)
    return problem, truth, judge.allowance(eager)


def found(problem, change):
    """Errors of the fused head's results after a change."""
    outcome = [x.clone() for x in judge.gradients(SpartonHead(), problem)]
    change(problem, *outcome)
    return judge.results(problem, *outcome)


def nothing(problem, reps, dhidden, dweight, dbias):
    pass


def dropped_tile(problem, reps, dhidden, dweight, dbias):
    reps[3, 128:192] = 0


def scaled_gradients(problem, reps, dhidden, dweight, dbias):
    for gradient in (dhidden, dweight, dbias):
        gradient *= 1.03


def scaled_dhidden(problem, reps, dhidden, dweight, dbias):
    dhidden *= 1.03


def scaled_dweight(problem, reps, dhidden, dweight, dbias):
    dweight *= 1.03


def neighbouring_token(problem, reps, dhidden, dweight, dbias):
    dhidden.copy_(dhidden.roll(1, 0))


def zero_gradient(problem, reps, dhidden, dweight, dbias):
    dhidden.zero_()


def unwritten(problem, reps, dhidden, dweight, dbias):
    dbias[-1] = float("nan")


@pytest.mark.parametrize("name", ["eager", "tiled", "sparton_hybrid", "sparton", "sparton_fp8"])
@pytest.mark.parametrize("pattern", suites.PATTERNS)
def test_right_heads_pass(name, pattern):
    problem = problems.random_problem(SHAPE, pattern, "cpu")
    truth, eager, _ = judge.make_truth(problem)
    head = HEADS[name].build()
    errors = judge.errors(judge.results(problem, *judge.gradients(head, problem)), truth)
    assert passes(errors, judge.allowance(eager, *HEADS[name][1:])), errors


WRONG = [
    dropped_tile, scaled_gradients, scaled_dhidden, scaled_dweight, neighbouring_token, unwritten
]  # fmt: skip


@pytest.mark.parametrize("change", [nothing, *WRONG])
def test_wrong_results_do_not(judged, change):
    problem, truth, allowed = judged
    errors = judge.errors(found(problem, change), truth)
    assert passes(errors, allowed) == (change is nothing), errors


@pytest.mark.parametrize("name", ["tiled", "sparton_hybrid", "sparton_fp8"])
@pytest.mark.parametrize("change", [dropped_tile, neighbouring_token, zero_gradient, unwritten])
def test_nor_under_a_wider_allowance(judged, change, name):
    problem, truth, _ = judged
    _, eager, _ = judge.make_truth(problem)
    errors = judge.errors(found(problem, change), truth)
    assert not passes(errors, judge.allowance(eager, *HEADS[name][1:])), errors


def test_a_wide_allowance_is_for_near_ties_alone():
    eager = dict.fromkeys(
        ("reps", "dhidden", "dweight", "dbias", "dhidden_sums", "dweight_products"), 0.01
    )
    usual = judge.allowance(eager | {judge.WORST: 0.01})
    wide = judge.allowance(eager | {judge.WORST: 0.01}, *HEADS["sparton_fp8"][1:])
    wider = {name for name, allowed in wide.items() if allowed > usual[name]}
    assert wider == {"dhidden", "dweight", judge.WORST}
    rounded = judge.allowance(eager | {judge.WORST: 0.01}, *HEADS["tiled"][1:])
    assert {name for name in rounded if rounded[name] > usual[name]} == {
        "reps", "dbias", "dhidden_sums", "dweight_products"
    }  # fmt: skip
    assert {name for name in wide if wide[name] < usual[name]} == set()


def test_sums_and_products_are_judged_closely_for_every_head(judged):
    """A gradient of one row in 20, lost: too little for the norm of all, not for its sum."""
    problem, truth, _ = judged
    _, eager, _ = judge.make_truth(problem)

    def lost(problem, reps, dhidden, dweight, dbias):
        dhidden[::20] = 0

    errors = judge.errors(found(problem, lost), truth)
    allowed = judge.allowance(eager, *HEADS["sparton_fp8"][1:])
    assert errors["dhidden_sums"] > allowed["dhidden_sums"]


def test_representations_alone_are_judged_too(judged):
    problem, truth, allowed = judged
    reps = SpartonHead()(*problem[:3], problem.tokens)
    assert passes(judge.errors(judge.results(problem, reps), truth), allowed)
    reps[0, 0] += 0.2
    assert not passes(judge.errors(judge.results(problem, reps), truth), allowed)


@pytest.mark.parametrize("backbone", ["", "eager"])
@pytest.mark.parametrize("mode", suites.MODES)
def test_no_time_without_passing(monkeypatch, backbone, mode):
    cell = Cell(suites.SHORT, "eager", mode, backbone=backbone)
    measure = STUDY.prepare([cell], SETTINGS)
    record = measure(cell)
    assert record["status"] == "ok"
    assert record.get("active_share") == (None if backbone else 1.0)
    assert (record["N"], record["S"], record["D"], record["V"]) == (6, 4, 32, 611)
    monkeypatch.setattr(EagerHead, "forward", lambda self, *x: TiledHead()(*x) * 1.05)
    record = measure(cell)
    assert record["status"] == "red_gate"
    assert "p50_ms" not in record


@pytest.mark.parametrize("backbone", ["", "eager"])
def test_cells_of_a_process_share_the_truth(monkeypatch, backbone):
    """The bare product, which comes first, needs none."""
    module, name = (encoders.Encoders, "_build") if backbone else (judge, "make_truth")
    made, original = [], getattr(module, name)
    spy = lambda *x, **how: made.append(1) or original(*x, **how)  # noqa: E731
    monkeypatch.setattr(module, name, spy)
    heads = ("sparton", "eager") if backbone else (suites.GEMM, "sparton", "eager")
    cells = [Cell(suites.SHORT, head, backbone=backbone) for head in heads]
    assert len({STUDY.process_of(cell) for cell in cells}) == 1
    measure = STUDY.prepare(cells, SETTINGS)
    assert len(made) == (1 if backbone else 0)
    records = list(map(measure, cells))
    assert [record["status"] for record in records] == ["ok"] * len(cells)
    assert ["errors" in record for record in records] == [h != suites.GEMM for h in heads]
    assert len(made) == (2 if backbone else 1)


def test_figure_2_has_seven_points_an_axis_and_all_heads_at_each():
    for axis, shapes in suites.SWEEPS.items():
        assert len(set(shapes)) == 7, axis
        sizes = [[int(size) for size in shape.split("x")] for shape in shapes]
        varying = [len(set(each)) for each in zip(*sizes, strict=True)]
        assert varying == [7 if name == axis else 1 for name in "BSV"]
    cells = {(cell.shape, cell.head) for cell in SUITES["figure2"]}
    shapes = {shape for sweep in suites.SWEEPS.values() for shape in sweep}
    assert cells == set(product(shapes, suites.ALL_HEADS)) and len(shapes) == 19


def test_the_portable_kernel_is_forced_where_hoppers_own_would_serve(monkeypatch):
    chosen = []

    def choose(*operands):
        variant = (torch.bfloat16, torch.device("cpu"), True, "max", "relu", False)
        chosen.append(forward.default_config(*variant))
        return torch.zeros(())

    monkeypatch.setattr(forward, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(SpartonHead, "forward", lambda self, *operands: choose())
    for name in ("sparton", "sparton_portable"):
        HEADS[name].build()(None, None, None, None)
    assert list(map(type, chosen)) == [HopperConfig, PortableConfig]


def test_truth_does_not_depend_on_the_chunks(judged, monkeypatch):
    problem, truth, _ = judged
    monkeypatch.setattr(judge, "CHUNK_TOKENS", 50)
    again = judge.make_truth(problem).results
    for name, x in truth.items():
        torch.testing.assert_close(again[name], x, rtol=1e-4, atol=1e-5)


def test_samples_touch_every_row(monkeypatch):
    monkeypatch.setattr(judge, "KEPT_ELEMENTS", 2000)
    rows = torch.arange(97)[:, None].expand(97, 768)
    assert judge._sample(rows).unique().numel() == 97


def test_patterns_are_what_they_say():
    shape = Shape(((12, 128, 128),), 2001, 32)
    facts = {
        name: problems.describe_pattern(problems.random_problem(shape, name, "cpu"))
        for name in suites.PATTERNS
    }
    assert facts["random"]["active_share"] == facts["concentrated"]["active_share"] == 1
    for name in ("random_1pct", "concentrated_1pct"):
        assert facts[name]["active_share"] == pytest.approx(0.01, rel=0.1)
    assert facts["random"]["top3_share"] < 0.2
    assert facts["concentrated"]["top3_share"] > 0.6


def test_problems_repeat_themselves():
    first, second = (problems.random_problem(SHAPE, "concentrated", "cpu") for _ in range(2))
    for a, b in zip(first[:3], second[:3], strict=True):
        assert torch.equal(a, b)
    sizes = first.tokens.num_sequences, first.tokens.max_seqlen, first.tokens.num_tokens
    assert sizes == (8, 33, 105)
    assert torch.equal(first.tokens.position_ids[:4], torch.tensor([0, 1, 2, 3]))
