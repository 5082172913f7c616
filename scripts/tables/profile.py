"""What each kernel of the head waits for, and what the steps of a training consist of."""

from collections.abc import Sequence

from benchmarks.head.profile import STALLS
from benchmarks.training.suites import PROFILED, PROFILED_IN_FP8
from tables.records import Record, markdown, table

KERNELS = {
    "_segment_max_hopper_kernel": "forward: product and maxima",
    "_count_kernel": "count entries by token",
    "_by_token_kernel": "list entries by token",
    "part_kernel": "sums of long lists",
    "dhidden_kernel": "gradient of the hidden states",
    "_by_vocabulary_kernel": "list entries by term",
    "dweight_kernel": "gradient of the weight",
}
GEMM = "the library's product"
# Kernels of a training's step by what their names begin with or contain, the first that fits.
FAMILIES = {
    "matrix products in FP8": ("qqtst", "qqsss"),
    "matrix products in 16 bits": ("nvjet", "cublasLt::splitK", "_linear_hopper"),
    "norms, with residual and dropout": ("_norm_", "layer_norm", "GammaBeta"),
    "attention": ("_varlen_attention", "_attention_hopper", "_dquery_", "_dkey_", "_shares_"),
    "GELU and its gradient": ("_gelu", "GeluBackward", "GeluCUDA"),
    "head": tuple(KERNELS),
    "rounding to FP8": ("_fp8_", "_norms_kernel"),
    "optimizer": ("multi_tensor_apply",),
}
REST = "the rest: sums of biases, copies, embeddings, loss"


@table("profile", "head_profile", command="head --suite profile")
def profile(records: list[Record]) -> str:
    """Launches of one forward and backward; those of a kernel added up."""
    rows = []
    for pattern, kernel in dict.fromkeys((r["pattern"], r["kernel"]) for r in records):
        launches = [r for r in records if (r["pattern"], r["kernel"]) == (pattern, kernel)]
        rows.append([KERNELS.get(kernel, GEMM), pattern, *_figures(launches)])
    header = [
        "", "pattern", "launches", "µs", "GHz", "tensor cores %", "issue slots %", "L2 %", "DRAM %",
        "DRAM MiB", "warps wait most for",
    ]  # fmt: skip
    return markdown(header, rows)


def _figures(launches: Sequence[Record]) -> list[str]:
    """Shares are means over the launches' time."""
    time = sum(launch["microseconds"] for launch in launches)

    def mean(name: str) -> float:
        return sum(launch[name] * launch["microseconds"] for launch in launches) / time

    shares = [f"{mean(f'{name}_pct'):.0f}" for name in ("tensor_pipe", "issue", "l2", "dram")]
    traffic = f"{sum(launch['dram_mib'] for launch in launches):,.0f}"
    stall = max(launches[0]["stalls"], key=launches[0]["stalls"].get)
    clock = f"{mean('sm_ghz'):.2f}"
    return [str(len(launches)), f"{time:,.0f}", clock, *shares, traffic, STALLS.get(stall, stall)]


@table("training_profile", "training", "profile", "training --suite profile")
def training(records: list[Record]) -> str:
    """Milliseconds of each family of kernels in a step, by what multiplies and by what lies between
    the layers."""
    names = {
        (PROFILED, False): "16 bits",
        (PROFILED, True): "16 bits, also between layers",
        (PROFILED_IN_FP8, False): "FP8",
        (PROFILED_IN_FP8, True): "FP8, 16 bits between layers",
    }
    profiles = {
        names[r["system"], r["half_residual"]]: r["profile"] for r in records if "profile" in r
    }
    return _beside(profiles) if profiles else ""


def _beside(profiles: dict[str, Record]) -> str:
    found = {name: _by_family(profile["kernels"]) for name, profile in profiles.items()}
    for name, profile in profiles.items():
        found[name][REST] = found[name].get(REST, 0.0) + profile.get("others_ms", 0.0)
    order = [name for name in (*FAMILIES, REST) if any(name in each for each in found.values())]
    rows = [
        [name, *(f"{each[name]:.1f}" if name in each else "" for each in found.values())]
        for name in order
    ]
    rows.append(["all kernels", *(f"{sum(each.values()):.1f}" for each in found.values())])
    rows.append(["a step by the clock", *(f"{each['step_ms']:.1f}" for each in profiles.values())])
    return markdown(["ms of a step", *found], rows)


def _by_family(kernels: Sequence[Record]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel in kernels:
        fitting = (
            family
            for family, parts in FAMILIES.items()
            if any(part in kernel["name"] for part in parts)
        )
        family = next(fitting, REST)
        found[family] = found.get(family, 0.0) + kernel["ms"]
    return found
