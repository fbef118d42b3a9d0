"""Generated tokens a second of the episode loop against a bare load on the same engine.

The loop plays groups of the search environment with the embedded demo model. Each of its requests is
recorded; the bare load then sends the same prompts with the same output lengths (``ignore_eos``) at the
same concurrency, as fast as the engine takes them, with the cheapest client. The two alternate, each pair
gives a ratio, the median counts. No cache is flushed: the bare load finds every prefix that the loop found.

    python benchmarks/rollout_efficiency.py [--concurrency 32 64] [--episodes 256] [--repeats 3] [--router]
    AGENTRL_API_KEY=... python benchmarks/rollout_efficiency.py --url http://127.0.0.1:30000

Prints one JSON object and one line for each number in flight. Target: at least 0.92 at each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from importlib.resources import files
from typing import Any

import aiohttp
import numpy as np
import orjson

from agentrl.envs.registry import make
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.policies.sglang import EngineClient, new_rid
from agentrl.rollout.sampling import request_fields
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import Generation, Outcome, SamplingParams, Task

TARGET = 0.92
GROUP = 8
RESPONSE, CONTEXT = 128, 2040


class Recording:
    """A policy client that notes each prompt and how many tokens came back."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.requests: list[tuple[np.ndarray, int]] = []

    async def generate(self, input_ids: np.ndarray, params: SamplingParams, **kwargs: Any) -> Generation:
        generation = await self._client.generate(input_ids, params, **kwargs)
        self.requests.append((np.array(input_ids), len(generation.tokens)))
        return generation


async def play(url: str, key: str, chat: ChatTemplate, options: Any, seed: int) -> tuple[float, list[tuple[Any, int]]]:
    """Tokens a second of the episode loop, and what it asked for."""
    async with EngineClient(url, key) as client:
        recording = Recording(client)
        params = SamplingParams(max_new_tokens=RESPONSE)
        limits = EpisodeLimits(max_response_len=RESPONSE, max_context_len=CONTEXT)
        runner = EpisodeRunner(lambda: make(options.env), recording, chat, params, limits, options.concurrency)
        try:
            # Environments are made once a run, not once a batch.
            await runner.run_group(Task("warm", seed=10**6 + seed), options.concurrency, "warm")
            recording.requests.clear()
            groups = max(1, options.episodes // GROUP)
            started = time.perf_counter()
            played = await asyncio.gather(
                *(runner.run_group(Task(f"t{i}", seed=seed * 1000 + i), GROUP, f"g{i:04d}") for i in range(groups))
            )
            seconds = time.perf_counter() - started
        finally:
            await runner.close()
        failed = [t for g in played for t in g.trajectories if t.outcome is Outcome.INFRA_ERROR]
        if failed:
            raise SystemExit(f"{len(failed)} episodes failed: {failed[0].error}")
        return sum(t.num_sampled for g in played for t in g.trajectories) / seconds, recording.requests


async def load(url: str, key: str, requests: list[tuple[Any, int]], concurrency: int) -> float:
    """Tokens a second of the bare load."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    bodies = []
    for ids, length in requests:
        sampling = {**request_fields(SamplingParams(max_new_tokens=length)), "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "rid": new_rid()}
        bodies.append((orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), length))
    queue = iter(bodies)

    async def worker(session: aiohttp.ClientSession) -> int:
        tokens = 0
        for body, length in queue:
            async with session.post(f"{url}/generate", data=body, headers=headers) as answer:
                got = len(orjson.loads(await answer.read())["output_ids"])
            if got != length:
                raise SystemExit(f"the engine gave {got} tokens where {length} were forced")
            tokens += got
        return tokens

    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(worker(session) for _ in range(concurrency))))
        return tokens / (time.perf_counter() - started)


async def compare(url: str, key: str, model: str, options: Any) -> dict[str, Any]:
    """Interleaved pairs."""
    chat = ChatTemplate(model)
    _, requests = await play(url, key, chat, options, seed=0)
    await load(url, key, requests, options.concurrency)
    pairs = []
    for repeat in range(options.repeats):
        ours, requests = await play(url, key, chat, options, seed=repeat + 1)
        pairs.append((ours, await load(url, key, requests, options.concurrency)))
    return {
        "benchmark": "rollout_efficiency",
        "env": options.env,
        "concurrency": options.concurrency,
        "loop_tokens_per_s": round(statistics.median(a for a, _ in pairs), 1),
        "bare_tokens_per_s": round(statistics.median(b for _, b in pairs), 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "ratios": [round(a / b, 3) for a, b in pairs],
        "requests": len(requests),
        "mean_prompt": round(statistics.mean(len(ids) for ids, _ in requests)),
        "mean_output": round(statistics.mean(n for _, n in requests), 1),
        "target": TARGET,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(files("agentrl") / "assets" / "demo"), help="HF folder")
    parser.add_argument("--env", default="search")
    parser.add_argument("--url", help="a running engine or router; its key in AGENTRL_API_KEY")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 64], help="episodes in flight")
    parser.add_argument("--episodes", type=int, default=256, help="episodes a repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--router", action="store_true", help="put sglang-router in front of the engine started here")
    options = parser.parse_args()
    with ExitStack() as stack:
        url, key = options.url, os.environ.get("AGENTRL_API_KEY", "")
        if url is None:
            from agentrl.engines.engine import EngineProcess, EngineSpec
            from agentrl.engines.router import RouterProcess

            engine = EngineProcess(EngineSpec(options.model, context_length=CONTEXT + 8))
            stack.callback(engine.stop)
            engine.start()
            url, key = engine.url, engine.api_key
            if options.router:
                router = RouterProcess()
                stack.callback(router.stop)
                router.start()
                router.add_worker(engine.url, engine.api_key)
                url, key = router.url, router.api_key
        reached = True
        for in_flight in options.concurrency:
            options.concurrency = in_flight
            result = asyncio.run(compare(url, key, options.model, options))
            reached &= result["ratio"] >= TARGET
            print(json.dumps(result))
            print(
                f"rollout efficiency: {result['ratio']:.3f} ({result['loop_tokens_per_s']:.0f} / "
                f"{result['bare_tokens_per_s']:.0f} tokens/s at {in_flight} in flight); target {TARGET}",
                flush=True,
            )
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())
