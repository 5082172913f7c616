"""Problems for MaxSim from hidden states. Q queries, N documents, L tokens, H hidden, E embedding.

Operands are queries, hidden and projection, and a bias where there is one.
"""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.maxsim import maxsim_from_hidden, maxsim_reference
from sparton.kernels.maxsim.hidden_operands import HiddenOperands

Operands = tuple[Tensor, ...]


def make_problem(
    device, *, Q=3, Lq=5, N=4, Ld=37, H=50, E=24, dtype=torch.float32, seed=0, bias=False
) -> tuple[Operands, Tensor, Tensor]:
    """Masks with holes; document 1 has no tokens, query 2 neither."""
    generator = torch.Generator().manual_seed(seed)
    queries, hidden, projection = (
        torch.randn(*shape, generator=generator) for shape in ((Q, Lq, E), (N, Ld, H), (E, H))
    )
    query_mask = torch.rand(Q, Lq, generator=generator) > 0.3
    document_mask = torch.rand(N, Ld, generator=generator) > 0.3
    query_mask[0], document_mask[0] = True, True
    query_mask[-1], document_mask[1] = False, False
    operands = (queries, hidden, projection / H**0.5)
    if bias:
        operands += (torch.randn(E, generator=generator),)
    return (
        tuple(x.to(device, dtype) for x in operands),
        query_mask.to(device),
        document_mask.to(device),
    )


def from_hidden(operands: Operands, *masks: Tensor, **options) -> Tensor:
    """:func:`maxsim_from_hidden` of operands with or without a bias."""
    *others, bias = operands if len(operands) > 3 else (*operands, None)
    return maxsim_from_hidden(*others, *masks, bias=bias, **options)


def packed(
    operands: Operands,
    cu_seqlens: Tensor,
    query_mask: Tensor | None = None,
    mask: Tensor | None = None,
    **options,
) -> HiddenOperands:
    """As the kernels take them; hidden states are rows already, or along several axes."""
    *others, bias = operands if len(operands) > 3 else (*operands, None)
    return HiddenOperands(*others, bias, cu_seqlens, query_mask, mask, **options)


def truth(
    operands: Operands, query_mask: Tensor, document_mask: Tensor, *, normalize: bool
) -> Tensor:
    """Project, normalise, then the reference; of operands in float64."""
    queries, hidden, projection, *bias = operands
    embeddings = hidden @ projection.T + sum(bias)
    if normalize:
        embeddings = F.normalize(embeddings, dim=-1, eps=1e-12)
    bounds = [
        torch.tensor([0, *accumulate([x.shape[1]] * x.shape[0])], dtype=torch.int32)
        for x in (queries, embeddings)
    ]
    return maxsim_reference(
        queries.flatten(0, 1),
        embeddings.flatten(0, 1),
        *bounds,
        query_mask.flatten(),
        document_mask.flatten(),
    )
