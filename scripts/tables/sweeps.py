"""Whole trainings, from the reports of their sweeps: the paper's Table 3, and its large vocabulary.

A study's records are the ``sweep.jsonl`` of its report."""

from functools import partial

from sparton.sweeps.report import in_markdown, read_published, tabulate
from tables.records import RESULTS, TABLES, device_folders, read_file, run_caption

NOT_TRAINED = "Not measured yet: `python train.py experiment={}`.\n"


def reports(study: str, printed: str | None = None, experiment: str | None = None) -> str:
    """The report of every device, each under its caption; what is ``printed`` in the paper beside
    it, with the time of the paper's training."""
    published = read_published(RESULTS / "paper.json", printed) if printed else None
    texts = []
    for folder in device_folders(study):
        records = read_file(folder / f"{study}.jsonl")
        described = [record["environment"] for record in records if record["environment"]]
        examples = described[0]["config"]["examples"] if published else None
        table, notes = tabulate(records, examples, published)
        texts.append(f"{in_markdown(table, notes)}\n{run_caption(*described)}\n")
    return "\n".join(texts) or NOT_TRAINED.format(experiment or study)


TABLES["table3"] = partial(reports, "table3", "table3")
TABLES["table3_authors_sample"] = partial(reports, "table3_authors_sample", "table3")
TABLES["table3_multilingual"] = partial(reports, "table3_multilingual", "multilingual")
TABLES["table3_in_domain"] = partial(
    reports, "table3_in_domain", experiment="table3 data=squad_acl evaluation=in_domain"
)
