"""Compressed indexes of encoded documents: what is learned from them, and how they are stored.

N documents, C centroids, T tokens, E width of a vector, P bytes of a token's residual.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.arguments import ArgumentError, Instance, refuse_below, refuse_other
from sparton.kernels.maxsim import CompressedTokens, ResidualCodec, compress, train_codec
from sparton.kernels.maxsim.codec import HELD_OUT, WIDTHS, published_num_centroids
from sparton.representations import Representations
from sparton.retrieval.indexes.compressed import (
    CANDIDATES,
    EXHAUSTIVE_TOKENS,
    PROBES,
    CompressedIndex,
)
from sparton.retrieval.indexes.documents import Documents, Empty, TokenParts, has_room
from sparton.retrieval.indexes.exact import TwoStageIndex
from sparton.retrieval.indexes.inverted import inverted_index
from sparton.retrieval.indexes.protocols import Index, refuse_dense
from sparton.retrieval.settings import RERANK_DEPTH
from sparton.types import Kind

ITERATIONS = 4  # of the clustering, as ColBERTv2 takes
SAMPLE = 64  # tokens of each centroid
TOKENS_AT_ONCE = 2**18
UNIT, UNIT_FP8 = 1e-2, 2**-4  # lengths of vectors may differ from 1 by this
RESIDENT = 0.8  # share of a GPU's free memory that documents may take


@dataclass(frozen=True)
class CompressedIndexBuilder:
    """Makes a :class:`~sparton.retrieval.indexes.compressed.CompressedIndex` of encoded documents;
    an :class:`~sparton.retrieval.indexes.exact.IndexBuilder`.

    Token vectors are compressed as ColBERTv2 does (https://arxiv.org/abs/2112.01488): to the number
    of the nearest centroid and ``nbits`` for every dimension, 6 bytes and ``E * nbits / 8`` in all.
    Centroids and buckets are learned from a sample of the documents, SAMPLE tokens for each
    centroid. The same documents give the same bytes on one kind of device. Where they fit into
    RESIDENT of a GPU's free memory, the documents stay there, otherwise on the host.

    With sparse vectors beside the token vectors, those find ``rerank_depth`` candidates.

    Attributes:
        nbits: 1, 2, 4 or 8.
        centroids: how many; None for the published number, the power of 2 at or below 16 times the
            square root of the number of tokens, at most a quarter of these.
        staged, probes, candidates, exhaustive_tokens: see
            :class:`~sparton.retrieval.indexes.compressed.CompressedIndex`.

    Raises:
        ValueError: ``nbits`` that do not exist, or numbers below 1.
    """

    needs: ClassVar[frozenset[Kind]] = frozenset({"tokens"})

    nbits: int = 2
    centroids: int | None = None
    staged: bool | None = None
    probes: int = PROBES
    candidates: int = CANDIDATES
    exhaustive_tokens: int = EXHAUSTIVE_TOKENS

    def __post_init__(self) -> None:
        refuse_other(WIDTHS, nbits=self.nbits)
        refuse_below(1, centroids=self.centroids, probes=self.probes, candidates=self.candidates)

    def __call__(
        self,
        documents: Representations | Documents,
        device: torch.device | str = "cpu",
        *,
        rerank_depth: int = RERANK_DEPTH,
    ) -> Index:
        """
        Args:
            documents: N texts on the host.
            device: where to compress and to score.
            rerank_depth: candidates of a query where documents have sparse vectors as well.

        Raises:
            ValueError: documents without token vectors, or whose vectors have not the length 1, or
                more centroids than tokens.
        """
        documents, device = Documents.of(documents), torch.device(device)
        if "tokens" not in documents.kinds:
            raise ArgumentError(
                "a compressed index holds token vectors, and these documents have none: set "
                "{index}",
                index=Instance("exact_index"),
            )
        refuse_dense("a compressed index", documents.kinds)
        centroids = f"-{self.centroids}-centroids" if self.centroids else ""
        arrays = documents.keep(
            f"compressed-{self.nbits}-bits{centroids}-{device.type}",
            lambda empty: self._arrays(documents.tokens, device, empty),
        )
        codec = ResidualCodec(*(arrays[name] for name in ResidualCodec._fields))
        stored = [arrays[name] for name in CompressedTokens._fields]
        place = _place(sum(each.nbytes for each in stored), device)
        index = CompressedIndex(
            CompressedTokens(*(each.to(place) for each in stored)), arrays["cu_seqlens"], codec,
            device, staged=self.staged, probes=self.probes, candidates=self.candidates,
            exhaustive_tokens=self.exhaustive_tokens,
        )  # fmt: skip
        if "sparse" not in documents.kinds:
            return index
        return TwoStageIndex(inverted_index(documents, device), index, rerank_depth)

    def _arrays(self, tokens: TokenParts, device: torch.device, empty: Empty) -> dict[str, Tensor]:
        """All that the index is made of, on the host, by name."""
        _check_lengths(tokens)
        codec = self._learn(tokens, device)
        stored = _compress(tokens, codec, device, empty)
        own = {name: each.cpu() for name, each in codec._asdict().items()}
        return own | stored._asdict() | {"cu_seqlens": tokens.cu_seqlens}

    def _learn(self, tokens: TokenParts, device: torch.device) -> ResidualCodec:
        total = tokens.num_tokens
        count = self.centroids or max(min(published_num_centroids(total), total // 4), 1)
        wanted = int(count * SAMPLE / (1 - HELD_OUT)) + 1
        texts = torch.arange(tokens.num_texts)
        if wanted < total:
            order = torch.randperm(tokens.num_texts, generator=torch.Generator().manual_seed(0))
            ends = tokens.lengths[order].cumsum(0)
            enough = int(torch.searchsorted(ends, wanted)) + 1
            texts = order[:enough].sort().values
        sample = tokens.take(texts).restored().values
        # A codec needs a token to cluster and one to set aside.
        sample = F.pad(sample, (0, 0, 0, max(2 - total, 0)))
        return train_codec(sample.to(device), count, self.nbits, iterations=ITERATIONS)


def _check_lengths(tokens: TokenParts) -> None:
    """Refuse token vectors whose directions alone are not enough."""
    bound = UNIT_FP8 if tokens.dtype == torch.float8_e4m3fn else UNIT
    for _, part in tokens.chunks(TOKENS_AT_ONCE):
        lengths = part.float().norm(dim=1)
        strange = ((lengths - 1).abs() > bound).nonzero().flatten()
        if len(strange):
            raise ArgumentError(
                "a compressed index keeps the directions of token vectors alone, but one of these "
                "has the length {}: set {index}, or normalize=True of the head",
                f"{lengths[strange[0]]:.3g}",
                index=Instance("exact_index"),
            )


def _compress(
    tokens: TokenParts, codec: ResidualCodec, device: torch.device, empty: Empty
) -> CompressedTokens:
    """All tokens on the host, compressed on a device."""
    total, packed = tokens.num_tokens, tokens.width * codec.nbits // 8
    stored = CompressedTokens(
        empty(total, dtype=torch.int32),
        empty(total, packed, dtype=torch.uint8),
        empty(total, dtype=torch.float16),
    )
    for first, vectors in tokens.chunks(TOKENS_AT_ONCE):
        found = compress(codec, vectors.to(device))
        for whole, own in zip(stored, found, strict=True):
            assert whole is not None and own is not None
            whole[first : first + len(own)] = own
    return stored


def _place(nbytes: int, device: torch.device) -> torch.device:
    """Where documents of this size stay: on the device if they fit there, else on the host."""
    return device if has_room(nbytes, device, RESIDENT) else torch.device("cpu")
