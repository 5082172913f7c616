"""How the forward of the streaming MaxSim is cut, and what a search calls the streaming kernels.

E embedding.
"""

from typing import Any, NamedTuple

import torch

from sparton.kernels.launch import cdiv, next_power_of_2
from sparton.kernels.maxsim.operands import MaxSimOperands
from sparton.kernels.tuned import Regime, regime_of, tuned, tuned_configs


class StreamingConfig(NamedTuple):
    """One way to launch the forward.

    Attributes:
        block_t: document tokens per tile.
        block_q: query tokens per tile and query.
        group: queries of a cross product that share a tile; a power of 2.
        block_e: units of an embedding that are multiplied at once. The queries stay on the chip
            where this covers E.
        max_registers: of a thread; fewer let more programs share a multiprocessor.
        descriptors: whether documents are read through a tensor descriptor (TMA), which takes fewer
            registers; where their rows are not aligned to 16 bytes they are read without.
        few_programs: where a launch would have fewer, several share the tiles of long queries.
    """

    block_t: int
    block_q: int
    group: int
    block_e: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    descriptors: bool = False
    few_programs: int = 256


def streaming_config(
    num_queries: int, num_tokens: int, E: int, dtype: torch.dtype, *, cross: bool
) -> StreamingConfig:
    """The configuration for ``num_queries`` queries of ``num_tokens`` tokens together.

    The tile is cut for queries of the average length; longer ones take several tiles.
    """
    full_precision = dtype == torch.float32
    width = cdiv(num_tokens, max(num_queries, 1))
    block_q = min(max(next_power_of_2(width), 16), 64 if full_precision else 128)
    group = 1
    while cross and group < num_queries and 2 * group * block_q <= (64 if full_precision else 128):
        group *= 2
    if full_precision:
        return StreamingConfig(32, block_q, group, 32, num_warps=4, num_stages=3)
    block_e = min(max(next_power_of_2(E), 16), 128)
    while block_e > 64 and E % block_e and E > 128:
        block_e //= 2
    config = StreamingConfig(64, block_q, group, block_e, num_warps=8, num_stages=3)
    if group * block_q <= 32:
        config = config._replace(num_warps=4, num_stages=4 if cross else 3)
    elif group * block_q == 128:
        # Two programs share a multiprocessor.
        config = config._replace(max_registers=128)
    return config._replace(descriptors=cross)


def num_splits(num_queries: int, num_tokens: int, programs: int, config: StreamingConfig) -> int:
    """Programs that share the tiles of a query of average length, where there are fewer than
    ``config.few_programs`` without."""
    width = cdiv(num_tokens, max(num_queries, 1))
    wanted = cdiv(config.few_programs, max(programs, 1))
    return max(min(cdiv(width, config.block_q), wanted), 1)


def streaming_regime(operands: MaxSimOperands, pass_: str) -> Regime:
    """What winners for flat operands belong to; ``pass_`` is forward, lowmem or unified. Documents
    of all queries have other winners than those of each query's own or of pairs."""
    shared = operands.per_query is None and operands.pairs is None
    queries, documents = operands.queries, operands.documents
    Q, N = (bounds.shape[0] - 1 for bounds in operands[2:4])
    return regime_of(
        f"maxsim_{'shared' if shared else 'own'}_{pass_}",
        queries.device,
        queries.dtype,
        queries.shape[-1],
        cdiv(queries.shape[0], max(Q, 1)),
        documents.shape[0] / max(N, 1),
    )


def tuned_streaming(operands: MaxSimOperands, pass_: str, kind: type[Any]) -> Any | None:
    """The winner of a search for flat operands, if there is one."""
    if not tuned_configs():
        return None
    return tuned((kind,), streaming_regime(operands, pass_))
