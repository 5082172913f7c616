"""What transformers' own models make of texts, each by itself: logits and gradients."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.models.backbone import Backbone
from sparton.types import TokenBatch, TokenRows

TOLERANCE = 1e-5  # of the largest value


def batch(lengths: tuple[int, ...] = (3, 1, 0, 30, 2, 17), seed: int = 0) -> TokenBatch:
    """Random texts of these lengths over 60 terms; by default one is empty, and two exceed the
    local window of the small ModernBERT."""
    generator = torch.Generator().manual_seed(seed)
    return TokenBatch.from_lists(
        [torch.randint(5, 60, (length,), generator=generator).tolist() for length in lengths]
    )


def alone(model: PreTrainedModel, tokens: TokenBatch) -> Tensor:
    """Logits ``[T, V]`` of every text by itself."""
    texts = tokens.input_ids.split(tokens.cu_seqlens.diff().tolist())
    return torch.cat([model(input_ids=text[None]).logits[0] for text in texts])


@torch.no_grad()
def states_attending(
    model: PreTrainedModel, tokens: TokenBatch, first: Sequence[int]
) -> tuple[TokenRows, Tensor]:
    """The first tokens of every text, and the last states ``[T, D]`` that ``model`` gives each text
    by itself with an attention mask of these."""
    bounds, texts = tokens.cu_seqlens.tolist(), []
    for (start, stop), own in zip(pairwise(bounds), first, strict=True):
        mask = (torch.arange(stop - start) < own).long()
        states = model.base_model(
            input_ids=tokens.input_ids[None, start:stop], attention_mask=mask[None]
        )
        texts.append(states[0][0])
    rows = [torch.arange(start, start + own) for start, own in zip(bounds[:-1], first, strict=True)]
    keys = TokenRows(torch.cat(rows), cu_seqlens_of(torch.tensor(first), torch.int32), max(first))
    return keys, torch.cat(texts)


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Of all parameters, for an upstream gradient that depends on the shape alone."""
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    output.backward(upstream)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def close(left: Tensor, right: Tensor, scale: float = 0.0) -> bool:
    scale = max(scale, float(right.detach().abs().max()))
    return torch.allclose(left, right, rtol=0, atol=TOLERANCE * scale)


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        # Attention scores do not change when a constant is added to all keys: this gradient is 0.
        if "key.bias" in name or "k_lin.bias" in name:
            continue
        assert close(actual[name], gradient), name
        assert not close(actual[name] * 1.01, gradient), name


def assert_same_logits_and_gradients(
    backbone: Backbone, stock: PreTrainedModel, tokens: TokenBatch
) -> None:
    """Those of ``backbone`` on packed tokens are those of ``stock`` on every text by itself."""
    expected, actual = alone(stock, tokens), backbone.decoder(backbone(tokens))
    assert close(actual, expected)
    assert not close(actual.roll(1, 0), expected)
    wanted = gradients(stock, expected)
    with backbone.decoder_in_place() as whole:
        found = gradients(whole, actual)
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        # Those that cancel out, of keys' biases and of embeddings that move all alike, are noise.
        assert close(found[name], gradient, 1e-2 * largest), name
    assert not close(found[name] * 1.01, wanted[name])


def num_parameters(model: torch.nn.Module) -> int:
    """Of all its parameters; a tied decoder counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
