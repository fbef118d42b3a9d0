"""A retrieval application behind a real server in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from agentrl.retrieval.server import listen, make_server


@contextlib.contextmanager
def served(app: Any, port: int = 0) -> Iterator[SimpleNamespace]:
    server = make_server(app)
    with listen("127.0.0.1", port) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield SimpleNamespace(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join(10)
