"""Which kernels serve CUDA tensors.

Q queries, N documents, K documents per query, C = N or K columns, T packed tokens, E embedding.

cross.py shares every tile of documents among many query tokens and is bound by arithmetic.
streaming.py reads each document once for a few query tokens and is bound by memory; it alone serves
documents of each query's own and lists of pairs. A cross product goes to cross.py if it has more
than FEW query tokens, about where a product of that many 16-bit rows costs as much time as reading
its columns, or embeddings wider than the streaming backward holds. The backward of a cross product
goes there in any case, unless few tokens meet many documents, whose lists by token take many
launches, or must be normalised, which streaming.py does on the fly.

"unified" adds with atomics what "lowmem" compares all query tokens for, once for each tile of
documents: it wins where documents of each query's own are scored by long queries. It launches more
kernels, which only pays where the host does not have to be waited for.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparton.kernels.maxsim.cross import cross_backward, cross_forward
from sparton.kernels.maxsim.lengths import verify_lengths
from sparton.kernels.maxsim.operands import MaxSimOperands, num_rows
from sparton.kernels.maxsim.streaming import streaming_forward
from sparton.kernels.maxsim.streaming_backward import (
    streaming_backward_lowmem,
    streaming_backward_unified,
)
from sparton.kernels.maxsim.streaming_rows import LARGEST_E

FEW, MANY_DOCUMENTS = 192, 1000
# From so many tokens of a query on it was the faster one on an H100 (docs/benchmarks.md); from so
# many similarities on it should be by the clock, too.
LONG_QUERY, MANY_SIMILARITIES = 512, 2**27


def is_product(operands: MaxSimOperands) -> bool:
    """Whether cross.py serves the forward of these operands, and then the backward, too."""
    if operands.per_query is not None or operands.pairs is not None:
        return False
    return operands.num_query_tokens > FEW or operands.queries.shape[-1] > LARGEST_E


def maxsim_forward_cuda(
    operands: MaxSimOperands, *, normalize: bool, argmax: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores fp32 ``[Q, C]`` and winners int32 ``[C, Tq]``, None without argmax."""
    if is_product(operands):
        verify_lengths(operands)
        return cross_forward(operands, normalize=normalize, argmax=argmax)
    if argmax and operands.queries.shape[-1] > LARGEST_E:
        raise ValueError(
            f"gradients of pairs and of queries' own documents take E <= {LARGEST_E} on a GPU, got "
            f"E = {operands.queries.shape[-1]}; project the tokens to fewer units"
        )
    return streaming_forward(operands.flat(), normalize=normalize, argmax=argmax)


def chooses_unified(operands: MaxSimOperands, backward: str) -> bool:
    """What "auto" stands for; E beyond the kernel's has "lowmem" in any case, and so has "auto"
    where PyTorch is to be deterministic."""
    if operands.queries.shape[-1] > LARGEST_E or backward != "auto":
        return backward == "unified" and operands.queries.shape[-1] <= LARGEST_E
    if operands.per_query is None or torch.are_deterministic_algorithms_enabled():
        return False
    length = operands.num_query_tokens / max(operands.scores_shape[0], 1)
    similarities = length * num_rows(operands.documents)
    return length >= LONG_QUERY and similarities >= MANY_SIMILARITIES


def maxsim_backward_cuda(
    grad: Tensor,
    argmax: Tensor,
    operands: MaxSimOperands,
    *,
    normalize: bool,
    backward: str,
    need_queries: bool = True,
    need_documents: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the operands in their dtype, None where not wanted; as rows, or along their
    axes.

    With "lowmem" sums run in a fixed order, whatever the kernels; :func:`chooses_unified` says when
    it is not that.
    """
    unified = chooses_unified(operands, backward)
    shared = operands.per_query is None and operands.pairs is None
    few_lists = shared and operands.scores_shape[1] < MANY_DOCUMENTS
    cross = is_product(operands) or (few_lists and not normalize)
    chosen: Callable[..., tuple[Tensor | None, Tensor | None]]
    if cross and not unified:
        chosen = cross_backward
    else:
        chosen = streaming_backward_unified if unified else streaming_backward_lowmem
        operands = operands.flat()
    return chosen(
        grad,
        argmax,
        operands,
        normalize=normalize,
        need_queries=need_queries,
        need_documents=need_documents,
    )
