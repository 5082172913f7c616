"""What is measured, as data: shapes, patterns of winners, suites of cells.

N sequences, S tokens of each, D hidden, V vocabulary. A shape is written ``NxSxVxD``, or ``NxSxV``
where D is 768.
"""

import re
from itertools import product
from typing import NamedTuple


class Shape(NamedTuple):
    """Sequences with lengths drawn uniformly from each (number, shortest, longest)."""

    lengths: tuple[tuple[int, int, int], ...]
    V: int = 30522
    D: int = 768

    def shrunk(self) -> "Shape":
        """Small enough for a test on a CPU; orders of magnitude stay recognisable."""
        lengths = [
            (min(number, 6), max(low // 64, 1), max(high // 64, 2))
            for number, low, high in self.lengths
        ]
        return Shape(tuple(lengths), self.V // 50 | 1, 32)


NAMED_SHAPES = {
    # As 512x256x30522, with 60 % of its tokens.
    "mix60": Shape(((512, 52, 256),)),
}


def shape_of(name: str) -> Shape:
    """The shape of a name in :data:`NAMED_SHAPES`, or written ``NxSxV`` or ``NxSxVxD``."""
    if name in NAMED_SHAPES:
        return NAMED_SHAPES[name]
    sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?", name)
    if not sizes:
        raise ValueError(
            f"{name} is no shape: write NxSxV, NxSxVxD or one of {', '.join(NAMED_SHAPES)}"
        )
    N, S, V, D = (int(size or 768) for size in sizes.groups())
    return Shape(((N, S, S),), V, D)


class Pattern(NamedTuple):
    """Which entries are active, and where their maxima lie.

    Attributes:
        active: share of the entries above 0.
        concentrated: three tokens of each sequence win most entries, as trained models have it;
            otherwise each token is as likely as the next.
    """

    active: float
    concentrated: bool


PATTERNS = {
    "random": Pattern(1.0, False),
    "random_1pct": Pattern(0.01, False),
    "concentrated": Pattern(1.0, True),
    "concentrated_1pct": Pattern(0.01, True),
}

FORWARD = "forward"  # without a graph, as an encoder runs
TRAINING_FORWARD = "training_forward"  # with all that its backward will need
FORWARD_BACKWARD = "forward_backward"
MODES = (FORWARD, TRAINING_FORWARD, FORWARD_BACKWARD)
COUNTERS = "counters"  # of the profiler, of a forward and backward

GEMM, GEMM_AS_IS = GEMMS = "gemm_padded", "gemm_as_is"
NO_HEAD = "none"


class Cell(NamedTuple):
    """One measurement.

    Attributes:
        shape, pattern: what the head is given.
        head: a key of heads.HEADS; :data:`GEMM`, :data:`GEMM_AS_IS` for the bare matrix product;
            :data:`NO_HEAD` for a backbone alone.
        mode: one of :data:`MODES`, or :data:`COUNTERS`.
        backbone: "" for the head alone, else how BERT-base before it runs: eager or compiled.
    """

    shape: str
    head: str
    mode: str = FORWARD
    pattern: str = "random"
    backbone: str = ""

    @property
    def label(self) -> str:
        parts = (self.shape, self.pattern, self.backbone and f"BERT {self.backbone}", self.head)
        return " ".join(part for part in (*parts, self.mode) if part)

    @property
    def compiles(self) -> bool:
        """Whether torch.compile runs in the cell."""
        return "compiled" in (self.backbone, self.head.rpartition("_")[2]) or (
            self.head == "sparton_hybrid"
        )


TABLE1, SHORT, MULTILINGUAL = "320x512x30522", "512x256x30522", "32x512x250002"
ALL_HEADS = (
    "eager", "compiled", "tiled", "tiled_compiled", "sparton_hybrid", "sparton", "sparton_fp8"
)  # fmt: skip
RIVALS = ("sparton_hybrid", "sparton")
PASSES = (FORWARD, FORWARD_BACKWARD)
LONG = tuple(f"128x{S}x30522" for S in (1024, 2048, 4096, 8192, 16384))
# From the paper's Figure 2 only the axes are known; each sweep passes through the same point.
SWEEPS = {
    "B": tuple(f"{B}x512x30522" for B in (8, 16, 32, 64, 128, 256, 512)),
    "S": tuple(f"64x{S}x30522" for S in (64, 128, 256, 512, 1024, 2048, 4096)),
    "V": tuple(f"64x512x{V}" for V in (7680, 15360, 30522, 61440, 100000, 150000, 250002)),
}

# Hidden sizes and vocabularies of encoders and decoders, at 8k and 32k tokens, and at 160k where an
# exact result takes seconds.
WIDTHS = (768, 1024, 2048, 3584, 4096)
VOCABULARIES = (30522, 50368, 128256, 151936, 250002)
WIDE = tuple(
    f"{N}x512x{V}x{D}"
    for D, V, N in product(WIDTHS, VOCABULARIES, (16, 64, 320))
    if N < 320 or V == 30522 or V * D <= 250002 * 1024
)
PORTABLE = tuple(f"64x512x30522x{D}" for D in WIDTHS)
WIDE_FP8 = ("320x512x30522x768", "64x512x30522x4096", "64x512x151936x4096")

# These share cells and hence a file, in which each cell is measured once.
TOGETHER = ("bars", "heads", "patterns")
SUITES: dict[str, list[Cell]] = {
    # The targets of this project.
    "bars": [
        Cell(TABLE1, GEMM),
        Cell(TABLE1, "sparton", TRAINING_FORWARD),
        *(Cell(TABLE1, head, mode) for head, mode in product(RIVALS, PASSES)),
        *(Cell(TABLE1, head, FORWARD_BACKWARD, "random_1pct") for head in RIVALS),
        Cell(SHORT, GEMM),
        *(Cell(SHORT, head, mode) for head, mode in product(RIVALS, PASSES)),
        *(Cell("mix60", "sparton", mode) for mode in PASSES),
        *(Cell(MULTILINGUAL, head, mode) for head, mode in product(RIVALS, PASSES)),
    ],
    # Every head at one shape.
    "heads": [
        Cell(TABLE1, GEMM),
        Cell(TABLE1, GEMM_AS_IS),
        *(Cell(TABLE1, head, mode) for head, mode in product(ALL_HEADS, PASSES)),
    ],
    # Where the maxima lie.
    "patterns": [Cell(TABLE1, h, FORWARD_BACKWARD, p) for p, h in product(PATTERNS, RIVALS)],
    # Every width and vocabulary beside the bare product.
    "wide": [
        Cell(shape, head, mode, "random_1pct")
        for shape in WIDE
        for head, mode in (
            (GEMM, FORWARD),
            ("sparton", FORWARD),
            ("sparton", FORWARD_BACKWARD),
            *([("sparton_fp8", FORWARD)] if shape in WIDE_FP8 else []),
        )
    ],
    # The kernel of all other GPUs in the place of Hopper's.
    "portable": [
        Cell(shape, head)
        for shape, head in product((TABLE1, *PORTABLE), (GEMM, "sparton", "sparton_portable"))
    ],
    # What the kernels wait for.
    "profile": [Cell(TABLE1, "sparton", COUNTERS, p) for p in ("random", "random_1pct")],
    # The paper's Table 2: long sequences.
    "table2": [
        Cell(shape, head, FORWARD_BACKWARD)
        for shape, head in product(LONG, ("tiled", "tiled_compiled", *RIVALS))
    ],
    # The paper's Figure 2: one size at a time.
    "figure2": [
        Cell(shape, head, FORWARD_BACKWARD)
        for shape in dict.fromkeys(name for sweep in SWEEPS.values() for name in sweep)
        for head in ALL_HEADS
    ],
    # The paper's Table 1: the head behind its backbone.
    "table1": [
        *(
            Cell(TABLE1, head, mode, backbone="eager")
            for mode, head in product(PASSES, (NO_HEAD, "eager", "tiled", *RIVALS))
        ),
        *(
            Cell(TABLE1, head, mode, backbone="compiled")
            for mode, head in product(PASSES, (NO_HEAD, "compiled", "tiled_compiled", *RIVALS))
        ),
    ],
}
