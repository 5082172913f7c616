"""What is searched for MaxSim: products of a batch, own documents, and reranking.

Q queries, N documents, K documents per query, C columns of the scores, T packed tokens, E
embedding.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sparton.kernels.maxsim.cross import cross_backward, cross_forward
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.maxsim.streaming import streaming_forward
from sparton.kernels.maxsim.streaming_backward import (
    streaming_backward_lowmem,
    streaming_backward_unified,
)
from sparton.kernels.maxsim.streaming_rows import DEFAULT_CONFIG
from sparton.kernels.maxsim.streaming_tiles import streaming_config, streaming_regime
from sparton.kernels.segment_max.tuning import (
    backward_candidates,
    forward_candidates,
    gradients_of_winners,
    regime,
)
from sparton.kernels.tuned import Regime
from sparton.kernels.tuning import (
    Problem,
    full_precision,
    neighbours,
    random_bounds,
    wrong_gradients,
)

ALLOWED_ERROR = 1e-3  # of the similarity of two tokens of unit length
BATCH, OWN = 128, 8  # queries of a training step; documents of each query's own
FORWARD_CHANGES = {
    "block_t": (32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "max_registers": (None, 128, 168),
    "descriptors": (False, True),
}
BACKWARD_CHANGES = {
    "row_elements": (512, 2048),
    "unroll": (2, 8),
    "columns": (16, 32, 128),
    "tile_elements": (4096, 16384),
    "tile_warps": (4,),
    "block_s": (16, 64),
    "programs": (512, 1024, 4096),
}

Forward = Callable[..., tuple[Tensor, Tensor | None]]


def maxsim_problems(
    width: int,
    query_length: int,
    document_length: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 2**16,
    device: str = "cuda",
) -> Iterator[Problem]:
    """All queries of a batch with all of its documents, forward and backward; documents of each
    query's own, forward and both backwards; and the forward of one query with all documents.

    Args:
        width: E.
        query_length: tokens of each query.
        document_length: mean number of tokens of a document.
        dtype: of queries and documents.
        tokens: of all documents together.
    """
    batch = example_operands(width, query_length, document_length, dtype, tokens, device)
    mean = batch.documents.shape[0] / (batch.document_cu_seqlens.shape[0] - 1)
    product = regime("maxsim_product", batch.documents, batch.queries, mean)
    yield _forward(product, cross_forward, batch, forward_candidates(dtype, device))
    own_name = product._replace(kernel="maxsim_product_backward")
    yield _backward(own_name, cross_backward, batch, cross_forward, backward_candidates())
    own = own_documents(batch)
    for operands in (own, one_query(batch)):
        shared = operands.per_query is None
        Q = operands.scores_shape[0]
        config = streaming_config(Q, operands.num_query_tokens, width, dtype, cross=shared)
        configs = neighbours(config, FORWARD_CHANGES)
        yield _forward(streaming_regime(operands, "forward"), streaming_forward, operands, configs)
    configs = neighbours(DEFAULT_CONFIG, BACKWARD_CHANGES)
    for name, backward in (
        ("lowmem", streaming_backward_lowmem),
        ("unified", streaming_backward_unified),
    ):
        yield _backward(streaming_regime(own, name), backward, own, streaming_forward, configs)


def example_operands(
    width: int,
    query_length: int,
    document_length: int,
    dtype: torch.dtype,
    tokens: int,
    device: str,
) -> MaxSimOperands:
    """BATCH queries of equal length with packed documents, random and of unit length; see
    :func:`~sparton.kernels.tuning.random_bounds`."""
    bounds = random_bounds(document_length, tokens)
    generator = torch.Generator(device).manual_seed(0)

    def unit(rows: int) -> Tensor:
        random = torch.randn(rows, width, generator=generator, device=device)
        return normalize(random, dim=-1).to(dtype)

    starts = torch.arange(0, (BATCH + 1) * query_length, query_length, dtype=torch.int32)
    return MaxSimOperands(
        unit(BATCH * query_length), unit(int(bounds[-1])), starts.to(device), bounds.to(device),
        None, None, None, query_length, int(bounds.diff().max()),
    )  # fmt: skip


def own_documents(batch: MaxSimOperands) -> MaxSimOperands:
    """As many of the queries as get OWN documents each, or fewer documents if these are few."""
    N = batch.document_cu_seqlens.shape[0] - 1
    per_query = min(OWN, N)
    Q = min(N // per_query, BATCH)
    bounds = batch.document_cu_seqlens[: Q * per_query + 1]
    length = batch.query_length
    assert length is not None
    return batch._replace(
        queries=batch.queries[: Q * length], documents=batch.documents[: int(bounds[-1])],
        query_cu_seqlens=batch.query_cu_seqlens[: Q + 1], document_cu_seqlens=bounds,
        per_query=per_query,
    )  # fmt: skip


def one_query(batch: MaxSimOperands) -> MaxSimOperands:
    """The first query with all documents."""
    return batch._replace(
        queries=batch.queries[: batch.query_length], query_cu_seqlens=batch.query_cu_seqlens[:2]
    )


def true_maxima(operands: MaxSimOperands) -> Tensor:
    """fp32 ``[C, Tq]``, the best similarity of each query token in each column; -inf of a document
    without tokens."""
    queries, documents = operands.queries.float(), operands.documents.float()
    starts = operands.query_cu_seqlens.tolist()
    maxima = queries.new_full(operands.argmax_shape, -torch.inf)
    lengths = operands.document_cu_seqlens.diff().tolist()
    for n, tokens in enumerate(documents.split(lengths)):
        rows, column = slice(None), n
        if operands.per_query is not None:
            q, column = divmod(n, operands.per_query)
            rows = slice(starts[q], starts[q + 1])
        if tokens.numel():
            maxima[column, rows] = (queries[rows] @ tokens.T).amax(1)
    return maxima


def _forward(
    regime: Regime, forward: Forward, operands: MaxSimOperands, configs: list[Any]
) -> Problem:
    """With winners, as in training, and without; the former is timed."""
    with full_precision():
        maxima = true_maxima(operands)

    def launch(config: Any, argmax: bool = True) -> tuple[Tensor, Tensor | None]:
        return forward(operands, normalize=False, argmax=argmax, config=config)

    def fault(config: Any) -> str | None:
        scores, winners = launch(config)
        alone, _ = launch(config, argmax=False)
        assert winners is not None
        return (
            _wrong_scores(scores, maxima, operands)
            or _wrong_winners(winners, maxima, operands)
            or _wrong_scores(alone, maxima, operands)
        )

    return Problem(regime, configs, launch, fault)


def _backward(
    regime: Regime,
    backward: Callable[..., tuple[Tensor | None, Tensor | None]],
    operands: MaxSimOperands,
    forward: Forward,
    configs: list[Any],
) -> Problem:
    """Both gradients through the winners that ``forward`` finds."""
    _, winners = forward(operands, normalize=False, argmax=True)
    assert winners is not None
    grad = torch.randn(operands.scores_shape, device=winners.device)
    assert operands.query_length is not None
    given = grad.T.repeat_interleave(operands.query_length, 1)
    sides = operands.documents, operands.queries
    truth = gradients_of_winners(given, winners, *sides)[::-1]

    def launch(config: Any) -> tuple[Tensor | None, Tensor | None]:
        return backward(grad, winners, operands, normalize=False, config=config)

    return Problem(regime, configs, launch, lambda config: wrong_gradients(truth, launch(config)))


def _wrong_scores(scores: Tensor, maxima: Tensor, operands: MaxSimOperands) -> str | None:
    summed = torch.where(maxima.isfinite(), maxima, 0.0)
    truth = summed.unflatten(1, (-1, operands.query_length)).sum(2).T
    if scores.shape != truth.shape:
        return f"scores are {tuple(scores.shape)}, not {tuple(truth.shape)}"
    if bad := int((~scores.isfinite()).sum()):
        return f"{bad} of {scores.numel()} scores were not written or are not finite"
    worst = float((scores - truth).abs().max())
    if worst > ALLOWED_ERROR:
        return f"scores are wrong by up to {worst:.2g}"
    return None


def _wrong_winners(winners: Tensor, maxima: Tensor, operands: MaxSimOperands) -> str | None:
    """Each winner must be a token of its document that attains the maximum, or -1 for none."""
    if winners.shape != maxima.shape:
        return f"winners are {tuple(winners.shape)}, not {tuple(maxima.shape)}"
    columns = torch.arange(maxima.shape[0], device=maxima.device)[:, None]
    document = columns
    if operands.per_query is not None:
        rows = torch.arange(maxima.shape[1], device=maxima.device)
        queries = torch.searchsorted(operands.query_cu_seqlens, rows, right=True) - 1
        document = queries * operands.per_query + columns
    bounds = operands.document_cu_seqlens
    inside = (winners >= bounds[document]) & (winners < bounds[document + 1])
    right = torch.where(maxima.isfinite(), inside, winners == -1)
    if bad := int((~right).sum()):
        return f"{bad} of {winners.numel()} winners lie outside their documents"
    queries, documents = operands.queries.float(), operands.documents.float()
    worst = maxima.new_zeros(())
    for best, found in zip(maxima, winners.clamp_min(0), strict=True):
        lost = best - (queries * documents[found]).sum(-1)
        worst = torch.maximum(worst, torch.where(best.isfinite(), lost, 0.0).abs().max())
    if float(worst) > ALLOWED_ERROR:
        return f"winners miss the maximum by up to {float(worst):.2g}"
    return None
