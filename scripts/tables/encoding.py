"""Encoding: texts to vectors on the host, beside the model alone and sentence-transformers."""

from tables.records import Record, bold, find, markdown, table


@table("encoding", "encoding")
def encoding(records: list[Record]) -> str:
    rows = []
    for kind, size in dict.fromkeys((record["kind"], record["size"]) for record in records):
        own = {"kind": kind, "size": size}
        others = [r for r in records if r["library"] == "sentence-transformers"]
        best = max((_rate(r) for r in others if r["kind"] == kind and r["size"] == size), default=0)
        ours, alone = (_rate(find(records, library=x, **own)) for x in ("sparton", "forward alone"))
        figures = [f"{rate:,.0f}" if rate else "" for rate in (alone, ours, best)]
        shares = [f"{ours / rate:.2f}" if rate else "" for rate in (alone, best)]
        rows.append([kind, size, *figures, *shares])
    header = ["kind", "model", "the model alone", bold("sparton"), "sentence-transformers"]
    return markdown([*header, "of the model alone", "times sentence-transformers"], rows)


def _rate(record: Record) -> float:
    return record.get("texts_per_s", 0.0)
