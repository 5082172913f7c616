"""Which kernels serve CUDA tensors.

Q queries, N documents, K documents per query, C = N or K columns, T packed tokens, E embedding.

cross.py shares every document tile among many query tokens and is bound by arithmetic;
streaming.py (documents of each query's own) is not there yet.
"""

from torch import Tensor

from sparton.kernels.maxsim.cross import cross_backward, cross_forward
from sparton.kernels.maxsim.operands import MaxSimOperands


def maxsim_forward_cuda(
    operands: MaxSimOperands, *, normalize: bool, argmax: bool
) -> tuple[Tensor, Tensor]:
    """Scores fp32 ``[Q, C]`` and, unless argmax is False, winners int32 ``[C, Tq]``."""
    if operands.per_query is not None:
        raise NotImplementedError(
            "documents of each query's own (pairs, [Q, K, Ld, E]) have no CUDA kernel yet; score "
            "them on the CPU, or take the entries from the cross product"
        )
    return cross_forward(operands, normalize=normalize, argmax=argmax)


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
    """Gradients ``[Tq, E]`` and ``[Td, E]`` in the operands' dtype, None where not wanted."""
    if backward == "unified":
        raise NotImplementedError('backward="unified" has no CUDA kernel yet; use "lowmem"')
    return cross_backward(
        grad,
        argmax,
        operands,
        normalize=normalize,
        need_queries=need_queries,
        need_documents=need_documents,
    )
