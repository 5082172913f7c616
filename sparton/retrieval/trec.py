"""Runs and judgments as TREC files, as trec_eval and its relatives read them."""

from pathlib import Path

from sparton.retrieval.metrics import Qrels
from sparton.retrieval.run import Run


def write_run(run: Run, path: Path | str, tag: str = "sparton") -> None:
    """One line ``query Q0 document rank score tag`` per result, ranks from 1.

    trec_eval ignores the rank and orders equal scores by document id, so that its figures can
    differ from ours in the last digits where scores are equal.

    Raises:
        ValueError: an identifier is empty or holds white space, which the format cannot express.
    """
    with Path(path).open("w", encoding="utf-8") as file:
        for query, ranking in run.rankings():
            _check_identifier(query)
            for rank, (document, score) in enumerate(ranking, start=1):
                _check_identifier(document)
                file.write(f"{query} Q0 {document} {rank} {score:.9g} {tag}\n")


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
                scores.setdefault(query, {})[document] = float(score)
            except ValueError:
                raise ValueError(
                    f"{path}:{number}: expected 'query Q0 document rank score tag', "
                    f"got {line.strip()!r}"
                ) from None
    return Run.from_scores(scores)


def write_qrels(qrels: Qrels, path: Path | str) -> None:
    """One line ``query 0 document grade`` per judgment.

    Raises:
        ValueError: an identifier is empty or holds white space.
    """
    with Path(path).open("w", encoding="utf-8") as file:
        for query, grades in qrels.items():
            _check_identifier(query)
            for document, grade in grades.items():
                _check_identifier(document)
                file.write(f"{query} 0 {document} {grade}\n")


def _check_identifier(name: str) -> None:
    if len(name.split()) != 1 or name != name.strip():
        raise ValueError(
            f"the identifier {name!r} is empty or holds white space, which TREC files cannot "
            "express: rename it in the collection"
        )
