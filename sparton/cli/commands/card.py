"""``sparton card``: what an evaluation found, into a model's card."""

import argparse
import json
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
    try:
        tasks = json.loads(file.read_text(encoding="utf-8"))["tasks"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no results of an evaluation ({error!r})") from error

    from sparton.hub import add_results

    add_results(options.model, tasks)
    print(f"{options.model / 'README.md'}: results of {len(tasks)} tasks")
