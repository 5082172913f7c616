"""Documents sent to a running engine, over HTTP."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests

from sparton.arguments import ArgumentError
from sparton.encoded.collection import EncodedTexts
from sparton.engines.engine import BUSY, Answer, Engine, Request
from sparton.engines.files import Pushed
from sparton.engines.lines import Batch, batches, check_ids, shards_with_ids
from sparton.retrieval.progress import progress_bar

_WORKERS = 4  # requests under way
_ATTEMPTS = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds
_TIMEOUT = 120.0  # seconds

_UNKNOWN_USER = (401, 403)
_AGAIN = "the same command sends all documents again, in the place of those that are there"

Item = TypeVar("Item")
Result = TypeVar("Result")


class HttpClient:
    """Sends requests to an engine, and sends them again while it is busy or not there.

    Args:
        engine: what authenticates is in its environment variable, and is never shown.
        url: of the engine.

    Raises:
        ArgumentError: a URL that is none, or has a password in it.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError("{url} must be http://HOST:PORT or https://HOST:PORT", url=url)
        if parts.username or parts.password:
            raise ArgumentError(
                "{url:name} has a name or a password in it, which others can see: put it into the "
                "environment variable {}",
                engine.key_variable,
                url=parts.hostname,
            )
        self._url, self._engine = url.rstrip("/"), engine
        key = os.environ.get(engine.key_variable)
        self._headers = engine.headers(key) if key else {}
        self._local = threading.local()
        self._answered = False
        self._stopped = threading.Event()

    def call(self, request: Request, allow: Sequence[int] = ()) -> Answer:
        """The answer to a request, which succeeds or has one of the statuses in ``allow``.

        Raises:
            ValueError: the engine refuses it; says why.
            ConnectionError: it is busy or not there, and was so after all attempts; or it was not
                there when it was asked first.
        """
        why = ""
        for attempt in range(_ATTEMPTS):
            self.pause(attempt)
            try:
                response = self._session().request(
                    request.method,
                    self._url + request.path,
                    data=request.body,
                    headers={"Content-Type": request.content_type},
                    timeout=_TIMEOUT,
                    allow_redirects=False,  # another host would get what authenticates
                )
            except requests.exceptions.SSLError as error:  # a ConnectionError, too
                raise ConnectionError(
                    f"{self._engine.name} at {self._url} has a certificate that is not trusted "
                    f"here ({error}): REQUESTS_CA_BUNDLE names a file of those that are"
                ) from error
            except (
                requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError
            ) as error:  # fmt: skip
                why = type(error).__name__
                if self._answered:
                    continue
                raise ConnectionError(
                    f"{self._engine.name} does not answer at {self._url} ({why}): start it, or "
                    "name the place where it is"
                ) from error
            self._answered = True
            if response.is_redirect:
                raise ValueError(
                    f"{self._engine.name} at {self._url} is elsewhere ({response.status_code}): "
                    f"its address is in {response.headers['location']}"
                )
            if 200 <= response.status_code < 300 or response.status_code in allow:
                return Answer(response.status_code, _content(response))
            why = f"{response.status_code} {response.reason}: {response.text[:500]}".strip()
            if response.status_code not in BUSY:
                hint = self._hint() if response.status_code in _UNKNOWN_USER else ""
                raise ValueError(f"{self._engine.name} at {self._url} refused ({why}){hint}")
        raise ConnectionError(
            f"{self._engine.name} at {self._url} did not answer {_ATTEMPTS} times ({why}): {_AGAIN}"
        )

    def pause(self, attempt: int) -> None:
        """Wait before an attempt, counted from 0; nobody waits any longer after :meth:`stop`.

        Raises:
            ConnectionError: it was stopped.
        """
        if self._stopped.wait(_pause(attempt) if attempt else 0.0):
            raise ConnectionError(f"{self._engine.name} at {self._url} is asked nothing more")

    def stop(self) -> None:
        """Ask nothing more, in any thread."""
        self._stopped.set()

    def _session(self) -> requests.Session:
        """One for each thread."""
        if not hasattr(self._local, "session"):
            session = requests.Session()
            session.auth = self._authenticate  # in the place of what a .netrc has
            self._local.session = session
        return self._local.session

    def _authenticate(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers.update(self._headers)
        return request

    def _hint(self) -> str:
        if self._headers:
            return ""
        return f"; the environment variable {self._engine.key_variable} authenticates"


def send(engine: Engine, texts: EncodedTexts, url: str, *, progress: bool = True) -> Pushed:
    """Make an index and put documents into it. Called again, it does the same again: documents are
    put in the place of those of the same ids, and an index that is there is kept.

    Args:
        engine: from :func:`~sparton.engines.engine_for`.
        texts: documents.
        url: of the engine.
        progress: show a bar on standard error.

    Raises:
        ArgumentError: a URL that cannot be.
        ValueError: an id, a weight or a document that the engine does not take, or an index that
            holds something else.
        ConnectionError: the engine does not answer, or refuses documents because it is busy.
    """
    client = HttpClient(engine, url)
    check_ids(engine, texts)
    engine.create(client)
    put, documents = partial(_put, client, engine), 0
    with progress_bar("documents" if progress else None, len(texts)) as advance:
        for ids, shard in shards_with_ids(texts):
            found = batches(engine, ids, shard, engine.together)
            sent = 0
            for number in _parallel(put, found, client.stop):
                sent += number
                advance(number)
            advance(len(ids) - sent)
            documents += sent
    return Pushed(documents, len(texts) - documents)


def _put(client: HttpClient, engine: Engine, batch: Batch) -> int:
    """Send some documents, those that were refused for now again; how many there were."""
    left = batch
    for attempt in range(_ATTEMPTS):
        client.pause(attempt)
        try:
            answer = client.call(engine.request(left.ids, left.lines))
            again = engine.busy(left.ids, answer)
        except ValueError as error:
            own = f"{left.ids[0]!r}" + (f" to {left.ids[-1]!r}" if left.ids[1:] else "")
            raise ValueError(f"{error}; this was about {own}, and {_AGAIN}") from error
        if not again:
            return len(batch.ids)
        left = Batch([left.ids[row] for row in again], [left.lines[row] for row in again])
    raise ConnectionError(
        f"{engine.name} was too busy {_ATTEMPTS} times for the document {left.ids[0]!r}: {_AGAIN}"
    )


def _pause(attempt: int) -> float:
    """Seconds to wait before an attempt, counted from 1."""
    return min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)


def _content(response: requests.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _parallel(
    function: Callable[[Item], Result], items: Iterable[Item], stop: Callable[[], None]
) -> Iterator[Result]:
    """``map`` in threads, with few items ahead; the first error ends it, and ``stop`` those that
    are under way."""
    failed: list[Exception] = []

    def tried(item: Item) -> Result:
        try:
            return function(item)
        except Exception as error:
            failed.append(error)
            stop()
            raise

    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(_WORKERS) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(tried, item))
                if len(waiting) > 2 * _WORKERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException as error:
            stop()
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, Exception) and failed:
                raise failed[0] from None  # and not what it has stopped
            raise
