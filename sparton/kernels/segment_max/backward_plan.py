"""How the work of a backward is cut, from its sizes alone (see backward.py).

N sequences, T packed tokens, D hidden, V rows of the weight.

The rows are gathered from the L2 cache: the hidden units are cut into slices so narrow that a slice
of all rows stays there while every program of the slice runs.
"""

import functools
from typing import NamedTuple

from sparton.kernels.launch import KEPT_PLANS, Step, cdiv, next_power_of_2, plan_step
from sparton.kernels.segment_max.ordering import plan_vocabulary_listing, vocabulary_rows
from sparton.kernels.segment_max.row_sums import (
    dhidden_kernel,
    dweight_direct_kernel,
    dweight_kernel,
    gradients_kernel,
    part_kernel,
)
from sparton.kernels.segment_max.token_lists import plan_listing, plan_token_lists

# Tokens of an ordinary sequence.
SHORT = 512
# Lists of at most this many shares are not split: it costs another launch.
FEW_SHARES, UNSPLIT = 8, 2**30
# Programs for the further shares of a sequence.
PART_PROGRAMS = 16


class BackwardConfig(NamedTuple):
    """How the work is cut; the sizes of blocks are powers of 2.

    Attributes:
        chunk: vocabulary entries that one program sorts by token, from 16 to 2^15.
        share: a token that won more entries than this is split over several programs.
        block_e: rows that a thread reads at once.
        block_t: most tokens of a program, on average.
        programs: fewer tokens per program where a launch would have fewer programs than this.
        buckets: a sequence with more tokens than this is listed by groups of tokens.
        sort_warps: of the programs that sort.
        slice_bytes: most bytes of a slice of all rows, unless the narrowest has more.
        workspace: most bytes beyond the results, unless a single row needs more. If it does not
            hold the lists by token of all sequences, these lie in the memory of ``dweight``, which
            is written after ``dhidden``, if that is larger.
    """

    chunk: int = 1024
    share: int = 512
    block_e: int = 8
    block_t: int = 4
    programs: int = 2**14
    buckets: int = 1024
    sort_warps: int = 4
    slice_bytes: int = 10 * 2**20
    workspace: int = 14 * 2**20


DEFAULT_CONFIG = BackwardConfig()


class Sizes(NamedTuple):
    """What the plan of a backward follows from: ``element_bytes`` of hidden and weight, ``strides``
    of the upstream gradient, and which gradients are wanted."""

    N: int
    V: int
    T: int
    D: int
    element_bytes: tuple[int, int]
    summed: int
    strides: tuple[int, ...]
    activation: str
    longest: int | None
    config: BackwardConfig
    dhidden: bool
    dweight: bool
    dbias: bool

    @property
    def direct(self) -> bool:
        """Whether the owner of a row of the weight walks down the sequences, without a list."""
        return self.dweight and self.activation == "none" and not self.dbias


class Plan(NamedTuple):
    """Steps of a backward, and the memory that they need beyond its results.

    Attributes:
        by_token: steps to dhidden, and to dweight where one launch sums both.
        memory: elements, int32, of the lists by token; 0 where these lie in the memory of dweight.
        by_row: steps to what else is wanted.
        rows: rows of the vocabulary that these list at a time.
    """

    by_token: tuple[Step, ...]
    memory: int
    by_row: tuple[Step, ...]
    rows: int


def _cut_units(rows: int, D: int, size: int, config: BackwardConfig) -> tuple[int, dict[str, int]]:
    """Slices of the units of ``rows`` rows of D elements of ``size`` bytes, and how a program of
    one warp reads them: LANES rows of 128 to 512 bytes at once, 16 bytes for each lane."""
    width = 512 // size
    while width > 128 // size and (D % width or rows * width * size > config.slice_bytes):
        width //= 2
    cut = {"BLOCK_E": config.block_e, "LANES": 512 // (width * size), "BLOCK_D": width}
    return cdiv(D, width), {"D": D, **cut, "num_warps": 1}


def _num_buckets(T: int, N: int, longest: int | None, most: int) -> int:
    """A bucket for each token of the longest sequence, if it is known; else enough for sequences of
    4 times the mean length, though not above SHORT on their account."""
    mean = cdiv(T, N)
    tokens = max(mean, min(4 * mean, SHORT)) if longest is None else longest
    return min(max(next_power_of_2(tokens), 32), most)


def _plan_dhidden(sizes: Sizes) -> tuple[int, bool, tuple[Step, ...]]:
    """The ``memory`` of a plan, whether the last step sums the weight's gradient as well, and the
    steps."""
    N, V, T, D, element_bytes, summed, strides, activation, longest, config, *_ = sizes
    lists = plan_token_lists(
        N, V, D, chunk=config.chunk,
        share=config.share if FEW_SHARES * config.share < V else UNSPLIT,
        buckets=_num_buckets(T, N, longest, config.buckets), workspace=config.workspace,
        lent=V * D * element_bytes[1] if sizes.dweight else 0,
    )  # fmt: skip
    slices, cut = _cut_units(V, D, element_bytes[1], config)
    row_slices, row_cut = _cut_units(T, D, element_bytes[0], config)
    length = max(cdiv(T, N) if longest is None else min(cdiv(T, N), longest), 1)
    block_t = min(max(lists.rows * length * slices // config.programs, 1), config.block_t)
    programs = cdiv(length, block_t)
    # Until dweight is written, its memory may hold the lists that dhidden is summed from.
    joint = sizes.direct and not lists.lent
    constants = {"BUCKETS": lists.buckets, "SHARE": lists.share, **cut}
    steps: list[Step] = []
    for first in range(0, N, lists.rows):
        last = min(first + lists.rows, N)
        steps += plan_listing(
            lists, V, first, last, summed, strides, num_warps=config.sort_warps,
            activation=activation,
        )  # fmt: skip
        if lists.share != UNSPLIT:
            grid = ((last - first) * PART_PROGRAMS, slices)
            steps.append(
                plan_step(part_kernel, grid, V, lists.size, PROGRAMS=PART_PROGRAMS, **constants)
            )
        tokens = (last - first) * programs
        grid = (tokens, slices)
        steps.append(plan_step(dhidden_kernel, grid, first, V, lists.size, programs, **constants))
    if joint:
        steps[-1] = plan_step(
            gradients_kernel, (tokens * slices + V * row_slices,),
            first, N, V, lists.size, programs, tokens, summed, *strides,
            ROW_LANES=row_cut["LANES"], ROW_BLOCK_D=row_cut["BLOCK_D"], **constants,
        )  # fmt: skip
    return 0 if lists.lent else lists.rows * lists.size // 4, joint, tuple(steps)


def _plan_dweight(sizes: Sizes) -> tuple[int, tuple[Step, ...]]:
    """Rows of the vocabulary that are listed at a time, 0 if none need be, and the steps."""
    N, V, T, D, element_bytes, summed, strides, activation, _, config, *_ = sizes
    slices, cut = _cut_units(T, D, element_bytes[0], config)
    if sizes.direct:
        return 0, (plan_step(dweight_direct_kernel, (V, slices), N, V, summed, *strides, **cut),)
    R = vocabulary_rows(N, V, config.workspace)
    steps: list[Step] = []
    for first in range(0, V, R):
        last = min(first + R, V)
        steps.append(
            plan_vocabulary_listing(
                N, V, first, last, summed, strides, activation=activation, lists=True,
                dbias=sizes.dbias,
            )
        )  # fmt: skip
        steps.append(plan_step(dweight_kernel, (last - first, slices), first, N, **cut))
    return R, tuple(steps)


def _plan_dbias(sizes: Sizes) -> tuple[Step, ...]:
    N, V, *_ = sizes
    step = plan_vocabulary_listing(
        N, V, 0, V, sizes.summed, sizes.strides, activation=sizes.activation, lists=False,
        dbias=True,
    )  # fmt: skip
    return (step,)


@functools.lru_cache(maxsize=KEPT_PLANS)
def plan_backward(sizes: Sizes) -> Plan:
    """All steps to the gradients that are wanted."""
    by_token: tuple[Step, ...] = ()
    by_row: tuple[Step, ...] = ()
    memory, rows, joint = 0, 0, False
    if sizes.dhidden:
        memory, joint, by_token = _plan_dhidden(sizes)
    if sizes.dweight and not joint:
        rows, by_row = _plan_dweight(sizes)
    elif sizes.dbias and not sizes.dweight:
        by_row = _plan_dbias(sizes)
    return Plan(by_token, memory, by_row, rows)
