"""Turn run folders of train.py and evaluate.py into measurement records, one JSON line per run.

    python scripts/record_runs.py --study in_domain runs/in_domain/*/seed-* runs/evaluate/*

Appends to ``results/<gpu>/<study>.jsonl``, replacing earlier records of the same label and seed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.records import folder_of, read_records, write_records
from sparton.training.figures import training_figures

FIGURES = (
    "metrics", "search", "query_terms", "document_terms", "query_vectors", "document_vectors",
    "lengths", "cut", "seconds", "speed",
)  # fmt: skip
# Options that make a head's runs others, as they mostly are.
USUAL = {
    "compiled": False, "fp8": False, "tile": None, "pooling": "max", "activation": "relu",
    "token_topk": None, "special_terms": True, "folding": None, "echo": None, "query_prompt": "",
    "document_prompt": "", "include_prompt": True,
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--study", required=True)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--label", help="of the record; default: the head, or the system's name")
    arguments = parser.parse_args()
    for folder in arguments.runs:
        record = describe_run(folder)
        record["label"] = arguments.label or record["label"]
        device = folder_of(record["environment"]["hardware"].get("gpu", "cpu"))
        path = arguments.results / device / f"{arguments.study}.jsonl"
        append(path, record)
        print(f"{path}: {record['label']} seed {record['seed']}")


def describe_run(folder: Path) -> dict[str, Any]:
    """Everything a table needs from one run folder."""
    results = json.loads((folder / "results.json").read_text())
    manifest_file = folder / "manifest.json"
    trained = manifest_file.exists()
    manifest = json.loads(manifest_file.read_text()) if trained else results["environment"]
    config = manifest["config"] if trained else results["config"]
    record = {
        "label": head_name(config["head"]) if trained else system_name(config),
        "seed": config.get("seed"),
        "environment": {key: manifest[key] for key in ("command", "git", "packages", "hardware")},
        "config": config,
        "tasks": {
            task["name"]: {name: task[name] for name in FIGURES if name in task}
            for task in results["tasks"]
        },
    }
    return record | (training_figures(folder / "metrics.jsonl") if trained else {})


def head_name(head: dict[str, Any]) -> str:
    """The head's class and what of :data:`USUAL` it has otherwise."""
    words = [head["_target_"].rsplit(".", 1)[-1]]
    others = {key: head[key] for key, usual in USUAL.items() if head.get(key, usual) != usual}
    for key, value in others.items():
        shown = value if key in ("pooling", "activation") else f"{key}={value}"
        words.append(key if value is True else shown)
    return " ".join(words)


def system_name(config: dict[str, Any]) -> str:
    if config["model"] != "bm25":
        return config["model"]
    return f"BM25, k1 {config['bm25']['k1']}, b {config['bm25']['b']}"


def append(path: Path, record: dict[str, Any]) -> None:
    same = (record["label"], record["seed"])
    kept = [other for other in read_records(path) if (other["label"], other["seed"]) != same]
    write_records(path, [*kept, record])


if __name__ == "__main__":
    main()
