"""One way for a family of kernels to be a PyTorch operator; imports no Triton.

A family has a function of tensors for the CPU, one of the same parameters for GPUs, what shapes
come out, and perhaps a backward. :class:`Operator` makes of them what torch.compile, torch.export
and dispatch modes see (``torch.library``), and what eager calls run: the dispatcher of operators
that are written in Python would take more time than small kernels, so that these calls run the same
functions from an autograd function, or directly where no gradient can follow.

Functions take tensors, numbers, booleans, strings, dtypes, and named tuples of these that begin
with a tensor. Operators of ``torch.library`` know no named tuples: there, each field is a parameter
of its own, a leaf.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from sparton.kernels.dispatch import Late, is_elsewhere, needs_operators, without_autocast


def gradient_follows(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed of these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


class Operator:
    """A function of tensors as an operator of PyTorch.

    Attributes:
        registered: what ``torch.library`` made of it. A result that is None is an empty tensor.
        registered_backward: the same of its backward, or None without one. Parameters are gradients
            of results, what is saved, and ``needs``, for each operand that has a gradient; it
            returns the gradients that are needed.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        fake: Callable[..., Any],
        cuda: Late | None = None,
        keeps: str | None = None,
    ) -> None:
        """
        Args:
            name: "sparton::NAME".
            function: returns a tensor or a tuple of tensors, some of which may be None; all
                annotated, and none keyword-only. No result shares memory with an operand. It runs
                without autocast, and with the device of the first tensor as the current one.
            fake: the same parameters in the same order, but ``keeps``; returns empty tensors of the
                shapes and dtypes of all results, contiguous.
            cuda: gives what runs instead where the first tensor is on a GPU, see
                :func:`~sparton.kernels.dispatch.late`.
            keeps: name of the last parameter, if it tells whether a backward will follow: without
                one, what is returned of results that are for a backward alone is not looked at.

        Raises:
            TypeError: ``keeps`` is not the last parameter.
        """
        self.name = name
        self.registered_backward: Any = None
        self._function = _Function(function, cuda)
        self._keeps, self._operands = keeps is not None, list(self._function.leaves)
        if keeps is not None and self._operands.pop() != keeps:
            raise TypeError(f"{name}: {keeps} is not its last parameter")
        self._num_learning, self._num_given = 0, 1

        def run(*leaves: Any) -> Any:
            return self._all(self._function(*self._function.gather(leaves)), leaves)

        def run_fake(*leaves: Any) -> Any:
            operands = leaves[: len(self._operands)]
            return self._all(fake(*self._function.gather(operands)), leaves)

        returned = _tensors_of(get_type_hints(function)["return"])
        self.registered: Any = _register(name, run, run_fake, self._function.leaves, returned)

    def differentiable(
        self,
        operands: Sequence[str],
        backward: Callable[..., Any],
        *,
        results: Sequence[str] = ("result",),
        forgets: Sequence[str] = (),
        fake: Callable[..., Any] | None = None,
        cuda: Late | None = None,
    ) -> None:
        """Give it a backward, whose leaves say by their names what is saved for it:

        1. ``grad``, or ``NAME_grad`` of several, for the gradients of the first results. All calls
           return these results alone. Where there are several, some gradients may be None.
        2. Operands and results by their names, and ``NAME_dtype`` for the dtype of an operand.
        3. ``need_NAME`` for whether an operand needs its gradient.

        Args:
            operands: names of those that have gradients, which are the first.
            backward: returns the gradient of each of these, in its shape and dtype, or anything
                where none is needed. It is differentiable once.
            results: names of all results.
            forgets: operands among its leaves that are not saved: they are None there.
            fake: the same parameters; empty tensors like the gradients. May be left out where
                ``backward`` has all ``operands`` among its leaves.
            cuda: as for the operator.

        Raises:
            TypeError: operands that are not the first, or a name that means nothing.
        """
        if list(operands) != self._operands[: len(operands)]:
            raise TypeError(f"{self.name}: {operands} are not the first of {self._operands}")
        self._backward = _Function(backward, cuda)
        leaves = [x for x in self._backward.leaves if not x.startswith("need_")]
        asked = [x.removeprefix("need_") for x in self._backward.leaves if x not in leaves]
        self._asked = _picker([operands.index(x) for x in asked])
        self._num_learning = len(operands)
        self._num_given = sum(x == "grad" or x.endswith("_grad") for x in leaves)
        self._plan_saving(leaves, [*self._operands, *results], forgets)

        def run(*arguments: Any) -> list[Tensor]:
            *leaves, needs = arguments
            return _apart(_needed(self._differentiate(leaves, needs), needs))

        def run_fake(*arguments: Any) -> list[Tensor]:
            *values, needs = arguments
            if fake is None:
                likes = [values[leaves.index(x)] for x, need in zip(operands, needs) if need]
                return [x.new_empty(x.shape) for x in likes]
            values += self._asked(needs)
            return _needed(fake(*self._backward.gather(values)), needs)

        parameters = {x: self._backward.leaves[x] for x in leaves} | {"needs": list[bool]}
        self.registered_backward = _register(
            f"{self.name}_backward", run, run_fake, parameters, list[Tensor]
        )
        others = [None] * (len(self._function.leaves) - self._num_learning)

        def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return *self._gradients(ctx, grads, ctx.needs_input_grad, registered=True), *others

        self.registered.register_autograd(differentiate, setup_context=self._save)

    def __call__(self, *arguments: Any) -> Any:
        """The first result, or a tuple of those that have gradients. What ``keeps`` names is no
        argument."""
        leaves = self._function.spread(arguments)
        learning = leaves[: self._num_learning]
        follows = gradient_follows(*learning)
        kept = (follows,) if self._keeps else ()
        if needs_operators():
            results = self.registered(*leaves, *kept)
        elif follows:
            return _Graph.apply((self, leaves, (*arguments, *kept), None), *learning)
        else:
            results = self._function(*arguments, *kept)
        return results if isinstance(results, Tensor) else self._given(results)

    def keep(self, *arguments: Any) -> tuple:
        """All results, also those for a backward, without a graph."""
        with torch.no_grad():
            if needs_operators():
                return self.registered(*self._function.spread(arguments), True)
            return self._function(*arguments, True)

    def repeat(self, results: tuple, *arguments: Any) -> Any:
        """What a call returns, and with its graph, where the ``results`` of :meth:`keep` are known:
        nothing is computed."""
        leaves = self._function.spread(arguments)
        return _Graph.apply((self, leaves, arguments, results), *leaves[: self._num_learning])

    def _given(self, results: tuple) -> Any:
        """What a call returns of all results."""
        return results[0] if self._num_given == 1 else results[: self._num_given]

    def _all(self, results: Any, leaves: Sequence[Any]) -> Any:
        """The results of the registered operator: a schema knows no optional ones, so that those
        that are None or not wanted are empty tensors."""
        if isinstance(results, Tensor):
            return results
        wanted = self._num_given if self._keeps and not leaves[-1] else len(results)
        return tuple(
            results[0].new_empty(0) if x is None or i >= wanted else x
            for i, x in enumerate(results)
        )

    def _plan_saving(
        self, leaves: Sequence[str], given: Sequence[str], forgets: Sequence[str]
    ) -> None:
        """Where what is saved lies among what is ``given``, operands and results, and where the
        backward's leaves lie among gradients, saved tensors, other saved values and None."""
        hints, tensors, options = self._backward.leaves, list[str](), list[str]()
        for leaf in leaves[self._num_given :]:
            if leaf not in given and leaf.removesuffix("_dtype") not in given:
                raise TypeError(f"{self.name}: its backward asks for {leaf!r}, none of {given}")
            is_tensor = leaf in given and Tensor in (hints[leaf], *get_args(hints[leaf]))
            if leaf not in forgets:
                (tensors if is_tensor else options).append(leaf)
        names = [x if x in given else x.removesuffix("_dtype") for x in options]
        self._tensors, self._options = (
            _picker([given.index(x) for x in kind]) for kind in (tensors, names)
        )
        self._dtypes = [i for i, x in enumerate(options) if x not in given]
        found = [*leaves[: self._num_given], *tensors, *options]
        self._order = _picker([found.index(x) if x in found else len(found) for x in leaves])

    def _save(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        outputs = (output,) if isinstance(output, Tensor) else output
        given = (*inputs[: len(self._operands)], *outputs)
        # Winners and the like have no gradient: it need not be made of zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self._tensors(given))
        ctx.options = list(self._options(given))
        for i in self._dtypes:
            ctx.options[i] = ctx.options[i].dtype

    def _gradients(
        self, ctx: Any, grads: Sequence[Tensor | None], needs: Sequence[bool], *, registered: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of the operands that have any, None where one is not needed."""
        needs, grads = list(needs[: self._num_learning]), grads[: self._num_given]
        if grads[0] is None and all(x is None for x in grads):
            return [None] * len(needs)
        leaves = self._order((*grads, *ctx.saved_tensors, *ctx.options, None))
        if registered:
            found = iter(self.registered_backward(*leaves, needs))
            return [next(found) if need else None for need in needs]
        gradients = self._differentiate(leaves, needs)
        if all(needs):
            return gradients
        return [x if need else None for x, need in zip(gradients, needs, strict=True)]

    def _differentiate(self, leaves: Sequence[Any], needs: Sequence[bool]) -> Sequence[Any]:
        gradients = self._backward(*self._backward.gather((*leaves, *self._asked(needs))))
        return (gradients,) if isinstance(gradients, Tensor) else gradients


class _Graph(torch.autograd.Function):
    """An operator in eager mode. A ``setup_context`` would have torch bind the arguments by name at
    every call, and autograd looks at each: those without gradients come in one."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Operator, Sequence, tuple, Any], *_: Any) -> Any:
        operator, leaves, arguments, results = call
        if results is None:
            results = operator._function(*arguments)
        ctx.operator = operator
        operator._save(ctx, leaves, results)
        return results if isinstance(results, Tensor) else operator._given(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # The registered backward refuses second derivatives where someone asks for them.
        registered = torch.is_grad_enabled() or needs_operators()
        needs = ctx.needs_input_grad[1:]
        return None, *ctx.operator._gradients(ctx, grads, needs, registered=registered)


class _Function:
    """A function for tensors on any device, and its leaves.

    Attributes:
        run: the function, for any device without ``cuda``.
        leaves: the types of its leaves, by name.
    """

    def __init__(self, function: Callable[..., Any], cuda: Late | None) -> None:
        self.run, self._cuda = function, cuda
        hints = get_type_hints(function)
        self.leaves: dict[str, Any] = {}
        self._kinds: list[Any] = []
        for name in inspect.signature(function).parameters:
            nested = hasattr(hints[name], "_fields")
            self._kinds.append(hints[name] if nested else None)
            self.leaves |= get_type_hints(hints[name]) if nested else {name: hints[name]}
        self._flat = not any(self._kinds)

    def spread(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The leaves of the arguments."""
        if self._flat:
            return arguments
        leaves: list[Any] = []
        for x, kind in zip(arguments, self._kinds):
            if kind is None:
                leaves.append(x)
            else:
                leaves.extend(x)
        return leaves

    def gather(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The arguments of these leaves; the last ones may be missing."""
        if self._flat:
            return leaves
        left = iter(leaves)
        arguments: list[Any] = []
        for kind in self._kinds:
            if kind is None:
                arguments += islice(left, 1)
            else:
                arguments.append(kind(*islice(left, len(kind._fields))))
        return arguments

    def __call__(self, *arguments: Any) -> Any:
        for x in arguments:
            tensor = x[0] if isinstance(x, tuple) else x
            if isinstance(tensor, Tensor):
                break
        function = self.run
        if self._cuda is not None and tensor.is_cuda:
            function = self._cuda()
        if is_elsewhere(tensor):
            with without_autocast(tensor.device), torch.cuda.device_of(tensor):
                return function(*arguments)
        with without_autocast(tensor.device):
            return function(*arguments)


def _tensors_of(hint: Any) -> Any:
    """``Tensor``, or ``tuple[Tensor, ...]`` of as many as are returned."""
    if hint is Tensor:
        return Tensor
    count = len(hint._fields if hasattr(hint, "_fields") else get_args(hint))
    return tuple.__class_getitem__((Tensor,) * count)


def _register(
    name: str, run: Callable, fake: Callable, leaves: dict[str, Any], returned: Any
) -> Any:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(x, kind, annotation=hint) for x, hint in leaves.items()]
    signature = inspect.Signature(parameters, return_annotation=returned)
    run.__signature__ = signature  # type: ignore[attr-defined]
    registered = torch.library.custom_op(name, run, mutates_args=())
    registered.register_fake(fake)
    return registered


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes a sequence to its elements at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    first = places[0] if places else 0
    return itemgetter(slice(first, first + len(places)))


def _needed(gradients: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
    return [x for x, need in zip(gradients, needs, strict=True) if need]


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Results of a registered operator share no memory with each other."""
    seen: set[int] = set()
    for i, x in enumerate(tensors):
        place = x.untyped_storage().data_ptr()
        if place in seen and x.numel():
            tensors[i] = x.clone()
        seen.add(place)
    return tensors
