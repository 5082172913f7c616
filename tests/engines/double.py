"""An engine that answers over HTTP as OpenSearch, Elasticsearch, Vespa, Qdrant or Milvus do, and
fails as it is told to."""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


class Double:
    """What an engine holds, and what was asked of it.

    Attributes:
        url: where it is.
        index: what made the index.
        documents: by id.
        requests: method and path.
        headers: of the last request.
        failures: statuses of the next requests with documents; 0 closes the connection, and 1 in
            the middle of the answer.
        busy: ids that are refused so many times, each with status 429, where others are taken.
        refused: an id that is never taken.
    """

    def __init__(self) -> None:
        self.url, self.index = "", None
        self.documents: dict[str, Any] = {}
        self.requests: list[str] = []
        self.headers: dict[str, str] = {}
        self.failures: list[int] = []
        self.busy: dict[str, int] = {}
        self.refused: str | None = None
        self.lock = threading.Lock()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict]:
        with self.lock:
            self.requests.append(f"{method} {path}")
            writes = re.search(r"_bulk|/points\?|upsert|POST /document/", self.requests[-1])
            if writes and self.failures:
                return self.failures.pop(0), {"error": "as it was told to"}
            if path.endswith("/_bulk"):
                return 200, {"items": [*self._bulk(body.decode().splitlines())]}
            if path.startswith("/document/v1/"):
                return self._vespa(method, unquote(path), body)
            if "/points?" in path:
                for point in json.loads(body)["points"]:
                    self.documents[point["payload"]["id"]] = point
                return 200, {"result": {"status": "completed"}}
            if path.endswith("/entities/upsert"):
                rows = json.loads(body)["data"]
                if waits := [row["id"] for row in rows if self.busy.get(row["id"])]:
                    self.busy[waits[0]] -= 1
                    return 200, {"code": 8, "message": "rate limit exceeded"}
                for row in rows:
                    if row["id"] == self.refused:
                        return 200, {"code": 1100, "message": "invalid row"}
                    self.documents[row["id"]] = row
                return 200, {"code": 0}
            return self._index(method, path, json.loads(body) if body else None)

    def _bulk(self, lines: list[str]) -> Iterator[dict]:
        for action, source in zip(lines[::2], lines[1::2], strict=True):
            identifier = json.loads(action)["index"]["_id"]
            status, error = 201, {}
            if self.busy.get(identifier):
                self.busy[identifier] -= 1
                status, error = 429, {"type": "rejected", "reason": "queue is full"}
            elif identifier == self.refused:
                status, error = 400, {"reason": "failed to parse", "caused_by": {"reason": "dots"}}
            else:
                self.documents[identifier] = json.loads(source)
            yield {"index": {"_id": identifier, "status": status, "error": error}}

    def _vespa(self, method: str, path: str, body: bytes) -> tuple[int, dict]:
        if method == "GET":
            return (404 if self.index else 400), {"message": "no such type or document"}
        identifier = path.split("/docid/", 1)[1]
        if identifier == self.refused:
            return 400, {"message": "cannot parse"}
        self.documents[identifier] = json.loads(body)["fields"]
        return 200, {"id": identifier}

    def _index(self, method: str, path: str, body: dict | None) -> tuple[int, dict]:
        if path.endswith("/_mapping"):
            return 200, {path.split("/")[1]: self.index}
        if method == "GET" and self.index is None:
            return 404, {"status": "not found"}
        if method == "GET":
            params = {**self.index, "on_disk_payload": True}  # what an engine says beyond it
            return 200, {"result": {"config": {"params": params}}}
        if self.index is not None and method == "PUT":
            return 400, {"error": {"type": "resource_already_exists_exception"}}
        self.index = body
        return 200, {"code": 0}


@contextmanager
def double() -> Iterator[Double]:
    """A double at a port of this machine."""
    engine = Double()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            engine.headers = dict(self.headers.items())
            status, content = engine.answer(self.command, self.path, body)
            if status == 0:
                self.close_connection = True
                self.connection.close()
                return
            if status == 1:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
                self.close_connection = True
                return
            said = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_PUT = do_POST = respond

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
