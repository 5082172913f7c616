"""MaxSim in plain PyTorch: the definition that every other version is tested against."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_length


def maxsim_reference(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    per_query: int | None = None,
    normalize: bool = False,
) -> Tensor:
    """Scores of Q queries against N documents, packed, differentiable by autograd.

    ``score(q, d) = sum over q's tokens s of max over d's tokens t of <q_s, d_t>``, over those
    tokens whose mask (bool ``[Tq]``, ``[Td]``, holes allowed) is True. Others do not exist: they
    never win, whatever the sign of the similarities. A query or a document without tokens scores 0.
    The gradient of a maximum goes to the first token that attains it. ``normalize`` first divides
    every token ``[E]`` by its length, or by 1e-12 if that is larger.

    Returns ``[Q, N]``, or with ``per_query`` = K ``[Q, K]``, where document k of query q is
    ``q * K + k``; in the dtype of the operands (float64 in means float64 truth out).
    """
    if normalize:
        queries, documents = (unit_length(x, dim=-1, eps=1e-12) for x in (queries, documents))
    sides: list[list[Tensor]] = []
    for tokens, bounds, mask in (
        (queries, query_cu_seqlens, query_mask),
        (documents, document_cu_seqlens, document_mask),
    ):
        kept = torch.ones_like(tokens[:, 0], dtype=torch.bool) if mask is None else mask
        sides.append([tokens[a:b][kept[a:b]] for a, b in pairwise(bounds.tolist())])
    rows = []
    for n, query in enumerate(sides[0]):
        own = sides[1] if per_query is None else sides[1][n * per_query : (n + 1) * per_query]
        none = queries.new_zeros(())
        rows += [(query @ d.T).max(dim=1).values.sum() if len(d) else none for d in own]
    return torch.stack(rows).view(len(sides[0]), -1) if rows else queries.new_zeros(0, 0)
