"""A small OpenAI-compatible server whose answers are scripted, for tests of judges."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer:
    """Answers ``/v1/chat/completions`` with what ``answer(body)`` returns.

    That is the text of a reply; or ``(status, headers, text of the body)``; or a number of seconds to stay silent.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()
        self._silent = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> JudgeServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._silent.set()
        self._http.shutdown()
        self._http.server_close()

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.requests.append({**body, "path": self.path})
                    server.keys.append(self.headers.get("Authorization"))
                    server._running += 1
                    server.most_at_once = max(server.most_at_once, server._running)
                try:
                    made = server.answer(body)
                finally:
                    with server._lock:
                        server._running -= 1
                if isinstance(made, (int, float)):
                    server._silent.wait(made)
                    self.close_connection = True
                    return
                status, headers, text = made if isinstance(made, tuple) else (200, {}, completion(made))
                content = text.encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        return Handler


def completion(text: str, finish: str = "stop") -> str:
    """The JSON of a chat completion."""
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}]})


def scripted(*answers: Any) -> Callable[[dict[str, Any]], Any]:
    """One answer after another; the last one again and again."""
    left, lock = list(answers), threading.Lock()

    def answer(body: dict[str, Any]) -> Any:
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return answer


def together(number: int, text: str) -> Callable[[dict[str, Any]], Any]:
    """The same answer, once so many requests are there at once."""
    everybody = threading.Barrier(number)

    def answer(body: dict[str, Any]) -> Any:
        everybody.wait(timeout=20)
        return text

    return answer


def when(event: threading.Event, text: str) -> Callable[[dict[str, Any]], Any]:
    """The same answer, once ``event`` is set."""

    def answer(body: dict[str, Any]) -> Any:
        event.wait(timeout=20)
        return text

    return answer
