"""Damaged checkpoints, and how they are told of."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from sparton.arguments import ArgumentError
from sparton.models.repository import Source, join


@contextmanager
def readable(source: Source, subfolder: str, part: str) -> Iterator[None]:
    """Tell in one sentence of files that transformers or tokenizers cannot read: they raise
    errors of any kind.

    Args:
        source, subfolder: where they are.
        part: of the model, for the sentence.

    Raises:
        OSError: for an OSError, such as that of a file that is missing.
        ValueError: for any other error but an ArgumentError, which is let pass.
    """
    place = join(source.name, subfolder)
    try:
        yield
    except ArgumentError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "ignore_mismatched_sizes" in str(error):
            told = "its weights have other shapes than its config.json describes"
        elif "trust_remote_code" in str(error):
            told = "it needs code that its folder brings along, which is never run here"
        else:
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            f"{place}: the {part} cannot be read ({told[:300]}): copy or download it again"
        ) from error


def check_finite(tensors: Iterable[tuple[str, Tensor]], place: str) -> None:
    """Refuse weights of which one is NaN, or infinite in fp32.

    Raises:
        ValueError: names the place and the tensor.
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        if not torch.stack(tensor.detach().float().aminmax()).isfinite().all():
            raise ValueError(
                f"{place}: the weights {name} are not all finite numbers in fp32: copy or download "
                "the model again; if it was saved so, its training diverged"
            )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        ValueError: the file is damaged, or a value is not finite in fp32.
    """
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): copy or download it again") from error
    check_finite(tensors.items(), str(path))
    return tensors


def check_weights(folder: Path) -> None:
    """Open every safetensors file of a local folder; the library's own error names no file."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{path} is damaged ({error}; {path.stat().st_size} bytes): "
                "copy or download it again"
            ) from error


def fault_of(folder: Path) -> str | None:
    """Whether the folder of a model is gone, or a file of weights in it damaged, in words; None for
    neither."""
    if not folder.exists():
        return "is gone"
    try:
        for each in {file.parent for file in folder.rglob("*.safetensors")}:
            check_weights(each)
    except ValueError:
        return "is damaged"
    return None
