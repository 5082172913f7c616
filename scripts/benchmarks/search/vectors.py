"""Sparse vectors with the lengths and the overlap of SPLADE's, drawn where they are searched.

N vectors over V terms.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.packing import ranges_of

WIDTH = 30_522
DOCUMENT_TERMS, QUERY_TERMS = 135, 43  # on average
PART = 65_536  # vectors drawn at a time
# Zipf's law, but less so: the most frequent term is in a third of the documents, and a query and a
# document share 2.2 terms on average, as SPLADE's do (Formal et al., 2021).
EXPONENT, OFFSET = 0.9, 30


def draw_vectors(number: int, terms: int, device: str, seed: int) -> Iterator[SparseVectors]:
    """``number`` vectors of about so many terms, in parts, on the host."""
    generator = torch.Generator(device).manual_seed(seed)
    shares = (torch.arange(WIDTH, dtype=torch.float64) + OFFSET) ** -EXPONENT
    shares /= shares.sum()
    draws = _draws(shares, terms)
    # Frequent terms have any numbers.
    names = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0)).int().to(device)
    bounds = shares.cumsum(0).float().to(device)
    for part in ranges_of(number, PART):
        chances = torch.rand(len(part), draws, generator=generator, device=device)
        found = names[torch.searchsorted(bounds, chances).clamp_(max=WIDTH - 1)].sort(1).values
        fresh = torch.ones_like(found, dtype=torch.bool)
        fresh[:, 1:] = found[:, 1:] != found[:, :-1]
        kept = found[fresh]
        values = torch.empty(len(kept), device=device).exponential_(2.0, generator=generator)
        vectors = SparseVectors(values + 0.05, kept, cu_seqlens_of(fresh.sum(1)), WIDTH)
        yield vectors.to("cpu")


def _draws(shares: Tensor, terms: int) -> int:
    """How often to draw a term with these shares to have so many different ones on average."""
    draws = terms
    while float((1 - (1 - shares) ** draws).sum()) < terms:
        draws += 1
    return draws
