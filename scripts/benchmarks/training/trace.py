"""What a trace of the profiler says of the device: busy time, families of kernels, gaps, waits."""

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.screen import Record

Event = dict[str, Any]
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
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
    """Per step: device time by family, idle time, and waits of the host. Which kernels and gaps
    these are stands in the trace, which a browser shows."""
    device = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    if not device:
        return {"busy_share": 0.0, "families_ms": {}, "host_waits": 0.0}
    end = first = device[0]["ts"]
    busy, families = 0.0, dict.fromkeys(FAMILIES, 0.0)
    for event in device:
        # Something runs, whatever the stream.
        stop = event["ts"] + event["dur"]
        busy += max(stop - max(event["ts"], end), 0.0)
        end = max(end, stop)
        families[family(event["name"])] += event["dur"]
    return {
        "busy_share": round(busy / (end - first), 4),
        "idle_ms": round((end - first - busy) / steps / 1e3, 4),
        "launches": round(len(device) / steps, 1),
        "families_ms": {name: round(total / steps / 1e3, 4) for name, total in families.items()},
        **_waits(events, steps),
    }


def family(name: str) -> str:
    return next(family for family, form in FAMILIES.items() if re.search(form, name, re.I))


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
