"""Search the fastest configuration of the SPLADE head's kernel for this GPU; a minute per length.

    python scripts/tune_head.py --hidden-size 768 --vocabulary 30522
    SPARTON_TUNED=1 python train.py ...

Every configuration's result is verified before it is timed, and wrong ones are named. Winners go to
the user's cache, by hidden size, vocabulary and mean length of a sequence; a run uses them if its
environment has SPARTON_TUNED=1.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from sparton.kernels.segment_max.tuning_cache import cache_file
from sparton.kernels.splade_head.tuning import Trial, tune_splade_head

DTYPES = ("bfloat16", "float16", "float32")


def show(trials: list[Trial], title: str, console: Console) -> None:
    table = Table("configuration", "ms", "refused because", title=title)
    for config, fault, milliseconds in trials:
        table.add_row(str(config), "" if fault else f"{milliseconds:.3f}", fault or "")
    console.print(table)


def positive(text: str) -> int:
    """The type of a number that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden-size", type=positive, required=True)
    parser.add_argument("--vocabulary", type=positive, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=[32, 128, 256, 512],
        help="mean tokens of a sequence; each gets a winner of its own",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=positive, default=2**16, help="of the batch that is measured"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    console = Console(width=180)
    for length in arguments.lengths:
        trials = tune_splade_head(
            arguments.hidden_size,
            arguments.vocabulary,
            length,
            dtype=getattr(torch, arguments.dtype),
            tokens=arguments.tokens,
        )
        show(trials, f"mean length {length}, {torch.cuda.get_device_name()}", console)
    console.print(f"Winners are in {cache_file()}; SPARTON_TUNED=1 uses them.")


if __name__ == "__main__":
    main()
