"""Shapes of training, operands, and what results are judged by.

T packed tokens, N sequences, H heads, d the width of a head.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gate import Errors
from benchmarks.kernels import FORWARD
from sparton.kernels.varlen_attention import varlen_attention_reference

BOTH = "forward+backward"
# Of the truth's norm, and of a token's mean norm for the worst token: one that is wrong hides among
# the others.
ALLOWED = {"norm": 0.01, "worst": 0.2}


class Shape(NamedTuple):
    """Sequences of lengths spread evenly: ``(how many, shortest, longest)`` each."""

    parts: tuple[tuple[int, int, int], ...]
    H: int = 12
    d: int = 64

    def shrunk(self) -> "Shape":
        parts = ((2, low // 16 + 1, high // 16 + 1) for _, low, high in self.parts)
        return Shape(tuple(parts), H=2, d=16)


DOCUMENTS, QUERIES = (384, 62, 256), (384, 6, 64)
SHAPES = {
    "documents": Shape((DOCUMENTS,)),
    "queries": Shape((QUERIES,)),
    "queries_documents": Shape((QUERIES, DOCUMENTS)),
    "mined_minilm": Shape(((2048, 62, 256),), d=32),
    "128x512": Shape(((128, 512, 512),)),
    "32x2048": Shape(((32, 2048, 2048),)),
}


class Problem(NamedTuple):
    """Query, key and value ``[T, H, d]``, the upstream gradient, the boundaries int32 ``[N + 1]``,
    the longest sequence, and products of a query and a key within all sequences of a head."""

    states: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    cu_seqlens: Tensor
    longest: int
    pairs: int

    def least_work(self, mode: str) -> tuple[int, int]:
        """Bytes if every tensor were moved once, and FLOPs: the forward has two matrix products,
        the backward five, one of which repeats the forward's first."""
        width = self.grad[0].numel()
        tensors, products = (4, 2) if mode == FORWARD else (12, 7)
        size = self.grad.numel() * self.grad.element_size()
        return tensors * size, 2 * products * self.pairs * width


def make_problem(shape: Shape, device: str) -> Problem:
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    for count, low, high in shape.parts:
        lengths += torch.randint(low, high + 1, (count,), generator=generator).tolist()
    # Triton's interpreter multiplies bfloat16 wrongly.
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    sizes = (4, sum(lengths), shape.H, shape.d)
    query, key, value, grad = torch.randn(sizes, generator=generator).to(device, dtype).unbind()
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    pairs = sum(length**2 for length in lengths)
    return Problem((query, key, value), grad, cu_seqlens, max(lengths), pairs)


def truth(problem: Problem) -> list[Tensor]:
    """Output and gradients in fp32."""
    query, key, value = leaves = [x.float().requires_grad_() for x in problem.states]
    out = varlen_attention_reference(query, key, value, problem.cu_seqlens, problem.cu_seqlens)
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.grad.float())]


def errors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Errors:
    """The largest of all results: see :data:`ALLOWED`."""
    each: dict[str, list[Tensor]] = {name: [] for name in ALLOWED}
    for x, y in zip(actual, expected):  # of a forward the first alone
        rows = (x.float() - y).flatten(1).norm(dim=1)
        each["norm"].append(rows.norm() / y.norm())
        each["worst"].append(rows.max() * len(rows) ** 0.5 / y.norm())
    # In a tensor a NaN is the maximum.
    return {name: float(torch.stack(found).max()) for name, found in each.items()}
