"""Manual pages: what a page is for, and how its description begins.

Pages are written for troff with the macros ``man`` or ``mdoc``. What is set is left, and how it is
set is dropped; a page that does more with its text than these macros is not understood.
"""

import re
from collections.abc import Iterable, Iterator

ESCAPES = {
    "\\-": "-", "\\(bu": "", "\\(em": "—", "\\(en": "\N{EN DASH}", "\\(aq": "'", "\\(dq": '"',
    "\\(co": "©",
    "\\(lq": '"', "\\(rq": '"', "\\(oq": "'", "\\(cq": "'", "\\(ga": "`", "\\(ha": "^",
    "\\(ti": "~", "\\e": "\\", "\\&": "", "\\ ": " ", "\\~": " ", "\\0": " ", "\\|": "", "\\^": "",
    "\\/": "", "\\,": "", "\\%": "", "\\:": "", "\\c": "", "\\'": "'", "\\`": "`", "\\.": ".",
}  # fmt: skip
ESCAPE = re.compile("|".join(map(re.escape, sorted(ESCAPES, key=len, reverse=True))))
STYLE = re.compile(r"\\(f(\[\w*\]|\(..|.)|s[-+]?\d+|m\[\w*\]|[*n](\[\w*\]|\(..|.)|k.|d|u|\[\w+\])")
# Macros whose words are text; of others the words are settings.
TEXT = {"B", "I", "R", "BR", "BI", "IB", "IR", "RB", "RI", "SM", "SB", "UR", "MT"}
MDOC_TEXT = {
    "Ar", "Cm", "Dq", "Dv", "Em", "Er", "Ev", "Fa", "Fl", "Fn", "Ft", "Ic", "Li", "Pa", "Pq", "Ql",
    "Qq", "Sq", "Sy", "Va", "Vt", "Xr",
}  # fmt: skip
PARAGRAPHS = {"PP", "P", "LP", "Pp", "TP", "IP", "HP", "RS", "RE", "sp", "br", "Bl", "It", "El"}
SKIPPED = {"nf": "fi", "EX": "EE", "TS": "TE", "Bd": "Ed", "ig": ".", "SY": "YS"}  # from, to
NAME = re.compile(r"\s+(?:-+|—|\u2013)\s+")


def pair_of(page: str, *, words: int) -> tuple[str, str] | None:
    """What NAME says that the page is for, and the first ``words`` of DESCRIPTION behind the name;
    None where one is missing."""
    sections = dict(_sections(page))
    name, parts = " ".join(sections.get("NAME", ())), sections.get("DESCRIPTION", [])
    said = NAME.split(name, maxsplit=1)
    if len(said) < 2 or not parts:
        return None
    description = " ".join(" ".join(parts).split()[:words])
    return said[1].rstrip("."), f"{said[0]}: {description}"


def _sections(page: str) -> Iterator[tuple[str, list[str]]]:
    """Titles and paragraphs."""
    title, until = "", ""
    lines: list[str] = []
    for line in page.splitlines():
        macro, _, rest = line[1:].strip().partition(" ") if line[:1] in {".", "'"} else ("", "", "")
        if until:
            until = "" if macro == until else until
        elif macro in SKIPPED:
            until = SKIPPED[macro]
        elif macro in {"SH", "Sh"}:
            yield title, _paragraphs(lines)
            title, lines = " ".join(_words(rest)).upper(), []
        elif macro in PARAGRAPHS:
            lines.append("")
        elif macro in {"Nm", "Nd"}:
            lines.append("— " * (macro == "Nd") + _plain(rest))
        elif macro in TEXT:
            lines.append(("" if len(macro) == 2 and macro != "SM" else " ").join(_words(rest)))
        elif macro in MDOC_TEXT:
            lines.append(" ".join(word for word in _words(rest) if word not in MDOC_TEXT))
        elif not macro and line[:1] not in {".", "'"}:
            lines.append(_plain(line))
    yield title, _paragraphs(lines)


def _words(rest: str) -> list[str]:
    """Arguments of a macro; quotes hold several words together."""
    return [_plain(a or b) for a, b in re.findall(r'"((?:[^"]|"")*)"|(\S+)', rest)]


def _plain(text: str) -> str:
    text = STYLE.sub("", re.sub(r'\\".*', "", text))
    return ESCAPE.sub(lambda found: ESCAPES[found[0]], text)


def _paragraphs(lines: Iterable[str]) -> list[str]:
    text = "\n".join(lines)
    return [" ".join(each.split()) for each in re.split(r"\n\s*\n", text) if each.strip()]
