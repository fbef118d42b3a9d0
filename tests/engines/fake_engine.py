"""SGLang's control plane and ``/generate`` without a model, with faults on demand."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from aiohttp import web

KEY = "fake-engine-key"


class FakeEngine:
    """An engine's state as the control plane sees it.

    ``faults`` maps a route to what goes wrong there: ``error`` (HTTP 500, nothing done), ``refuse`` (HTTP 400
    with SGLang's body), ``drop`` (connection cut, nothing done), ``drop_after`` (done, connection cut), ``hang``
    (no answer, nothing done), ``hang_after`` (done, no answer). ``fault_times`` limits how often.
    """

    def __init__(self, *, version: str = "default") -> None:
        self.paused = False
        self.session_open = False
        self.version = version
        self.groups: set[str] = set()
        self.buckets: list[tuple[str, ...]] = []
        self.weights = dict.fromkeys("abc", "the checkpoint's")
        self.calls: list[str] = []
        self.generated: list[str] = []
        self.faults: dict[str, str] = {}
        self.fault_times: dict[str, int] = defaultdict(lambda: 1)
        self.generate_seconds = 0.0
        self.suffix = ""
        """Of what weights become: the trainer's next ones."""
        self.url = ""
        self.key: str | None = None
        self._runner: web.AppRunner | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def start(self) -> FakeEngine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        open_to_all = path in ("/health", "/health_generate")
        if not open_to_all and request.headers.get("Authorization") != f"Bearer {self.key or KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json() if request.can_read_body else {}
        if path != "/in_turn":
            return await self._one(path, body, request)
        for each, asked in body:
            answer = await self._one(each, asked, request)
            if answer.status != 200:
                answer.headers["x-refused"] = each
                return answer
        return answer

    async def _one(self, path: str, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        self.calls.append(path)
        fault = self.faults.get(path) if self.fault_times[path] > 0 else None
        if fault is not None:
            self.fault_times[path] -= 1
        if fault in ("hang", "drop", "error", "refuse"):
            return await self._fail(fault, request)
        answer = await self._act(path, body)
        if fault is not None:
            return await self._fail(fault, request)
        return answer

    async def _fail(self, fault: str, request: web.Request) -> web.StreamResponse:
        if fault.startswith("hang"):
            await asyncio.sleep(3600)
        if fault.startswith("drop"):
            request.transport.close()
        if fault == "refuse":
            return web.json_response({"success": False, "message": "refused on purpose"}, status=400)
        return web.json_response({"message": "broken on purpose"}, status=500)

    async def _act(self, path: str, body: dict[str, Any]) -> web.StreamResponse:
        if path == "/generate":
            return await self._generate(body)
        ok, message = getattr(self, "_" + path.strip("/"), lambda _: (True, ""))(body)
        answer: dict[str, Any] = {"success": ok, "message": message, "weight_version": self.version}
        if path == "/weights_checker" and body["action"] == "checksum":
            answer["ranks"] = [{"checksums": self.weights}]
        return web.json_response(answer, status=200 if ok else 400)

    async def _generate(self, body: dict[str, Any]) -> web.StreamResponse:
        await self._resumed.wait()
        await asyncio.sleep(self.generate_seconds)
        self.generated.append(body.get("rid") or "")
        meta = {"weight_version": self.version, "finish_reason": {"type": "length"}}
        return web.json_response({"output_ids": [1], "meta_info": meta})

    def _pause_generation(self, body: dict[str, Any]) -> tuple[bool, str]:
        self.paused = True
        self._resumed.clear()
        return True, ""

    def _continue_generation(self, body: dict[str, Any]) -> tuple[bool, str]:
        self.paused = False
        self._resumed.set()
        return True, ""

    def _begin_weight_update(self, body: dict[str, Any]) -> tuple[bool, str]:
        if self.session_open:
            return False, "a weight-update session is already open"
        self.session_open = True
        return True, ""

    def _end_weight_update(self, body: dict[str, Any]) -> tuple[bool, str]:
        if not self.session_open:
            return False, "no weight-update session is open"
        self.session_open = False
        return True, ""

    def _init_weights_update_group(self, body: dict[str, Any]) -> tuple[bool, str]:
        self.groups.add(body["group_name"])
        return True, ""

    def _destroy_weights_update_group(self, body: dict[str, Any]) -> tuple[bool, str]:
        known = body["group_name"] in self.groups
        self.groups.discard(body["group_name"])
        return known, "" if known else "The group to be destroyed does not exist."

    def _update_weights_from_distributed(self, body: dict[str, Any]) -> tuple[bool, str]:
        if not self.session_open:
            return False, "must run between begin_weight_update() and end_weight_update()"
        if body["group_name"] not in self.groups:
            return False, f"Group {body['group_name']} not in {self.groups}"
        self.buckets.append(tuple(body["names"]))
        return self._loaded(body, dict.fromkeys(body["names"], "sent" + self.suffix))

    def _update_weights_from_disk(self, body: dict[str, Any]) -> tuple[bool, str]:
        if body["load_format"] != "auto":
            return False, "the engine's own format, that of dummy weights, loads no files"
        return self._loaded(body, dict.fromkeys("abc", "sent" + self.suffix))

    def _weights_checker(self, body: dict[str, Any]) -> tuple[bool, str]:
        if body["action"] == "reset_tensors":
            self.weights = {name: f"random {id(self)} {len(self.calls)} {name}" for name in self.weights}
        return True, ""

    def _loaded(self, body: dict[str, Any], weights: dict[str, str]) -> tuple[bool, str]:
        self.weights |= weights
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        return True, ""
