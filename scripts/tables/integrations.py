"""Trainings with sentence-transformers, as they come and with the drop-ins of this project."""

from tables.records import Record, markdown, table

_ROWS = {
    "splade plain": "`SparseEncoder`",
    "splade fused": "`SparseEncoder`, `fuse(model)`",
    "colbert plain": "`MultiVectorEncoder`",
    "colbert scores": "`MultiVectorEncoder`, `fuse_scores(loss)`",
    "colbert fused": "`MultiVectorEncoder`, both",
    "colbert bf16": "`MultiVectorEncoder`, both, scores in 16 bits",
}


@table("integrations", "integrations")
def integrations(records: list[Record]) -> str:
    found = {record["variant"]: record for record in records}
    rows = []
    for variant, words in _ROWS.items():
        if record := found.get(variant):
            plain = found[f"{variant.split()[0]} plain"]
            rows.append(
                [
                    words,
                    f"{record['pairs_per_second']:,.0f}",
                    f"{record['pairs_per_second'] / plain['pairs_per_second']:.2f}",
                    f"{record['memory_gib']:.1f}",
                    f"{record['memory_gib'] / plain['memory_gib']:.2f}",
                    f"{record['loss']:.3f}",
                ]
            )
    header = ["", "pairs/s", "times its own", "peak GiB", "of its own", "loss"]
    return markdown(header, rows)
