"""The working folder beside the output, which makes an interrupted run go on where it stopped.

It holds the settings, the encoded documents, and the output in parts. The output itself appears
when all parts are there, and the folder goes.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparton.arguments import ArgumentError
from sparton.packing import ranges_of
from sparton.reading import read_json
from sparton.retrieval.progress import progress_bar
from sparton.training.state import changes
from sparton.writing import replacing, writing

PART = 1024
SETTINGS = "arguments.json"
ENDINGS = (".jsonl", ".jsonl.gz")

MinePart = Callable[[int, int], tuple[list[str], Counter[str]]]


def working_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def description_file(output: Path) -> Path:
    """The file that describes the output: beside it, under a name that no pattern for JSON lines
    takes in."""
    name = output.name.removesuffix(".gz").removesuffix(".jsonl")
    return output.with_name(f"{name}.mined.json")


def check_output(output: Path) -> None:
    """Refuse a name that training would not read, or one that is taken.

    Raises:
        ArgumentError: names the output.
    """
    if not output.name.endswith(ENDINGS):
        raise ArgumentError("{output} must end in {}", " or ".join(ENDINGS), output=output)
    if output.exists():
        raise ArgumentError("{output} exists: remove it or name another file", output=output)


def agree(output: Path, settings: Mapping[str, Any]) -> None:
    """Store the settings, or compare them with those of an unfinished run that left some work.

    Raises:
        ArgumentError: names every setting that differs.
    """
    file = working_folder(output) / SETTINGS
    fresh = json.loads(json.dumps(settings))
    if not _begun(file.parent) or not file.exists():
        with replacing(file) as beside:
            beside.write_text(json.dumps(fresh, indent=2) + "\n", encoding="utf-8")
        return
    if different := changes(read_json(file), fresh):
        raise ArgumentError(
            "{} holds an unfinished run with other settings: {}. Run it with its own to finish it, "
            "remove the folder, or name another {output:name}",
            working_folder(output),
            ", ".join(different),
            output=output,
        )


@contextmanager
def kept_if_begun(folder: Path) -> Iterator[None]:
    """A working folder without anything to go on from is removed if the block fails."""
    try:
        yield
    except BaseException:
        if not _begun(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _begun(folder: Path) -> bool:
    """Whether a run has left some work, encoded documents or a part of the output."""
    return any(each.suffix in (".jsonl", ".safetensors") for each in folder.rglob("*"))


def mine_parts(output: Path, examples: int, mine: MinePart, progress: bool) -> Counter[str]:
    """Write the parts that are missing; the counts of all."""
    folder = working_folder(output)
    total: Counter[str] = Counter()
    with progress_bar("examples" if progress else None, examples) as advance:
        for rows in ranges_of(examples, PART):
            part, counted = _part_files(folder, rows.start)
            if not part.exists():
                lines, counts = mine(rows.start, rows.stop)
                with replacing(counted) as fresh:
                    fresh.write_text(json.dumps(counts), encoding="utf-8")
                with replacing(part) as fresh:
                    fresh.write_text("".join(lines), encoding="utf-8", newline="\n")
            total.update(read_json(counted))
            advance(len(rows))
    return total


def assemble(
    output: Path, examples: int, settings: Mapping[str, Any], counts: Mapping[str, int]
) -> None:
    """Join the parts, describe them, and remove the working folder.

    Raises:
        ArgumentError: no example is left to write; the parts, which no other settings would go on
            from, are gone.
        OSError: the disk is full or not writable; the parts stay.
    """
    folder = working_folder(output)
    if not counts["written"]:
        shutil.rmtree(folder, ignore_errors=True)
        raise ArgumentError(
            "no example has enough negatives, {} is not written: raise {depth:name}, relax "
            "{margin:name} or {share:name}, or take {short}",
            output,
            depth=None,
            margin=None,
            share=None,
            short="keep",
        )
    parts = [_part_files(folder, rows.start)[0] for rows in ranges_of(examples, PART)]
    description = {"arguments": dict(settings), "counts": dict(counts)}
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
