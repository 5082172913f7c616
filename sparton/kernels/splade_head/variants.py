"""The variants of the SPLADE head, by the names of sentence-transformers' SpladePooling."""

from typing import Literal, get_args

from torch import Tensor

Pooling = Literal["max", "sum"]
Activation = Literal["relu", "log1p_relu"]


def check_variant(
    pooling: str, activation: str, fp8: bool = False, token_topk: int | None = None
) -> None:
    """Raise ValueError for a name that does not exist, listing those that do, for variants that the
    fused head does not serve together, and for a ``token_topk`` that is no number of terms."""
    for option, value, names in (
        ("pooling", pooling, get_args(Pooling)),
        ("activation", activation, get_args(Activation)),
    ):
        if value not in names:
            raise ValueError(f"{option} must be one of {', '.join(names)}, got {value!r}")
    if fp8 and pooling != "max":
        raise ValueError(f"fp8 serves max pooling alone, got pooling={pooling!r}: set fp8=False")
    check_token_topk(token_topk)
    if token_topk is not None and (fp8 or pooling != "max"):
        raise ValueError(
            f"the fused head has token_topk={token_topk} for max pooling without FP8 alone, got "
            f"pooling={pooling!r} and fp8={fp8}: leave one of them out, or take another head, such "
            "as TiledHead"
        )


def check_token_topk(token_topk: int | None) -> None:
    """Raise ValueError unless it is None or a whole number from 1 on."""
    whole = hasattr(token_topk, "__index__") and not isinstance(token_topk, bool)
    if token_topk is not None and not (whole and token_topk >= 1):
        raise ValueError(
            f"token_topk must be a whole number of terms from 1 on, or None for all, got "
            f"{token_topk!r}"
        )


def activate(logits: Tensor, activation: str) -> Tensor:
    """``log1p(relu(x))``, or with "log1p_relu" ``log1p(log1p(relu(x)))``."""
    values = logits.relu().log1p()
    return values.log1p() if activation == "log1p_relu" else values
