"""Heads behind their backbone: BERT-base with random weights in bfloat16.

N sequences, T packed tokens, D hidden, V vocabulary.

Random weights leave nearly every entry active, the most work a head's backward can have. Dropout
is off. There is no padding in these shapes, so packed and padded backbones have the same work.
"""

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gate import Results
from benchmarks.head.heads import HEADS
from benchmarks.head.judge import Truth, Work
from benchmarks.head.problems import SEED, random_tokens
from benchmarks.head.suites import FORWARD, NO_HEAD, Cell, Shape
from sparton.models.backbone import Backbone
from sparton.models.backbones import random_bert
from sparton.models.heads import EagerHead
from sparton.models.splade import SpladeEncoder

CHECKED_SEQUENCES = 8


class Encoders:
    """The encoders of one backbone, whose weights they share."""

    def __init__(self, shape: Shape, device: str, *, compiled: bool) -> None:
        self.shape, self.device = shape, device
        self.backbone = self._build(compiled=compiled)  # on the CPU until the first cell
        self.tokens = random_tokens(shape)

    @cached_property
    @torch.no_grad()
    def truth(self) -> Truth:
        """Hidden states and representations of the first sequences: those of fp32 arithmetic on the
        same weights, and the errors of bfloat16 and the eager head."""
        tokens = self.tokens.select(0, min(CHECKED_SEQUENCES, self.tokens.num_sequences))
        tokens, head = tokens.to(self.device), EagerHead()
        backbone = self._build(compiled=False).to(self.device)

        def observed() -> Results:
            hidden, decoder = backbone(tokens), backbone.decoder
            reps = head(hidden, decoder.weight, decoder.bias, tokens)
            return {"hidden": hidden.float(), "reps": reps.float()}

        eager = observed()
        backbone.float()
        return Truth.of(observed(), eager, {})

    def work(self, cell: Cell) -> Work:
        """What is timed of a cell, and its results."""
        backbone, tokens = self.backbone.to(self.device), self.tokens.to(self.device)
        checked = min(CHECKED_SEQUENCES, tokens.num_sequences)
        if cell.head == NO_HEAD:
            model: nn.Module = backbone
            name, rows = "hidden", int(tokens.cu_seqlens[checked])
            size, dtype = (tokens.num_tokens, self.shape.D), torch.bfloat16
        else:
            model = SpladeEncoder(backbone, HEADS[cell.head].build()).eval()
            name, rows = "reps", checked
            size, dtype = (tokens.num_sequences, self.shape.V), torch.float32

        def results() -> Results:
            # With a graph where one is timed: compiled code for both would take twice as long.
            with torch.set_grad_enabled(cell.mode != FORWARD):
                return {name: model(tokens)[:rows].detach().float()}

        if cell.mode == FORWARD:
            return Work(partial(torch.no_grad()(model), tokens), results, tokens)
        generator = torch.Generator(self.device).manual_seed(SEED)
        upstream = torch.randn(size, generator=generator, device=self.device).to(dtype)
        return Work(partial(_backward, model, tokens, upstream), results, tokens)

    def _build(self, *, compiled: bool) -> Backbone:
        layers, heads = (12, 12) if self.shape.D == 768 else (2, 2)
        longest = max(high for _, _, high in self.shape.lengths)
        sizes = (self.shape.V, self.shape.D, layers, heads)
        backbone = random_bert(*sizes, max_length=longest, compile=compiled)
        return backbone.to(torch.bfloat16).eval()


def _backward(model: nn.Module, tokens: Any, upstream: Tensor) -> None:
    torch.autograd.grad(model(tokens), list(model.parameters()), upstream, allow_unused=True)
