"""The head behind its backbone: BERT-base with random weights in bfloat16.

N sequences, T packed tokens, D hidden, V vocabulary.

Random weights leave nearly every entry active, the most work a head's backward can have. Dropout
is off. There is no padding in these shapes, so packed and padded backbones have the same work.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gate import Errors, Results
from benchmarks.head.heads import head_of
from benchmarks.head.judge import errors
from benchmarks.head.problems import SEED, random_tokens
from benchmarks.head.suites import FORWARD, NO_HEAD, Cell, Shape
from sparton.models.backbones import random_bert
from sparton.models.splade import SpladeEncoder
from sparton.types import TokenBatch

CHECKED_SEQUENCES = 8


def build(cell: Cell, shape: Shape) -> nn.Module:
    """The cell's encoder, or its backbone alone, on the CPU."""
    layers, heads = (12, 12) if shape.D == 768 else (2, 2)
    longest = max(high for _, _, high in shape.lengths)
    compiled = cell.backbone == "compiled"
    backbone = random_bert(shape.V, shape.D, layers, heads, max_length=longest, compile=compiled)
    backbone.to(torch.bfloat16).eval()
    return backbone if cell.head == NO_HEAD else SpladeEncoder(backbone, head_of(cell))


@torch.no_grad()
def make_truth(model: Any, shape: Shape, device: str) -> tuple[Results, Errors]:
    """Hidden states and representations of the first sequences: those of fp32 arithmetic on the
    same weights, and the errors of bfloat16 and the eager head."""
    tokens = random_tokens(shape)
    tokens = tokens.select(0, min(CHECKED_SEQUENCES, tokens.num_sequences)).to(device)

    def observed() -> Results:
        hidden, decoder = model.backbone(tokens), model.backbone.decoder
        reps = model.head(hidden, decoder.weight, decoder.bias, tokens)
        return {"hidden": hidden.float(), "reps": reps.float()}

    model.to(device)
    eager = observed()
    model.float()
    truth = observed()
    return truth, errors(eager, truth)


def run_and_results(
    cell: Cell, model: nn.Module, shape: Shape, device: str
) -> tuple[Callable[[], Any], Callable[[], Results], TokenBatch]:
    """What is timed, what its results are, and the tokens it runs on."""
    tokens = random_tokens(shape).to(device)
    model.to(device)
    checked = min(CHECKED_SEQUENCES, tokens.num_sequences)
    name, rows = "reps", checked
    size, dtype = (tokens.num_sequences, shape.V), torch.float32
    if cell.head == NO_HEAD:
        name, rows = "hidden", int(tokens.cu_seqlens[checked])
        size, dtype = (tokens.num_tokens, shape.D), torch.bfloat16

    def results() -> Results:
        # With a graph where one is timed: compiled code for both would take twice as long.
        with torch.set_grad_enabled(cell.mode != FORWARD):
            return {name: model(tokens)[:rows].detach().float()}

    if cell.mode == FORWARD:
        return partial(_without_graph, model, tokens), results, tokens
    generator = torch.Generator(device).manual_seed(SEED)
    upstream = torch.randn(size, generator=generator, device=device).to(dtype)
    return partial(_backward, model, tokens, upstream), results, tokens


@torch.no_grad()
def _without_graph(model: nn.Module, tokens: TokenBatch) -> None:
    model(tokens)


def _backward(model: nn.Module, tokens: TokenBatch, upstream: Tensor) -> None:
    torch.autograd.grad(model(tokens), list(model.parameters()), upstream, allow_unused=True)
