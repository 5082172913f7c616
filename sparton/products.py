"""Products with the weights of linear layers, which many passes may share in the form that matrix
products read."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparton.kernels.dispatch import autocast_dtype
from sparton.sharded import is_sharded


class _Form(NamedTuple):
    """What products read of some parameters, with its graph and without, and the state of these
    that it was made of. They are held, so that no others come to lie where they do."""

    parameters: list[Tensor]
    versions: list[int]
    whole: Tensor
    detached: Tensor


# Of this thread: another may train the same weights meanwhile.
_forms: ContextVar[dict[Any, _Form] | None] = ContextVar("forms", default=None)


@contextmanager
def keeping_weights(module: nn.Module) -> Iterator[None]:
    """Within, :func:`linear` stacks the weights of a module, and rounds them to the dtype of
    autocast, once for all passes, with gradients and without; until the end they take that much
    memory. Those of a module whose weights are spread over the ranks, all of them then, are not
    kept."""
    first = next(module.parameters(), None)
    with _Keeping(None if first is not None and is_sharded(first) else {}):
        yield


def as_before() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of ``torch.utils.checkpoint``: what is computed again for a backward pass,
    which on a GPU is in a thread of autograd's, finds the weights kept that the forward found."""
    return nullcontext(), _Keeping(_forms.get())


class _Keeping:
    """Within, these forms are those that are kept; None for none. It may be entered again."""

    def __init__(self, forms: dict[Any, _Form] | None) -> None:
        self._forms = forms
        self._before: list[Token] = []

    def __enter__(self) -> None:
        self._before.append(_forms.set(self._forms))

    def __exit__(self, *_: object) -> None:
        _forms.reset(self._before.pop())


def linear(x: Tensor, *layers: nn.Module, bias: bool = True) -> Tensor:
    """What one linear layer or several make of ``x``, side by side, in one product.

    Layers of another class, such as adapters are, run as they are.

    Args:
        x: ``[..., D]``.
        layers: with weights ``[Vi, D]`` and all of them with a bias ``[Vi]`` or none.
        bias: False leaves it out, for a kernel that adds it.

    Returns:
        ``[..., V1 + V2 + ...]``.
    """
    plain = all(type(layer) is nn.Linear for layer in layers)
    if len(layers) > 1:
        plain = plain and len({layer.weight.requires_grad for layer in layers}) == 1
    if not plain:
        results = [layer(x) for layer in layers]
        return results[0] if len(results) == 1 else torch.cat(results, dim=-1)
    weight = _form(x, [layer.weight for layer in layers])
    if not bias or layers[0].bias is None:
        return F.linear(x, weight)
    return F.linear(x, weight, _form(x, [layer.bias for layer in layers]))


def keeps_weights() -> bool:
    """Whether they are kept here, see :func:`keeping_weights`. A compiled graph has its own way
    with weights."""
    return not torch.compiler.is_compiling() and _forms.get() is not None


def kept(dtype: torch.dtype, *parameters: Tensor) -> Tensor:
    """Parameters ``[Vi, ...]`` one above the other, in the dtype of products and without a graph,
    as the kept weights of :func:`linear` are; for functions of autograd that know the way from
    their products to the parameters themselves. Asked where :func:`keeps_weights` is true."""
    return _kept(dtype, list(parameters)).detached


def _form(x: Tensor, parameters: list[Any]) -> Tensor:
    """Parameters one above the other, in the dtype of products with ``x`` where that is kept;
    otherwise autocast rounds them."""
    if not keeps_weights():
        return _stacked(parameters)
    return _kept(autocast_dtype(x) or parameters[0].dtype, parameters).whole


def _kept(dtype: torch.dtype, parameters: list[Any]) -> _Form:
    forms = _forms.get()
    assert forms is not None
    key = (dtype, *map(id, parameters))
    versions = [parameter._version for parameter in parameters]
    form = forms.get(key)
    if form is None or form.versions != versions:
        # Passes without a graph may come first: the others need one.
        with torch.enable_grad():
            whole = _stacked(parameters).to(dtype)
        form = forms[key] = _Form(parameters, versions, whole, whole.detach())
    return form


def _stacked(parameters: list[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else torch.cat(parameters)
