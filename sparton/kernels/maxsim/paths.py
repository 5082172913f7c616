"""Which kernels serve CUDA tensors.

Q queries, N documents, K documents per query, C = N or K columns, T packed tokens, E embedding.

cross.py shares every tile of documents among many query tokens and is bound by arithmetic.
streaming.py reads each document once for a few query tokens and is bound by memory; it alone serves
documents of each query's own. A cross product goes to cross.py if it has more than FEW query
tokens: about where a product of that many 16-bit rows costs as much time as reading its columns.
"""

from collections.abc import Callable

from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.maxsim.cross import cross_backward, cross_forward
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.maxsim.streaming import streaming_forward
from sparton.kernels.maxsim.streaming_backward import (
    streaming_backward_lowmem,
    streaming_backward_unified,
)

FEW = 256


def is_product(operands: MaxSimOperands) -> bool:
    """Whether cross.py serves these operands."""
    return operands.per_query is None and operands.num_query_tokens > FEW


@on_its_device
def maxsim_forward_cuda(
    operands: MaxSimOperands, *, normalize: bool, argmax: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores fp32 ``[Q, C]`` and winners int32 ``[C, Tq]``, None without argmax."""
    if is_product(operands):
        return cross_forward(operands, normalize=normalize, argmax=argmax)
    return streaming_forward(operands.flat(), normalize=normalize, argmax=argmax)


@on_its_device
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
    """Gradients of the operands' rows in their dtype, None where not wanted.

    "auto" and "lowmem" are the same: whatever the kernels, sums run in a fixed order.
    """
    chosen: Callable[..., tuple[Tensor | None, Tensor | None]]
    if backward != "unified" and is_product(operands):
        chosen = cross_backward
    else:
        unified = backward == "unified"
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
