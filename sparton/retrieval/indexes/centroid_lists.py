"""Which documents have a token near a centroid.

N documents, Q queries, W query tokens, C centroids, T tokens, L entries of all lists.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of, ranges_within, rows_of, sequence_ids

TOKENS_AT_ONCE = 2**24


class CentroidLists(NamedTuple):
    """The documents of every centroid, each once, ascending.

    Attributes:
        documents: int32 ``[L]``.
        cu_seqlens: int64 ``[C + 1]``, boundaries of the centroids' lists.
    """

    documents: Tensor
    cu_seqlens: Tensor

    @property
    def nbytes(self) -> int:
        return self.documents.nbytes + self.cu_seqlens.nbytes

    @classmethod
    def of(
        cls, codes: Tensor, cu_seqlens: Tensor, num_centroids: int, device: torch.device
    ) -> "CentroidLists":
        """The lists of documents' codes, on a device that sees some tokens at a time.

        Args:
            codes: int ``[T]``, the centroid of each token, anywhere.
            cu_seqlens: int ``[N + 1]`` on the host, boundaries of the documents.
            num_centroids: C.
        """
        entries: list[Tensor] = []
        counts = torch.zeros(num_centroids, dtype=torch.int64, device=device)
        for first, last in ranges_within(cu_seqlens, TOKENS_AT_ONCE):
            start, stop = cu_seqlens[[first, last]].tolist()
            own = (cu_seqlens[first : last + 1] - start).to(device)
            document = sequence_ids(own, stop - start) + first
            found = ((codes[start:stop].to(device).long() << 32) | document).unique()
            entries.append(found)
            counts += (found >> 32).bincount(minlength=num_centroids)
        bounds = cu_seqlens_of(counts)
        documents = torch.empty(int(bounds[-1]), dtype=torch.int32, device=device)
        filled = bounds[:-1].clone()
        while entries:  # those of earlier documents come first in every list
            found = entries.pop(0)
            own = (found >> 32).bincount(minlength=num_centroids)
            places = torch.repeat_interleave(filled - cu_seqlens_of(own)[:-1], own)
            places += torch.arange(len(found), device=device)
            documents[places] = (found & 0x7FFFFFFF).int()
            filled += own
        return cls(documents, bounds)

    def hits(self, centroids: Tensor, cu_seqlens: Tensor, num_documents: int) -> Tensor:
        """The pairs of a query and a document that is in the list of one of its centroids.

        Args:
            centroids: int64 ``[W, M]``, those of each query token.
            cu_seqlens: int ``[Q + 1]``, boundaries of the queries.

        Returns:
            int32 ``[P, 2]``, each pair once, ascending.
        """
        num_queries = len(cu_seqlens) - 1
        found = self.documents.new_zeros(num_queries, num_documents, dtype=torch.uint8)
        if found.is_cuda:
            from sparton.kernels.maxsim.lists import mark_listed

            mark_listed(found, centroids, cu_seqlens, *self)
        else:
            rows, bounds = rows_of(centroids.flatten(), self.cu_seqlens)
            owners = sequence_ids(bounds[cu_seqlens * centroids.shape[1]], len(rows))
            found[owners, self.documents[rows]] = 1
        return found.nonzero().to(torch.int32, memory_format=torch.contiguous_format)
