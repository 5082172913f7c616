"""What a trace of the profiler says of the device: busy time, families of kernels, gaps, waits."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]
Record = dict[str, Any]
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
TOP_KERNELS, TOP_GAPS = 25, 8
LONGEST_NAME = 160
# The first that fits counts. Products that give fp32 are those of the scores: all else is 16-bit.
FAMILIES = {
    "collectives": r"nccl",
    "copies": r"^Mem(cpy|set)|copy_kernel|CatArray|direct_copy",
    "attention": r"flash|fmha|attention|cudnn.*(sdpa|mha)",
    "maxsim": r"maxsim|masked_max|residual_(fwd|bwd)|_scores_kernel|_normalize|inverse_norm",
    "head": (
        r"segment_max|dweight|dhidden|by_(token|vocabulary)|logit_grads|^(part|gradients)_kernel|"
        r"hybrid_head|_rescore|_count_kernel|_quantize"
    ),
    "optimizer": r"adam|multi_tensor|lpnorm|foreach",
    "loss": r"copy_entries|softmax|nll_loss|sgemm|s1688gemm|f32f32_f32f32|_tss_",
    "GEMM": r"gemm|cutlass|nvjet|xmma|cublas|splitk|gemv",
    "norms and elementwise": r"",
}


def summarize(events: Sequence[Event], steps: int) -> Record:
    """Per step: device time by family, the kernels that take most, gaps, and waits of the host."""
    device = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    if not device:
        return {"busy_share": 0.0, "families_ms": {}, "kernels": [], "gaps": [], "host_waits": 0.0}
    busy, gaps = _busy(device)
    span = max(e["ts"] + e["dur"] for e in device) - device[0]["ts"]
    idle = sum(length for length, _, _ in gaps)
    return {
        "busy_share": round(busy / span, 4),
        "idle_ms": round(idle / steps / 1e3, 4),
        "launches": round(len(device) / steps, 1),
        "families_ms": _families(device, steps),
        "kernels": _kernels(device, steps),
        "gaps": [
            {"ms": round(length / 1e3, 4), "after": _short(before), "before": _short(after)}
            for length, before, after in sorted(gaps, reverse=True)[:TOP_GAPS]
        ],
        **_waits(events, steps),
    }


def family(name: str) -> str:
    return next(family for family, form in FAMILIES.items() if re.search(form, name, re.I))


def _busy(device: Sequence[Event]) -> tuple[float, list[tuple[float, str, str]]]:
    """Microseconds in which something ran, whatever the stream, and the gaps between: length, the
    kernel before and the one after."""
    busy, end, last = 0.0, device[0]["ts"], ""
    gaps = []
    for event in device:
        begin, stop = event["ts"], event["ts"] + event["dur"]
        if begin > end:
            gaps.append((begin - end, last, event["name"]))
        busy += max(stop - max(begin, end), 0.0)
        if stop >= end:
            end, last = stop, event["name"]
    return busy, gaps


def _families(device: Sequence[Event], steps: int) -> dict[str, float]:
    sums: dict[str, float] = dict.fromkeys(FAMILIES, 0.0)
    for event in device:
        sums[family(event["name"])] += event["dur"]
    return {name: round(total / steps / 1e3, 4) for name, total in sums.items()}


def _kernels(device: Sequence[Event], steps: int) -> list[Record]:
    durations: dict[str, list[float]] = defaultdict(list)
    for event in device:
        durations[event["name"]].append(event["dur"])
    ranked = sorted(durations, key=lambda name: -sum(durations[name]))[:TOP_KERNELS]
    return [
        {
            "name": _short(name),
            "family": family(name),
            "ms": round(sum(durations[name]) / steps / 1e3, 4),
            "launches": round(len(durations[name]) / steps, 2),
        }
        for name in ranked
    ]


def _waits(events: Sequence[Event], steps: int) -> Record:
    """How often the host waited for the device, and how long. What follows the last launch is the
    end of the profile, not of a step."""
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    last = max((e["ts"] for e in runtime if e["name"] in LAUNCHES), default=0.0)
    waits = [e for e in runtime if e["name"] in HOST_WAITS and e["ts"] <= last]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "DtoH" in e["name"]]
    return {
        "host_waits": round(len(waits) / steps, 2),
        "host_wait_ms": round(sum(e["dur"] for e in waits) / steps / 1e3, 4),
        "copies_to_host": round(len(copies) / steps, 2),
    }


def _short(name: str) -> str:
    return name[:LONGEST_NAME]
