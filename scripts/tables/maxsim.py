"""MaxSim: every provider side by side, and the targets of the project."""

from collections.abc import Sequence
from typing import NamedTuple

from maxsim_benchmark.providers import PROVIDERS, Cell, cells
from maxsim_benchmark.shapes import BOTH, FORWARD, SHAPES
from tables.records import Record, by_device, device_folders, drawing, find, markdown, milliseconds

STUDY = "maxsim"
OURS = tuple(name for name in PROVIDERS if name.startswith("sparton"))
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


def forward_table() -> str:
    """Times of the forward pass, and where they stand under the card's ceilings."""
    table = by_device(STUDY, lambda records: _side_by_side(records, FORWARD))
    names = [f"roofline-{folder.name}.svg" for folder in device_folders(STUDY)]
    figures = [drawing(name, "Roofline of MaxSim's forward") for name in names]
    return "\n".join([table, *figures]) if any(figures) else table


def backward_table() -> str:
    return by_device(STUDY, lambda records: _side_by_side(records, BOTH))


def other_run(name: str) -> str:
    """Forward, then forward and backward, of a run that had what the main one leaves out."""
    return by_device(
        f"{STUDY}_{name}",
        lambda records: "\n".join(_side_by_side(records, mode) for mode in (FORWARD, BOTH)),
    )


def _side_by_side(records: list[Record], mode: str) -> str:
    """A row for each shape, a column for each provider; the fastest in bold, in brackets the time
    of the kernels alone."""
    shapes = [name for name, shape in SHAPES.items() if mode in shape.modes]
    providers = [
        name
        for name in PROVIDERS
        if any(find(records, **cell._asdict()) for cell in cells(shapes, [name]) if cell[1] == mode)
    ]
    rows = []
    for shape in shapes:
        found = [find(records, **Cell(shape, mode, name)._asdict()) for name in providers]
        if not any(found):
            continue
        times = [record["p50_ms"] for record in found if "p50_ms" in record]
        figures = [_time(record, min(times, default=0.0)) for record in found]
        floor, share = _floor(found)
        rows.append([shape, *figures, floor, share])
    names = [provider_name(name) for name in providers]
    return markdown([f"{MODES[mode]}, ms", *names, "floor", "share of the floor"], rows)


def provider_name(provider: str) -> str:
    """``lik_lowmem`` is "LIK lowmem"."""
    package, _, option = provider.partition("_")
    return f"{WORDS.get(package, package)} {option}".strip()


def _time(record: Record, best: float) -> str:
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
    found = (find(records, **cell._replace(provider=name)._asdict()) for name in providers)
    timed = [record for record in found if "p50_ms" in record]
    return min(timed, key=lambda record: record["p50_ms"], default={})


def targets_table() -> str:
    return by_device(STUDY, _targets)


def _targets(records: list[Record]) -> str:
    rows = []
    for target in TARGETS:
        cell = Cell(target.shape, target.mode, target.provider)
        ours, best = find(records, **cell._asdict()), fastest(records, cell, target.rivals)
        verdict, met = ours.get("status", "?"), "?"
        if "p50_ms" in ours and best:
            ratio = ours["p50_ms"] / best["p50_ms"]
            times = f"{_time(ours, 0)} / {_time(best, 0)} ms, {provider_name(best['provider'])}"
            verdict, met = f"{times}: {ratio:.2f}", "yes" if ratio <= target.limit else "**no**"
        rivals_said = (
            "the better peer" if target.rivals == PEERS else provider_name(target.rivals[0])
        )
        row = [
            target.name,
            target.shape,
            MODES[target.mode],
            f"≤ {target.limit:.2f} of {rivals_said}",
        ]
        rows.append([*row, verdict, met])
    return markdown(["bar", "shape", "mode", "target", "measured", "met"], rows)
