"""The benchmark of whole trainings without a GPU: suites, workload, watching, gate, profile."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import benchmark_training
from head_benchmark.runner import read_records, write_records
from sparton.models.backbones import SPECIAL_TOKENS, pretrained
from training_benchmark import commands, figures, runner, suites, trace, workload
from training_benchmark.profiling import STEPS
from training_benchmark.suites import LENGTHS, OURS, SUITES, Cell, plan

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/benchmark_training.py"
EAGER, SPARTON = (Cell(OURS, suites.SPLADE, head, 384) for head in ("eager", "sparton"))
CELLS = [cell for cells in SUITES.values() for cell in cells]
MINIATURE = suites.MINIATURE_VOCABULARY


def run_script(folder: Path, *words: str) -> None:
    command = [sys.executable, str(SCRIPT), "--miniature", "--folder", str(folder / "work"), *words]
    subprocess.run(command, check=True)


def test_suites_name_heads_that_exist_and_batches_that_divide():
    heads = {path.stem for path in (SCRIPT.parents[1] / "configs/head").glob("*.yaml")}
    for cells in SUITES.values():
        assert len(set(cells)) == len({cell.label for cell in cells}) == len(cells)
    for cell in CELLS:
        assert (cell.head in heads) == (cell.system == OURS)
        assert cell.batch == cell.local_batch * cell.gpus
        assert cell.lengths in LENGTHS


@pytest.mark.parametrize("miniature", [False, True])
def test_cells_that_are_compared_log_the_same_steps(miniature):
    for cell in CELLS:
        found = plan(cell, 20.0, miniature)
        assert found.windows >= suites.WARM_UP_WINDOWS + suites.FEWEST_WINDOWS
        assert found.batch % cell.gpus == 0
        for other in filter(lambda other: figures.same_losses(cell, other), CELLS):
            assert plan(other, 20.0, miniature).log_every == found.log_every
            assert plan(other, 20.0, miniature).batch == found.batch


@pytest.mark.parametrize("vocabulary", [MINIATURE, suites.BERT, suites.XLM_ROBERTA])
def test_words_are_different_and_their_number_is_the_vocabulary(vocabulary):
    words = workload.words(vocabulary)
    assert len(set(words)) == len(words) == vocabulary - len(SPECIAL_TOKENS)


def test_every_word_is_a_token_and_lengths_keep_their_limits(tmp_path):
    lengths = LENGTHS[suites.SPLADE]
    workload.write_pairs(tmp_path / "pairs.jsonl", suites.BERT, lengths, 300)
    workload.word_tokenizer(suites.BERT).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for side, (shortest, longest) in zip(("query", "positive"), lengths, strict=True):
        texts = [json.loads(line)[side] for line in (tmp_path / "pairs.jsonl").open()]
        rows = tokenizer(texts)["input_ids"]
        assert [len(row) - 2 for row in rows] == [len(text.split()) for text in texts]
        assert tokenizer.unk_token_id not in {token for row in rows for token in row}
        assert min(map(len, rows)) >= shortest and max(map(len, rows)) <= longest
        assert abs(sum(map(len, rows)) / len(rows) - (shortest + longest) / 2) < longest / 12


def test_some_terms_are_active_or_nearly_all(tmp_path):
    from sparton.datasets.tokenization import PackedTokenizer

    shares = {}
    for activity in (suites.OWN_WORDS, suites.ALL_TERMS):
        folder = tmp_path / activity
        workload.write_model(folder, MINIATURE, activity, miniature=True)
        backbone = pretrained(str(folder))
        tokens = PackedTokenizer(backbone.tokenizer, 16, 16).documents(["ba be bi", "gu ka zo ba"])
        with torch.no_grad():
            logits = backbone.decoder(backbone.eval()(tokens))
        shares[activity] = (logits[:5].amax(0) > 0).float().mean().item()
    assert 0 < shares[suites.OWN_WORDS] < 0.2
    assert shares[suites.ALL_TERMS] > 0.5


def windows(*losses: float, **more: float) -> list[figures.Record]:
    line = {"step_ms": 100.0, "tokens_per_second": 7.0, "memory_allocated_mib": 1024.0}
    speeds = (1.0, 2.0, 30.0, 10.0, 20.0)
    return [
        {"step": 11 * number, "loss": loss, "examples_per_second": speed, **line, **more}
        for number, (loss, speed) in enumerate(zip(losses, speeds, strict=True), 1)
    ]


def test_figures_leave_the_warm_up_out_but_not_its_memory():
    lines = windows(5.0, 4.0, 3.0, 2.0, 1.0, loss_query_flops=0.5)
    lines[0]["memory_allocated_mib"] = 2048.0
    first = dict(lines[0], step=1, loss=9.0, examples_per_second=0.1)
    arrivals, recompiled = [8.5, 9.0, 10.0, 11.0, 12.0, 13.0], [3, 3, 4, 4, 5, 5]
    found = figures.summary([first, *lines], arrivals, recompiled, log_every=11)
    assert [found[f"examples_per_second_p{q}"] for q in (20, 50, 80)] == [10.0, 20.0, 30.0]
    assert found["peak_allocated_gib"] == 2.0
    assert found["seconds_to_first_step"] == pytest.approx(8.0)
    assert (found["recompilations"], found["recompilations_after_warm_up"]) == (5, 1)
    assert (found["loss_first"], found["loss_last"], found["windows"]) == (5.0, 1.0, 3)
    assert found["signature"] == {"loss": 5.0, "loss_query_flops": 0.5}
    assert "mfu" not in found and "peak_reserved_gib" not in found


def judged(cell: Cell, last: float = 1.5, status: str = "ok", **signature: float) -> tuple:
    first = {"loss": 2.0, "loss_document_flops": 16.0} | signature
    record = {"loss_first": first["loss"], "loss_last": last, "signature": first}
    return cell, record | {"status": status}


def test_heads_that_agree_pass():
    earlier = [judged(EAGER), judged(SPARTON._replace(batch=512), loss=9.0)]
    assert figures.objection(*judged(SPARTON), []) is None
    assert figures.objection(*judged(SPARTON, loss=2.01, loss_document_flops=16.2), earlier) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"last": float("nan")}, "went from 2.0 to nan"),
        ({"loss": float("inf")}, "went from inf"),
        ({"last": 3.0}, "rose from 2 to 3"),
        ({"loss": 2.3, "last": 2.0}, "first loss is 2.3, that of sparton splade eager 384 2"),
        # A representation that is 6 % too large.
        ({"loss_document_flops": 16 * 1.06**2}, "first loss_document_flops is 17.98"),
    ],
)
def test_heads_that_disagree_are_refused(found, words):
    assert words in (figures.objection(*judged(SPARTON, **found), [judged(EAGER)]) or "")


def test_what_failed_is_no_measure_of_others():
    earlier = [judged(EAGER, status="red_gate", loss=9.0), judged(SPARTON, loss=2.1)]
    assert figures.objection(*judged(SPARTON._replace(compiled=True)), earlier) is None


def test_a_run_is_watched_and_its_end_has_a_name(tmp_path):
    def ended(code: str, limit: float = 20.0) -> dict:
        words = [sys.executable, "-c", f"import sys, time\n{code}"]
        return runner.outcome_of(runner.watch(words, tmp_path, tmp_path, limit), limit)

    assert ended("pass") == {"status": "ok"}
    assert ended("sys.exit('torch.OutOfMemoryError: CUDA')")["status"] == "oom"
    assert ended("raise ValueError('no')") == {
        "status": "failed",
        "error": "exit code 1: ValueError: no",
    }
    assert ended("time.sleep(30)", limit=0.3)["status"] == "timeout"


def test_lines_are_seen_when_they_come(tmp_path):
    code = (
        "import sys, time\n"
        "log = open('metrics.jsonl', 'w', buffering=1)\n"
        "for step in range(3):\n"
        "    print('Recompiling function f', file=sys.stderr, flush=True)\n"
        "    log.write('{}\\n'); time.sleep(0.4)\n"
    )
    watched = runner.watch([sys.executable, "-c", code], tmp_path, tmp_path, 30.0)
    assert watched.recompiled == [1, 2, 3]
    assert watched.arrivals[0] < watched.arrivals[1] < watched.arrivals[2] < watched.seconds


@pytest.mark.slow
def test_heads_compute_the_same_in_real_runs(tmp_path):
    output = tmp_path / "training.jsonl"
    cells = r"(eager|sparton) 384$|sparton 384 in 64s$"
    run_script(tmp_path, "--suite", "splade", "--output", str(output), "--cells", cells)
    records = read_records(output)
    assert [record["status"] for record in records] == ["ok"] * 3, records
    first, *others = (record["signature"] for record in records)
    assert first["loss_document_flops"] > 0
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)
    assert records[0]["config"]["batch"] == plan(EAGER, 20.0, miniature=True).batch
    assert records[0]["cell_command"][:2] == ["python", "train.py"]
    assert str(tmp_path) not in json.dumps(records[0]["cell_command"])
    assert {"git_sha", "gpu", "torch", "versions", "run"} <= set(records[0])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="its trainer needs accelerate")
@pytest.mark.parametrize("part", ["splade 384 in 64s", "colbert 384"])
def test_sentence_transformers_trains_on_the_same_workload(tmp_path, part):
    output = tmp_path / "training.jsonl"
    cells = f"^sentence_transformers {part}$"
    run_script(tmp_path, "--suite", part.split()[0], "--output", str(output), "--cells", cells)
    (record,) = read_records(output)
    assert record["status"] == "ok", record
    assert record["examples_per_second_p50"] > 0


@pytest.mark.slow
def test_the_profile_runs_the_loop_of_train_py(tmp_path):
    output = tmp_path / "profile.jsonl"
    words = ("--suite", "splade", "--profile", "--cells", "sparton 384$", "--output", str(output))
    run_script(tmp_path, *words)
    (record,) = read_records(output)
    assert record["status"] == "ok", record
    assert record["profiled_steps"] == STEPS
    assert record["step_ms"] > 0 and record["model_tflop"] >= 0


def on_device(name: str, begin: float, duration: float, cat: str = "kernel") -> trace.Event:
    return {"cat": cat, "name": name, "ts": begin, "dur": duration}


def test_a_trace_is_summed_up_per_step():
    events = [
        on_device("nvjet_hsh_gemm", 0, 4000),
        on_device("flash_fwd_kernel", 4000, 2000),
        on_device("ncclDevKernel_AllReduce", 5000, 2000),  # beside another
        on_device("Memcpy DtoH (Device -> Pageable)", 9000, 1000, "gpu_memcpy"),
        on_device("cudaLaunchKernel", 8000, 5, "cuda_runtime"),
        on_device("cudaStreamSynchronize", 7000, 500, "cuda_runtime"),
        on_device("cudaDeviceSynchronize", 8500, 900, "cuda_runtime"),  # ends the profile
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9999},
        {"ph": "M", "name": "process_name"},
    ]
    found = trace.summarize(events, steps=2)
    assert found["busy_share"] == 0.8
    assert found["idle_ms"] == 1.0
    assert found["families_ms"]["GEMM"] == 2.0
    assert found["families_ms"]["attention"] == found["families_ms"]["collectives"] == 1.0
    assert found["kernels"][0] == {
        "name": "nvjet_hsh_gemm", "family": "GEMM", "ms": 2.0, "launches": 0.5
    }  # fmt: skip
    assert found["gaps"] == [
        {
            "ms": 2.0,
            "after": "ncclDevKernel_AllReduce",
            "before": "Memcpy DtoH (Device -> Pageable)",
        }
    ]
    waits = (found["host_waits"], found["host_wait_ms"], found["copies_to_host"])
    assert waits == (0.5, 0.25, 0.5)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("_segment_max_hopper_kernel", "head"),
        ("dweight_kernel", "head"),
        ("gradients_kernel", "head"),
        ("_maxsim_residual_fwd_kernel", "maxsim"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x128_8x5_nt_align1>", "loss"),
        ("nvjet_sm90_tss_112x128_64x7_1x2_h_bz_splitK_TNN", "loss"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "GEMM"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("void at::native::vectorized_layer_norm_kernel", "norms and elementwise"),
        ("triton_poi_fused_gelu_3", "norms and elementwise"),
        ("void (anonymous namespace)::softmax_warp_forward", "loss"),
        ("Memset (Device)", "copies"),
    ],
)
def test_kernels_have_families(name, family):
    assert trace.family(name) == family


def context(**changes) -> dict:
    keys = dict.fromkeys((*benchmark_training.SAME_RUN, "dirty"))
    return {**keys, "suite": "splade", "git_sha": "a", "run": "1"} | changes


def test_suites_of_one_file_are_runs_of_their_own(tmp_path):
    path = tmp_path / "training.jsonl"
    kept = context(suite="gpus", git_sha="b") | EAGER._asdict() | {"status": "failed"}
    failed = context() | EAGER._asdict() | {"status": "failed"}
    good = context() | SPARTON._asdict() | {"status": "oom"}
    write_records(path, [kept, failed, good])
    asked = {EAGER, SPARTON}
    assert benchmark_training.resume(path, context(), asked, fresh=False) == [kept, good]
    assert benchmark_training.resume(path, context(), asked, fresh=True) == [kept]
    assert benchmark_training.resume(path, context(), set(), fresh=False) == [kept, failed, good]


@pytest.mark.parametrize(
    ("now", "words"),
    [({"git_sha": "c"}, "git_sha = a, this is c"), ({"dirty": True}, "that no commit names")],
)
def test_records_that_may_be_of_another_run_are_not_continued(tmp_path, now, words):
    path = tmp_path / "training.jsonl"
    write_records(path, [context() | EAGER._asdict() | {"status": "ok"}])
    with pytest.raises(SystemExit, match=words):
        benchmark_training.resume(path, context(**now), set(), fresh=False)


def test_miniatures_stay_out_of_the_results():
    with pytest.raises(SystemExit):
        benchmark_training.parse_arguments(["--suite", "splade", "--miniature"])


def test_commands_name_no_place_on_this_machine():
    place = commands.Place("model", "pairs.jsonl", "run")
    for cell in CELLS:
        words = commands.command(cell, plan(cell, 20.0), place, False)
        assert str(commands.ROOT) not in " ".join(commands.shown(words))
        assert ("--nproc_per_node=4" in words) == (cell.gpus == 4)
