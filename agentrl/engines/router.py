"""sglang-router in front of the engines: one address, a sticky choice of engine per trajectory.

``python -m agentrl.engines.router '<json of RouterArgs fields>'`` runs the router itself; it goes through
``RouterArgs`` because the policy wanted here, ``consistent_hashing``, is refused by its command line.
The routing key is the header that ``rollout.policies.sglang`` sends, one value per trajectory, so that every turn
finds the prefix of the turn before in the engine's cache; when an engine goes, only its own
trajectories move.

The router does not retry: a sticky policy would retry on the same dead engine. The client does, and
the circuit breaker set here opens on the first failures and is asked again within seconds, so that
the client's next attempt goes elsewhere and a restarted engine is used soon.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from agentrl.errors import EngineError
from agentrl.processes.server import ServerProcess, die_with_owner, free_port, take_api_key

POLICIES = ("consistent_hashing", "cache_aware", "round_robin", "random", "manual")

DEFAULTS: dict[str, Any] = {
    "disable_retries": True,
    "cb_failure_threshold": 2,
    "cb_success_threshold": 1,
    "cb_timeout_duration_secs": 2,
    "cb_window_duration_secs": 10,
    "health_check_interval_secs": 2,
    "health_check_timeout_secs": 5,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    "worker_startup_timeout_secs": 30,
    "worker_startup_check_interval": 1,
    "request_timeout_secs": 3600,
    "max_concurrent_requests": -1,
    "shutdown_grace_period_secs": 1,
    "log_level": "warn",
}


class RouterProcess(ServerProcess):
    """A running router on this machine.

    Args:
        policy: one of :data:`POLICIES`.
        host: address to listen on.
        options: more ``RouterArgs`` fields, over :data:`DEFAULTS`.
    """

    def __init__(
        self,
        *,
        policy: str = "consistent_hashing",
        log_dir: str | os.PathLike[str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise EngineError(f"router policy {policy!r} is not known; expected one of {', '.join(POLICIES)}")
        super().__init__(
            *("router", "agentrl.engines.router"),
            log_dir=log_dir, host=host, port=port, api_key=api_key, health_path="/liveness",
        )  # fmt: skip
        self.policy = policy
        self.options = {**DEFAULTS, **(options or {})}

    def arguments(self) -> list[str]:
        fields = {**self.options, "policy": self.policy, "host": self.host, "port": self.port}
        return [json.dumps(fields)]

    def workers(self) -> list[dict[str, Any]]:
        """What the router knows of each engine: ``url``, ``is_healthy``, ``load``, ``id``, ..."""
        return self._call("GET", "/workers").get("workers", [])

    def add_worker(self, url: str, api_key: str, *, timeout: float = 30.0) -> None:
        """Admit an engine and return once the router sends it requests.
        Raises EngineError: it was not admitted within ``timeout`` seconds."""
        self._call("POST", "/workers", {"url": url, "api_key": api_key})
        self._wait_for(
            lambda: any(w["url"] == url and w.get("is_healthy") for w in self.workers()),
            timeout,
            f"the router did not admit {url} within {timeout:g} s",
        )

    def remove_worker(self, url: str, *, timeout: float = 10.0) -> None:
        """Take an engine out and return once it gets no new requests. Unknown ones are no error."""
        ids = [worker["id"] for worker in self.workers() if worker["url"] == url]
        for worker_id in ids:
            self._call("DELETE", f"/workers/{urllib.parse.quote(worker_id, safe='')}")
        self._wait_for(
            lambda: all(worker["url"] != url for worker in self.workers()),
            timeout,
            f"the router did not remove {url} within {timeout:g} s",
        )

    def _wait_for(self, condition: Any, timeout: float, failure: str) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise EngineError(f"{failure}. Log: {self.log_path}\n{self.log_tail()}")
            time.sleep(0.05)

    def _call(self, method: str, path: str, body: Any = None, timeout: float = 10.0) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            text = error.read()[:300].decode(errors="replace")
            raise EngineError(f"router {method} {path}: HTTP {error.code}: {text}") from error
        except (urllib.error.URLError, OSError) as error:
            raise EngineError(f"router {method} {path}: {error}. Log: {self.log_path}") from error


def main(argv: list[str]) -> None:
    """Run the router until stopped."""
    die_with_owner()
    # Not `sglang_router.launch_router`, which imports sglang and torch for a debugging router.
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    fields = json.loads(argv[0])
    # It always serves its metrics; by default on a fixed port.
    fields.setdefault("prometheus_host", "127.0.0.1")
    fields.setdefault("prometheus_port", free_port())
    Router.from_args(RouterArgs(**fields, api_key=take_api_key())).start()


if __name__ == "__main__":
    main(sys.argv[1:])
