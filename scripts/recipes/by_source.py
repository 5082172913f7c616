"""Sort mined examples of scripts/recipes/pool.py into a file for each of its sources.

python scripts/recipes/by_source.py scored.jsonl --output scored
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

from sparton.writing import replacing_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mined", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    arguments = parser.parse_args()
    with (
        arguments.mined.open(encoding="utf-8") as lines,
        replacing_folder(arguments.output) as fresh,
        ExitStack() as files,
    ):
        by_source = {}
        for line in lines:
            source = json.loads(line)["query_id"].partition("-")[0]
            if source not in by_source:
                file = (fresh / f"{source}.jsonl").open("w", encoding="utf-8")
                by_source[source] = files.enter_context(file)
            by_source[source].write(line)


if __name__ == "__main__":
    main()
