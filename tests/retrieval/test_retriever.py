from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from retrieval_server import served

from agentrl.envs.builtin.search.world import world_index
from agentrl.errors import ConfigError, DataError, InfraError
from agentrl.retrieval import HttpRetriever, LocalRetriever, open_index
from agentrl.retrieval.retriever import KEY_VARIABLE, LONGEST_PAUSE
from agentrl.retrieval.server import MAX_BODY, create_app, serve
from agentrl.tools.builtin.search import SearchTool


@pytest.fixture
def server(corpus: Path) -> Iterator[SimpleNamespace]:
    with served(create_app(LocalRetriever(open_index(corpus)), default_topk=2)) as running:
        yield running


def test_client_and_server_give_what_the_index_gives(corpus: Path, server: SimpleNamespace):
    client = HttpRetriever(server.url)
    queries = ["river Egypt", "Oslo", "nothing of this"]
    assert client.search(queries, 2) == LocalRetriever(open_index(corpus)).search(queries, 2)
    client.close()


def test_the_world_can_be_asked_over_http():
    local = LocalRetriever(world_index(0))
    with served(create_app(local)) as running:
        query = "employer of Frank Norworth"
        (remote,), (here,) = HttpRetriever(running.url).search([query], 3), local.search([query], 3)
    assert [hit.passage for hit in remote] == [hit.passage for hit in here]


def test_the_wire_format_is_search_r1s(server: SimpleNamespace):
    request = {"queries": ["Oslo"], "topk": 1, "return_scores": True}
    result = httpx.post(f"{server.url}/retrieve", json=request).json()["result"]
    assert result[0][0]["document"] == {
        "id": "o",
        "contents": '"Oslo"\nOslo is the capital of Norway. Oslo lies on a fjord.',
    }
    assert result[0][0]["score"] > 0
    bare = httpx.post(f"{server.url}/retrieve", json={"queries": ["river"], "topk": None}).json()["result"]
    assert [document["id"] for document in bare[0]] == ["n", "d"]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 400, ""),
        (b"[]", 400, "Input should be an object"),
        (b'{"queries": "Oslo"}', 400, "queries: Input should be a valid array"),
        (b'{"queries": [1]}', 400, "queries.0: Input should be a valid string"),
        (b'{"queries": [], "topk": 0}', 400, "topk: Input should be greater than or equal to 1"),
        (b'{"queries": ' + b"[" * 200_000, 400, ""),
        (b'{"queries": [], "topk": true}', 400, "topk: Input should be a valid integer"),
        (b'{"queries": [], "topk": "3"}', 400, "topk: Input should be a valid integer"),
        (b'{"queries": [], "return_scores": 1}', 400, "return_scores: Input should be a valid boolean"),
        (b'{"queries": [' + b'"a",' * 1100 + b'"a"]}', 400, "at most 1024 items"),
        (b" " * (MAX_BODY + 1), 413, "longer than"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(server: SimpleNamespace, body: bytes, status: int, text: str):
    answer = httpx.post(f"{server.url}/retrieve", content=body)
    assert answer.status_code == status
    assert text in answer.json()["error"]


def test_a_key_is_asked_for_and_never_sent_back(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    app = create_app(LocalRetriever(open_index(corpus)), api_key="s3cret")
    with served(app) as running:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        for key in (None, "wrong", "s3cre"):
            with pytest.raises(InfraError, match="401") as refused:
                HttpRetriever(running.url, api_key=key, patience=0).search(["Oslo"], 1)
            assert "s3cret" not in str(refused.value)
        monkeypatch.setenv(KEY_VARIABLE, "s3cret")
        assert HttpRetriever(running.url).search(["Oslo"], 1)[0][0].passage.title == "Oslo"


def test_serving_to_others_without_a_key_is_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        serve(lambda: open_index(corpus), host="0.0.0.0", port=0)


def test_a_port_in_use_is_named(corpus: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*choose another --port"):
            serve(lambda: open_index(corpus), port=port)


def test_a_bad_corpus_line_stops_the_server_before_it_listens(write_jsonl):
    with pytest.raises(DataError, match=r"corpus.jsonl:3: expected a string"):
        serve(lambda: open_index(write_jsonl([{"contents": "a"}, {"contents": "b"}, {"text": None}])), port=0)


def test_serve_says_where_it_listens(corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    serve(lambda: open_index(corpus), port=0)
    assert "serving 3 passages on http://127.0.0.1:" in capsys.readouterr().out


def test_stopping_frees_the_port(corpus: Path):
    app = create_app(LocalRetriever(open_index(corpus)))
    with served(app) as first:
        port = int(first.url.rpartition(":")[2])
    with served(app, port) as second:
        assert httpx.get(f"{second.url}/health").status_code == 200


class Script(BaseHTTPRequestHandler):
    """Answers each request with the next of ``answers``: (status, body) or None for a closed connection."""

    answers: list
    seen: list

    def do_POST(self) -> None:
        type(self).seen.append(self.rfile.read(int(self.headers["content-length"])))
        answer = type(self).answers.pop(0)
        if answer is None:
            self.connection.close()
            return
        status, body = answer
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def scripted():
    running = []

    def start(answers: list) -> tuple[str, type[Script]]:
        handler = type("Handler", (Script,), {"answers": list(answers), "seen": []})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}", handler

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


GOOD = json.dumps({"result": [[{"document": {"id": 7, "contents": '"T"\nbody'}, "score": 1.5}]]}).encode()


@pytest.mark.parametrize("failure", [(503, b"busy"), (429, b"slow down"), (500, b""), None])
def test_passing_failures_are_retried(scripted, failure, caplog):
    url, handler = scripted([failure, failure, (200, GOOD)])
    (hits,) = HttpRetriever(url, backoff=0.01).search(["q"], 3)
    assert (hits[0].passage.title, hits[0].passage.text, hits[0].score) == ("T", "body", 1.5)
    assert len(handler.seen) == 3 and not caplog.records
    assert json.loads(handler.seen[0]) == {"queries": ["q"], "topk": 3, "return_scores": True}


def test_the_clients_mistakes_are_not_retried(scripted):
    url, handler = scripted([(400, b"bad topk")])
    with pytest.raises(InfraError, match="after 1 attempts .*bad topk"):
        HttpRetriever(url, backoff=0.01).search(["q"], 3)
    assert len(handler.seen) == 1


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"{}", b'{"result": 3}', b'{"result": [[{"score": 1}]]}', b'{"result": []}', b'{"result": [["x"]]}'],
)
def test_an_answer_of_another_kind_is_an_infrastructure_error(scripted, body: bytes):
    url, _ = scripted([(200, body)])
    with pytest.raises(InfraError):
        HttpRetriever(url, patience=0).search(["q"], 1)


def test_documents_without_scores_are_accepted(scripted):
    body = b'{"result": [[{"id": "a", "contents": "text only"}]]}'
    url, _ = scripted([(200, body)])
    (hits,) = HttpRetriever(url + "/retrieve").search(["q"], 1)
    assert (hits[0].passage.id, hits[0].passage.text, hits[0].score) == ("a", "text only", 0.0)


def test_a_dead_server_is_an_infrastructure_error_that_says_what_to_do():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(InfraError, match="agentrl serve-retriever"):
        HttpRetriever(f"http://127.0.0.1:{port}", patience=0.1, backoff=0.01).search(["q"], 1)


def test_a_server_that_hangs_is_given_up_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = HttpRetriever(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2, patience=0.3, backoff=0.01)
        assert client.patience == 0.5
        with pytest.raises(InfraError, match="Timeout"):
            client.search(["q"], 1)


def test_searches_that_wait_for_a_connection_give_up_in_time():
    """A server with a long queue is an infrastructure error to every search, the last in the queue included."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = HttpRetriever(url, timeout=0.3, patience=0, max_connections=1)
        errors: list[str] = []

        def search() -> None:
            with pytest.raises(InfraError) as caught:
                client.search(["q"], 1)
            errors.append(str(caught.value))

        threads = [threading.Thread(target=search) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(errors) == 12
    assert any("no connection was free" in text for text in errors), "not one after another"


def test_a_server_that_is_away_is_waited_for_and_nothing_is_lost(corpus: Path, monkeypatch, caplog):
    """The port is dead at first; each failed attempt brings the server nearer, so no clock decides."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    client = HttpRetriever(f"http://127.0.0.1:{port}", backoff=0.01)
    app = create_app(LocalRetriever(open_index(corpus)))
    running = contextlib.ExitStack()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            running.enter_context(served(app, port))

    monkeypatch.setattr("agentrl.retrieval.retriever.time.sleep", pause)
    with running:
        (hits,) = client.search(["Oslo"], 1)
    assert hits[0].passage.title == "Oslo" and client.retries == 20
    assert max(pauses) <= 1.5 * LONGEST_PAUSE and max(pauses) > LONGEST_PAUSE / 2
    said = [text for record in caplog.records if "retrieval server" in (text := record.getMessage())]
    assert len(said) == 2 and "is away" in said[0] and "for 300 s at most" in said[0] and "is back after" in said[1]


def test_retries_are_in_the_record_of_the_call(scripted):
    url, _ = scripted([(503, b""), (503, b""), (200, GOOD), (200, GOOD)])
    tool = SearchTool(retriever=HttpRetriever(url, backoff=0.001))
    assert asyncio.run(tool("q")).metadata == {"passages": ["7"], "retries": 2}
    assert asyncio.run(tool("q")).metadata == {"passages": ["7"]}


# -- a server that is not to be believed ---------------------------------------------------------------


def test_an_answer_without_end_is_not_read(scripted):
    url, _ = scripted([(200, b" " * 5000)])
    with pytest.raises(InfraError, match="an answer of more than 1,000 bytes"):
        HttpRetriever(url, max_bytes=1000).search(["q"], 1)


def test_a_compressed_answer_is_not_unpacked(scripted):
    url, _ = scripted([(200, gzip.compress(b'{"result": [[' + b" " * 10**6 + b"]]}"))])
    with pytest.raises(InfraError, match="answered something else"):
        HttpRetriever(url).search(["q"], 1)


def test_an_answer_byte_by_byte_is_given_up_in_time():
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while not ended.wait(0.02):
                connection.sendall(b" ")

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        client = HttpRetriever(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5, patience=0)
        with pytest.raises(InfraError, match="not complete within 0.5 s"):
            client.search(["q"], 1)
        ended.set()
        thread.join(10)


@pytest.mark.parametrize(
    "body",
    [
        b'{"result": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"result": [[{"document": {"contents": "a"}, "score": ' + b"9" * 400 + b"}]]}",
    ],
    ids=["deep", "huge number"],
)
def test_an_answer_that_breaks_its_reader_is_the_servers_fault(scripted, body: bytes):
    url, _ = scripted([(200, body)])
    with pytest.raises(InfraError, match="answered something else"):
        HttpRetriever(url).search(["q"], 1)


def test_no_more_passages_are_taken_than_were_asked_for(scripted):
    many = {"result": [[{"document": {"id": n, "contents": "text"}} for n in range(2000)]]}
    url, _ = scripted([(200, json.dumps(many).encode())])
    assert len(HttpRetriever(url).search(["q"], 3)[0]) == 3


def test_something_that_is_no_url_is_refused():
    with pytest.raises(ConfigError, match="expected http://host:port"):
        HttpRetriever("localhost:8000")


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_a_missing_server_package_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch, missing: str):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"needs the package {missing}: pip install 'agentrl-toolkit\[retriever\]'"):
        create_app(LocalRetriever(open_index(corpus)))
