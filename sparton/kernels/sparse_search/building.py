"""Makes an inverted index of documents.

N documents in blocks of B, V terms, P postings.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.kernels.launch import cdiv
from sparton.kernels.sparse_search.postings import (
    CPU_BLOCK,
    GPU_BLOCK,
    GROUP,
    LARGEST_BLOCK,
    Postings,
)
from sparton.kernels.sparse_search.threads import run_ranges, thread_ranges
from sparton.kernels.sparse_vectors import SparseVectors


def invert(
    parts: Sequence[SparseVectors],
    *,
    block: int | None = None,
    on_gpu: bool = False,
    empty: Callable[..., Tensor] = torch.empty,
) -> Postings:
    """The postings of all parts, whose documents are numbered one part after the other.

    Two passes of counting sort in all of torch's threads. Parts may be mapped from files: beyond
    the result, nothing is held in memory.

    Args:
        parts: on the host, at least one, over the same terms.
        block: B; by default what suits the device, more where blocks would have more terms than
            postings.
        on_gpu: where they will be searched.
        empty: makes the arrays of the result, of a size and a ``dtype``; others than that of torch
            may map them to files.

    Raises:
        ValueError: no parts, parts of different widths, terms out of range, a block that is no
            power of 2 from 64 to 65,536.
    """
    from sparton.kernels.sparse_search import loops

    width = _checked_width(parts)
    num_documents = sum(part.num_vectors for part in parts)
    num_postings = sum(part.num_entries for part in parts)
    if block is None:
        block = _default_block(num_documents, num_postings, width, on_gpu)
    if not GROUP <= block <= LARGEST_BLOCK or block & (block - 1):
        raise ValueError(f"block is {block}, must be a power of 2 from 64 to 65,536")
    # A term's end lies one place too far until all its postings are placed: then it has arrived.
    held = (
        empty(cdiv(num_documents, block) * width + 2, dtype=torch.int64).zero_(),
        empty(num_postings, dtype=torch.uint16),
        empty(num_postings, dtype=torch.float32),
    )
    ends, places, weights = (each.numpy() for each in held)

    def count(first: int, part: SparseVectors) -> None:
        terms, bounds = _arrays(part.terms, part.cu_seqlens)
        _by_blocks(
            lambda few: loops.count_postings(terms, bounds, first, few, width, block, ends[2:]),
            first, part.num_vectors, block,
        )  # fmt: skip

    def place(first: int, part: SparseVectors) -> None:
        terms, values, bounds = _arrays(part.terms, part.values.float(), part.cu_seqlens)
        _by_blocks(
            lambda few: loops.place_postings(
                terms, values, bounds, first, few, width, block, ends[1:], places, weights
            ),
            first, part.num_vectors, block,
        )  # fmt: skip

    firsts = [0, *accumulate(part.num_vectors for part in parts)]
    for first, part in zip(firsts, parts):
        count(first, part)
    np.cumsum(ends, out=ends)
    for first, part in zip(firsts, parts):
        place(first, part)
    starts = held[0][:-1]
    return Postings(held[1], held[2], starts, num_documents, width, block)


def _arrays(*tensors: Tensor) -> list[NDArray]:
    return [each.detach().cpu().numpy() for each in tensors]


def _by_blocks(
    run: Callable[[tuple[int, int]], None], first: int, num_documents: int, block: int
) -> None:
    """Call ``run`` with ranges of a part's documents, of which no two have documents of one block,
    in threads. The part's documents are ``first, first + 1, ...`` of all."""
    begin, end = first // block, cdiv(first + num_documents, block)

    def run_range(_: int, a: int, b: int) -> None:
        least, most = ((begin + each) * block - first for each in (a, b))
        run((max(least, 0), min(most, num_documents)))

    run_ranges(run_range, thread_ranges(end - begin))


def _checked_width(parts: Sequence[SparseVectors]) -> int:
    if not parts:
        raise ValueError("there are no parts to index: give at least one, which may be empty")
    width = parts[0].width
    for number, part in enumerate(parts):
        if part.width != width:
            raise ValueError(
                f"part {number} has {part.width} terms but part 0 has {width}: encode both with "
                "the same model"
            )
        if part.num_entries:
            least, most = map(int, part.terms.aminmax())
            if least < 0 or most >= width:
                raise ValueError(
                    f"part {number} has terms from {least} to {most}, must be from 0 to "
                    f"{width - 1}: encode it again"
                )
    return width


def _default_block(num_documents: int, num_postings: int, width: int, on_gpu: bool) -> int:
    block = GPU_BLOCK if on_gpu else CPU_BLOCK
    while block < min(LARGEST_BLOCK, num_documents) and (
        cdiv(num_documents, block) * width > num_postings // 8
    ):
        block *= 2
    return block
