"""What grows in a run of some minutes: nothing should."""

from statistics import fmean

from tables.records import Record, markdown, table

FIGURES = {
    "open_files": ("open files", ",.1f"),
    "resident_mib": ("memory of the process, MiB", ",.0f"),
    "gpu_mib": ("memory of the GPU, MiB", ",.0f"),
    "step_ms": ("a step, ms", ",.2f"),
}


@table("endurance", "endurance")
def endurance(records: list[Record]) -> str:
    rows = []
    for key, (words, form) in FIGURES.items():
        values = [record[key] for record in records if key in record]
        third = len(values) // 3
        if not third:  # a CPU has no GPU's memory, and a run that has just begun has no thirds
            continue
        parts = values[:third], values[third:-third], values[-third:]
        rows.append([words, *(format(fmean(part), form) for part in parts)])
    steps = max(record.get("step", 0) for record in records)
    return f"{steps:,} steps.\n\n{markdown(['mean of', 'first third', 'second', 'last'], rows)}"
