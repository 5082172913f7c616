"""Pages of documentation in HTML: headings, and the paragraphs below them."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser

HEADINGS = ("h1", "h2", "h3", "h4")
LEFT_OUT = ("script", "style", "nav", "table", "pre", "footer")
NUMBER = re.compile(r"^((chapter|appendix|part|section)\s+)?([\dA-Z]{1,3}\.)+(\d+\.?)*\s*", re.I)
MARKS = str.maketrans("", "", "¶§#")


class _Outline(HTMLParser):
    """Collects ``(tag, text)`` of headings and paragraphs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, str]] = []
        self._tag, self._text, self._outside = "", "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in LEFT_OUT:
            self._outside += 1
        elif tag in HEADINGS or tag == "p":
            self._end()
            self._tag = tag

    def handle_endtag(self, tag: str) -> None:
        if tag in LEFT_OUT:
            self._outside = max(self._outside - 1, 0)
        elif tag == self._tag:
            self._end()

    def handle_data(self, data: str) -> None:
        if self._tag and not self._outside:
            self._text += data

    def _end(self) -> None:
        text = " ".join(self._text.translate(MARKS).split())
        if self._tag and text:
            self.parts.append((self._tag, text))
        self._tag, self._text = "", ""


def pairs_of(page: str, *, words: int) -> Iterator[tuple[str, str]]:
    """A heading, and the first ``words`` of the paragraphs between it and the next. A heading of
    one or two words stands behind the title of its page."""
    outline = _Outline()
    outline.feed(page)
    title, heading, text = "", "", []
    for tag, part in [*outline.parts, ("h1", "")]:
        if tag == "p":
            text += part.split()
            continue
        if heading and text:
            yield heading, " ".join(text[:words])
        heading, text = NUMBER.sub("", part), []
        if tag == "h1" and not title:
            title = heading
        elif len(heading.split()) < 3 and heading and title:
            heading = f"{title}: {heading}"
