"""The command of a cell. Paths in it are relative to the folder of the workload, where it runs."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import SCRIPTS, python_path
from benchmarks.training.decoders import DECODERS
from benchmarks.training.suites import (
    COLBERT,
    JOINT,
    MODERNBERT_BASE,
    OURS,
    Cell,
    Plan,
)

ROOT = SCRIPTS.parent
TRAIN = str(ROOT / "train.py")
RIVAL = "benchmarks.training.rival"
LEARNING_RATE, WEIGHT_DECAY, WARM_UP, CLIP_NORM = 2e-5, 0.01, 0.06, 1.0
REGULARIZER_WEIGHT = 1e-4
SEED = 0


class Place(NamedTuple):
    """Where a cell finds its parts: the model folder, the file of pairs, the folder of its run."""

    model: str
    pairs: str
    run: str


def num_workers(cell: Cell, miniature: bool) -> int:
    """Processes that tokenise ahead for each training process, as many for every system."""
    cores = len(os.sched_getaffinity(0))  # more than these our loader would not start
    return 0 if miniature else max(min(8, cores // cell.gpus - 1), 1)


def overrides(cell: Cell, plan: Plan, place: Place, miniature: bool) -> list[str]:
    """What follows ``python train.py``."""
    found = {
        "head": cell.head,
        **_backbone(cell, miniature),
        "backbone.name": place.model,
        "backbone.compile": str(cell.compiled).lower(),
        "backbone.half_residual": str(cell.half_residual).lower(),
        "backbone.gradient_checkpointing": str(cell.checkpointed).lower(),
        "data": "text_files",
        "data_dir": ".",
        "data.files": f"{{pairs:{place.pairs}}}",
        "evaluation": "none",
        "logger": "profile" if cell.profiled else "none",
        "sharding": "full" if cell.sharded else "none",
        "batch": plan.batch,
        "micro_batch": plan.micro_batch or "null",
        "steps": plan.steps,
        "log_every": plan.log_every,
        "checkpoint_every": "null",
        "query_length": plan.lengths.query[1],
        "document_length": plan.lengths.document[1],
        "precision": _precision(cell, miniature),
        "num_workers": num_workers(cell, miniature),
        "optimizer.lr": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "scheduler.warmup": WARM_UP,
        "clip_norm": CLIP_NORM,
        "seed": SEED,
        "hydra.run.dir": place.run,
        **_search_of_maxima(cell, miniature),
        **_regularizers(cell),
        **_token_vectors(cell),
    }
    return [f"{key}={value}" for key, value in found.items()]


def _precision(cell: Cell, miniature: bool) -> str:
    if miniature:  # on a CPU, which has no FP8
        return "fp32"
    return "fp8" if cell.in_fp8 else "bf16"


def _search_of_maxima(cell: Cell, miniature: bool) -> dict[str, object]:
    """FP8 is for the head as well."""
    in_fp8 = cell.in_fp8 and cell.head == "sparton" and not miniature
    return {"head.fp8": "true"} if in_fp8 else {}


def _backbone(cell: Cell, miniature: bool) -> dict[str, object]:
    if cell.backbone not in DECODERS:
        return {"backbone": "bert_base"}
    found: dict[str, object] = {"backbone": "causal_lm", "backbone.attention": "causal"}
    found["backbone.special_tokens"] = "null"  # as the tokenizer has them
    found["backbone.logit_shift"] = DECODERS[cell.backbone].shift(miniature)
    if cell.lora:
        dtype = "fp32" if miniature else "bf16"
        found["backbone.lora"] = f"{{rank: {cell.lora}, alpha: {2 * cell.lora}, dtype: {dtype}}}"
    return found


def _regularizers(cell: Cell) -> dict[str, object]:
    kind = "none" if cell.model == COLBERT else "flops"
    found: dict[str, object] = {}
    for side in ("query_regularizer", "document_regularizer"):
        found[f"regularizer@{side}"] = kind
        if kind == "flops":
            found[f"{side}.flops.weight"] = REGULARIZER_WEIGHT
    return found


def _token_vectors(cell: Cell) -> dict[str, object]:
    """Vectors of tokens as a fresh model of sentence-transformers has them: nothing is added to
    the texts, and no token is left out."""
    prefix = {COLBERT: "head", JOINT: "head.tokens"}.get(cell.model)
    if prefix is None:
        return {}
    settings = {"query_expansion": "false", "query_marker": "''", "document_marker": "''"}
    settings["skiplist"] = "''"
    found: dict[str, object] = {f"{prefix}.{key}": value for key, value in settings.items()}
    return found | ({"loss": "joint"} if cell.model == JOINT else {})


def attention(cell: Cell) -> str | None:
    """What transformers is asked for by sentence-transformers' model; None leaves it its default.
    With FlashAttention it leaves padding out, which the default cannot."""
    if cell.system == OURS or cell.backbone != MODERNBERT_BASE:
        return None
    return "flash_attention_2" if find_spec("flash_attn") else "sdpa"


def command(cell: Cell, plan: Plan, place: Place, miniature: bool) -> list[str]:
    """The words that start a cell, after those of the interpreter."""
    if cell.trainer != OURS:
        return ["-m", RIVAL, json.dumps((cell, plan, place, miniature))]
    words = [TRAIN, *overrides(cell, plan, place, miniature)]
    if cell.gpus == 1:
        return words
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={cell.gpus}"]
    return [*launcher, *words]


def environment(folder: Path, gpus: int = 1) -> dict[str, str]:
    """Of a cell's process: no more GPUs than it has, of which transformers would take all that it
    sees; no hub; and the compiler says when it compiles anew."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(n) for n in range(gpus)] if visible is None else visible.split(",")
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(devices[:gpus]),
        "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "HYDRA_FULL_ERROR": "1",
        "TORCH_LOGS": "recompiles",
    }


def shown(words: list[str]) -> list[str]:
    """A command as a record has it, without the paths of one machine."""
    return ["python", *(word.replace(f"{ROOT}{os.sep}", "") for word in words)]
