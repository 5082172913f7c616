"""``sparton card``: what an evaluation found, into a model's card."""

import filecmp
from collections.abc import Sequence
from pathlib import Path

from sparton.cli.commands.flags import command_parser


def main(arguments: Sequence[str]) -> None:
    """Write results into the ``README.md`` of a saved model."""
    parser = command_parser("card", main.__doc__)
    parser.add_argument("model", type=Path, help="folder of a saved model")
    parser.add_argument(
        "--results",
        type=Path,
        help="results.json of an evaluation, or its folder; default: that of the training",
    )
    options = parser.parse_args(arguments)
    if not options.model.is_dir():
        raise FileNotFoundError(
            f"{options.model} is no folder: name that of a saved model, as in runs/latest/model"
        )
    file = options.results or options.model.parent
    if file.is_dir():
        file = file / "results.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file; sparton evaluate model={options.model} writes one, for "
            "--results"
        )

    from sparton.evaluation.results import read_results
    from sparton.hub import add_results

    measured = read_results(file)
    if measured.model and not _is(measured.model, options.model):
        raise ValueError(
            f"{file} has the results of another model, {measured.model}: sparton evaluate "
            f"model={options.model} writes those of this one"
        )
    named = [
        task | {"name": ", ".join([task["name"], *measured.settings])} for task in measured.tasks
    ]
    add_results(options.model, named)
    number = f"{len(named)} task{'s' if len(named) > 1 else ''}"
    print(f"{options.model / 'README.md'}: results of {number}")


def _is(measured: str, model: Path) -> bool:
    """Whether a model may be the one that was measured: the same folder, one with the same weights,
    or one that was moved since or came from the hub."""
    if measured == "bm25":
        return False
    before = Path(measured)
    if not before.is_dir() or before.resolve() == model.resolve():
        return True
    weights = sorted(file.relative_to(before) for file in before.rglob("*.safetensors"))
    own = sorted(file.relative_to(model) for file in model.rglob("*.safetensors"))
    return own == weights and all(
        filecmp.cmp(before / name, model / name, shallow=False) for name in own
    )
