"""Turns a second of two rollout workers against one, and by how much event loops lag with thousands in flight.

The workers are real: Ray actors with the episode loop, the client, a chat template, a ToolEnv and its tool. The engine
is scripted: a process that answers each request on loopback after 50 ms, in steps as engines do, and costs as little as
Python allows, since on two cores its time comes out of the workers'. Ideal is therefore two, less what engine and
manager take.

- ratio: 1,024 episodes in flight in all; pools of one and of two workers play the same groups in turn.
- lag: 4,096 episodes in flight over two workers; the 99th percentile of by how much a timer is late, in the workers and
  in this process, which hands out groups and takes trajectories as the manager does.

    python benchmarks/workers.py [--repeats 7] [--rounds 1]

Prints one JSON object and one line. Targets: ratio at least 1.6, lags at most 0.5 s. About four minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import random
import select
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from client_cpu import TURNS, answer, english, lookup, make_tokenizer

from agentrl.config import load_config
from agentrl.config.schema import Config
from agentrl.orchestrator.cluster import Bundle, Cluster
from agentrl.orchestrator.workers import RayWorker, Setting, WorkerPool
from agentrl.rollout.options import episode_limits, open_chat, rollout_params
from agentrl.rollout.worker import LoopLag, RareCollection
from agentrl.types import Task

RATIO, LAG_S = 1.6, 0.5
GROUP, LATENCY_S, STEP_S, SAMPLED = 8, 0.05, 0.005, 64
CALL = '\n<tool_call>\n{"name": "search", "arguments": {"query": "who wrote it", "page": 3}}\n</tool_call>'
WORDS = english()
drawn = random.Random(1)


def page() -> str:
    start = drawn.randrange(len(WORDS) - 85)
    return " ".join(WORDS[start : start + 85])


Lookup = lookup(page, lambda: " ".join(WORDS[:100]), TURNS)
"""What workers play: ``workers.py:Lookup``."""


def serve(body: bytes, port: Any) -> None:
    """Answers every request the same, ``LATENCY_S`` later; looks at nothing but its length. Like an engine it works in
    steps: it reads and answers every ``STEP_S``, so that a request costs no wake-up of its own."""
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    listener = socket.create_server(("127.0.0.1", 0), backlog=8192)
    listener.setblocking(False)
    events = select.epoll()
    events.register(listener, select.EPOLLIN)
    connections: dict[int, socket.socket] = {}
    missing: dict[int, int] = {}
    due: deque[tuple[float, socket.socket]] = deque()
    port.send(listener.getsockname()[1])
    while True:
        for number, _ in events.poll():
            if number == listener.fileno():
                with contextlib.suppress(BlockingIOError):
                    while True:
                        connection, _ = listener.accept()
                        connections[connection.fileno()], missing[connection.fileno()] = connection, 0
                        events.register(connection, select.EPOLLIN)
                continue
            data = connections[number].recv(1 << 16)
            if not data:
                events.unregister(number)
                connections.pop(number).close()
                continue
            if not missing[number]:
                head = data.index(b"\r\n\r\n") + 4
                at = data.index(b"Content-Length: ") + 16
                missing[number] = head + int(data[at : data.index(b"\r", at)])
            missing[number] -= len(data)
            if not missing[number]:
                due.append((time.monotonic() + LATENCY_S, connections[number]))
        while due:
            time.sleep(STEP_S)
            now = time.monotonic()
            while due and due[0][0] <= now:
                due.popleft()[1].sendall(reply)
            if events.poll(0):
                break


def reply_of(cfg: Config, model: str) -> bytes:
    """What the engine says: some thought and one call, in as many tokens as a short turn has."""
    said = json.loads(answer(open_chat(cfg, model), WORDS, CALL))
    meta = said["meta_info"]
    first = len(said["output_ids"]) - SAMPLED
    del meta["weight_versions"]
    meta["output_token_logprobs"] = meta["output_token_logprobs"][first:]
    return json.dumps({"output_ids": said["output_ids"][first:], "meta_info": meta}).encode()


class Pool:
    """A started pool and its runner."""

    def __init__(self, cfg: Config, model: str, url: str, options: list[dict[str, Any]], logs: Path):
        self.cfg = cfg

        def make(number: int, concurrency: int) -> RayWorker:
            log_file = logs / f"rollout-worker-{len(options)}-{number}.log"
            own = options[number]
            return RayWorker(number, own, 120.0, cfg, model, url, "key", concurrency=concurrency, log_file=log_file)

        self.pool = WorkerPool(make, len(options), cfg.rollout_concurrency)

    async def start(self) -> None:
        """Start the workers, and have them make their environments."""
        await self.pool.start()
        params, limits = rollout_params(self.cfg), episode_limits(self.cfg)
        self.runner = self.pool.open(Setting("train", *self.cfg.env_spec(), params, limits))
        await self.play(self.cfg.rollout_concurrency)

    async def play(self, episodes: int) -> float:
        """Turns a second over so many episodes."""
        turns = self.cfg.max_turns
        gc.collect()
        began = time.perf_counter()
        calls = [self.runner.run_group(Task(f"t{i}", seed=i), GROUP, f"g{i:06d}") for i in range(episodes // GROUP)]
        with RareCollection():
            groups = await asyncio.gather(*calls)
        seconds = time.perf_counter() - began
        failed = [t.error or t.stop_reason for g in groups for t in g.trajectories if t.num_turns != turns]
        if failed:
            raise SystemExit(f"{len(failed)} episodes failed: {failed[0]}")
        print(f"{episodes} episodes: {episodes * turns / seconds:.0f} turns/s", file=sys.stderr, flush=True)
        return episodes * turns / seconds


async def measure(cluster: Cluster, folder: Path, url: str, options: argparse.Namespace) -> dict[str, Any]:
    places = [cluster.options(i) for i in range(3)]

    def pool(workers: list[dict[str, Any]], in_flight: int, turns: int = TURNS) -> Pool:
        cfg = load_config(
            ["--env", f"{Path(__file__).resolve()}:Lookup", "--rollout-concurrency", str(in_flight), "--max-turns",
             str(turns), "--rollout-max-response-len", str(SAMPLED), "--rollout-max-context-len", "2048"]
        )  # fmt: skip
        return Pool(cfg, str(folder), url, workers, folder)

    one, two = pool(places[:1], 1024), pool(places[1:], 1024)
    await one.start()
    await two.start()
    rates = []
    for _ in range(options.repeats):
        rates.append((await one.play(1024 * options.rounds), await two.play(1024 * options.rounds)))
    await one.pool.close()
    await two.pool.close()

    many, lag = pool(places[1:], 4096, 3), LoopLag()
    await many.start()
    lag.start()
    rate = await many.play(4096)
    of_workers = [of["event_loop_lag_p99"] for of in await many.pool.each("lag")]
    of_manager = lag.metrics()["event_loop_lag_p99"]
    await lag.stop()
    await many.pool.close()
    one_rate, two_rate = (statistics.median(column) for column in zip(*rates, strict=True))
    return {
        "benchmark": "workers",
        "one": round(one_rate),
        "two": round(two_rate),
        "ratio": round(statistics.median(b / a for a, b in rates), 2),
        "ratios": [round(b / a, 2) for a, b in rates],
        "at_4096": round(rate),
        "lag_workers": round(max(of_workers), 3),
        "lag_manager": round(of_manager, 3),
        "load": os.getloadavg()[0],
        "targets": {"ratio": RATIO, "lag": LAG_S},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=1, help="episodes a repeat, in multiples of 1,024")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="w-", dir="/tmp") as temp:
        folder = Path(temp) / "m"
        make_tokenizer(WORDS).save_pretrained(folder)
        cfg = load_config(["--env", f"{Path(__file__).resolve()}:Lookup"])
        receiver, sender = multiprocessing.Pipe(duplex=False)
        engine = multiprocessing.get_context("fork").Process(
            target=serve, args=(reply_of(cfg, str(folder)), sender), daemon=True
        )
        engine.start()
        url = f"http://127.0.0.1:{receiver.recv()}"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        try:
            with Cluster(lambda world: [Bundle(str(i)) for i in range(3)], namespace="w", temp_dir=temp) as cluster:
                result = asyncio.run(measure(cluster, folder, url, options))
        finally:
            engine.terminate()
    print(json.dumps(result))
    print(
        f"turns/s of 2 workers / 1 at 1,024 in flight: {result['ratio']:.2f} ({result['two']} / {result['one']}); "
        f"event-loop lag p99 at 4,096: workers {result['lag_workers']:.2f} s, manager {result['lag_manager']:.2f} s; "
        f"targets {RATIO} and {LAG_S}"
    )
    return int(result["ratio"] < RATIO or max(result["lag_workers"], result["lag_manager"]) > LAG_S)


if __name__ == "__main__":
    sys.exit(main())
