"""WordNet: words of one meaning, and what they mean."""

from collections.abc import Iterator


def synsets_of(data: str) -> Iterator[tuple[list[str], str]]:
    """The words of each line of a file ``data.*``, and their gloss (wndb(5WN))."""
    for line in data.splitlines():
        if line.startswith(" "):  # the licence
            continue
        fields, _, gloss = line.partition(" | ")
        number, *rest = fields.split()[3:]
        words = rest[: 2 * int(number, 16) : 2]
        # (a) and the like say where an adjective may stand
        yield [word.partition("(")[0].replace("_", " ") for word in words], gloss.strip()
