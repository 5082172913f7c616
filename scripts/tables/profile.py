"""What each kernel of the head waits for, by the profiler's counters."""

from collections.abc import Sequence

from benchmarks.head.profile import STALLS
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
