"""train.py as its users run it: one process or several, killed and resumed, with every logger."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sparton.cli.checks import check
from sparton.cli.training import run_training
from sparton.errors import CheckpointError
from sparton.training.distributed import World
from tests.composing import composed
from tests.evaluation.problems import write_beir

ROOT = Path(__file__).resolve().parents[1]
ALONE = World(0, 1, torch.device("cpu"))
MINIATURE = [
    "experiment=quickstart",
    "debug=tiny",
    "backbone.hidden_size=32",
]
# Adam makes full updates of gradients that are rounding errors: a small rate keeps them small.
GENTLE = ["optimizer.lr=1e-4", "evaluation=none"]


def run_here(folder: Path, *overrides: str, miniature: Sequence[str] = MINIATURE) -> list[dict]:
    """A run in this process; gives its metric records."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg = composed(*miniature, *overrides)
    check(cfg, ALONE.size)
    run_training(cfg, ALONE, folder)
    return read_records(folder)


def read_records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_command(folder: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> list[str]:
    command = launcher or (sys.executable,)
    return [*command, str(ROOT / "train.py"), *MINIATURE, f"hydra.run.dir={folder}", *overrides]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    run_here(folder)
    return folder


def test_a_run_leaves_model_metrics_results_and_manifest(reference):
    manifest = json.loads((reference / "manifest.json").read_text())
    assert manifest["config"]["batch"] == 8
    assert {"command", "git", "packages", "hardware"} <= set(manifest)
    results = json.loads((reference / "results.json").read_text())
    assert 0 < results["mean"]["ndcg@10"] < 1
    assert list(reference.rglob("quickstart*.trec"))
    records = read_records(reference)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert "dev_ndcg@10" in records[1]


def test_the_model_loads_in_sentence_transformers_with_the_same_representations(reference):
    from sentence_transformers import SparseEncoder

    from sparton.datasets.tokenization import PackedTokenizer
    from sparton.models.folders import load_encoder

    encoder = load_encoder(reference / "model").eval()
    texts = ["the first text", "another one, a little longer than the first"]
    tokens = PackedTokenizer(encoder.tokenizer, 24, 64).documents(texts)
    theirs = SparseEncoder(str(reference / "model"), device="cpu").encode(texts).to_dense()
    with torch.no_grad():
        ours = encoder(tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert ours.sum() > 0
    assert not torch.allclose(ours[0], theirs[1], atol=1e-3)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="bit-identical is promised on a CPU only")
def test_a_run_killed_by_the_system_ends_bit_identical(tmp_path, reference):
    """SIGKILL as soon as the checkpoint of step 2 is there, then the same command again."""
    command = run_command(tmp_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.time() + 120
        while not (tmp_path / "checkpoints" / "step-00000002.pt").exists():
            assert process.poll() is None, process.stdout.read().decode()
            assert time.time() < deadline, "no checkpoint within two minutes"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    subprocess.run(command, check=True, capture_output=True)
    whole = weights(reference)
    assert whole.keys() == weights(tmp_path).keys()
    assert all(torch.equal(whole[name], value) for name, value in weights(tmp_path).items())
    steps = [record["step"] for record in read_records(tmp_path)]
    assert steps == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def gentle(tmp_path_factory) -> list[dict]:
    return run_here(tmp_path_factory.mktemp("gentle"), *GENTLE)


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="two processes of NCCL cannot share the one GPU"
)
def test_two_processes_train_as_one(tmp_path, gentle):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    command = run_command(tmp_path, *GENTLE, launcher=torchrun)
    subprocess.run(command, check=True, capture_output=True)
    for one, two in zip(gentle, read_records(tmp_path), strict=True):
        for key in ("loss", "gradient_norm", "query_active_terms"):
            assert two[key] == pytest.approx(one[key], rel=1e-4), (one["step"], key)


@pytest.mark.slow
def test_a_run_says_what_its_folder_held(tmp_path, caplog):
    log = "sparton.cli.assembly"
    caplog.set_level("INFO", logger=log)
    with_checkpoint, without = "checkpoint_every=2", "checkpoint_every=null"
    said = []
    for override in (with_checkpoint, with_checkpoint, without, without):
        caplog.clear()
        run_here(tmp_path / override, "steps=2", *GENTLE, override)
        said.append([each.getMessage() for each in caplog.records if each.name == log])
    done = "all 2 steps were done before: only the tests are left"
    replaced = (
        f"the model in {tmp_path / without} is replaced; name=NAME gives a run another folder"
    )
    assert said == [[], [done], [], [replaced]]


@pytest.mark.slow
def test_cut_queries_are_told_of_once_however_often_models_are_evaluated(tmp_path, caplog):
    records = run_here(tmp_path, "query_length=4", "evaluation.every=1", "steps=3")
    assert sum("dev_ndcg@10" in record for record in records) == 3
    said = [
        each.getMessage().partition(":")[0]
        for each in caplog.records
        if each.name == "sparton.datasets.lengths" and each.levelname == "WARNING"
    ]
    assert said == ["source quickstart", "quickstart", "quickstart"]  # training, dev and test


@pytest.mark.slow
@pytest.mark.quick(1)
def test_micro_batches_train_as_one_batch(tmp_path, gentle):
    records = run_here(tmp_path, *GENTLE, "micro_batch=3")
    for one, many in zip(gentle, records, strict=True):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert records[0]["loss"] != run_here(tmp_path / "other", *GENTLE, "seed=1")[0]["loss"]


@pytest.mark.slow
def test_a_run_in_fp8_learns(tmp_path):
    records = run_here(tmp_path, "head.fp8=true", "precision=bf16", "evaluation=none")
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0] - 0.1


def scored_folder(folder: Path, scores: list) -> Path:
    """A folder for data=distillation: 16 records of a positive and two negatives."""
    records = [
        {"query": f"q{n}", "pos": [f"p{n}"], "neg": [f"n{n}", f"m{n}"], "scores": scores}
        for n in range(16)
    ]
    (folder / "distillation").mkdir(parents=True)
    text = "\n".join(map(json.dumps, records))
    (folder / "distillation" / "train.jsonl").write_text(text)
    return folder


@pytest.mark.slow
def test_a_sum_of_losses_trains_on_several_teachers_and_logs_its_parts(tmp_path):
    data = scored_folder(tmp_path, [[9.0, 0.8], [2.0, 0.3], [1.0, 0.5]])
    settings = ["data=distillation", f"data_dir={data}", "num_negatives=2", "evaluation=none"]
    settings += ["loss=infonce_margin_mse", "regularizer@document_regularizer=[flops,l0_flops]"]
    whole = run_here(tmp_path / "whole", *settings)
    losses = [record for record in whole if "loss" in record]
    for record in losses:
        total = record["loss_ranking_infonce"] + 0.05 * record["loss_ranking_margin_mse"]
        assert record["loss_ranking"] == pytest.approx(total, rel=1e-5)
        assert record["loss_ranking_margin_mse"] > 0
        assert "loss_document_l0_flops" in record
    parts = run_here(tmp_path / "parts", *settings, "micro_batch=3")
    for one, other in zip(losses, [record for record in parts if "loss" in record]):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.slow
def test_another_configuration_does_not_resume_this_one(tmp_path):
    run_here(tmp_path, "steps=2")
    with pytest.raises(CheckpointError, match=r"batch=16 \(was 8\)"):
        run_here(tmp_path, "steps=2", "batch=16")
    records = run_here(tmp_path, "steps=2", "log_every=2", "num_workers=1")
    assert [record["step"] for record in records] == [1, 2]


@pytest.mark.slow
def test_other_data_does_not_resume_a_run(tmp_path):
    file = tmp_path / "pairs.jsonl"
    texts = [["query", "document", "text"][n % 3] + f" number {n}" for n in range(20)]
    lines = [json.dumps([text, f"{text} again"]) + "\n" for text in texts]
    settings = ["data=text_files", f"data.files={{mine: {file}}}", "data_dir=.", "evaluation=none"]
    file.write_text("".join(lines[:18]))
    run_here(tmp_path, *settings, "steps=2")
    file.write_text("".join(lines))
    with pytest.raises(CheckpointError, match=r"data\.mine\.examples=20 \(was 18\)\. Give"):
        run_here(tmp_path, *settings, "steps=2")
    file.write_text("".join(lines[17::-1]))  # as many as before, in another order
    with pytest.raises(CheckpointError, match=r"or data: data\.mine\.content=\w+ \(was \w+\)\. G"):
        run_here(tmp_path, *settings, "steps=2")
    other = tmp_path / "copy.jsonl"
    other.write_text("".join(lines[:18]))
    file.unlink()
    other.rename(file)  # another file of the same content
    run_here(tmp_path, *settings, "steps=2")


@pytest.mark.slow
def test_other_judgments_of_the_dev_set_do_not_resume_a_run(tmp_path):
    folder = write_beir(tmp_path / "beir")
    judged = (folder / "qrels/test.tsv").read_text().splitlines(keepends=True)
    (folder / "qrels/dev.tsv").write_text("".join(judged))
    settings = ["evaluation=beir_folder", f"evaluation.path={folder}", "steps=2"]
    run_here(tmp_path / "run", *settings)
    (folder / "qrels/dev.tsv").write_text("".join(judged[:-1]))
    with pytest.raises(CheckpointError, match=r"data: evaluation\.dev\.content=\w+ \(was \w+\)\. "):
        run_here(tmp_path / "run", *settings)
    (folder / "qrels/dev.tsv").write_text("".join([judged[0], *judged[:0:-1]]))  # in another order
    run_here(tmp_path / "run", *settings)


@pytest.mark.slow
def test_tensorboard_has_every_step_once_and_the_tests(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    directory = f"logger.tensorboard.directory={tmp_path / 'tensorboard'}"
    overrides = ["logger=tensorboard", directory, "log_every=1", "steps=4", "checkpoint_every=2"]
    run_here(tmp_path, *overrides)
    (tmp_path / "checkpoints" / "step-00000004.pt").unlink()
    run_here(tmp_path, *overrides)
    written = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [each.step for each in written.Scalars("loss")] == [1, 2, 3, 4]
    results = json.loads((tmp_path / "results.json").read_text())
    [found] = written.Scalars("test_ndcg@10")
    assert found.value == pytest.approx(results["mean"]["ndcg@10"])


@pytest.mark.slow
def test_the_parts_of_a_resumed_run_are_one_run_of_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    overrides = ["logger=wandb", "logger.wandb.mode=offline", "steps=4", "checkpoint_every=2"]
    for name in ("run", "run", "another"):
        folder = tmp_path / name
        run_here(folder, *overrides, f"logger.wandb.directory={folder}")
        (folder / "checkpoints" / "step-00000004.pt").unlink()
    files = [path.stem for path in (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")]
    [other] = (tmp_path / "another" / "wandb").glob("offline-run-*/*.wandb")
    assert len(files) == 2 and len(set(files)) == 1 and other.stem not in files


@pytest.mark.slow
def test_a_loss_that_its_data_cannot_serve_is_refused_before_any_step(tmp_path):
    with pytest.raises(ValueError, match="num_negatives=0, but the loss MarginMSE compares"):
        run_here(tmp_path / "alone", "loss=margin_mse")
    (tmp_path / "triples").mkdir()
    lines = "\n".join(f"q{n}\tp{n}\tn{n}" for n in range(16))
    (tmp_path / "triples" / "triples.tsv").write_text(lines)
    bare = ["data=triples", f"data_dir={tmp_path}", "num_negatives=1", "evaluation=none"]
    for loss in ("margin_mse", "kl_divergence", "infonce_margin_mse", "kl_margin_mse"):
        with pytest.raises(ValueError, match=r"loss follows a teacher, but .* as for distillation"):
            run_here(tmp_path / loss, *bare, f"loss={loss}")
        assert not list((tmp_path / loss).iterdir())
    assert run_here(tmp_path / "triplet", *bare, "loss=triplet")[0]["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch=0", "batch=0: must be at least 1"),
        ("precision=fp16", "precision=fp16 needs a CUDA GPU"),
        ("document_length=1000", "document_length=1000 is more than the 64 positions"),
        ("query_regularizer.flops.weight=-1", "weight must not be negative, got -1"),
        ("init_from=.", "ignores backbone.hidden_size=32: leave that out"),
    ],
)
def test_what_could_not_train_is_refused_in_one_sentence(tmp_path, override, message):
    if "fp16" in override and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    process = subprocess.run(
        run_command(tmp_path, override), capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert message in process.stderr
    assert "Traceback" not in process.stderr
