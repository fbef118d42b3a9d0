"""A chat server in a thread: answers by a script, and refuses what OpenAI's own API refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(content: Any = "", *, finish: str = "stop", usage: Any = (10, 3), choice: Any = None, **message: Any):
    """The JSON of one completion. ``usage``: prompt and answer tokens, or None."""
    answer: dict[str, Any] = {
        "id": "cmpl",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **message},
                "finish_reason": finish,
                **(choice or {}),
            }
        ],
    }
    if usage is not None:
        answer["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return answer


def call(name: str, arguments: Any, call_id: str | None = "call_abc") -> dict[str, Any]:
    """A tool call of a message; ``arguments`` other than text are written as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def refused(status: int, message: str, headers: dict[str, str] | None = None, **error: Any) -> Any:
    """An error answer in OpenAI's form."""
    return status, {"error": {"message": message, "type": "x", **error}}, headers or {}


class FakeOpenAI:
    """Serves ``script``: one entry a chat request, the last one for ever.

    An entry is an answer's JSON, a ``(status, JSON, headers)``, bytes (sent with status 200), ``"hang"``, ``"drop"``
    (closes the connection), or a function from the request's body to one of these.

    Args:
        key: asked for as a bearer token.
        models: ids listed at ``/v1/models``; a number is the status of that answer.
        strict: refuse calls without results and results without calls, as OpenAI does.
    """

    def __init__(
        self, *script: Any, key: str | None = None, models: list[str] | int | Any = ("m",), strict: bool = True
    ) -> None:
        self.script, self.key, self.models, self.strict = list(script), key, models, strict
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # clients that leave are part of the tests
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> FakeOpenAI:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def _next(self, body: dict[str, Any]) -> Any:
        with self._lock:
            self.bodies.append(body)
            entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return entry(body) if isinstance(entry, Callable) else entry

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
                    return self._send(*refused(401, f"wrong key {self.headers.get('Authorization')}"))
                if isinstance(fake.models, int):
                    return self._send(*refused(fake.models, "no list"))
                return self._send(200, {"object": "list", "data": [{"id": name} for name in fake.models]}, {})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                fake.headers.append(dict(self.headers))
                if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
                    return self._send(*refused(401, f"Incorrect API key: {self.headers.get('Authorization')}"))
                if self.path != "/v1/chat/completions":
                    return self._send(*refused(404, "no such path"))
                body = json.loads(raw.decode("utf-8"))
                problem = history_problem(body["messages"]) if fake.strict else None
                if problem:
                    return self._send(*refused(400, problem))
                entry = fake._next(body)
                if entry == "hang":
                    fake._over.wait(3600)
                    return self._close()
                if entry == "drop":
                    return self._close()
                if isinstance(entry, bytes):
                    return self._send(200, entry, {})
                return self._send(*entry) if isinstance(entry, tuple) else self._send(200, entry, {})

            def _send(self, status: int, answer: Any, headers: dict[str, str]) -> None:
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def _close(self) -> None:
                self.close_connection = True

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


def history_problem(messages: list[dict[str, Any]]) -> str | None:
    """What OpenAI would refuse in a history: calls without results, results without calls, unknown roles."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return f"tool result {message['tool_call_id']!r} answers no call"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return f"calls {waiting} have no result"
        if message["role"] not in ("system", "user", "assistant"):
            return f"invalid role {message['role']}"
        if not isinstance(message["content"], str):
            return "content must be text"
        for tool_call in message.get("tool_calls", ()):
            if not isinstance(tool_call["function"]["arguments"], str):
                return "arguments must be text"
            waiting.append(tool_call["id"])
    return None
