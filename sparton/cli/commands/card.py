"""``sparton card``: what an evaluation found, into a model's card."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    """Write results into the ``README.md`` of a saved model."""
    parser = argparse.ArgumentParser(prog="sparton card", description=main.__doc__)
    parser.add_argument("model", type=Path, help="folder of a saved model")
    parser.add_argument(
        "--results",
        type=Path,
        help="results.json of an evaluation, or its folder; default: that of the training",
    )
    options = parser.parse_args(arguments)
    file = options.results or options.model.parent
    if file.is_dir():
        file = file / "results.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file; sparton evaluate model={options.model} writes one, for "
            "--results"
        )

    from sparton.evaluation.results import read_tasks
    from sparton.hub import add_results

    tasks = read_tasks(file)
    add_results(options.model, tasks)
    print(f"{options.model / 'README.md'}: results of {len(tasks)} tasks")
