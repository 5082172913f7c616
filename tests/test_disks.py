"""Commands on disks that are read-only or full: the first cause is what is read, the exit code
holds, and nothing half-written stays."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.dense import DenseEncoder
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.pooling import Pooling
from sparton.training.status import read_status
from tests.forking import environment
from tests.pipelines.mining_problems import generate, write
from tests.test_train import MINIATURE

MARK = "ended: "
# Each command in a process of its own, on a disk of its own that nobody else sees.
PROGRAM = f"""
import json, os, subprocess, sys
import sparton.cli.main, sparton.cli.assembly, sparton.cli.evaluation, sparton.pipelines
disk, *cases = sys.argv[1:]
for options, *words in map(json.loads, cases):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=True)
    if not (child := os.fork()):
        sparton.cli.main.main(words)
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [os.path.join(place, file) for place, _, files in os.walk(disk) for file in files]
    sys.stderr.write("\\n{MARK}" + json.dumps([code, left]) + "\\n")
    sys.stderr.flush()
    subprocess.run(["umount", disk], check=True)
"""
NAMESPACE = ("unshare", "--map-root-user", "--mount")
READ_ONLY, FULL = "Read-only file system", "No space left on device"


def can_mount() -> bool:
    mount = ("mount", "-t", "tmpfs", "none", "/mnt")
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run([*NAMESPACE, *mount], capture_output=True).returncode
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Texts, a model, and a point for disks."""
    place = tmp_path_factory.mktemp("place")
    pairs = generate(300)
    texts = [pair["positive"] for pair in pairs]
    write(place / "pairs.jsonl", pairs)
    for file, own in (("corpus", texts), ("queries", [pair["query"] for pair in pairs[:9]])):
        records = [{"_id": f"{row}", "text": text} for row, text in enumerate(own)]
        write(place / "beir" / f"{file}.jsonl", records)
    judged = "".join(f"{row}\t{row}\t1\n" for row in range(9))
    (place / "beir" / "qrels").mkdir()
    (place / "beir" / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    encoder = build_encoder(tiny(texts, hidden_size=32, layers=1), EagerHead())
    save_encoder(encoder, place / "splade", query_length=16, document_length=32)
    dense = DenseEncoder(tiny(texts, hidden_size=32, layers=1).bare(), Pooling("mean", True))
    save_encoder(dense, place / "dense", query_length=16, document_length=32)
    for folder in ("disk", "run"):
        (place / folder).mkdir()
    (place / "run" / "checkpoints").symlink_to(place / "disk")
    return place


def cases(place: Path) -> list[tuple[str, list[str], str]]:
    """The options of a disk, a command, and what it cannot write."""
    disk, model, beir = (str(place / name) for name in ("disk", "splade", "beir"))
    train = ["train", *MINIATURE]
    mine = ["mine", f"{place}/pairs.jsonl", "--output", f"{disk}/mined.jsonl"]
    adapt = ["adapt", beir, "--backbone", model, "--steps", "1", "--output", f"{disk}/adapted"]
    evaluate = ["evaluate", f"model={model}", "evaluation=beir_folder", f"output={disk}/out"]
    evaluate += [f"evaluation.path={beir}"]
    export = ["export", model, "--beir", beir, "--side", "document"]
    export += ["--output", f"{disk}/vectors.jsonl"]
    idf = ["idf", beir, "--tokenizer", model, "--output", f"{disk}/idf.json"]
    embed = ["embed", beir, "--model", f"{place}/dense", "--output", f"{disk}/embedded"]
    embed += ["--query-length", "16", "--document-length", "32"]
    in_disk, beside = f"hydra.run.dir={disk}/run", f"hydra.run.dir={place}/run"
    return [
        ("ro", [*train, in_disk], "disk/run"),
        ("ro", [*train, beside], "step-00000002.pt"),
        ("ro", evaluate, "disk/out"),
        ("ro", mine, "mined.jsonl.parts"),
        ("ro", adapt, "adapted.run"),
        ("ro", embed, "embedded"),
        ("ro", export, "vectors.jsonl"),
        ("ro", idf, "idf.json"),
        ("size=200k", [*train, beside], "step-00000002.pt"),
        ("size=8k", evaluate, "beir.trec"),
        ("size=12k", mine, "part-000000"),
        ("size=20k", [*mine, "--miner", model], "safetensors"),
        ("size=40k", adapt, "step-00000001.pt"),
        ("size=140k", embed, "embedded"),  # the model fits, not the embeddings
        ("size=8k", export, "vectors.jsonl"),
        ("nr_inodes=1", idf, "idf.json"),
    ]


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace")
@pytest.mark.skipif(torch.cuda.is_available(), reason="processes that fork have no GPU")
def test_a_disk_that_takes_nothing_is_what_is_read_and_nothing_half_written_stays(place):
    asked = cases(place)
    words = [json.dumps([option, *words]) for option, words, _ in asked]
    ended = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", PROGRAM, str(place / "disk"), *words],
        capture_output=True,
        text=True,
        env=environment(HF_DATASETS_CACHE=f"{place}/cache", OMP_NUM_THREADS="1"),
        cwd=place,
    )
    assert ended.returncode == 0, ended.stderr
    said: list[str] = []
    results = []
    for line in ended.stderr.splitlines():
        if line.startswith(MARK):
            results.append(("\n".join(said), *json.loads(line.removeprefix(MARK))))
            said = []
        elif line:
            said.append(line)
    assert len(results) == len(asked)
    for (option, (command, *_), missing), (told, code, left) in zip(asked, results, strict=True):
        cause = READ_ONLY if option == "ro" else FULL
        assert code == 1 and "Traceback" not in told, (option, command, told)
        last = told.splitlines()[-1]
        assert last.startswith(f"sparton {command}: "), (option, command, told)
        assert missing in last and cause in last, (option, command, told)
        assert "Make room" in last or "make" in last.lower(), last
        ends = (".tmp", ".old", ".partial", missing)
        assert not [path for path in left if path.endswith(ends)], (option, command, left)
    assert "step-00000002.pt" in read_status(place / "run").message
