"""Documents sent to a double of each engine, which fails now and then."""

import json
import time

import pytest
import requests

from sparton.arguments import ArgumentError
from sparton.encoded import delete_texts
from sparton.engines import ENGINES, engine_for, send, sending
from tests.engines.double import double
from tests.engines.problems import IDS, engine_of, representations, write_encoded


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(sending, "_FIRST_PAUSE", 0.001)


@pytest.fixture
def texts(tmp_path):
    return write_encoded(tmp_path / "docs", representations(), IDS, rows_per_shard=1)


@pytest.mark.parametrize("name", ENGINES)
def test_all_documents_arrive_whatever_fails(name, texts):
    with double() as there:
        engine = engine_of(name, texts)
        there.index = {"a": "schema"} if name == "vespa" else None
        there.failures = [503, 0, 429, 1, 502]
        tells = "search" in name or name == "milvus"  # of documents, not of requests
        there.busy = {IDS[0]: 2, IDS[2]: 1} if tells else {}
        assert send(engine, texts, there.url, progress=False) == (3, 1)
        assert there.documents.keys() == set(IDS[:3])
        assert not there.failures and not any(there.busy.values())
        before = json.dumps(there.documents, sort_keys=True)
        assert send(engine, texts, f"{there.url}/", progress=False) == (3, 1)
        assert json.dumps(there.documents, sort_keys=True) == before, "a rerun changes nothing"


def test_deleted_texts_are_passed_over(tmp_path):
    write_encoded(tmp_path / "docs", representations(), IDS, rows_per_shard=2)
    texts = delete_texts(tmp_path / "docs", [IDS[0]])
    with double() as there:
        assert send(engine_of("qdrant", texts), texts, there.url, progress=False) == (2, 1)
    assert there.documents.keys() == {IDS[1], IDS[2]}
    assert there.documents[IDS[1]]["vector"]["sparse"]["indices"] == [0, 2]


def test_only_documents_that_were_refused_are_sent_again(tmp_path):
    texts = write_encoded(tmp_path / "docs", representations(), IDS, rows_per_shard=4)
    with double() as there:
        there.busy = {IDS[1]: 1}
        engine, sent = engine_of("opensearch", texts), []
        request = engine.request
        engine.request = lambda ids, lines: sent.append([*ids]) or request(ids, lines)
        send(engine, texts, there.url, progress=False)
    assert sent == [IDS[:3], [IDS[1]]]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("elasticsearch", r"refused the document 'zwei': failed to parse \(dots\)"),
        ("vespa", r"refused \(400 Bad Request: .*cannot parse"),
        ("milvus", "milvus refused: invalid row"),
    ],
)
def test_what_is_never_taken_ends_it(name, reason, texts):
    with double() as there:
        there.index = {"a": "schema"} if name == "vespa" else None
        there.refused = IDS[1]
        with pytest.raises(ValueError, match=reason) as refused:
            send(engine_of(name, texts), texts, there.url, progress=False)
    told = str(refused.value)
    assert told.endswith(
        "about 'zwei', and the same command sends all documents again, in the place "
        "of those that are there"
    )
    assert "authenticates" not in told


def test_attempts_have_a_bound(texts):
    with double() as there:
        there.failures = [503] * 100
        with pytest.raises(ConnectionError, match=r"did not answer 8 times \(503 .*same command"):
            send(engine_of("qdrant", texts), texts, there.url, progress=False)
    with double() as there:
        there.busy = dict.fromkeys(IDS, 100)
        with pytest.raises(ConnectionError, match="too busy 8 times for the document"):
            send(engine_of("opensearch", texts), texts, there.url, progress=False)
    with double() as there:
        there.failures = [0] * 100
        with pytest.raises(ConnectionError, match=r"did not answer 8 times \(ConnectionError\)"):
            send(engine_of("qdrant", texts), texts, there.url, progress=False)
    with pytest.raises(
        ConnectionError, match=r"does not answer at http.* \(ConnectionError\): sta"
    ):
        send(engine_of("qdrant", texts), texts, there.url, progress=False)


@pytest.mark.parametrize("name", ["opensearch", "elasticsearch", "qdrant"])
def test_an_index_of_something_else_is_kept(name, texts):
    with double() as there:
        send(engine_of(name, texts, kind="sparse"), texts, there.url, progress=False)
        with pytest.raises(ValueError, match="documents is there and holds"):
            send(engine_of(name, texts), texts, there.url, progress=False)


def test_vespa_needs_its_schema(texts):
    with double() as there, pytest.raises(ValueError, match="no document type documents: write"):
        send(engine_of("vespa", texts), texts, there.url, progress=False)


@pytest.mark.parametrize(
    ("name", "variable", "header", "value"),
    [
        ("opensearch", "OPENSEARCH_CREDENTIALS", "Authorization", "Basic dXNlcjpzZWNyZXQ="),
        ("elasticsearch", "ELASTICSEARCH_API_KEY", "Authorization", "ApiKey user:secret"),
        ("vespa", "VESPA_TOKEN", "Authorization", "Bearer user:secret"),
        ("qdrant", "QDRANT_API_KEY", "api-key", "user:secret"),
        ("milvus", "MILVUS_TOKEN", "Authorization", "Bearer user:secret"),
    ],
)
def test_what_authenticates_is_sent_and_not_said(
    name, variable, header, value, texts, monkeypatch, tmp_path, capfd
):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login other password other\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with double() as there:
        there.index = {"a": "schema"} if name == "vespa" else None
        there.failures = [401]
        with pytest.raises(ValueError, match=f"401 .*{variable} authenticates"):
            send(engine_of(name, texts), texts, there.url)
        assert header not in there.headers
        monkeypatch.setenv(variable, "user:secret")
        there.failures = [401]
        with pytest.raises(ValueError, match="401") as refused:
            send(engine_of(name, texts), texts, there.url)
        assert there.headers[header] == value
    assert "secret" not in f"{refused.value!r}{capfd.readouterr()}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:9200", "url='localhost:9200' must be http://HOST:PORT or https://HOST:PORT"),
        ("https://me:secret@host:1", "url has a name or a password in it.*OPENSEARCH_CREDENTIALS"),
    ],
)
def test_a_url_that_cannot_be_is_refused(url, message, texts):
    engine = engine_for("opensearch", texts.facts.settings)
    with pytest.raises(ArgumentError, match=message) as refused:
        send(engine, texts, url, progress=False)
    assert "secret" not in f"{refused.value!r}"


def answering(monkeypatch, respond):
    """Every request gets what ``respond`` gives or raises."""
    monkeypatch.setattr(requests.Session, "request", lambda *_, **__: respond())


@pytest.mark.parametrize("name", ENGINES)
def test_a_redirection_is_no_success(name, texts, monkeypatch):
    elsewhere = requests.Response()
    elsewhere.status_code, elsewhere.headers["location"] = 308, "https://there:9200/"
    answering(monkeypatch, lambda: elsewhere)
    with pytest.raises(ValueError, match=r"is elsewhere \(308\): its address is in https://there"):
        send(engine_of(name, texts), texts, "http://here:1", progress=False)


def test_a_certificate_that_is_not_trusted_is_told(texts, monkeypatch):
    def respond():
        raise requests.exceptions.SSLError("self-signed certificate")

    answering(monkeypatch, respond)
    with pytest.raises(ConnectionError, match="REQUESTS_CA_BUNDLE"):
        send(engine_of("qdrant", texts), texts, "https://here:1", progress=False)


def test_nobody_waits_for_others_after_an_error(tmp_path, monkeypatch):
    """The last is refused; the others would be busy for a minute."""
    monkeypatch.setattr(sending, "_FIRST_PAUSE", 60.0)
    monkeypatch.setattr(sending, "_LONGEST_PAUSE", 60.0)

    def put(client, engine, batch):
        if batch.ids == [IDS[2]]:
            time.sleep(0.5)
            raise ValueError("cannot parse")
        client.pause(1)

    monkeypatch.setattr(sending, "_put", put)
    texts = write_encoded(tmp_path / "docs", representations(), IDS, rows_per_shard=4)
    engine, began = engine_of("vespa", texts), time.monotonic()
    with double() as there:
        there.index = {"a": "schema"}
        with pytest.raises(ValueError, match="cannot parse"):
            send(engine, texts, there.url, progress=False)
    assert time.monotonic() - began < 30
