"""Average the weights of several models that began with the same pretrained weights.

    sparton average runs/a/seed-0/model runs/b/seed-0/model --output MODEL
    sparton evaluate model=MODEL

The mean is a model of the same architecture and cost. Models of different architectures are
refused, by the name of what differs.
"""

from collections.abc import Sequence
from pathlib import Path

from sparton.cli.commands.flags import command_parser, flags_named

INTERRUPTED = "nothing was written, the same command starts again"


def main(arguments: Sequence[str]) -> None:
    """``sparton average``."""
    parser = command_parser("average", __doc__)
    parser.add_argument("models", nargs="+", help="two folders or hub names, or more")
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")
    parsed = parser.parse_args(arguments)

    from sparton.evaluation import check_model

    for model in parsed.models:
        check_model(model)

    # Only now, as it takes seconds: what is wrong so far has been said.
    from sparton.pipelines import average_models

    with flags_named(models="MODEL"):
        average_models(parsed.models, parsed.output)
    print(f"{parsed.output}: the mean of {len(parsed.models)} models")
