"""Runs as TREC files, as trec_eval and its relatives read them."""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sparton.retrieval.run import Run


def write_run(run: Run, path: Path | str, tag: str = "sparton") -> None:
    """One line ``query Q0 document rank score tag`` per result, ranks from 1.

    trec_eval ignores the rank, and orders equal scores as :meth:`Run.ties_by_id
    <sparton.retrieval.run.Run.ties_by_id>` does.

    Raises:
        ValueError: an identifier is empty or holds white space, which the format cannot express.
    """
    found = np.zeros(len(run.document_ids), np.bool_)
    found[run.rows[run.rows >= 0]] = True
    check_identifiers(run.query_ids)
    check_identifiers([run.document_ids[row] for row in found.nonzero()[0].tolist()])
    with Path(path).open("w", encoding="utf-8") as file:
        for query, ranking in run.rankings():
            lines = [
                f"{query} Q0 {document} {rank} {score:.9g} {tag}\n"
                for rank, (document, score) in enumerate(ranking, start=1)
            ]
            file.write("".join(lines))


def read_run(path: Path | str) -> Run:
    """A run in the order of its scores; equal scores keep the order of the file.

    Raises:
        ValueError: a line without the six columns or with a score that is not a number.
    """
    scores: dict[str, dict[str, float]] = {}
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                query, _, document, _, score, _ = line.split()
                if math.isnan(value := float(score)):
                    raise ValueError
                scores.setdefault(query, {})[document] = value
            except ValueError:
                raise ValueError(
                    f"{path}:{number}: expected 'query Q0 document rank score tag', "
                    f"got {line.strip()!r}"
                ) from None
    return Run.from_scores(scores)


def check_identifiers(names: Iterable[str]) -> None:
    """Refuse what no such file can hold.

    Raises:
        ValueError: an identifier is empty or holds white space.
    """
    for name in names:
        if name.split() != [name]:
            raise ValueError(
                f"the identifier {name!r} is empty or holds white space, which TREC files cannot "
                "express: rename it in the collection"
            )
