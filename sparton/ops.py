"""The kernels, for modules and training loops of your own.

They need torch, and Triton where tensors lie on a GPU; tensors on a CPU run PyTorch versions of the
same algorithms, except attention. All of them work under torch.autocast and inside torch.compile.

What batches look like:

- Padded batches come with masks of booleans or integers, nonzero at the tokens that take part, such
  as the ``attention_mask`` of a tokenizer. Padding may lie anywhere.
- Packed batches have no padding: N sequences lie end to end along one axis of T tokens, and int32
  ``cu_seqlens [N + 1]`` says where each of them begins and ends. :func:`pack` makes them of padded
  ones, :func:`unpack` goes back. No work is done for padding, and nothing waits for the device
  except :func:`pack`, once.

The SPLADE head of a masked-language model, packed once and used in two places::

    tokens = sparton.ops.pack(hidden, attention_mask)  # [N, S, D] and [N, S]
    reps = sparton.ops.splade_head(tokens.values, weight, bias, tokens.cu_seqlens)  # [N, V]

or, as long as there is one place::

    reps = sparton.ops.splade_head(hidden, weight, bias, attention_mask=attention_mask)

Late interaction, padded::

    scores = sparton.ops.maxsim(queries, documents, query_mask, document_mask)  # [Q, N]
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from sparton.kernels import maxsim as _maxsim
from sparton.kernels import splade_head as _head
from sparton.kernels import varlen_attention as _attention
from sparton.kernels.maxsim import BestDocuments, CompressedTokens, Fp8Tokens, ResidualCodec
from sparton.kernels.maxsim.codec import published_num_centroids, with_inverse_norms
from sparton.kernels.splade_head import TopK
from sparton.kernels.splade_head.variants import Activation, Pooling
from sparton.packing import Packed, boolean_mask, pack, unpack

if TYPE_CHECKING:  # it needs Triton
    from sparton.kernels.tuning import Problem, Trial

__all__ = [
    "BestDocuments",
    "CompressedTokens",
    "Fp8Tokens",
    "Packed",
    "ResidualCodec",
    "TopK",
    "compress",
    "decompress",
    "maxsim",
    "maxsim_centroids",
    "maxsim_fp8",
    "maxsim_from_hidden",
    "maxsim_pairs",
    "maxsim_residual",
    "maxsim_residual_varlen",
    "maxsim_topk",
    "maxsim_varlen",
    "pack",
    "published_num_centroids",
    "quantize_fp8",
    "splade_head",
    "splade_head_topk",
    "train_codec",
    "tune_maxsim",
    "tune_splade_head",
    "unpack",
    "use_tuned_configs",
    "varlen_attention",
    "varlen_self_attention",
    "with_inverse_norms",
]

P = ParamSpec("P")
R = TypeVar("R")


def splade_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    pooling: Pooling = "max",
    activation: Activation = "relu",
    fp8: bool = False,
    token_topk: int | None = None,
) -> Tensor:
    """SPLADE representations without their logits in memory, of packed or of padded hidden states.

    ``reps[n, v] = log1p(relu(max over the tokens t of sequence n of hidden[t] . weight[v]
    + bias[v]))``. See :func:`sparton.kernels.splade_head.splade_head` for precision, ties and NaN.

    Args:
        hidden: packed ``[T, D]`` with ``cu_seqlens``, or padded ``[N, S, D]`` with
            ``attention_mask``; float16, bfloat16 or float32 (float64 on a CPU). They are what the
            last matrix of a masked-language model reads.
        weight: ``[V, D]`` of that matrix, in the same dtype, or in any under autocast.
        bias: ``[V]`` in any float dtype, or None.
        cu_seqlens: int32 or int64 ``[N + 1]``, boundaries of packed sequences, from 0 to T,
            ascending.
        attention_mask: ``[N, S]`` of booleans or integers. The host waits once for the number of
            tokens; :func:`pack` shares the wait among several calls, or saves it.
        pooling: "max" or "sum" over the tokens of a sequence.
        activation: "relu", or "log1p_relu" for a second log1p.
        fp8: look for the maxima in FP8, on GPUs that have it.
        token_topk: only so many of the largest logits of each token enter the maximum, which keeps
            the logits of a few tokens at a time, 128 MiB on a GPU; None for all.

    Returns:
        fp32 ``[N, V]``, differentiable once with respect to hidden, weight and bias.

    Raises:
        ValueError: neither or both of cu_seqlens and attention_mask, operands that do not fit
            together, an unknown name, or what FP8 or ``token_topk`` does not serve.
    """
    _tensor(weight, "weight")
    _tensor_or_none(bias, "bias")
    tokens, bounds = _packed_hidden(hidden, cu_seqlens, attention_mask)
    return _head.splade_head(
        tokens, weight, bias, bounds, pooling=pooling, activation=activation, fp8=fp8,
        token_topk=token_topk,
    )  # fmt: skip


def splade_head_topk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    k: int,
    attention_mask: Tensor | None = None,
    pooling: Pooling = "max",
    activation: Activation = "relu",
    fp8: bool = False,
) -> TopK:
    """The k largest entries of each row of :func:`splade_head`, without the dense ``[N, V]``.

    Among equal values the smaller index comes first. The result has no gradient.

    Args:
        hidden, weight, bias, cu_seqlens, attention_mask, pooling, activation, fp8: see
            :func:`splade_head`.
        k: from 1 to V.

    Returns:
        Values fp32 ``[N, k]`` and indices int64 ``[N, k]``, the largest first.

    Raises:
        ValueError: k is no whole number in its range, or what :func:`splade_head` refuses.
    """
    _tensor(weight, "weight")
    _tensor_or_none(bias, "bias")
    tokens, bounds = _packed_hidden(hidden, cu_seqlens, attention_mask)
    return _head.splade_head_topk(
        tokens, weight, bias, bounds, k, pooling=pooling, activation=activation, fp8=fp8
    )


def tune_splade_head(
    hidden_size: int,
    vocabulary: int,
    mean_length: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 2**16,
) -> "dict[str, list[Trial]]":
    """Search the fastest way to run :func:`splade_head` and its backward on this GPU, for batches
    of one kind.

    Every configuration's result is verified before it is timed. The winners are used from now on
    and kept in the user's cache, which :func:`use_tuned_configs` reads; it takes minutes. The last
    bits of gradients depend on the configuration.

    Args:
        hidden_size, vocabulary: D and V.
        mean_length: mean number of tokens of a sequence.
        dtype: of hidden states and weight.
        tokens: T of the batch that is measured.

    Returns:
        By kernel, all configurations that were tried, the fastest first, the wrong ones last.

    Raises:
        RuntimeError: there is no GPU, or no configuration of a kernel gave right results.
    """
    from sparton.kernels.splade_head.tuning import head_problems

    return _tune(head_problems(hidden_size, vocabulary, mean_length, dtype=dtype, tokens=tokens))


def tune_maxsim(
    width: int,
    query_length: int,
    document_length: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 2**16,
) -> "dict[str, list[Trial]]":
    """:func:`tune_splade_head` for :func:`maxsim` and its kin: within a batch and with documents of
    each query's own, both with their backwards, and for reranking.

    Args:
        width: E, units of an embedding.
        query_length: tokens of a query.
        document_length: mean number of tokens of a document.
        dtype: of queries and documents.
        tokens: of all documents that are measured.
    """
    from sparton.kernels.maxsim.tuning import maxsim_problems

    return _tune(maxsim_problems(width, query_length, document_length, dtype=dtype, tokens=tokens))


def _tune(problems: Iterable["Problem"]) -> "dict[str, list[Trial]]":
    from sparton.kernels.tuning import tune

    if not torch.cuda.is_available():
        raise RuntimeError("a search for the fastest way to run a kernel needs a CUDA GPU")
    return {problem.regime.kernel: tune(problem) for problem in problems}


def use_tuned_configs() -> None:
    """Run :func:`splade_head` and :func:`maxsim` with the winners of earlier searches on GPUs of
    this kind, as SPARTON_TUNED=1 in the environment of a process does."""
    from sparton.kernels import tuned

    tuned.use_tuned_configs()


def _packed_hidden(
    hidden: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Hidden states ``[T, D]`` and their boundaries, however they came."""
    dims = 2 if attention_mask is None else 3
    hidden = _tensor(hidden, "hidden")
    _tensor_or_none(cu_seqlens, "cu_seqlens")
    _tensor_or_none(attention_mask, "attention_mask")
    if (cu_seqlens is None) == (attention_mask is None) or hidden.dim() != dims:
        given = [
            name
            for name, value in (("cu_seqlens", cu_seqlens), ("attention_mask", attention_mask))
            if value is not None
        ]
        raise ValueError(
            "hidden must be padded [N, S, D] with attention_mask [N, S], or packed [T, D] with "
            f"cu_seqlens [N + 1], got {tuple(hidden.shape)} with {' and '.join(given) or 'neither'}"
        )
    if attention_mask is not None:
        packed = pack(hidden, attention_mask)
        return packed.values, packed.cu_seqlens
    assert cu_seqlens is not None
    return hidden, cu_seqlens


def _public(function: Callable[P, R], dims: int, remedy: str, first: int = 0) -> Callable[P, R]:
    """A kernel that takes masks of integers too, and says what must be a tensor, and where batches
    of another form belong.

    Args:
        dims: how many axes the tokens of a batch have.
        remedy: what to do with tokens that have another number of axes.
        first: place of the tokens among the arguments.
    """
    parameters = inspect.signature(function).parameters
    tokens, checks = tuple(parameters)[first], {Tensor: _tensor, Tensor | None: _tensor_or_none}
    tensors = [
        (place, name, _boolean if name.endswith("_mask") else checks[parameter.annotation])
        for place, (name, parameter) in enumerate(parameters.items())
        if parameter.annotation in checks
    ]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        positional = list(args)
        for place, name, checked in tensors:
            if place < len(positional):
                positional[place] = checked(positional[place], name)
            elif name in kwargs:
                kwargs[name] = checked(kwargs[name], name)
        given = positional[first] if first < len(positional) else kwargs.get(tokens)
        if isinstance(given, Tensor) and given.dim() != dims:
            raise ValueError(
                f"{tokens} must have {dims} axes, got {tuple(given.shape)}: "
                f"{remedy.format(name=tokens)}"
            )
        return cast(Callable[..., R], function)(*positional, **kwargs)

    return call


def _tensor(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}: make a tensor, by torch.as_tensor")
    return value


def _tensor_or_none(value: object, name: str) -> Tensor | None:
    return None if value is None else _tensor(value, name)


def _boolean(mask: object, name: str) -> Tensor | None:
    return None if mask is None else boolean_mask(_tensor(mask, name), name)


_PACK = (
    "packed = sparton.ops.pack({name}, attention_mask) makes packed.values and packed.cu_seqlens "
    "of a padded batch"
)
_PACK_OR = "padded batches go to sparton.ops.%s with their masks, or " + _PACK
_PACKED_GO = "packed tokens go to sparton.ops.%s with their boundaries"
_UNPACK = "sparton.ops.unpack makes a padded batch of packed tokens"

maxsim = _public(_maxsim.maxsim, 3, _PACKED_GO % "maxsim_varlen")
maxsim_pairs = _public(_maxsim.maxsim_pairs, 3, _PACKED_GO % 'maxsim_varlen(pairing="pairs")')
maxsim_varlen = _public(_maxsim.maxsim_varlen, 2, _PACK_OR % "maxsim")
maxsim_fp8 = _public(_maxsim.maxsim_fp8, 3, _UNPACK)
maxsim_from_hidden = _public(
    _maxsim.maxsim_from_hidden, 3, f"hidden may be packed, queries are padded; {_UNPACK}"
)
maxsim_topk = _public(_maxsim.maxsim_topk, 2, _PACK)
maxsim_residual = _public(_maxsim.maxsim_residual, 3, _PACKED_GO % "maxsim_residual_varlen")
maxsim_residual_varlen = _public(_maxsim.maxsim_residual_varlen, 2, _PACK_OR % "maxsim_residual")
maxsim_centroids = _public(_maxsim.maxsim_centroids, 2, _PACK)
train_codec = _public(_maxsim.train_codec, 2, _PACK)
compress = _public(_maxsim.compress, 2, _PACK, first=1)
decompress = _maxsim.decompress
quantize_fp8 = _maxsim.quantize_fp8
varlen_attention = _public(_attention.varlen_attention, 3, _PACK)
varlen_self_attention = _public(_attention.varlen_self_attention, 4, _PACK)
