"""Encoding: texts to vectors on the host, beside the model alone and sentence-transformers; and by
the commands that encode and evaluate collections."""

from tables.records import Record, bold, find, markdown, table

MARCO = 8_800_000  # passages


@table("encoding", "encoding")
def encoding(records: list[Record]) -> str:
    rows = []
    for kind, size in dict.fromkeys((record["kind"], record["size"]) for record in records):
        own = {"kind": kind, "size": size}
        others = [r for r in records if r["library"] == "sentence-transformers"]
        best = max((_rate(r) for r in others if r["kind"] == kind and r["size"] == size), default=0)
        libraries = ("forward alone", "tokens alone", "sparton", "sparton fp8")
        alone, tokens, ours, narrow = (_rate(find(records, library=x, **own)) for x in libraries)
        figures = [f"{rate:,.0f}" if rate else "" for rate in (alone, tokens, ours, narrow, best)]
        floor = min(filter(None, (alone, tokens)), default=0)
        shares = [f"{ours / rate:.2f}" if rate else "" for rate in (alone, floor, best)]
        rows.append([kind, size, *figures, *shares])
    header = ["kind", "model", "the model alone", "tokens alone", bold("sparton"), "in FP8"]
    header += ["sentence-transformers", "of the model alone", "of the lower"]
    return markdown([*header, "times sentence-transformers"], rows)


@table("collections", "collections", together="verb")
def collections(records: list[Record]) -> str:
    """Commands on one GPU and on several."""
    rows = []
    for record in records:
        one = find(records, verb=record["verb"], kind=record["kind"], gpus=1)
        own, base = _rate(record), _rate(one)
        # Older records have how long all took under the name of a setting.
        seconds = record.get("all_s", record["seconds"])
        times = (f"{seconds:.1f}", f"{record['start_s']:.1f}") if own else ("", "")
        rows.append(
            [
                f"`{record['verb']}.py`, {record['kind']}",
                str(record["gpus"]),
                f"{own:,.0f}" if own else record["status"],
                f"{own / base:.2f}" if own and base else "",
                *times,
            ]
        )
    header = ["", "GPUs", "texts/s", "times one GPU", "s", "s of all else"]
    return markdown(header, rows)


def _rate(record: Record) -> float:
    """Texts per second; 0 where none can be believed."""
    return record.get("texts_per_s", 0.0) if record.get("status") == "ok" else 0.0


@table("passages", "passages")
def passages(records: list[Record]) -> str:
    """What was measured, and what it makes of MS MARCO's 8.8 million passages: all of it grows with
    the number of texts, but for the start of the command that encodes, where that is known."""
    rows = []
    for record in records:
        if record["status"] != "ok":
            rows.append([f"{record['passages']:,}", str(record["gpus"]), record["status"]])
            continue
        times = dict.fromkeys((1, MARCO / record["passages"]))  # once where all were measured
        rows += [_passages(record, factor) for factor in times]
    header = ["passages", "GPUs", "", "encoded and stored, s", "GB", "indexed, s"]
    return markdown([*header, "GB of the index", "6,980 queries, s", "one query, ms"], rows)


def _passages(record: Record, factor: float) -> list[str]:
    speed = record["speed"]
    searched = record["queries_s"] + record["search_s"] * factor
    start = record.get("start_s", 0.0)
    encoded = start + (record["encode_s"] - start) * factor
    return [
        f"{record['passages'] * factor:,.0f}",
        str(record["gpus"]),
        "measured" if factor == 1 else "projected",
        f"{encoded:,.0f}",
        f"{record['bytes'] * factor / 1e9:.1f}",
        f"{record['index_s'] * factor:.1f}",
        f"{speed['index_bytes'] * factor / 1e9:.1f}",
        f"{searched:.1f}",
        f"{speed['latency']['p50']:.1f}" if factor == 1 else "",
    ]
