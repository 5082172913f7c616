"""What makes models good on collections that nobody tuned for: train with one ingredient after the
other, and measure every model on four test sets, two of which belong to no training data.

    python scripts/zero_shot.py --data data                  # everything, then results/<device>/
    python scripts/zero_shot.py --list
    python scripts/zero_shot.py --only 'splade-best*' --jobs 4 --gpus 0,1 --stop-after 480
    python scripts/zero_shot.py --only splade-base --output trial --results trial -- steps=20

Each step is one command of this repository, and those that are done are left out, so that a stopped
study goes on where it was; what was done with other words is refused. A step that is asked for
brings along what it builds on. What follows ``--`` goes to every training: that makes a trial, as
--adapt, --pool and --negatives do, whose figures do not belong in results/.
scripts/recipes/ingredients.py has the recipes. Every kind of model on one recipe,
results/*/in_domain_models.jsonl, is part of this study (``--only 'kinds-*'``).

Pairs of Debian's packages lie in DATA/debian: scripts/debian_pairs.py makes them.
"""

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

import record_runs
from benchmarks.records import folder_of
from recipes.kinds import kinds
from recipes.pool import JUDGED
from recipes.steps import ROOT, Failed, Runner, Step, chosen, places
from recipes.zero_shot import TARGETS, zero_shot

SECONDS = "seconds.txt"  # of a step, in the folder of its results


def main() -> None:
    arguments = parse_arguments()
    console = Console(highlight=False)
    listed = [*zero_shot(arguments), *kinds(arguments)]
    names = arguments.only or [step.name for step in listed]
    try:
        steps = chosen(listed, names)
    except ValueError as error:
        sys.exit(f"zero_shot.py: {error}")
    if arguments.list:
        for step in steps:
            done = f"done {step.otherwise}".strip()
            state = done if step.is_done else f"after {', '.join(step.needs) or 'nothing'}"
            console.print(f"{step.name}: {state}", soft_wrap=True, markup=False)
        return
    for step in chosen(listed, names, built_on=True):
        if step.otherwise:
            sys.exit(
                f"zero_shot.py: {step.done} was made otherwise than {step.name} is now, "
                f"{step.otherwise}: remove it, or name another --output"
            )

    pooled = any(step.name == "pool" and not step.is_done for step in steps)
    if pooled and not (arguments.data / "debian").is_dir():
        sys.exit(f"zero_shot.py: --data {arguments.data} has no debian: see docs/data_sets.md")

    def noted(step: Step, seconds: float | None) -> None:
        note(step, seconds, arguments.results)

    where = places(arguments.jobs, arguments.gpus)
    logs = arguments.output / "logs"
    # Who ends this process wants its steps ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("zero_shot.py: terminated"))
    try:
        Runner(steps, where, logs, noted, arguments.stop_after, console).run()
    except Failed as failed:
        sys.exit(f"zero_shot.py: {failed} failed; the same command goes on from there")


def note(step: Step, seconds: float | None, results: Path) -> None:
    """Put a run's figures among the published ones, with the seconds of the whole step."""
    folder = step.done.parent
    file = folder / SECONDS
    if seconds is not None:
        file.write_text(f"{seconds:.1f}\n")
    record = record_runs.describe_run(folder)
    record["label"] = step.label
    if file.exists():
        record["seconds"] = float(file.read_text())
    device = folder_of(record["environment"]["hardware"].get("gpu", "cpu"))
    record_runs.append(results / device / f"{step.study}.jsonl", record)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the five sets")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/zero_shot")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--jobs", type=int, default=1, help="steps at a time")
    parser.add_argument("--gpus", type=lambda words: words.split(","), default=[], metavar="0,1")
    parser.add_argument("--seeds", type=int, default=3, help="of the chosen recipes")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="start nothing then")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="names, or patterns as *-best")
    parser.add_argument("--list", action="store_true", help="show the steps, do nothing")
    parser.add_argument(
        "--adapt", default=["--steps", "1000"], type=str.split, metavar="'--steps 100'",
        help="for every sparton adapt",
    )  # fmt: skip
    parser.add_argument("--negatives", type=int, default=3, help="of a query, in the kinds' study")
    parser.add_argument(
        "--pool", default=[], type=str.split, metavar="'--limit 100'", help="for recipes/pool.py"
    )
    parser.add_argument("overrides", nargs="*", default=[], help="of every training")
    arguments = parser.parse_args()
    for name in ("data", "output", "results"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    for folder in (*JUDGED.values(), *TARGETS):
        if not (arguments.data / folder).is_dir():
            parser.error(f"--data {arguments.data} has no {folder}: see docs/data_sets.md")
    if min(arguments.jobs, arguments.seeds) < 1:
        parser.error("--jobs and --seeds must be 1 or more")
    changed = [
        name
        for name in ("overrides", "adapt", "pool", "negatives")
        if getattr(arguments, name) != parser.get_default(name)
    ]
    if changed and arguments.results == parser.get_default("results") and not arguments.list:
        parser.error(
            f"figures of a trial, whose {' and '.join(changed)} are not the study's, do not belong "
            "in results/: name a folder with --results"
        )
    return arguments


if __name__ == "__main__":
    main()
