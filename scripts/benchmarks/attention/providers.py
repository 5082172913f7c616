"""Attentions that are compared, each a function of leaves and its results as they are judged."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, cast

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.problems import Problem
from benchmarks.kernels import run
from sparton import packing
from sparton.kernels.varlen_attention import varlen_attention

SPARTON, FLASH = "sparton", "flash_varlen"
SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PROVIDERS = (SPARTON, FLASH, *SDPA)


class Attempt(NamedTuple):
    """One provider on one problem; padding it, where it needs that, is not part of the work."""

    attend: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    grad: Tensor
    packed: Callable[[Tensor], Tensor]

    def run(self, mode: str) -> tuple[Tensor, ...]:
        """The output, and with the backward the gradients."""
        return run(self.attend, self.leaves, self.grad, mode)

    def results(self, mode: str) -> list[Tensor]:
        return [self.packed(x) for x in self.run(mode)]


def attempt(provider: str, problem: Problem) -> Attempt:
    bounds = (problem.cu_seqlens, problem.cu_seqlens, problem.longest, problem.longest)
    if provider in SDPA:
        return _padded(SDPA[provider], problem)
    kernel: Callable[..., Tensor] = varlen_attention
    if provider == FLASH:
        kernel = cast(Callable[..., Tensor], varlen_attn)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(query, key, value, *bounds)

    return Attempt(attend, problem.states, problem.grad, lambda x: x)


def _padded(backend: SDPBackend, problem: Problem) -> Attempt:
    """All of the longest sequence's length, and a mask unless that is everyone's."""
    bounds, total = problem.cu_seqlens, problem.grad.shape[0]

    def pad(x: Tensor) -> Tensor:
        return packing.pad(x, bounds, problem.longest).transpose(1, 2)

    mask = packing.padding_mask(bounds, problem.longest)[:, None, None, :]
    seen = None if bool(mask.all()) else mask.expand(-1, -1, problem.longest, -1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend) if query.is_cuda else nullcontext():
            return scaled_dot_product_attention(query, key, value, attn_mask=seen)

    leaves = tuple(pad(x) for x in problem.states)
    return Attempt(
        attend, leaves, pad(problem.grad), lambda x: packing.unpad(x.transpose(1, 2), bounds, total)
    )
