"""Generated tokens a second of the episode loop against a bare load on the same engine.

The loop plays groups of the search environment with the embedded demo model. Each of its requests is recorded. Then the
same goes to the engine from the cheapest client, at the same concurrency, with output lengths forced (``ignore_eos``),
in two ways:

- ``episodes``: the same conversations. A turn is asked for when the one before it has come: its prompt is what was
  sent and sampled so far, and what the environment added. So the engine has the same to prefill and to generate, and
  the end of a batch, when few conversations are left, is the same. What is missing to 1 is the loop's own.
- ``requests``: the recorded prompts, none of which waits for another; first turns first.

No side finds what another one left in the prefix cache: each has a name of its own there (SGLang's ``extra_key``),
and the loop tasks of its own. Before, the bare load found every prompt cached and prefilled nothing. The three
alternate, each round gives the ratios, the median counts.

    python benchmarks/rollout_efficiency.py [--concurrency 32 64] [--episodes 256] [--repeats 3] [--router]
    AGENTRL_API_KEY=... python benchmarks/rollout_efficiency.py --url http://127.0.0.1:30000

Prints one JSON object and one line for each number in flight. Target: loop ÷ episodes at least 0.92 at each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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


Conversation = list[tuple[np.ndarray, int]]
"""Of each turn the prompt and how many tokens were sampled."""


class Recording:
    """A policy client that notes each prompt and how many tokens came back."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.episodes: dict[str, Conversation] = {}

    async def generate(
        self, input_ids: np.ndarray, params: SamplingParams, *, routing_key: str, **kwargs: Any
    ) -> Generation:
        turns = self.episodes.setdefault(routing_key, [])
        generation = await self._client.generate(input_ids, params, routing_key=routing_key, **kwargs)
        turns.append((np.array(input_ids), len(generation.tokens)))
        return generation


async def play(url: str, key: str, chat: ChatTemplate, options: Any, seed: int) -> tuple[float, list[Conversation]]:
    """Tokens a second of the episode loop, and what it asked for, in the order in which episodes began."""
    async with EngineClient(url, key) as client:
        recording = Recording(client)
        params = SamplingParams(max_new_tokens=RESPONSE)
        limits = EpisodeLimits(max_response_len=RESPONSE, max_context_len=CONTEXT)
        runner = EpisodeRunner(lambda: make(options.env), recording, chat, params, limits, options.concurrency)
        try:
            # Environments are made once a run, not once a batch.
            await runner.run_group(Task("warm", seed=10**6 + seed), options.concurrency, "warm")
            recording.episodes.clear()
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
        return sum(t.num_sampled for g in played for t in g.trajectories) / seconds, list(recording.episodes.values())


def body(ids: np.ndarray, length: int, cache: str) -> bytes:
    """A request that the loop might have sent."""
    sampling = {**request_fields(SamplingParams(max_new_tokens=length)), "ignore_eos": True}
    asked = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "rid": new_rid()}
    return orjson.dumps({**asked, "extra_key": cache}, option=orjson.OPT_SERIALIZE_NUMPY)


async def load(url: str, key: str, conversations: list[Conversation], concurrency: int) -> float:
    """Tokens a second of the bare load."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    cache, queue = new_rid(), iter(conversations)

    async def worker(session: aiohttp.ClientSession) -> int:
        tokens = 0
        for turns in queue:
            before, said = np.empty(0, np.int32), 0
            ids = before
            for prompt, length in turns:
                # What follows the turn before, if that is still what the prompt begins with.
                grown = np.array_equal(prompt[: len(before)], before)
                ids = np.concatenate([ids, prompt[len(before) + said :]]) if grown else prompt
                async with session.post(f"{url}/generate", data=body(ids, length, cache), headers=headers) as answer:
                    sampled = orjson.loads(await answer.read())["output_ids"]
                if len(sampled) != length:
                    raise SystemExit(f"the engine gave {len(sampled)} tokens where {length} were forced")
                before, said, ids = prompt, length, np.concatenate([ids, np.array(sampled, np.int32)])
                tokens += length
        return tokens

    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(worker(session) for _ in range(concurrency))))
        return tokens / (time.perf_counter() - started)


async def compare(url: str, key: str, model: str, options: Any) -> dict[str, Any]:
    """Interleaved rounds."""
    chat = ChatTemplate(model)
    _, episodes = await play(url, key, chat, options, seed=0)
    await load(url, key, episodes, options.concurrency)
    rates = []
    for repeat in range(options.repeats):
        ours, episodes = await play(url, key, chat, options, seed=repeat + 1)
        same = await load(url, key, episodes, options.concurrency)
        alone = [[turn] for row in itertools.zip_longest(*episodes) for turn in row if turn is not None]
        rates.append((ours, same, await load(url, key, alone, options.concurrency)))
    turns = [turn for episode in episodes for turn in episode]
    middle = [round(statistics.median(column), 1) for column in zip(*rates, strict=True)]
    return {
        "benchmark": "rollout_efficiency",
        "env": options.env,
        "concurrency": options.concurrency,
        "tokens_per_s": dict(zip(("loop", "episodes", "requests"), middle, strict=True)),
        "ratio": round(statistics.median(a / b for a, b, _ in rates), 3),
        "ratios": [round(a / b, 3) for a, b, _ in rates],
        "to_requests": [round(a / c, 3) for a, _, c in rates],
        "turns": len(turns),
        "mean_prompt": round(statistics.mean(len(ids) for ids, _ in turns)),
        "mean_output": round(statistics.mean(n for _, n in turns), 1),
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
                f"rollout efficiency: {result['ratio']:.3f} ({result['tokens_per_s']['loop']:.0f} / "
                f"{result['tokens_per_s']['episodes']:.0f} tokens/s at {in_flight} in flight; against requests that "
                f"wait for no other {statistics.median(result['to_requests']):.3f}); target {TARGET}",
                flush=True,
            )
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())
