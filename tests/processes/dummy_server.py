"""A server for process tests: health, children in sessions of their own, ways to misbehave."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys

from agentrl.processes.ahead import Arguments
from agentrl.processes.server import die_with_owner, take_api_key


def main() -> None:
    die_with_owner()
    arguments = Arguments(sys.argv[2]).wait() if sys.argv[1] == "--ahead" else sys.argv[1:]
    key = take_api_key()
    options = json.loads(arguments[0])
    if options.get("print"):
        print(options["print"], flush=True)
    if "exit" in options:
        raise SystemExit(options["exit"])
    for _ in range(options.get("children", 0)):
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    if options.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ok = options.get("healthy", True) and self.headers.get("Authorization") == f"Bearer {key}"
            self.send_response(200 if ok else 503)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    assert "AGENTRL_API_KEY" not in os.environ
    http.server.ThreadingHTTPServer(("127.0.0.1", options["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main()
