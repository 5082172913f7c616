"""Vespa 8.

Sparse vectors are ``tensor<float>(t{})``, token vectors ``tensor<bfloat16>(tok{},x[E])``, written
as the hexadecimal digits of their bits.
https://docs.vespa.ai/en/reference/document-json-format.html
https://docs.vespa.ai/en/reference/document-v1-api-reference.html
Every document is scored: ``where true``. With both halves the sparse one is the first phase, and
MaxSim the second.
https://docs.vespa.ai/en/reference/query-api-reference.html
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.engines.engine import Client, Document, Engine, Request
from sparton.types import Kind

_SPARSE = "sum(query(sparse) * attribute(sparse))"
_MAXSIM = "sum(reduce(sum(query(tokens) * cell_cast(attribute(tokens), float), x), max, tok), q)"
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


class Vespa(Engine):
    """See :class:`~sparton.engines.engine.Engine`; the index is a document type, and its namespace
    has the same name. The key is a token of Vespa Cloud."""

    name = "vespa"
    loses: ClassVar[Mapping[Kind, str]] = {
        "sparse": "nothing",
        "tokens": "8 significant bits of a component are kept",
    }
    suffix = ".jsonl"
    together = 1
    longest_id = 2**16
    key_variable = "VESPA_TOKEN"
    index_names = re.compile(r"[a-z][a-z0-9_]*")
    search_path = "/search/"

    def check_id(self, identifier: str) -> None:
        super().check_id(identifier)
        if identifier in (".", ".."):
            raise ValueError(
                f"the id {identifier!r} is no part of a URL, where vespa has it: encode the texts "
                "with other ids"
            )
        if _CONTROLS.search(identifier):
            raise ValueError(
                f"the id {identifier!r} has control characters, which vespa does not take: encode "
                "the texts with other ids"
            )

    def setup(self) -> dict[str, str]:
        return {f"schemas/{self.index}.sd": self._schema(), "services.xml": self._services()}

    def create(self, client: Client) -> None:
        path = f"/document/v1/{self.index}/{self.index}/docid/-"
        answer = client.call(Request("GET", path), allow=[400, 404])
        if answer.status == 400:
            raise ValueError(
                f"vespa has no document type {self.index}: write the files first, deploy the "
                "application in their folder (vespa deploy), and send the documents then"
            )

    def line(self, document: Document) -> bytes:
        fields = [f'"id": {_json(document.id)}']
        if document.terms is not None:
            fields.append(f'"sparse": {self.weights_text(document)}')
        if document.tokens is not None:
            bits = enumerate(_bfloat16(document.tokens))
            fields.append(f'"tokens": {_json({str(row): digits for row, digits in bits})}')
        inside = f'"fields": {{{", ".join(fields)}}}'
        return f"{self._opening(document.id)}{inside}}}\n".encode()

    def request(self, ids: Sequence[str], lines: Sequence[bytes]) -> Request:
        ((identifier, line),) = zip(ids, lines, strict=True)
        path = f"/document/v1/{self.index}/{self.index}/docid/{quote(identifier, safe='')}"
        return Request("POST", path, b"{" + line[len(self._opening(identifier).encode()) :])

    def _query(self, query: Document, k: int, depth: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "yql": f"select id from {self.index} where true",
            "hits": k,
            "ranking.profile": "_".join(sorted(self.kinds)),
            "ranking.softtimeout.enable": False,  # which leaves documents out when time is short
            "timeout": "60s",
        }
        if "sparse" in self.kinds:
            body["input.query(sparse)"] = self.weights(query)
        if "tokens" in self.kinds:
            rows = enumerate(query.vectors())
            body["input.query(tokens)"] = {str(row): vector for row, vector in rows}
        if len(self.kinds) > 1:
            body["ranking.rerankCount"] = depth
        return body

    def _opening(self, identifier: str) -> str:
        return f'{{"put": {_json(f"id:{self.index}:{self.index}::{identifier}")}, '

    def _schema(self) -> str:
        width, profile = self.settings.token_width, "_".join(sorted(self.kinds))
        fields, inputs, phases = [_field("id", "string", "summary | attribute")], [], []
        if "sparse" in self.kinds:
            fields.append(_field("sparse", "tensor<float>(t{})"))
            inputs.append("query(sparse) tensor<float>(t{})")
            phases.append(_block("first-phase", [f"expression: {_SPARSE}"]))
        if "tokens" in self.kinds:
            phase = "second-phase" if phases else "first-phase"
            fields.append(_field("tokens", f"tensor<bfloat16>(tok{{}},x[{width}])"))
            inputs.append(f"query(tokens) tensor<float>(q{{}},x[{width}])")
            phases.append(_block(phase, [f"expression: {_MAXSIM}"]))
        document = _block(f"document {self.index}", fields)
        ranking = _block(f"rank-profile {profile}", [_block("inputs", inputs), *phases])
        return _block(f"schema {self.index}", [document, ranking]) + "\n"

    def _services(self) -> str:
        return (
            '<services version="1.0">\n'
            '    <container id="default" version="1.0"><search/><document-api/></container>\n'
            '    <content id="documents" version="1.0">\n'
            "        <min-redundancy>1</min-redundancy>\n"
            f'        <documents><document type="{self.index}" mode="index"/></documents>\n'
            "    </content>\n"
            "</services>\n"
        )


def _field(name: str, kind: str, indexing: str = "attribute") -> str:
    return _block(f"field {name} type {kind}", [f"indexing: {indexing}"])


def _block(head: str, parts: Sequence[str]) -> str:
    inside = "\n".join(parts).replace("\n", "\n    ")
    return f"{head} {{\n    {inside}\n}}"


def _json(content: str | dict[str, str]) -> str:
    return json.dumps(content, ensure_ascii=False)


def _bfloat16(vectors: NDArray[np.floating]) -> list[str]:
    """The bits of every vector, rounded to the nearest, 4 hexadecimal digits a component."""
    rounded = torch.from_numpy(np.array(vectors)).to(torch.bfloat16)
    bits = rounded.view(torch.int16).numpy().astype(">i2")
    return [row.tobytes().hex() for row in bits]
