"""Documents by term: which of them have a term, and with what weight.

N documents in blocks of B, V terms, P postings.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.launch import cdiv

# Neighbours whose best score tells whether any of them may be a result; the smallest block.
GROUP = 64
LARGEST_BLOCK = 2**16
# Scores of a block stay in a core's second cache, or in the first of a multiprocessor, where
# several blocks are searched at once.
CPU_BLOCK, GPU_BLOCK = 2**14, 2**12


class Postings(NamedTuple):
    """An inverted index: the active entries of N documents, ordered by block, term and document.

    Attributes:
        places: uint16 ``[P]``, the number of a posting's document within its block.
        weights: fp32 ``[P]``.
        starts: int64 ``[ceil(N / B) * V + 1]``, term v of block b owns the postings
            ``starts[b * V + v] : starts[b * V + v + 1]``.
        num_documents: N.
        width: V.
        block: B, documents in a block, a power of 2 from 64 to 65,536.
    """

    places: Tensor
    weights: Tensor
    starts: Tensor
    num_documents: int
    width: int
    block: int

    @property
    def num_blocks(self) -> int:
        return cdiv(self.num_documents, self.block)

    @property
    def nbytes(self) -> int:
        """6 bytes a posting, and 8 for each term of each block."""
        return sum(each.nbytes for each in self[:3])

    def to(self, device: torch.device | str) -> "Postings":
        places, weights, starts = (each.to(device) for each in self[:3])
        return self._replace(places=places, weights=weights, starts=starts)

    def arrays(self) -> dict[str, Tensor]:
        """All there is, by name; the numbers in ``sizes``, int64 ``[3]``."""
        sizes = torch.tensor([self.num_documents, self.width, self.block])
        return {**dict(zip(self._fields, self[:3])), "sizes": sizes}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor]) -> "Postings":
        """The inverse of :meth:`arrays`.

        Raises:
            ValueError: names, dtypes or shapes that are not those of postings.
        """
        dtypes = {
            "places": torch.uint16,
            "weights": torch.float32,
            "starts": torch.int64,
            "sizes": torch.int64,
        }
        found = {name: array.dtype for name, array in arrays.items()}
        if found != dtypes:
            raise ValueError(f"arrays of postings are {dtypes}, got {found}: build the index again")
        sizes = arrays["sizes"].tolist()
        postings = cls(arrays["places"], arrays["weights"], arrays["starts"], *sizes)
        lengths = [len(each) for each in postings[:3]]
        rows = postings.num_blocks * postings.width
        if lengths != [int(postings.starts[-1]), int(postings.starts[-1]), rows + 1]:
            raise ValueError(
                f"arrays of postings with the sizes {sizes} have the lengths {lengths}: build the "
                "index again"
            )
        return postings
