"""Search the fastest configurations of the kernels for this GPU; minutes for each length.

    sparton tune head --hidden-size 768 --vocabulary 30522
    sparton tune maxsim --width 128 --query-length 32 --lengths 64 256
    SPARTON_TUNED=1 sparton train ...

Forward and backward passes are searched. Every configuration's result is verified before it is
timed, and wrong ones are named. Winners go to the user's cache, by GPU and sizes; a process uses
them if its environment has SPARTON_TUNED=1.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparton.cli.commands.flags import command_parser

if TYPE_CHECKING:
    from rich.console import Console

    from sparton.kernels.tuning import Trial

INTERRUPTED = "what was found so far is kept"
DTYPES = ("bfloat16", "float16", "float32")


def main(arguments: Sequence[str]) -> None:
    """``sparton tune``."""
    parser = command_parser("tune", __doc__)
    kinds = parser.add_subparsers(dest="kernels", required=True, metavar="head|maxsim")
    head = kinds.add_parser("head", help="the SPLADE head")
    head.add_argument("--hidden-size", type=_positive, required=True, help="of the model")
    head.add_argument("--vocabulary", type=_positive, required=True, help="terms")
    maxsim = kinds.add_parser("maxsim", help="late interaction")
    maxsim.add_argument(
        "--width", type=_positive, default=128, help="units of an embedding; default: 128"
    )
    maxsim.add_argument(
        "--query-length", type=_positive, default=32, help="tokens of a query; default: 32"
    )
    for kind, what in ((head, "sequence"), (maxsim, "document")):
        kind.add_argument(
            "--lengths", type=_positive, nargs="+", default=[32, 128, 256, 512],
            help=f"mean tokens of a {what}; each gets winners of its own; default: 32 128 256 512",
        )  # fmt: skip
        kind.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
        kind.add_argument(
            "--tokens",
            type=_positive,
            default=2**16,
            help="of the batch that is measured; default: 65536",
        )
    parsed = parser.parse_args(arguments)

    import torch
    from rich.console import Console

    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device, whose kernels could be tuned")
    from sparton.kernels.tuned import cache_file

    console, gpu = Console(width=180), torch.cuda.get_device_name()
    for length in parsed.lengths:
        for kernel, trials in _search(parsed, length).items():
            _show(trials, f"{kernel}, mean length {length}, {gpu}", console)
    console.print(f"Winners are in {cache_file()}; SPARTON_TUNED=1 uses them.", soft_wrap=True)


def _search(parsed: argparse.Namespace, length: int) -> "Mapping[str, list[Trial]]":
    import torch

    from sparton import ops

    options: dict[str, Any] = {
        "dtype": getattr(torch, parsed.dtype),
        "tokens": parsed.tokens,
    }
    if parsed.kernels == "head":
        return ops.tune_splade_head(parsed.hidden_size, parsed.vocabulary, length, **options)
    return ops.tune_maxsim(parsed.width, parsed.query_length, length, **options)


def _show(trials: "Sequence[Trial]", title: str, console: "Console") -> None:
    from rich.table import Table

    table = Table("configuration", "ms", "refused because", title=title)
    for config, fault, milliseconds in trials:
        table.add_row(str(config), "" if fault else f"{milliseconds:.3f}", fault or "")
    console.print(table)


def _positive(text: str) -> int:
    """The type of a number that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text}")
    return number
