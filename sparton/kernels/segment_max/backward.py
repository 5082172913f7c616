"""Backward from (reps, argmax) alone; the same bits every time.

N sequences, T packed tokens, D hidden, V rows of the weight.

Only active entries, those with ``reps > 0``, carry a gradient ``g = grad * exp(-reps)``, or with a
second log1p ``g = grad * exp(-(reps + expm1(reps)))``. Without an activation all entries that have
a winner are active and ``g = grad``. Each entry moves two rows:
``g * hidden[argmax]`` to ``dweight[v]`` and ``g * weight[v]`` to ``dhidden[argmax]``. Slab by slab,
entries are listed by destination in a fixed order (see ordering.py); the program that owns a
destination row then adds them up in fp32 and stores once, in the dtype of the operand. Work follows
the number of active entries, and nothing waits for the host. Where all entries are active, the
owner of a row of the weight walks down the sequences and needs no list; then one launch sums both
gradients, unless the lists lie in the memory of one.
"""

import torch
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import run_steps
from sparton.kernels.segment_max.backward_plan import (
    DEFAULT_CONFIG,
    BackwardConfig,
    Sizes,
    plan_backward,
)
from sparton.kernels.segment_max.forward import kernel_name
from sparton.kernels.segment_max.operands import num_rows
from sparton.kernels.tuned import regime_of, tuned, tuned_configs


@on_its_device
def segment_max_backward(
    grad: Tensor,
    reps: Tensor | None,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    *,
    bias_dtype: torch.dtype | None,
    need_hidden: bool = True,
    need_weight: bool = True,
    activation: str = "relu",
    summed: int = 1,
    columns: Tensor | None = None,
    longest: int | None = None,
    config: BackwardConfig | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``sum(grad * reps)``.

    Args:
        grad: upstream gradient ``[N, V // summed]``, any strides; with ``columns`` ``[N, Q]``.
        reps, argmax: what a forward without sums returns, ``[N, V]``. Without an activation reps
            are not read and may be None.
        hidden: ``[T, D]``.
        weight: ``[V, D]``.
        cu_seqlens: int32 ``[N + 1]``.
        bias_dtype: dtype of the wanted bias gradient, None for no such gradient.
        need_hidden, need_weight: whether these gradients are wanted.
        activation: of the forward.
        summed: so many neighbouring rows share a column of ``grad``, as where a forward summed
            them; its scores ``[V // summed, N]`` lie the other way round.
        columns: int32 ``[V]``, the column of ``grad`` that holds a row's upstream gradient, where
            others than ``summed`` neighbours share one; below Q, which is not checked.
        longest: most tokens of a sequence where that is known, to cut the work more closely. The
            gradients are right whatever it says.
        config: how the work is cut, by default as the winner of a search or DEFAULT_CONFIG says.
            The order of summation, hence the last bits, depend on it, but not on its ``workspace``.

    Returns:
        dhidden ``[T, D]``, dweight ``[V, D]``, dbias ``[V]``, each None if not wanted. Sums run in
        fp32 in a fixed order, whatever the strides of ``grad``; the results are in the dtypes of
        the operands.

    Raises:
        ValueError: shapes that do not belong together.
    """
    N, V = argmax.shape[0], weight.shape[0]
    width = V // max(summed, 1) if columns is None else grad.shape[-1]
    if (
        summed < 1
        or V % summed
        or argmax.shape != (N, V)
        or grad.shape != (N, width)
        or (reps is not None and reps.shape != (N, V))
    ):
        raise ValueError(
            f"grad, reps and argmax must all be [N, V] with V = {V}, got {tuple(grad.shape)}, "
            f"{None if reps is None else tuple(reps.shape)}, {tuple(argmax.shape)}; grad is "
            f"narrower only with columns= or with summed= (here {summed}), a divisor of V"
        )
    if columns is not None and (columns.shape != (V,) or columns.dtype != torch.int32):
        raise ValueError(
            f"columns must be int32 [V] = [{V}], got {columns.dtype} {tuple(columns.shape)}"
        )
    if reps is None and activation != "none":
        raise ValueError(f"activation={activation!r} needs reps; only 'none' does without")
    reps, columns = (None if x is None else x.contiguous() for x in (reps, columns))
    operands = (x.contiguous() for x in (argmax, hidden, weight, cu_seqlens))
    return backward_of_checked(
        grad, reps, *operands, bias_dtype=bias_dtype, need_hidden=need_hidden,
        need_weight=need_weight, activation=activation, summed=summed, columns=columns,
        longest=longest, config=config,
    )  # fmt: skip


def backward_of_checked(
    grad: Tensor,
    reps: Tensor | None,
    argmax: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    *,
    bias_dtype: torch.dtype | None = None,
    need_hidden: bool,
    need_weight: bool,
    activation: str,
    summed: int = 1,
    columns: Tensor | None = None,
    longest: int | None = None,
    config: BackwardConfig | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """:func:`segment_max_backward` of operands that are known to belong together, to be contiguous
    but for ``grad``, and to lie on the current device. The rows of hidden and weight may lie along
    several axes, as those of their gradients do then."""
    (N, V), T, D = argmax.shape, num_rows(hidden), hidden.shape[-1]
    empty = not (N and V and T)
    allocate = torch.zeros_like if empty else torch.empty_like
    dhidden = allocate(hidden) if need_hidden else None
    dweight = allocate(weight) if need_weight else None
    dbias = None
    if bias_dtype is not None:
        dbias = torch.empty(V, dtype=bias_dtype, device=weight.device)
    if empty:
        return dhidden, dweight, None if dbias is None else dbias.zero_()
    if config is None and tuned_configs():
        name = f"{kernel_name(activation)}_backward"
        regime = regime_of(name, hidden.device, hidden.dtype, D, V, T / N)
        config = tuned((BackwardConfig,), regime)
    config = config or DEFAULT_CONFIG
    sizes = Sizes(
        N, V, T, D, (hidden.element_size(), weight.element_size()), summed, grad.stride(),
        activation, longest, config, need_hidden, need_weight, dbias is not None,
    )  # fmt: skip
    plan = plan_backward(sizes)
    memory = argmax.new_empty(plan.memory, dtype=torch.int32) if plan.memory else dweight
    tensors: dict[str, Tensor | None] = {
        "grad": grad, "columns": columns, "reps": reps, "argmax": argmax, "hidden": hidden,
        "weight": weight, "cu": cu_seqlens, "dhidden": dhidden, "dweight": dweight, "dbias": dbias,
        "memory": memory,
    }  # fmt: skip
    run_steps(plan.by_token, tensors)
    if plan.by_row:
        # The lists by token are gone before there are others.
        memory = tensors["memory"] = None
        tensors["entries"] = tensors["counts"] = None
        if plan.rows:
            tensors["entries"] = argmax.new_empty((plan.rows, N), dtype=torch.int64)
            tensors["counts"] = argmax.new_empty(plan.rows, dtype=torch.int32)
        run_steps(plan.by_row, tensors)
    return dhidden, dweight, dbias
