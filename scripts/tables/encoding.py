"""Encoding: texts to vectors on the host, beside the model alone and sentence-transformers; and by
the commands that encode and evaluate collections."""

from tables.records import Record, bold, find, markdown, table


@table("encoding", "encoding")
def encoding(records: list[Record]) -> str:
    rows = []
    for kind, size in dict.fromkeys((record["kind"], record["size"]) for record in records):
        own = {"kind": kind, "size": size}
        others = [r for r in records if r["library"] == "sentence-transformers"]
        best = max((_rate(r) for r in others if r["kind"] == kind and r["size"] == size), default=0)
        libraries = ("forward alone", "sparton", "sparton fp8")
        alone, ours, narrow = (_rate(find(records, library=x, **own)) for x in libraries)
        figures = [f"{rate:,.0f}" if rate else "" for rate in (alone, ours, narrow, best)]
        shares = [f"{ours / rate:.2f}" if rate else "" for rate in (alone, best)]
        rows.append([kind, size, *figures, *shares])
    header = ["kind", "model", "the model alone", bold("sparton"), "layers in FP8"]
    header.append("sentence-transformers")
    return markdown([*header, "of the model alone", "times sentence-transformers"], rows)


@table("collections", "collections")
def collections(records: list[Record]) -> str:
    """Commands on one GPU and on several."""
    rows = []
    for record in records:
        one = find(records, verb=record["verb"], kind=record["kind"], gpus=1)
        own, base = _rate(record), _rate(one)
        rows.append(
            [
                f"`{record['verb']}.py`, {record['kind']}",
                str(record["gpus"]),
                f"{own:,.0f}" if own else record["status"],
                f"{own / base:.2f}" if own and base else "",
                *(f"{record[key]:.1f}" if key in record else "" for key in ("seconds", "start_s")),
            ]
        )
    header = ["", "GPUs", "texts/s", "times one GPU", "s", "s before the first text"]
    return markdown(header, rows)


def _rate(record: Record) -> float:
    return record.get("texts_per_s", 0.0)
