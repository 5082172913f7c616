"""Make training pairs from Debian's packages: real text under free licences, without a hub.

    python scripts/debian_pairs.py          # data/debian/*.jsonl; downloads 134 MB, takes minutes
    python train.py data=real_text          # with SQuAD and ACL beside them

Five files of JSON lines: descriptions of packages, short and long; manual pages, what they are for
and how they begin; headings of documentation and the paragraphs below; words of WordNet and their
meaning; and words of one meaning. ``sources.json`` says the versions of all packages, and
``licences/`` has the licence of each.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from debian import manuals, pages, wordnet
from debian.archive import DEFAULT_SUITE, DESCRIPTIONS, Suite, paragraphs
from sparton.writing import replacing_folder

WORDS = 200  # of a positive
FEWEST, MOST_ALIKE = 8, 3  # words of a positive; pairs of one query, as "see also" has them
MANUALS = (
    "manpages", "manpages-dev", "perl-doc", "git-man", "libssl-doc", "tcl8.6-doc", "tk8.6-doc",
    "ncurses-doc", "libcurl4-doc", "coreutils", "util-linux", "systemd", "iproute2", "e2fsprogs",
    "openssh-client", "rsync", "zsh-common", "libbsd-dev", "mdadm", "lvm2", "nftables",
    "bind9-utils",
)  # fmt: skip
DOCUMENTATION = (
    "python3.11-doc", "postgresql-doc-15", "sqlite3-doc", "apache2-doc", "git-doc", "bash-doc",
    "debian-reference-en", "debian-policy", "developers-reference", "r-doc-html", "gnuplot-doc",
    "libboost1.81-doc", "erlang-doc", "octave-doc",
)  # fmt: skip
WORDNET = "wordnet-base"
# Packages that are parts of one source say the same of what they are parts of.
PARTS = re.compile(
    r"\s*[(\u2013\u2014-]+\s*(development|debug|shared|runtime|common|data|documentation).*$"
)

Pairs = Iterator[tuple[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("data/debian"))
    parser.add_argument("--downloads", type=Path, default=Path("data/debian-packages"))
    parser.add_argument("--suite", default=DEFAULT_SUITE, help="of a mirror, or file:///...")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    suite = Suite(arguments.suite, arguments.downloads)
    versions: dict[str, str] = {}
    with replacing_folder(arguments.output) as fresh:
        (fresh / "licences").mkdir()
        for name, pairs in kinds(suite, versions, fresh / "licences").items():
            console.print(f"{name}: {write(pairs, fresh / f'{name}.jsonl'):,} pairs")
        sources = {"suite": arguments.suite, "packages": versions}
        (fresh / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")


def kinds(suite: Suite, versions: dict[str, str], licences: Path) -> dict[str, Pairs]:
    """The pairs by the name of their file; packages are read as pairs are asked for."""
    read = partial(read_package, suite, versions, licences)
    return {
        "descriptions": descriptions(suite),
        "manuals": (pair for package in MANUALS for pair in manual_pages(read(package))),
        "documentation": (pair for package in DOCUMENTATION for pair in headings(read(package))),
        "wordnet": glosses(read(WORDNET)),
        "synonyms": synonyms(read(WORDNET)),
    }


def read_package(
    suite: Suite, versions: dict[str, str], licences: Path, package: str
) -> Iterator[tuple[str, str]]:
    """Names and texts of a package's files; its licence is copied."""
    versions[package] = suite.version(package)
    for file in suite.files(package):
        if file.name == f"usr/share/doc/{package}/copyright":
            (licences / f"{package}.txt").write_bytes(file.content)
        yield file.name, file.text()


def descriptions(suite: Suite) -> Pairs:
    for fields in paragraphs(suite.index(DESCRIPTIONS)):
        short, _, long = fields["Description-en"].partition("\n")
        text = " ".join(re.sub(r"^ \.$", "", long, flags=re.M).split())
        yield PARTS.sub("", short), " ".join(text.split()[:WORDS])


def manual_pages(files: Pairs) -> Pairs:
    for name, text in files:
        if name.startswith("usr/share/man/man"):
            pair = manuals.pair_of(text, words=WORDS)
            if pair is not None:
                yield pair


def headings(files: Pairs) -> Pairs:
    for name, text in files:
        if name.endswith((".html", ".htm", ".html.en")):
            yield from pages.pairs_of(text, words=WORDS)


def glosses(files: Pairs) -> Pairs:
    for words, gloss in _synsets(files):
        yield ", ".join(words), gloss


def synonyms(files: Pairs) -> Pairs:
    for words, _ in _synsets(files):
        if len(words) > 1:
            yield words[0], ", ".join(words[1:])


def _synsets(files: Pairs) -> Iterator[tuple[list[str], str]]:
    for name, text in files:
        if Path(name).name.startswith("data.") and "wordnet" in name:
            yield from wordnet.synsets_of(text)


def kept(pairs: Iterable[tuple[str, str]], fewest: int) -> Pairs:
    """Without short positives, positives that were there before, and queries that many have."""
    queries: Counter[str] = Counter()
    positives: set[str] = set()
    for query, positive in pairs:
        alike = query.casefold()
        if len(positive.split()) < fewest or not alike or positive in positives:
            continue
        queries[alike] += 1
        positives.add(positive)
        if queries[alike] <= MOST_ALIKE:
            yield query, positive


def write(pairs: Pairs, path: Path) -> int:
    fewest = 1 if path.stem in ("wordnet", "synonyms") else FEWEST
    records = (json.dumps({"query": q, "positive": p}) for q, p in kept(pairs, fewest))
    with path.open("w", encoding="utf-8") as file:
        return sum(file.write(f"{record}\n") > 0 for record in records)


if __name__ == "__main__":
    main()
