"""Where the weights of a training are: all on every rank, or a part of each on every rank.

This module alone knows of the second, ``torch.distributed.fsdp.fully_shard`` (FSDP2; Zhao et al.,
arXiv 2304.11277). Gradients and optimizer states are where their weights are. The step stays what
it is: a layer gathers its weights while it runs, and sums its gradients when its backward pass
ends. What reads weights elsewhere does so within :meth:`Weights.gathered`.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from sparton.models.body import EncoderBody
from sparton.models.encoder import Encoder
from sparton.models.layouts import UniformLayout, layers_of
from sparton.sharded import is_sharded, whole
from sparton.training.distributed import World
from sparton.training.optimization import Optimizer
from sparton.training.precision import Precision
from sparton.training.sharded_state import Keys, load_sharded, save_sharded
from sparton.training.state import load_checkpoint, save_checkpoint


class Weights(Protocol):
    """What the loop asks of the weights that it trains; all ranks ask together."""

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, every rank has all weights, and encodes without the others; nothing learns."""
        ...

    def to_save(self) -> AbstractContextManager[Encoder | None]:
        """An encoder with all weights on the main rank, which nobody else needs to save; None on
        the others."""
        ...

    def save_checkpoint(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        """See ``save_checkpoint`` of ``sparton.training.state``."""
        ...

    def load_checkpoint(
        self, folder: Path, keys: Collection[str], optimizer: Optimizer
    ) -> dict[str, Any] | None:
        """See ``load_checkpoint`` of ``sparton.training.state``."""
        ...


@dataclass(frozen=True)
class WholeWeights:
    """All weights of an encoder on every rank; the main rank alone writes."""

    encoder: Encoder
    world: World

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def to_save(self) -> AbstractContextManager[Encoder | None]:
        return nullcontext(self.encoder if self.world.is_main else None)

    def save_checkpoint(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        if self.world.is_main:
            save_checkpoint(folder, step, state)

    def load_checkpoint(
        self, folder: Path, keys: Collection[str], optimizer: Optimizer
    ) -> dict[str, Any] | None:
        return load_checkpoint(folder, keys)


class ShardedWeights:
    """A part of every weight of an encoder on every rank.

    Each layer of a body is gathered by itself and forgotten after it has run; in bfloat16 where
    autocast would round its matrices to that. What is not in a layer (embeddings, decoder, what a
    head brings along) is gathered for a whole step: heads read all of the decoder.

    One rank has all of each weight. Its checkpoints are those of any other number of ranks.

    Args:
        encoder: with the same weights on all ranks, on any device. It is brought to that of the
            world and sharded in place, before an optimizer sees its parameters.
        world: the ranks, of one machine.
        precision: of the training.

    Raises:
        ValueError: ranks on several machines, fp16 or fp8, compiled layers, or a body whose layers
            run more often on some ranks than on others.
    """

    def __init__(self, encoder: Encoder, world: World, precision: Precision) -> None:
        _check(encoder, world, precision)
        self.encoder, self.world = encoder, world
        self._shell = _without_weights(encoder) if world.is_main else None
        if world.size == 1:
            encoder.to(world.device)
            return
        mesh = init_device_mesh(world.device.type, (world.size,))
        # Autocast would make copies of 16 bits of all layers, and keep them for the backward pass.
        rounded = torch.bfloat16 if precision.name == "bf16" else None
        for part in (*reversed(layers_of(encoder)), encoder):
            inside = part is not encoder
            given = [each for each in part.parameters() if not is_sharded(each)]
            part.to(world.device)
            world.broadcast(part)
            policy = MixedPrecisionPolicy(
                rounded if inside else None, torch.float32, cast_forward_inputs=False
            )
            sharded = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=inside)
            sharded.set_gradient_divide_factor(1.0)  # the objective is of the global batch
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
            if hasattr(sharded, "set_reduce_scatter_unused_params"):  # torch 2.11 has no such thing
                sharded.set_reduce_scatter_unused_params(True)  # a rank may use what others do not
            for parameter in given:  # modules beside those of the encoder may still hold them
                parameter.data = parameter.data.new_empty(0)
        register_fsdp_forward_method(encoder, "encode_both")  # as the step calls it
        # Or a layer that runs before, in an evaluation, would take itself for the root.
        sharded._get_fsdp_state()._lazy_init()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        for part in self._parts():
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in self._parts():
                part.set_reshard_after_forward(part is not self.encoder, recurse=False)
                part.reshard()

    @contextmanager
    def to_save(self) -> Iterator[Encoder | None]:
        shell = self._shell
        for own, empty in _pairs(self.encoder, shell):
            weight = whole(own.detach())
            if empty is not None:
                empty.data = weight.cpu()
        try:
            yield shell
        finally:
            if shell is not None:
                for parameter in shell.parameters():
                    parameter.data = _placeholder(parameter)

    def save_checkpoint(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        save_sharded(folder, step, state, self.world)

    def load_checkpoint(
        self, folder: Path, keys: Collection[str], optimizer: Optimizer
    ) -> dict[str, Any] | None:
        learning = [p for group in optimizer.param_groups for p in group["params"]]
        like: dict[Keys, Tensor] = {
            ("optimizer", "state", row): each for row, each in enumerate(learning)
        }
        for name, value in self.encoder.state_dict().items():
            like |= {(kind, name): value for kind in ("encoder", "averages")}
        return load_sharded(folder, keys, like, self.world)

    def _parts(self) -> Iterator[FSDPModule]:
        """The encoder, and what is gathered apart from it; nothing on one rank."""
        return (part for part in self.encoder.modules() if isinstance(part, FSDPModule))


def place_weights(
    encoder: Encoder, world: World, precision: Precision, *, sharded: bool = False
) -> Weights:
    """Bring an encoder to the device of its rank, in the dtypes of a training and with the weights
    of the main rank.

    Args:
        sharded: whether each rank is to have a part of every weight, or all.

    Raises:
        ValueError: see :class:`ShardedWeights` and :func:`~sparton.models.fp8.multiply_in_fp8`.
    """
    precision.prepare(encoder)
    if sharded:
        return ShardedWeights(encoder, world, precision)
    encoder.to(world.device)
    world.broadcast(encoder)
    return WholeWeights(encoder, world)


def _check(encoder: Encoder, world: World, precision: Precision) -> None:
    if not world.one_machine:
        raise ValueError(
            "sharded weights need the links within a machine, and these ranks are on several: "
            "train on those of one, or unsharded"
        )
    if precision.name == "fp16":
        raise ValueError(
            "precision=fp16 scales gradients, which sharded ones cannot be: take bf16, or train "
            "unsharded"
        )
    if precision.name == "fp8":
        raise ValueError(
            "precision=fp8 rounds whole weights once in a step, and sharded ones are gathered many "
            "times: take bf16, or train unsharded"
        )
    if any(part._compiled_call_impl is not None for part in encoder.modules()):
        raise ValueError(
            "compiled layers would gather their weights within their graphs, and be compiled over "
            "and over: build the backbone with compile=False, or train unsharded"
        )
    for body in encoder.modules():
        if isinstance(body, EncoderBody) and isinstance(body.layout, UniformLayout):
            raise ValueError(
                f"{type(body.model).__name__} runs {body.layout.name}, and ranks with other "
                "lengths would wait for each other for ever: train it unsharded"
            )


def _without_weights(encoder: Encoder) -> Encoder:
    """A copy on the CPU that is all there but for the values of its parameters."""
    held: dict[int, Any] = {
        id(each): nn.Parameter(_placeholder(each), requires_grad=False)
        for each in encoder.parameters()
    }
    return copy.deepcopy(encoder, held).cpu()


def _placeholder(like: Tensor) -> Tensor:
    """A tensor of this shape and dtype that takes no memory."""
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def _pairs(encoder: Encoder, shell: Encoder | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each parameter and buffer of an encoder, and its place in the shell, if there is one."""
    own = [*encoder.parameters(), *encoder.buffers()]
    empty = [*shell.parameters(), *shell.buffers()] if shell is not None else [None] * len(own)
    return zip(own, empty, strict=True)
