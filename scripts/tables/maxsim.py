"""MaxSim: every provider side by side, and the targets of the project."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.kernels import KernelCell as Cell
from benchmarks.maxsim.providers import PROVIDERS
from benchmarks.maxsim.shapes import BOTH, FORWARD, SHAPES
from tables.bars import MET
from tables.records import TABLES, Record, by_device, drawings, find, markdown, milliseconds, table

STUDY = "maxsim"
PEERS = tuple(name for name in PROVIDERS if name.startswith(("lik", "flash")))
WORDS = {"lik": "LIK", "flash": "flash-maxsim"}
MODES = {FORWARD: "forward", BOTH: "forward and backward"}


class Target(NamedTuple):
    """The time of ``provider`` is at most ``limit`` of the best of ``rivals`` at the same shape."""

    name: str
    shape: str
    mode: str
    limit: float
    rivals: tuple[str, ...] = PEERS
    provider: str = "sparton"


TARGETS = (
    Target("training", "128x128_32x300", FORWARD, 0.40),
    Target("training", "128x128_32x300", BOTH, 0.60),
    Target("pages as images", "32x32_1024x1024", FORWARD, 0.75),
    Target("reranking", "1x10000_32x300", FORWARD, 1.00),
    Target("packed", "64x512_packed", FORWARD, 0.60, ("lik",)),
    Target("packed", "64x512_packed", BOTH, 0.60, ("lik",)),
    Target("from hidden states", "64x64_hidden", BOTH, 0.50, ("lik_projected",)),
    Target("compressed, 2 bits", "1x10000_residual_2", FORWARD, 0.10, ("lik",)),
    Target("FP8", "32x32_1024x1024", FORWARD, 0.65, ("sparton",), "sparton_fp8_tensor"),
)


def forward() -> str:
    """Times of the forward pass, and where they stand under the card's ceilings."""
    found = by_device(STUDY, partial(_side_by_side, FORWARD), command=STUDY, together="shape")
    drawn = drawings(STUDY, "roofline", "Roofline of MaxSim's forward")
    return f"{found}\n{drawn}" if drawn else found


@table("maxsim_backward", STUDY, together="shape")
def backward(records: list[Record]) -> str:
    return _side_by_side(BOTH, records)


@table("maxsim_compiled", f"{STUDY}_compiled", command=STUDY)
@table("maxsim_rest", f"{STUDY}_rest", command=STUDY)
def both(records: list[Record]) -> str:
    """Of a run that had what the main one leaves out."""
    return "\n".join(_side_by_side(mode, records) for mode in MODES)


@table("maxsim_backwards", "maxsim_backward")
def backwards(records: list[Record]) -> str:
    """Both of ours, forward and backward, and what "unified" takes of the device's time."""
    rows = []
    for shape in dict.fromkeys(record["shape"] for record in records):
        cells = [Cell(shape, BOTH, f"sparton_{name}") for name in ("lowmem", "unified")]
        lowmem, unified = (find(records, cell) for cell in cells)
        if "device_ms" in lowmem and "device_ms" in unified:
            ratio = unified["device_ms"] / lowmem["device_ms"]
            rows.append([shape, _time(lowmem), _time(unified), f"{ratio:.2f}"])
    return markdown(["forward and backward, ms", "lowmem", "unified", "of the device"], rows)


def _side_by_side(mode: str, records: list[Record]) -> str:
    """A row for each shape, a column for each provider; the fastest in bold, in brackets the time
    of the kernels alone."""
    seen = {(r["shape"], r["provider"]): r for r in records if r["mode"] == mode}
    there = {record["provider"] for record in seen.values() if _there(record)}
    providers = [name for name in PROVIDERS if name in there]
    rows = []
    for shape in SHAPES:
        found = [seen.get((shape, name), {}) for name in providers]
        if any(found):
            times = [record["p50_ms"] for record in found if "p50_ms" in record]
            figures = [_time(record, min(times, default=0.0)) for record in found]
            rows.append([shape, *figures, *_floor(found)])
    names = [provider_name(name) for name in providers]
    return markdown([f"{MODES[mode]}, ms", *names, "floor", "share of the floor"], rows)


def _there(record: Record) -> bool:
    """Whether it was tried, by a package that was installed."""
    return bool(record) and record["status"] != "absent"


def provider_name(provider: str) -> str:
    """``lik_lowmem`` is "LIK lowmem"."""
    package, _, option = provider.partition("_")
    return f"{WORDS.get(package, package)} {option}".strip()


def _time(record: Record, best: float = 0.0) -> str:
    if "p50_ms" not in record:
        return milliseconds(record)
    time = record["p50_ms"]
    said = f"**{_digits(time)}**" if time == best else _digits(time)
    return f"{said} ({_digits(record['device_ms'])})" if "device_ms" in record else said


def _digits(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 1 else f"{milliseconds:.2f}"


def _floor(found: Sequence[Record]) -> tuple[str, str]:
    """Of the first provider that was timed: the least time, and what part of its own that is."""
    record = next((record for record in found if "p50_ms" in record), {})
    if not record:
        return "", ""
    floor = max(record["memory_floor_ms"], record["flop_floor_ms"])
    bound = "memory" if floor == record["memory_floor_ms"] else "products"
    return f"{floor:.3f} ({bound})", f"{100 * record['share_of_floor']:.0f} %"


def fastest(records: Sequence[Record], cell: Cell, providers: Sequence[str]) -> Record:
    """The provider with the least time at the shape and mode of ``cell``; {} if none was timed."""
    found = (find(records, cell._replace(provider=name)) for name in providers)
    timed = [record for record in found if "p50_ms" in record]
    return min(timed, key=lambda record: record["p50_ms"], default={})


@table("maxsim_targets", STUDY, together="shape")
def targets(records: list[Record]) -> str:
    rows = []
    for name, shape, mode, limit, rivals, provider in TARGETS:
        cell = Cell(shape, mode, provider)
        ours, best = find(records, cell), fastest(records, cell, rivals)
        if not ours or not any(_there(find(records, cell._replace(provider=r))) for r in rivals):
            continue
        verdict, met = ours["status"], None
        if "p50_ms" in ours and best:
            ratio = ours["p50_ms"] / best["p50_ms"]
            times = f"{_time(ours)} / {_time(best)} ms, {provider_name(best['provider'])}"
            verdict, met = f"{times}: {ratio:.2f}", ratio <= limit
        whose = "the better peer" if rivals == PEERS else provider_name(rivals[0])
        rows.append([name, shape, MODES[mode], f"≤ {limit:.2f} of {whose}", verdict, MET[met]])
    return markdown(["bar", "shape", "mode", "target", "measured", "met"], rows)


TABLES["maxsim_forward"] = forward
