"""Representations on their way from a device to the host, in steps that wait for nothing that was
asked of the device after them.

N texts, V terms, C columns, P active entries, T tokens, E width of a token's vector.
"""

from typing import Any, Literal, NoReturn, get_args

import numpy as np
import torch
from torch import Tensor

from sparton.arguments import refuse_other
from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.maxsim import quantize_fp8
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.ordering import empty_on_host

FileDtype = Literal["float16", "float32"]  # which others can read, too
VectorDtype = Literal["float16", "bfloat16", "float32", "float8_e4m3fn"]
VECTOR_DTYPES: tuple[VectorDtype, ...] = get_args(VectorDtype)


class NotFiniteError(ValueError):
    """A representation has a NaN, or a number too large for its dtype."""


class Transfer:
    """The representations of one batch, without zeros and without tokens that take no part.

    The host must know how many entries there are before it can ask for them. It waits for that
    number in :meth:`compact`, which is best called when the device has other work already, and for
    the entries in :meth:`finish`.

    Args:
        sparse: weights ``[N, C]`` of any float dtype; None to leave them out.
        terms: int ``[N, C]``, of which terms the weights are, ascending in each row; None for those
            of the columns' numbers.
        width: V.
        tokens, dense: None to leave them out.
        vector_dtype: in which these vectors are stored, see :func:`store_tokens`.
    """

    def __init__(
        self,
        sparse: Tensor | None,
        tokens: TokenVectors | None = None,
        dense: TokenVectors | None = None,
        *,
        terms: Tensor | None = None,
        width: int = 0,
        vector_dtype: VectorDtype = "float16",
    ) -> None:
        self._halves: dict[str, _LeavingWeights | _LeavingTokens] = {}
        if sparse is not None:
            self._halves["sparse"] = _LeavingWeights(sparse, terms, width)
        if tokens is not None:
            self._halves["tokens"] = _LeavingTokens(tokens, vector_dtype)
        if dense is not None:
            self._halves["dense"] = _LeavingTokens(dense, vector_dtype)
        vectors = tokens or dense
        self._ready = _mark(sparse if vectors is None else vectors.values)
        self._compacted = False

    def compact(self) -> None:
        """Ask the device for what is stored, now that the host learns how much that is."""
        self._wait()
        sources = [half.compact() for half in self._halves.values()]
        self._ready = _mark(sources[-1])
        self._compacted = True

    def finish(self) -> Representations:
        """What is stored, on the host.

        Raises:
            NotFiniteError: a weight or a component is NaN, infinite or too large for its dtype.
        """
        if not self._compacted:
            self.compact()
        self._wait()
        halves: dict[str, Any] = {kind: half.finish() for kind, half in self._halves.items()}
        return Representations(**halves)

    def _wait(self) -> None:
        if self._ready is not None:
            self._ready.synchronize()


class _LeavingWeights:
    def __init__(self, weights: Tensor, terms: Tensor | None, width: int) -> None:
        self._weights, self._terms, self._width = weights.detach().float(), terms, width
        self._active = self._weights != 0  # NaN is
        self._lengths = _to_host(self._active.sum(1))

    def compact(self) -> Tensor:
        places = _places(self._active.flatten(), int(self._lengths.sum()))
        values = self._weights.flatten().index_select(0, places)
        if self._terms is None:
            terms = places % max(self._weights.shape[1], 1)
        else:
            terms = self._terms.flatten().index_select(0, places)
        self._finite = _to_host(values.isfinite().all())
        self._values, self._indices = _to_host(values), _to_host(terms.int())
        del self._weights, self._active, self._terms
        return values

    def finish(self) -> SparseVectors:
        lengths, values, terms = map(_own, (self._lengths, self._values, self._indices))
        stored = SparseVectors(values, terms, cu_seqlens_of(lengths), self._width)
        if not self._finite:
            broken = (~values.isfinite()).nonzero()[0]
            row = int(torch.searchsorted(stored.cu_seqlens, broken, right=True)) - 1
            raise NotFiniteError(
                f"row {row} of a batch of representations has the weight {values[broken[0]]}:"
                " the model diverged or overflowed its precision; evaluate an earlier checkpoint, "
                "or in fp32"
            )
        return stored


class _LeavingTokens:
    def __init__(self, tokens: TokenVectors, dtype: VectorDtype) -> None:
        self._values, self._mask, self._dtype = tokens.values.detach(), tokens.mask, dtype
        bounds = tokens.cu_seqlens.long()
        if self._mask is not None:
            bounds = cu_seqlens_of(self._mask)[bounds]
        self._bounds = _to_host(bounds)

    def compact(self) -> Tensor:
        if self._mask is not None:
            rows = _places(self._mask, int(self._bounds[-1]))
            self._values = self._values.index_select(0, rows)
        stored, scales = self._values.to(getattr(torch, query_dtype(self._dtype))), None
        self._finite = _to_host(stored.isfinite().all())
        if self._dtype == "float8_e4m3fn":
            stored, scales = quantize_fp8(self._values)
        self._stored = _to_host(stored)
        self._scales = None if scales is None else _to_host(scales)
        return stored

    def finish(self) -> TokenVectors:
        stored, bounds = _own(self._stored), _own(self._bounds)
        if not self._finite:
            self._refuse(bounds)
        scales = None if self._scales is None else _own(self._scales)
        return TokenVectors(stored, bounds, scales=scales)

    def _refuse(self, bounds: Tensor) -> NoReturn:
        held = self._values.to(getattr(torch, query_dtype(self._dtype)))
        broken = (~held.isfinite()).any(dim=1).nonzero()[0].cpu()
        text = int(torch.searchsorted(bounds, broken, right=True)) - 1
        worst = self._values[broken[0]].float().abs().max().item()
        cause = "the model diverged or overflowed its precision; evaluate an earlier checkpoint"
        if np.isfinite(worst):
            cause = f"{self._dtype} cannot hold it; store float32"
        raise NotFiniteError(
            f"text {text} of a batch has a token vector with the component {worst:g}: {cause}"
        )


def check_vector_dtype(vector_dtype: object) -> None:
    """Refuse a way to store vectors that does not exist.

    Raises:
        ValueError: names the setting and its value.
    """
    refuse_other(VECTOR_DTYPES, vector_dtype=vector_dtype)


def query_dtype(documents: VectorDtype) -> VectorDtype:
    """In which dtype the token vectors of queries are stored that are compared with documents of
    another, or of the same: those in FP8 are compared in float16."""
    return "float16" if documents == "float8_e4m3fn" else documents


def as_stored(found: Representations, vector_dtype: VectorDtype = "float16") -> Representations:
    """What an encoder gives, as a collection holds it: on the host, the active entries of sparse
    vectors alone, and no tokens that take no part. What is so already stays as it is.

    Raises:
        NotFiniteError: a weight or a component is NaN, infinite or too large for its dtype.
    """
    vectors = [each for each in (found.tokens, found.dense) if each is not None]
    whole = isinstance(found.sparse, Tensor)
    masked = any(each.mask is not None for each in vectors)
    if not whole and not masked and not any(leaf.is_cuda for leaf in found.leaves()):
        return found
    sparse = found.expanded().sparse
    assert not isinstance(sparse, SparseVectors)
    left = Transfer(
        sparse, found.tokens, found.dense, width=found.width, vector_dtype=vector_dtype
    ).finish()
    return left._replace(score_weights=found.score_weights)


def store_sparse(sparse: Tensor) -> SparseVectors:
    """The active entries of sparse vectors ``[N, V]`` of any float dtype, on the host.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    found = Transfer(sparse, None, width=sparse.shape[1]).finish().sparse
    assert isinstance(found, SparseVectors)
    return found


def store_tokens(vectors: TokenVectors, dtype: VectorDtype = "float16") -> TokenVectors:
    """The token vectors that take part in MaxSim, on the host, without a mask.

    Half precision rounds a component by at most 2^-11 of its size: the MaxSim of vectors of length
    1 changes by less than 0.001 per query token, which reorders near ties only. ``bfloat16``, with
    which models in that precision lose nothing, rounds by 2^-8. ``float8_e4m3fn`` takes half the
    bytes, and 4 for the scale of each vector; it rounds by 2^-4 of a component, or by 2^-18 of the
    vector's largest where that is more, and MaxSim changes by at most 0.0625 per query token.

    Raises:
        ValueError: a component is NaN, infinite or too large for ``dtype``.
    """
    found = Transfer(None, vectors, vector_dtype=dtype).finish().tokens
    assert found is not None
    return found


def _places(flags: Tensor, number: int) -> Tensor:
    """Where ``number`` flags ``[T]`` are set, all that are; int64, without asking the device."""
    return torch.nonzero_static(flags, size=number).squeeze(1)


def _to_host(tensor: Tensor) -> Tensor:
    """A tensor that will be on the host once the device is through with its work up to now."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _own(tensor: Tensor) -> Tensor:
    """In memory that may be kept: what is pinned is for the next copy."""
    return empty_on_host(tensor.shape, tensor.dtype).copy_(tensor) if tensor.is_pinned() else tensor


def _mark(tensor: Tensor | None) -> torch.cuda.Event | None:
    """The end of what a device has to do now; None on the host."""
    if tensor is None or not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
