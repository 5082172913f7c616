"""The projection of a late-interaction model: the Dense modules of its folder as one linear layer.

D hidden width, E width of a token's vector.
"""

import torch
from torch import Tensor

from sparton.models.folders.files import WEIGHTS, class_name, read_module, read_weights
from sparton.models.repository import Source, join


def read_projection(source: Source, folders: list[str]) -> dict[str, Tensor]:
    """The state of a linear layer, fp32, of the Dense modules in some folders: linear maps in a row
    are one linear map.

    Raises:
        ValueError: they have activations, do not fit to each other, or are damaged.
        FileNotFoundError: a file is missing.
    """
    weight, bias = _read_linear(source, folders[0])
    for folder in folders[1:]:
        matrix, shift = _read_linear(source, folder)
        if matrix.shape[1] != len(weight):
            raise ValueError(
                f"{join(source.name, folder, WEIGHTS)} maps {matrix.shape[1]} numbers, and the "
                f"Dense module before it gives {len(weight)}: copy or download the folder again"
            )
        weight = matrix @ weight
        if bias is not None:
            shift = matrix @ bias + (0 if shift is None else shift)
        bias = shift
    whole = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return {key: value.float() for key, value in whole.items()}


def _read_linear(source: Source, folder: str) -> tuple[Tensor, Tensor | None]:
    """Matrix ``[out, in]`` and bias ``[out]`` of a Dense module without activation, fp64; a
    residual connection is part of the matrix."""
    config = read_module(source, join(folder, "config.json"))
    # Where nothing is said, sentence-transformers has its default.
    activation = class_name(config.get("activation_function", str, "Tanh"))
    if activation != "Identity":
        raise ValueError(
            f"{source}/{folder} has activation={activation}; only a projection without activation "
            'is supported, whose config.json has "activation_function": '
            '"torch.nn.modules.linear.Identity"'
        )
    missing = "with the weights of the projection; save the model again with a current library"
    found = read_weights(source, folder, missing)
    file = join(source.name, folder, WEIGHTS)
    if "linear.weight" not in found:
        raise ValueError(f"{file} holds {', '.join(found)} instead of linear.weight")
    weight, bias = found["linear.weight"].double(), found.get("linear.bias")
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(
            f"{file} holds a linear.weight of the shape {[*weight.shape]}, and a projection is a "
            "matrix: copy or download the folder again"
        )
    described = config.get("bias", bool, bias is not None)
    expected, actual = [len(weight)] if described else None, None if bias is None else [*bias.shape]
    if actual != expected:
        raise ValueError(
            f"{file} holds a linear.bias of the shape {actual}, but bias={described} in "
            f"{folder}/config.json and the {len(weight)} rows of linear.weight ask for {expected}: "
            "copy or download the folder again"
        )
    if config.get("use_residual", bool, False):
        residual = found.get("residual.weight", torch.eye(len(weight)))
        if residual.shape != weight.shape:
            raise ValueError(
                f"{file} has a residual connection of the shape {[*residual.shape]} beside a "
                f"linear.weight of the shape {[*weight.shape]}: copy or download the folder again"
            )
        weight = weight + residual
    return weight, None if bias is None else bias.double()
