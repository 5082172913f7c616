"""Heads side by side: at one shape, and where the maxima lie."""

from benchmarks.head.suites import (
    ALL_HEADS,
    FORWARD,
    FORWARD_BACKWARD,
    GEMM,
    GEMM_AS_IS,
    PASSES,
    PORTABLE,
    RIVALS,
    TABLE1,
    VOCABULARIES,
    WIDE_FP8,
    WIDTHS,
    Cell,
)
from tables.records import Record, bold, find, markdown, mebibytes, milliseconds, table

GEMMS = {
    GEMM: "bare GEMM, vocabulary padded to 64s",
    GEMM_AS_IS: "bare GEMM, vocabulary as it is",
}
PATTERNS = {
    "random": "random, every entry active",
    "random_1pct": "random, 1 % active",
    "concentrated": "three tokens win most, every entry active",
    "concentrated_1pct": "three tokens win most, 1 % active",
}


@table("heads", "head", command="head --suite heads")
def heads(records: list[Record]) -> str:
    """Time and memory of every head, forward and forward with backward."""
    rows = []
    for head in (*GEMMS, *ALL_HEADS):
        found = [find(records, Cell(TABLE1, head, mode)) for mode in PASSES]
        if any(found):
            name = GEMMS.get(head, bold(head))
            rows.append([name, *map(milliseconds, found), *map(mebibytes, found)])
    header = ["", "forward ms", "forward + backward ms", "forward MiB", "forward + backward MiB"]
    return markdown(header, rows)


@table("patterns", "head", command="head --suite patterns")
def patterns(records: list[Record]) -> str:
    """Forward and backward of the two designs for each pattern of winners."""
    rows = []
    for pattern, words in PATTERNS.items():
        cells = [Cell(TABLE1, head, FORWARD_BACKWARD, pattern) for head in RIVALS]
        hybrid, ours = (find(records, cell) for cell in cells)
        if not ours:
            continue
        shares = [
            f"{100 * ours[key]:.3g} %" if key in ours else ""
            for key in ("active_share", "top3_share")
        ]
        both = "p50_ms" in ours and "p50_ms" in hybrid
        ratio = f"{ours['p50_ms'] / hybrid['p50_ms']:.2f}" if both else ""
        rows.append([words, *shares, milliseconds(hybrid), milliseconds(ours), ratio])
    header = ["maxima", "active", "held by three tokens", *(f"{h} ms" for h in RIVALS), "ratio"]
    return markdown(header, rows)


def _wide(shape: str, head: str, mode: str = FORWARD) -> Cell:
    return Cell(shape, head, mode, "random_1pct")


@table("wide", "head_wide", command="head --suite wide", together="shape")
def wide(records: list[Record]) -> str:
    """The forward over the bare product, and the forward with backward over the forward."""
    rows = []
    for D in WIDTHS:
        for N in (16, 64, 320):
            ratios = [_ratios(records, f"{N}x512x{V}x{D}") for V in VOCABULARIES]
            if any(ratios):
                rows.append([f"{D:,}", f"{N * 512:,}", *ratios])
    return markdown(["D", "tokens", *(f"V = {V:,}" for V in VOCABULARIES)], rows)


def _ratios(records: list[Record], shape: str) -> str:
    bare, forward, both = (
        find(records, _wide(shape, head, mode)).get("p50_ms")
        for head, mode in ((GEMM, FORWARD), ("sparton", FORWARD), ("sparton", FORWARD_BACKWARD))
    )
    if not (bare and forward):
        return ""
    return f"**{forward / bare:.2f}**" + (f" {both / forward:.2f}" if both else "")


@table("wide_fp8", "head_wide", command="head --suite wide", together="shape")
def wide_fp8(records: list[Record]) -> str:
    """The forward in FP8 beside that in 16 bits."""
    rows = []
    for shape in WIDE_FP8:
        heads = GEMM, "sparton", "sparton_fp8"
        found = [find(records, _wide(shape, head)) for head in heads]
        if "p50_ms" in found[-1]:
            ratio = f"{found[2]['p50_ms'] / found[1]['p50_ms']:.2f}"
            rows.append([shape, *map(milliseconds, found), ratio])
    header = ["N x S x V x D", GEMMS[GEMM], "sparton ms", "sparton_fp8 ms", "ratio"]
    return markdown(header, rows)


@table("portable", "head_portable", command="head --suite portable", together="shape")
def portable(records: list[Record]) -> str:
    """The forward of the kernel that other GPUs have beside that of Hopper's own."""
    rows = []
    for shape in (TABLE1, *PORTABLE):
        bare, own, forced = (
            find(records, Cell(shape, head)) for head in (GEMM, "sparton", "sparton_portable")
        )
        if all("p50_ms" in record for record in (bare, own, forced)):
            ratios = [forced["p50_ms"] / record["p50_ms"] for record in (bare, own)]
            times = map(milliseconds, (bare, own, forced))
            rows.append([shape, *times, *(f"{ratio:.2f}" for ratio in ratios)])
    header = ["N x S x V x D", GEMMS[GEMM], "sparton ms", "portable ms"]
    return markdown([*header, "of the bare GEMM", "of sparton"], rows)
