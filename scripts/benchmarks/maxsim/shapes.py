"""What is measured, as data, and the least work that each shape asks for."""

from typing import NamedTuple

from benchmarks.kernels import FORWARD

BOTH = "forward_backward"
CROSS, OWN, PACKED, HIDDEN, RESIDUAL = "cross", "own", "packed", "hidden", "residual"
KINDS = (CROSS, OWN, PACKED, HIDDEN, RESIDUAL)
CENTROIDS = 2**14


class Shape(NamedTuple):
    """A problem.

    Attributes:
        Q, N: queries, and documents of each query (OWN) or of all.
        Lq, Ld: tokens of a query and of a document; PACKED documents have log-normal lengths with
            this median, at most 8 times as long.
        modes: what is timed: FORWARD without a graph, BOTH with all gradients.
        kind: one of KINDS: every query with every document; documents of each query's own; packed
            documents; documents as hidden states; compressed documents.
        H: hidden size before the projection (HIDDEN).
        nbits: of compressed documents (RESIDUAL).
        fp8: whether FP8 is measured as well.
    """

    Q: int
    N: int
    Lq: int
    Ld: int
    modes: tuple[str, ...] = (FORWARD,)
    kind: str = CROSS
    E: int = 128
    H: int = 0
    nbits: int = 0
    fp8: bool = False

    def shrunk(self) -> "Shape":
        """Small enough for a test on a CPU."""
        Q, N, Lq, Ld = (min(x, n) for x, n in zip(self[:4], (3, 5, 7, 19), strict=True))
        return self._replace(Q=Q, N=N, Lq=Lq, Ld=Ld, E=32, H=self.H and 48)


SHAPES = {
    # Reranking: one query, many documents.
    "1x1000_32x1024": Shape(1, 1000, 32, 1024),
    "1x1000_128x1024": Shape(1, 1000, 128, 1024),
    "1x10000_32x300": Shape(1, 10000, 32, 300),
    # Training within a batch.
    "128x128_32x300": Shape(128, 128, 32, 300, (FORWARD, BOTH), fp8=True),
    "128x128_32x128": Shape(128, 128, 32, 128, (BOTH,)),
    "256x256_32x128": Shape(256, 256, 32, 128, (BOTH,)),
    "256x256_32x300": Shape(256, 256, 32, 300, (BOTH,)),
    "16x512_32x300": Shape(16, 512, 32, 300, (BOTH,)),
    "16x1024_32x128": Shape(16, 1024, 32, 128, (BOTH,)),
    # Distillation: documents of each query's own.
    "32x8_own_32x300": Shape(32, 8, 32, 300, (FORWARD, BOTH), OWN),
    # Images as documents and as queries.
    "32x32_1024x1024": Shape(32, 32, 1024, 1024, (FORWARD, BOTH), fp8=True),
    # Without padding.
    "1x10000_packed": Shape(1, 10000, 32, 120, (FORWARD,), PACKED),
    "64x512_packed": Shape(64, 512, 32, 120, (FORWARD, BOTH), PACKED),
    # From hidden states.
    "64x64_hidden": Shape(64, 64, 32, 300, (FORWARD, BOTH), HIDDEN, H=768),
    # Compressed documents.
    **{
        f"1x10000_residual_{nbits}": Shape(1, 10000, 32, 300, (FORWARD,), RESIDUAL, nbits=nbits)
        for nbits in (1, 2, 4, 8)
    },
    # Long queries; others tune their kernels for minutes here.
    "4x8_own_512x512": Shape(4, 8, 512, 512, (FORWARD, BOTH), OWN),
}


def least_work(shape: Shape, mode: str, operand_bytes: int, tokens: int) -> tuple[int, int]:
    """Bytes and FLOPs that no algorithm does without: operands once per pass over them, results
    once; similarities of all pairs of tokens, gradients through the winners alone.

    Args:
        operand_bytes: of all operands.
        tokens: of all documents.
    """
    scores = shape.Q * shape.N
    lists = 1 if shape.kind == OWN else shape.Q
    traffic, flop = operand_bytes + 4 * scores, 2 * lists * shape.Lq * tokens * shape.E
    projection = 2 * tokens * shape.H * shape.E
    if mode == BOTH:
        # Backward: read the operands and the scores' gradient, write gradients as large as those.
        traffic += 2 * operand_bytes + 4 * scores
        flop += 4 * scores * shape.Lq * shape.E + 2 * projection
    return traffic, flop + projection
