"""Both backwards of MaxSim over the shapes between which the choice of ``auto`` must be right."""

from typing import ClassVar

from benchmarks.kernels import KernelCell
from benchmarks.maxsim.providers import cells
from benchmarks.maxsim.shapes import BOTH, OWN, Shape
from benchmarks.maxsim.study import MaxSimStudy
from benchmarks.study import Settings

BACKWARDS = ("sparton", "sparton_lowmem", "sparton_unified")
# (Q, K, Lq, Ld) of documents of each query's own: from short passages to long documents, of which
# a query has few.
OWN_SIZES = (
    (32, 8, 32, 64), (32, 8, 32, 180), (128, 16, 32, 180), (32, 8, 32, 512), (16, 8, 32, 1024),
    (8, 8, 32, 4096), (16, 8, 128, 256), (16, 8, 128, 1024), (8, 4, 128, 4096), (4, 8, 512, 256),
    (4, 8, 512, 512), (8, 8, 512, 512), (4, 8, 512, 1024), (4, 4, 512, 4096), (8, 8, 1024, 1024),
    (32, 8, 512, 512), (64, 8, 512, 512), (32, 8, 1024, 1024),
)  # fmt: skip
# (Q, N, Lq, Ld) of all queries with all documents: the first few with few query tokens.
CROSS_SIZES = (
    (1, 2000, 32, 300), (4, 1000, 32, 300), (4, 2000, 32, 128), (1, 1000, 128, 1024),
    (16, 128, 32, 1024), (128, 128, 32, 64), (512, 512, 32, 180), (8, 64, 512, 1024),
    (8, 8, 2048, 2048),
)  # fmt: skip


def _name(sizes: tuple[int, int, int, int], kind: str) -> str:
    queries, documents, *lengths = sizes
    return f"{queries}x{documents}_{kind}{lengths[0]}x{lengths[1]}"


class BackwardStudy(MaxSimStudy):
    """Both backwards of MaxSim, with its forward, over queries, documents and their tokens: where
    each is the faster one is what backward="auto" goes by."""

    name = "maxsim_backward"
    shapes: ClassVar = {
        **{_name(sizes, "own_"): Shape(*sizes, (BOTH,), OWN) for sizes in OWN_SIZES},
        **{_name(sizes, ""): Shape(*sizes, (BOTH,)) for sizes in CROSS_SIZES},
    }

    def suites(self, settings: Settings) -> dict[str, list[KernelCell]]:
        return {self.name: cells(self.shapes, BACKWARDS)}


STUDY = BackwardStudy()
