"""The variants of the SPLADE head, by the names of sentence-transformers' SpladePooling."""

from typing import Literal, get_args

from torch import Tensor

Pooling = Literal["max", "sum"]
Activation = Literal["relu", "log1p_relu"]


def check_variant(pooling: str, activation: str, fp8: bool = False) -> None:
    """Raise ValueError for a name that does not exist, listing those that do, and for variants that
    do not go together."""
    for option, value, names in (
        ("pooling", pooling, get_args(Pooling)),
        ("activation", activation, get_args(Activation)),
    ):
        if value not in names:
            raise ValueError(f"{option} must be one of {', '.join(names)}, got {value!r}")
    if fp8 and pooling != "max":
        raise ValueError(f"fp8 serves max pooling alone, got pooling={pooling!r}: set fp8=False")


def activate(logits: Tensor, activation: str) -> Tensor:
    """``log1p(relu(x))``, or with "log1p_relu" ``log1p(log1p(relu(x)))``."""
    values = logits.relu().log1p()
    return values.log1p() if activation == "log1p_relu" else values
