"""The figures of records, as the screen and the published table show them."""

from collections.abc import Mapping
from typing import Any

# By heading: the field and its form. MiB and GiB stand for bytes in these units.
LOADING = {
    "pairs/s": ("pairs_per_s", "{:,.0f}"),
    "pairs per CPU second of the workers": ("pairs_per_worker_cpu_s", "{:,.0f}"),
    "main process, CPU ms per batch": ("main_cpu_ms_per_batch", "{:.2f}"),
    "files opened after s": ("open_s", "{:.2f}"),
    "first batch after s": ("first_batch_s", "{:.2f}"),
    "batch 50,000 after s": ("resume_s", "{:.2f}"),
    "disk reads per pair": ("page_faults_per_pair", "{:.2f}"),
    "main process MiB": ("main_bytes", "MiB"),
    "workers MiB": ("workers_bytes", "MiB"),
    "of that grown MiB": ("grown_bytes", "MiB"),
    "mapped GiB": ("mapped_bytes", "GiB"),
}
PREPARATION = {
    "examples": ("examples", "{:,}"),
    "files GiB": ("file_bytes", "GiB"),
    "tables GiB": ("table_bytes", "GiB"),
    "prepared in s": ("prepare_s", "{:,.0f}"),
    "CPU s": ("prepare_cpu_s", "{:,.0f}"),
    "memory MiB": ("prepare_bytes", "MiB"),
}
_UNITS = {"MiB": 2**20, "GiB": 2**30}


def shown(record: Mapping[str, Any], heading: str) -> str:
    key, form = (LOADING | PREPARATION)[heading]
    if form in _UNITS:
        places = 0 if form == "MiB" else 1
        return f"{record[key] / _UNITS[form]:,.{places}f}"
    return form.format(record[key])
