"""Time and memory of the SPLADE heads on one GPU, after their results were checked.

    python scripts/benchmark_head.py --output results/h200/head.jsonl
    python scripts/benchmark_head.py --shapes table1 mix --sparton-configs

A head is compared with fp32 truth first. One whose error exceeds that of eager PyTorch in bfloat16
gets the status red_gate and no time. N sequences, T packed tokens, D hidden, V vocabulary.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sparton.kernels.splade_head import splade_head_reference
from sparton.kernels.splade_head.forward import ForwardConfig, forward_configs, splade_head_forward
from sparton.models.heads import CompiledHead, EagerHead, SpartonHead, TiledHead
from sparton.training.manifest import describe_environment
from sparton.types import TokenBatch

HEADS: dict[str, Callable[[], torch.nn.Module]] = {
    "eager": EagerHead,
    "compiled": CompiledHead,
    "tiled": TiledHead,
    "tiled_compiled": lambda: TiledHead(compiled=True),
    "sparton": SpartonHead,
}
ACTIVE = {"all": 1.0, "1%": 0.01}


class Shape(NamedTuple):
    """Sequences with lengths drawn uniformly from each (number, shortest, longest)."""

    lengths: tuple[tuple[int, int, int], ...]
    D: int
    V: int


SHAPES = {
    "table1": Shape(((320, 512, 512),), 768, 30522),
    "short": Shape(((512, 256, 256),), 768, 30522),
    "multilingual": Shape(((32, 512, 512),), 768, 250002),
    "mix": Shape(((512, 5, 64), (512, 20, 256)), 768, 30522),
    "mix384": Shape(((512, 5, 64), (512, 20, 256)), 384, 30522),
    # Padded heads pad a mix's queries to the length of its documents. Judge them on one side.
    "queries": Shape(((512, 5, 64),), 768, 30522),
    "documents": Shape(((512, 20, 256),), 768, 30522),
    "long1024": Shape(((128, 1024, 1024),), 768, 30522),
    "long4096": Shape(((128, 4096, 4096),), 768, 30522),
    "long16384": Shape(((128, 16384, 16384),), 768, 30522),
}


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    tokens: TokenBatch
    upstream: Tensor


def make_problem(shape: Shape, active: float, concentrated: bool) -> Problem:
    """Random bfloat16 operands whose bias makes about this share of the entries active.

    ``concentrated`` scales three tokens of each sequence up, so that they win most entries, as
    trained models do.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.cat(
        [torch.randint(low, high + 1, (n,), generator=generator) for n, low, high in shape.lengths]
    )
    cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    T = int(lengths.sum())
    positions = torch.arange(T) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
    tokens = TokenBatch(torch.zeros_like(positions), positions, cu_seqlens, int(lengths.max()))
    torch.manual_seed(0)
    hidden = torch.randn(T, shape.D, device="cuda", dtype=torch.bfloat16)
    if concentrated:
        hidden[(positions < 3).cuda()] *= 2
    weight = torch.randn(shape.V, shape.D, device="cuda", dtype=torch.bfloat16) / shape.D**0.5
    bias = torch.full((shape.V,), 30.0, device="cuda")
    tokens = tokens.to("cuda")
    reps, _ = splade_head_forward(hidden, weight, bias, tokens.cu_seqlens, argmax=False)
    maxima = reps.flatten()[:: max(reps.numel() // 2**20, 1)].expm1() - 30
    # A small bias keeps the logits small: rounded to bfloat16, large ones are all ties.
    threshold = maxima.kthvalue(max(int((1 - active) * maxima.numel()), 1)).values - 1e-3
    bias = (-threshold).expand(shape.V).clone()
    return Problem(hidden, weight, bias, tokens, torch.randn_like(reps))


def gradients(head: Callable, problem: Problem) -> tuple[Tensor, ...]:
    """reps, dhidden, dweight, dbias of a head."""
    leaves = [x.detach().requires_grad_() for x in problem[:3]]
    reps = head(*leaves, problem.tokens)
    return reps.detach(), *torch.autograd.grad(reps, leaves, problem.upstream.to(reps.dtype))


def reference(hidden: Tensor, weight: Tensor, bias: Tensor, tokens: TokenBatch) -> Tensor:
    return splade_head_reference(hidden, weight, bias, tokens.cu_seqlens)


def by_sequence(head: Callable, problem: Problem, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """reps, dhidden, dweight, dbias of a head at some precision, sequence by sequence (the logits
    of all sequences might not fit); gradients are summed in fp32."""
    weight, bias = (x.detach().to(dtype).requires_grad_() for x in problem[1:3])
    like = (problem.upstream, *problem[:3])
    reps, dhidden, dweight, dbias = (torch.zeros(x.shape, device="cuda") for x in like)
    ids = problem.tokens.input_ids
    for n, (start, stop) in enumerate(pairwise(problem.tokens.cu_seqlens.tolist())):
        ends = problem.tokens.cu_seqlens.new_tensor([0, stop - start])
        tokens = TokenBatch(ids[start:stop], ids[start:stop], ends, stop - start)
        leaves = (problem.hidden[start:stop].to(dtype).requires_grad_(), weight, bias)
        row = head(*leaves, tokens)
        reps[n] = row[0].detach()
        upstream = problem.upstream[n : n + 1].to(row.dtype)
        dhidden[start:stop], *shared = torch.autograd.grad(row, leaves, upstream)
        dweight += shared[0]
        dbias += shared[1]
    return reps, dhidden, dweight, dbias


def errors(actual: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    return [
        float((a.float() - b).norm() / b.norm().clamp_min(1e-30))
        for a, b in zip(actual, truth, strict=True)
    ]


def measure(run: Callable[[], Any], seconds: float = 2.0) -> dict[str, float]:
    """Milliseconds between CUDA events around each call, and bytes beyond what was allocated."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = min(max(math.ceil(seconds / (time.perf_counter() - begin)), 10), 200)
    peak = torch.cuda.max_memory_allocated() - before
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) for start, stop in events)
    quantiles = {f"p{q}_ms": times[round(q / 100 * (repeats - 1))] for q in (20, 50, 80)}
    return {**quantiles, "peak_bytes": peak, "repeats": repeats}


def environment() -> dict[str, Any]:
    """What every record says of the machine and the code; git is None where there is none."""
    found = describe_environment()
    git = found["git"] or {"sha": None, "dirty": None}
    return {
        "command": found["command"],
        "git_sha": git["sha"],
        "dirty": git["dirty"],
        "gpu": torch.cuda.get_device_name(),
        "driver": found["hardware"].get("driver"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seed": 0,
    }


def guarded(cell: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The cell's record; running out of memory is a result like any other."""
    try:
        return cell()
    except torch.OutOfMemoryError:
        return {"status": "oom"}
    finally:
        torch.cuda.empty_cache()


def gated(found: list[float], allowed: list[float], run: Callable[[], Any]) -> dict[str, Any]:
    """Time of a run whose errors are no larger than allowed."""
    record: dict[str, Any] = {"errors": found, "allowed": allowed}
    if not all(a <= b for a, b in zip(found, allowed, strict=True)):
        return {**record, "status": "red_gate"}
    return {**record, **measure(run), "status": "ok"}


def head_cell(
    name: str, problem: Problem, truth: Sequence[Tensor], allowed: list[float], backward: bool
) -> dict[str, Any]:
    head = HEADS[name]()

    def forward() -> None:
        with torch.no_grad():
            head(*problem[:3], problem.tokens)

    run = (lambda: gradients(head, problem)) if backward else forward
    return gated(errors(gradients(head, problem), truth), allowed, run)


def gemm_cell(problem: Problem) -> dict[str, Any]:
    """cuBLAS: all logits of the real tokens, vocabulary padded to a multiple of 64."""
    V, D = problem.weight.shape
    weight = problem.weight.new_zeros(-(-V // 64) * 64, D)
    weight[:V] = problem.weight
    logits = weight.new_empty(problem.hidden.shape[0], weight.shape[0])
    return {**measure(lambda: torch.mm(problem.hidden, weight.T, out=logits)), "status": "ok"}


def winner_errors(problem: Problem, reps: Tensor, argmax: Tensor) -> list[float]:
    """How many winners lie outside their sequence, where only a rep of 0 may have none (-1), and,
    in a sample, the largest difference between reps and those of the winners alone."""
    starts, stops = problem.tokens.cu_seqlens[:-1, None], problem.tokens.cu_seqlens[1:, None]
    none = (argmax == -1) & (reps == 0)
    outside = ~none & ((argmax < starts) | (argmax >= stops))
    rows = torch.randint(0, reps.shape[0], (64, 1), device=reps.device)
    sample = (rows, torch.arange(0, reps.shape[1], 97, device=reps.device))
    won = problem.hidden[argmax[sample].clamp(0, problem.hidden.shape[0] - 1)].float()
    logits = (won * problem.weight[::97].float()).sum(-1) + problem.bias[::97]
    expected = logits.relu().log1p().masked_fill(none[sample], 0.0)
    return [float(outside.sum()), float((expected - reps[sample]).abs().max())]


def config_cell(problem: Problem, config: ForwardConfig, truth: Tensor) -> dict[str, Any]:
    """One configuration of the forward kernel, checked at the measured shape."""
    operands = (*problem[:3], problem.tokens.cu_seqlens)
    reps, argmax = splade_head_forward(*operands, config=config)
    found = [*errors([reps], [truth]), *winner_errors(problem, reps, argmax)]
    return gated(found, [1e-4, 0, 1e-3], lambda: splade_head_forward(*operands, config=config))


def head_records(problem: Problem, heads: Sequence[str]) -> list[dict[str, Any]]:
    truth = by_sequence(reference, problem, torch.float32)
    # Eager rounds logits: near-ties fall differently, so its gradients differ by whole entries.
    eager = errors(by_sequence(EagerHead(), problem, torch.bfloat16), truth)
    allowed = [1.1 * error + 1e-3 for error in eager]
    records = [{"head": "cublas_gemm", "mode": "forward", **guarded(lambda: gemm_cell(problem))}]
    for name in heads:
        for mode in ("forward", "forward_backward"):
            backward = mode == "forward_backward"
            cell = guarded(lambda: head_cell(name, problem, truth, allowed, backward))  # noqa: B023
            records.append({"head": name, "mode": mode, **cell})
        torch.compiler.reset()
    return records


def neighbours(config: ForwardConfig) -> list[ForwardConfig]:
    """The configuration and what one changed setting makes of it, block shapes apart."""
    segments = [config._replace(segment=n) for n in (32, 64, 128) if n != config.segment]
    groups = [config._replace(group_tokens=n) for n in (1024, 16384)]
    return [config, config._replace(band=8), *segments, *groups]


def config_records(problem: Problem, vary: bool) -> list[dict[str, Any]]:
    truth = by_sequence(reference, problem, torch.float32)[0]
    records = []
    capability = torch.cuda.get_device_capability()
    listed = forward_configs(problem.hidden.dtype, capability, problem.hidden.shape[1])
    for config in [c for one in listed for c in (neighbours(one) if vary else [one])]:
        cell = guarded(lambda: config_cell(problem, config, truth))  # noqa: B023
        records.append({"head": str(config), "mode": "forward", **cell})
    return records


def show(records: list[dict[str, Any]], flop: float, title: str, console: Console) -> None:
    table = Table("head", "mode", "p50 ms", "TFLOP/s forward", "peak MiB", "status", title=title)
    for r in records:
        rate = f"{flop / r['p50_ms'] / 1e9:.0f}" if "p50_ms" in r and r["mode"] == "forward" else ""
        table.add_row(
            r["head"], r["mode"], f"{r['p50_ms']:.3f}" if "p50_ms" in r else "-", rate,
            f"{r['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in r else "-", r["status"],
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["table1", "mix"])
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--active", nargs="+", choices=list(ACTIVE), default=list(ACTIVE))
    parser.add_argument("--concentrated", action="store_true", help="three tokens win most entries")
    parser.add_argument("--sparton-configs", action="store_true", help="forward configs instead")
    parser.add_argument("--vary", action="store_true", help="and their neighbours")
    parser.add_argument("--output", type=Path, help="JSONL file to append to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    console, context = Console(width=160), environment()
    for name in arguments.shapes:
        for active in arguments.active[:1] if arguments.sparton_configs else arguments.active:
            problem = make_problem(SHAPES[name], ACTIVE[active], arguments.concentrated)
            (T, D), V = problem.hidden.shape, problem.weight.shape[0]
            shape = {
                "shape": name, "N": problem.tokens.num_sequences, "T": T, "D": D, "V": V,
                "active": active, "concentrated": arguments.concentrated,
            }  # fmt: skip
            if arguments.sparton_configs:
                records = config_records(problem, arguments.vary)
            else:
                records = head_records(problem, arguments.heads)
            show(records, 2 * T * D * V, json.dumps(shape), console)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                with arguments.output.open("a") as file:
                    file.writelines(json.dumps({**context, **shape, **r}) + "\n" for r in records)
            del problem
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
