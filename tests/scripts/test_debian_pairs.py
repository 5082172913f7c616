"""Pairs from packages, on a suite of two packages that the test makes."""

import gzip
import hashlib
import io
import json
import lzma
import sys
import tarfile

import pytest

import debian_pairs
from debian import manuals, pages, wordnet
from debian.archive import DESCRIPTIONS, INDEXES, Suite, paragraphs

PAGE = r""".\" A comment
.TH TAC 1
.SH NAME
tac \- concatenate and print files in reverse
.SH SYNOPSIS
.B tac
[\fI\,OPTION\/\fR]...
.SH DESCRIPTION
.\" Another
Write each \fIFILE\fR to standard output,
.BR last " line first (see"
.IR cat (1)).
.nf
left out
.fi
.PP
With no FILE, read standard input.
.SH AUTHOR
Somebody
"""
MDOC = """.Dd May 2
.Sh NAME
.Nm strlcpy ,
.Nm strlcat
.Nd size-bounded string copying
.Sh DESCRIPTION
The
.Fn strlcpy
functions copy
.Ar src .
"""
HTML = """<html><head><style>p {}</style></head><body><h1>3.2. Sockets&mdash;how</h1>
<p>A socket is an <b>end</b> of a way.</p><nav><p>next</p></nav>
<h2>Usage<a href="#u">&para;</a></h2>
<p>Open it.</p><p>Close it.</p><pre>code</pre><h2>What nobody explains</h2></body></html>"""
SYNSETS = """  1 This software
00001740 03 n 02 entity 0 physical_thing 0 001 ~ 00001930 n 0000 | that which is; "it is"
00002000 00 a 01 galore(ip) 0 000 | in great numbers
"""


def test_a_manual_page_says_what_it_is_for():
    expected = (
        "concatenate and print files in reverse",
        "tac: Write each FILE to standard output, last line first (see cat(1)). With no FILE, "
        "read standard input.",
    )
    assert manuals.pair_of(PAGE, words=50) == expected
    assert manuals.pair_of(PAGE, words=3)[1] == "tac: Write each FILE"
    assert manuals.pair_of(PAGE.replace("DESCRIPTION", "NOTES"), words=50) is None
    query, positive = manuals.pair_of(MDOC, words=50)
    assert query == "size-bounded string copying"
    assert positive == "strlcpy , strlcat: The strlcpy functions copy src ."


def test_headings_go_with_the_paragraphs_below_them():
    assert list(pages.pairs_of(HTML, words=50)) == [
        ("Sockets—how", "A socket is an end of a way."),
        ("Sockets—how: Usage", "Open it. Close it."),
    ]


def test_synsets_have_words_and_a_gloss():
    assert list(wordnet.synsets_of(SYNSETS)) == [
        (["entity", "physical thing"], 'that which is; "it is"'),
        (["galore"], "in great numbers"),
    ]


def test_queries_that_many_have_and_positives_that_were_there_are_left_out():
    pairs = [("See also", f"the page number {n} says more of it") for n in range(9)]
    pairs += [("other", "the page number 0 says more of it"), ("short", "no")]
    assert list(debian_pairs.kept(pairs, 4)) == pairs[: debian_pairs.MOST_ALIKE]


def packed(files: dict[str, bytes]) -> bytes:
    """A package: an ``ar`` archive, whose first member has an odd size."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    deb = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0"), ("data.tar.xz", data.getvalue())):
        deb += f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        deb += content + b"\n" * (len(content) % 2)
    return deb


@pytest.fixture
def suite(tmp_path) -> str:
    """The address of a suite in a folder, with packages for manuals, documentation and WordNet."""
    folder = tmp_path / "debian/dists/stable"
    contents = {
        "coreutils": {"usr/share/man/man1/tac.1.gz": gzip.compress(PAGE.encode())},
        "bash-doc": {"usr/share/doc/bash-doc/x.html": HTML.encode()},
        "wordnet-base": {"usr/share/wordnet/data.noun": SYNSETS.encode()},
    }
    index = ""
    for name, files in contents.items():
        deb = packed({**files, f"usr/share/doc/{name}/copyright": b"free"})
        path = tmp_path / f"debian/pool/{name}.deb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(deb)
        index += f"Package: {name}\nVersion: 1\nFilename: pool/{name}.deb\n"
        index += f"SHA256: {hashlib.sha256(deb).hexdigest()}\n\n"
    texts = "Package: tac\nDescription-en: reverse files - development files\n"
    texts += " It prints what it reads, the last line first.\n .\n That is all there is to say.\n\n"
    release = "Suite: stable\nSHA256:\n"
    for name, text in ((INDEXES[0], index), (DESCRIPTIONS, texts)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(lzma.compress(text.encode()))
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        release += f" {digest} {(folder / name).stat().st_size} {name}\n"
    (folder / "Release").write_text(release)
    return folder.as_uri()


def test_a_suite_becomes_files_of_pairs(suite, tmp_path, monkeypatch):
    monkeypatch.setattr(debian_pairs, "MANUALS", ("coreutils",))
    monkeypatch.setattr(debian_pairs, "DOCUMENTATION", ("bash-doc",))
    words = ["--suite", suite, "--output", str(tmp_path / "pairs"), "--downloads", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["debian_pairs.py", *words])
    debian_pairs.main()

    def read(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (tmp_path / f"pairs/{name}.jsonl").open()]

    (described,) = read("descriptions")
    assert described == {
        "query": "reverse files",
        "positive": "It prints what it reads, the last line first. That is all there is to say.",
    }
    assert [pair["query"] for pair in read("manuals")] == ["concatenate and print files in reverse"]
    assert [pair["query"] for pair in read("documentation")] == ["Sockets—how"]  # one is short
    assert [pair["query"] for pair in read("wordnet")] == ["entity, physical thing", "galore"]
    assert read("synonyms") == [{"query": "entity", "positive": "physical thing"}]
    sources = json.loads((tmp_path / "pairs/sources.json").read_text())
    assert sources["packages"] == {"coreutils": "1", "bash-doc": "1", "wordnet-base": "1"}
    licences = sorted(path.name for path in (tmp_path / "pairs/licences").iterdir())
    assert licences == ["bash-doc.txt", "coreutils.txt", "wordnet-base.txt"]


def test_what_is_not_what_the_suite_says_is_refused(suite, tmp_path):
    found = Suite(suite, tmp_path / "kept")
    with pytest.raises(ValueError, match="has no package cowsay"):
        found.version("cowsay")
    (tmp_path / "debian/pool/bash-doc.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(ValueError, match=r"bash-doc\.deb has the SHA256 .* the suite says"):
        next(found.files("bash-doc"))
    list(found.files("coreutils"))
    (tmp_path / "debian/pool/coreutils.deb").unlink()
    assert list(found.files("coreutils"))  # kept from before


def test_lines_of_a_field_go_on():
    text = "Package: a\nDescription-en: one\n two\n .\n\nPackage: b\n"
    assert list(paragraphs(text)) == [
        {"Package": "a", "Description-en": "one\n two\n ."},
        {"Package": "b"},
    ]
