"""The working folder beside the output, which makes an interrupted run go on where it stopped.

It holds the arguments, the encoded documents, and the output in parts. The output itself appears
when all parts are there, and the folder goes.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sparton.retrieval.output import replacing, writing
from sparton.retrieval.progress import progress_bar

PART = 1024
ARGUMENTS = "arguments.json"
ENDINGS = (".jsonl", ".jsonl.gz")

MinePart = Callable[[int, int], tuple[list[str], Counter[str]]]


def working_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def description_file(output: Path) -> Path:
    """Beside the output, under a name that no pattern for JSON lines takes in."""
    name = output.name.removesuffix(".gz").removesuffix(".jsonl")
    return output.with_name(f"{name}.mined.json")


def check_output(output: Path) -> None:
    """Raise ValueError for a name that training would not read, or one that is taken."""
    if not output.name.endswith(ENDINGS):
        raise ValueError(f"--output {output} must end in {' or '.join(ENDINGS)}")
    if output.exists():
        raise ValueError(f"--output {output} exists: remove it or name another file")


def lock(output: Path) -> FileLock:
    """Held by the one process that writes ``output``.

    Raises:
        ValueError: another one does.
    """
    folder = working_folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / "lock")
    try:
        held.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"another process is writing {output}: wait for it, or name another --output"
        ) from error
    return held


def agree(output: Path, arguments: Mapping[str, Any]) -> None:
    """Store the arguments, or compare them with those of an unfinished run that left some work.

    Raises:
        ValueError: names every argument that differs.
    """
    file = working_folder(output) / ARGUMENTS
    fresh = json.loads(json.dumps(arguments))
    begun = any(each.suffix in (".jsonl", ".npz") for each in file.parent.iterdir())
    if not begun or not file.exists():
        with replacing(file) as beside:
            beside.write_text(json.dumps(fresh, indent=2) + "\n", encoding="utf-8")
        return
    old = json.loads(file.read_text(encoding="utf-8"))
    different = [
        f"{name}={fresh.get(name)} (was {old.get(name)})"
        for name in dict.fromkeys([*fresh, *old])
        if fresh.get(name) != old.get(name)
    ]
    if different:
        raise ValueError(
            f"{working_folder(output)} holds an unfinished run with other arguments: "
            f"{', '.join(different)}. Run it with its own arguments to finish it, remove the "
            "folder, or name another --output"
        )


def mine_parts(output: Path, examples: int, mine: MinePart) -> Counter[str]:
    """Write the parts that are missing; the counts of all."""
    folder = working_folder(output)
    total: Counter[str] = Counter()
    with progress_bar("examples", examples) as advance:
        for start in range(0, examples, PART):
            stop = min(start + PART, examples)
            part, counted = _part_files(folder, start)
            if not part.exists():
                lines, counts = mine(start, stop)
                with replacing(counted) as fresh:
                    fresh.write_text(json.dumps(counts), encoding="utf-8")
                with replacing(part) as fresh:
                    fresh.write_text("".join(lines), encoding="utf-8", newline="\n")
            total.update(json.loads(counted.read_text(encoding="utf-8")))
            advance(stop - start)
    return total


def assemble(
    output: Path, examples: int, arguments: Mapping[str, Any], counts: Mapping[str, int]
) -> None:
    """Join the parts, describe them, and remove the working folder.

    Raises:
        ValueError: no example is left to write.
        OSError: the disk is full or not writable; the parts stay.
    """
    if not counts["written"]:
        raise ValueError(
            f"no example has enough negatives, {output} is not written: widen the window (--depth),"
            f" relax --margin or --share, or --short keep; then remove {working_folder(output)}"
        )
    folder = working_folder(output)
    parts = [_part_files(folder, start)[0] for start in range(0, examples, PART)]
    description = {"arguments": dict(arguments), "counts": dict(counts)}
    with replacing(description_file(output)) as fresh:
        fresh.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    with (
        replacing(output) as fresh,
        writing(fresh, compress=output.suffix == ".gz") as sink,
    ):
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, sink)
    shutil.rmtree(folder, ignore_errors=True)


def _part_files(folder: Path, start: int) -> tuple[Path, Path]:
    """The part that begins with example ``start``, and its counts, which are written first."""
    name = f"part-{start // PART:06d}"
    return folder / f"{name}.jsonl", folder / f"{name}.json"
