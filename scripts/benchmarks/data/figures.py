"""The figures of records, as the screen and the published table show them."""

from benchmarks.screen import figure

MIB, GIB = 2**-20, 2**-30
LOADING = {
    "pairs/s": figure("pairs_per_s", ",.0f"),
    "pairs per CPU second of the workers": figure("pairs_per_worker_cpu_s", ",.0f"),
    "main process, CPU ms per batch": figure("main_cpu_ms_per_batch", ".2f"),
    "files opened after s": figure("open_s", ".2f"),
    "first batch after s": figure("first_batch_s", ".2f"),
    "batch 50,000 after s": figure("resume_s", ".2f"),
    "disk reads per pair": figure("page_faults_per_pair", ".2f"),
    "main process MiB": figure("main_bytes", ",.0f", MIB),
    "workers MiB": figure("workers_bytes", ",.0f", MIB),
    "of that grown MiB": figure("grown_bytes", ",.0f", MIB),
    "mapped GiB": figure("mapped_bytes", ",.1f", GIB),
}
PREPARATION = {
    "examples": figure("examples", ",.0f"),
    "files GiB": figure("file_bytes", ",.1f", GIB),
    "tables GiB": figure("table_bytes", ",.1f", GIB),
    "prepared in s": figure("prepare_s", ",.0f"),
    "CPU s": figure("prepare_cpu_s", ",.0f"),
    "memory MiB": figure("prepare_bytes", ",.0f", MIB),
}
