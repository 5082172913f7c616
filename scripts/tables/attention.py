"""Attention over packed sequences: time of the kernels, ours beside PyTorch's."""

from benchmarks.attention.problems import BOTH, SHAPES, Shape
from benchmarks.kernels import FORWARD
from tables.records import Record, find, markdown, table

PROVIDERS = {
    "sparton": "**ours**",
    "flash_varlen": "FlashAttention, packed",
    "sdpa_cudnn": "cuDNN, padded",
    "sdpa_efficient": "memory-efficient, padded",
}
MODES = {FORWARD: "forward ms", BOTH: "forward + backward ms"}


@table("attention", "attention", command="attention")
def attention(records: list[Record]) -> str:
    columns = [f"{words}, {mode}" for mode in MODES.values() for words in PROVIDERS.values()]
    rows = []
    for name in dict.fromkeys(record["shape"] for record in records):
        cells = [
            find(records, shape=name, mode=mode, provider=provider)
            for mode in MODES
            for provider in PROVIDERS
        ]
        rows.append([_described(SHAPES[name]), *(_time(record) for record in cells)])
    return markdown(["sequences x tokens, heads x width", *columns], rows)


def _described(shape: Shape) -> str:
    parts = [
        f"{count:,} x {low if low == high else f'{low} to {high}'}"
        for count, low, high in shape.parts
    ]
    return f"{' and '.join(parts)}, {shape.H} x {shape.d}"


def _time(record: Record) -> str:
    """Of the device's kernels; what happened where there is no time."""
    return f"{record['device_ms']:.3f}" if "device_ms" in record else record.get("status", "")
