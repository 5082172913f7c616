"""Problems for the SPLADE head of real sizes, on a GPU."""

from itertools import accumulate

import torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def operands(lengths, V, D, dtype, *, bias=0.0, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(sum(lengths), D, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(V, D, generator=generator, device="cuda").to(dtype) / D**0.5
    shift = torch.randn(V, generator=generator, device="cuda") + bias
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    return hidden, weight, shift, cu_seqlens


def gradients(reps, leaves, upstream):
    return torch.autograd.grad(reps, leaves, upstream.to(reps.dtype))
