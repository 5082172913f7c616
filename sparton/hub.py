"""Cards of trained models, and models on the Hugging Face hub."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sparton.arguments import ArgumentError
from sparton.models.folders.card import RESULTS, RESULTS_END
from sparton.models.origin import CARD, Origin, read_origin

_LOADS = re.compile(r'((?:sparton\.load|Encoder|SentenceTransformer)\(")[^"]*("\))')


def add_results(folder: str | Path, tasks: Sequence[Mapping[str, Any]]) -> None:
    """Write what an evaluation found into a model's card: a table, and the hub's ``model-index``.

    Args:
        folder: of a saved model.
        tasks: as ``results.json`` of an evaluation lists them, each with its ``name`` and
            ``metrics``, and perhaps its ``speed`` and ``exact_recall``.

    Raises:
        FileNotFoundError: the folder has no card.
        ValueError: the card lacks the place for results, or there are no tasks.
    """
    from huggingface_hub import EvalResult

    card = _read_card(folder)
    if not tasks:
        raise ValueError(f"there are no results to add to {Path(folder) / CARD}")
    card.data.model_name = card.data.model_name or Path(folder).name
    card.data.eval_results = [
        EvalResult(
            task_type="text-retrieval",
            dataset_name=task["name"],
            dataset_type=task["name"],
            metric_type=metric.replace("@", "_at_"),
            metric_value=round(value, 5),
        )
        for task in tasks
        for metric, value in task["metrics"].items()
    ]
    body = card.text
    start, end = body.find(RESULTS), body.find(RESULTS_END)
    if not 0 <= start < end:
        raise ValueError(
            f"{Path(folder) / CARD} has no place for results: put {RESULTS} and {RESULTS_END} "
            "where they shall stand, on lines of their own"
        )
    card.text = f"{body[:start]}{RESULTS}\n{_table(tasks)}{body[end:]}"
    card.save(Path(folder) / CARD)


def push(
    folder: str | Path,
    repository: str,
    *,
    license: str | None = None,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload of a model trained with sparton",
) -> str:
    """Upload a saved model to the Hugging Face hub; the repository is made if it is not there.

    Args:
        folder: of a saved model.
        repository: "user/name".
        license: under which the model is published; None for the one that its card names.
        private: make the repository private, if it is made.
        token: of the hub; None for the one of ``hf auth login``.
        message: of the commit.

    Returns:
        the address of the commit.

    Raises:
        FileNotFoundError: the folder has no card.
        ValueError: no licence is known, or the terms of the model that training began with forbid
            commercial use and the licence does not say so.
    """
    from huggingface_hub import HfApi

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"repository={repository!r}: must be a user or an organisation and a name")
    card = _read_card(folder)
    chosen = license or card.data.license
    check_license(chosen, base_model=_first(card.data.base_model))
    card.data.license = chosen
    card.data.model_name = repository.partition("/")[2]
    card.text = _LOADS.sub(rf"\g<1>{repository}\g<2>", card.text)
    api = HfApi(token=token)
    api.create_repo(repository, private=private, exist_ok=True)
    # The card last: until it stands there, nobody finds a model without its terms.
    api.upload_folder(
        repo_id=repository, folder_path=folder, ignore_patterns=[CARD], commit_message=message
    )
    return str(
        api.upload_file(
            path_or_fileobj=str(card).encode(),
            path_in_repo=CARD,
            repo_id=repository,
            commit_message=message,
        )
    )


def check_license(license: str | None, *, base_model: str | None) -> None:
    """Refuse to publish under terms that are not known, or that those of the base forbid.

    Raises:
        ValueError: names the licence, the base and the remedy.
        OSError: the hub has no such base.
    """
    if license is None:
        raise ArgumentError(
            "{} names no licence, and none is known of the weights that training began with: give "
            "{license:name}, such as apache-2.0",
            CARD,
            license=None,
        )
    if base_model is None or Origin(license=license).is_non_commercial:
        return
    base = read_origin(base_model)
    if base.is_non_commercial:
        raise ValueError(
            f"{base_model}, from which this model was trained, stands under {base.license}, which "
            f"forbids commercial use and is inherited; license={license} allows it: pass "
            f"license={base.license}"
        )


def _read_card(folder: str | Path) -> Any:
    from huggingface_hub import ModelCard

    path = Path(folder) / CARD
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CARD}: it is no model that sparton has saved")
    return ModelCard.load(path, ignore_metadata_errors=True)


def _first(base: str | list[str] | None) -> str | None:
    return base[0] if isinstance(base, list) else base


def _table(tasks: Sequence[Mapping[str, Any]]) -> str:
    """A row per task: its metrics and, where they were measured, what approximate search loses,
    speed and size."""
    rows = [_cells(task) for task in tasks]
    heads = [*dict.fromkeys(chain.from_iterable(rows))]
    lines = [["task", *heads], ["---", *("---:" for _ in heads)]]
    for task, row in zip(tasks, rows, strict=True):
        lines.append([task["name"], *(row.get(head, "") for head in heads)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(task: Mapping[str, Any]) -> dict[str, str]:
    """What was measured of a task, by its heading."""
    cells = {metric: f"{value:.4f}" for metric, value in task["metrics"].items()}
    found = task.get("exact_recall", {}).get("at_10")
    if found is not None:
        cells["of exact@10"] = f"{found:.4f}"
    if "speed" in task:
        speed, latency = task["speed"], task["speed"]["latency"]
        rate = speed.get("documents_per_second")
        cells["documents/s"] = "" if rate is None else f"{rate:,.0f}"
        shown = (f"{latency[each]:,.1f}" for each in ("p50", "p95", "p99"))
        cells["ms a query, p50 / p95 / p99"] = " / ".join(shown)
        cells["index MB"] = f"{speed['index_bytes'] / 1e6:,.1f}"
    return cells
