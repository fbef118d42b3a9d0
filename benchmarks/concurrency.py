"""Turns a second of one rollout worker with many episodes in flight, against what latency alone would allow.

A scripted engine answers after 50 ms, the one tool of a ToolEnv after another 50 ms; ideal is therefore
``in flight ÷ 0.1 s`` turns a second. What is missing is our own CPU time, and what the event loop waits for. Everything
else is the real thing: runner, episode loop, template, tokenization, parsing, ledger, ToolEnv. The tool is a coroutine
(the target holds for it), and for comparison a blocking function, which needs a thread a call.

    python benchmarks/concurrency.py [--in-flight 256] [--turns 8] [--repeats 5]

Prints one JSON object and one line. Target: at least 0.80.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from typing import Any

import numpy as np
from client_cpu import english, make_chat
from turn_cost import CALL, SAMPLED, pages_of

import agentrl
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import Generation, SamplingParams, Task

TARGET = 0.80
LATENCY_S, TOOL_S = 0.05, 0.05
GROUP = 8


class ScriptedEngine:
    """A policy client that always says the same, ``LATENCY_S`` later."""

    def __init__(self, chat: ChatTemplate, words: list[str]) -> None:
        call = chat.encoder.encode(CALL)
        thought = chat.encoder.encode(" ".join(words[:SAMPLED]))[: SAMPLED - len(call) - 1]
        self._tokens = np.concatenate([thought, call, [chat.end_of_turn_id]]).astype(np.int32)
        self._logprobs = np.full(len(self._tokens), -0.5, np.float32)
        self._versions = np.ones(len(self._tokens), np.int32)
        self.requests = 0

    async def generate(
        self, input_ids: np.ndarray, params: SamplingParams, *, rid: str, routing_key: str, timeout: float
    ) -> Generation:
        """See :class:`agentrl.rollout.policies.sglang.PolicyClient`."""
        await asyncio.sleep(LATENCY_S)
        self.requests += 1
        return Generation(
            self._tokens, self._logprobs, self._versions, "stop", prompt_tokens=len(input_ids), seconds=LATENCY_S
        )


def make_env(pages: list[str], turns: int, *, blocking: bool) -> agentrl.Env:
    """A :class:`agentrl.ToolEnv` whose tool takes ``TOOL_S``, as a coroutine or as a blocking call."""
    drawn = random.Random(1)

    @agentrl.tool(name="search")
    async def wait(query: str, page: int = 1) -> str:
        """Finds pages that answer a question.

        Args:
            query: What is looked for.
            page: Which page of results.
        """
        await asyncio.sleep(TOOL_S)
        return drawn.choice(pages)

    @agentrl.tool(name="search")
    def block(query: str, page: int = 1) -> str:
        """Finds pages that answer a question.

        Args:
            query: What is looked for.
            page: Which page of results.
        """
        time.sleep(TOOL_S)
        return drawn.choice(pages)

    class Lookup(agentrl.ToolEnv):
        tools = (block,) if blocking else (wait,)
        max_turns = turns + 1

        async def task(self, rng: np.random.Generator, split: str) -> tuple[str, str]:
            return drawn.choice(pages), "nobody"

        def reward(self, text: str, answer: str) -> float:
            return float(text == answer)

    return Lookup()


async def play(chat: ChatTemplate, words: list[str], options: Any, *, blocking: bool) -> tuple[float, float]:
    """(achieved ÷ ideal turns a second, CPU seconds a turn), over episodes of which ``in_flight`` run at once."""
    pages, engine = pages_of(chat, words), ScriptedEngine(chat, words)
    params = SamplingParams(max_new_tokens=SAMPLED)
    limits = EpisodeLimits(max_turns=options.turns, max_context_len=1 << 16)
    runner = EpisodeRunner(
        lambda: make_env(pages, options.turns, blocking=blocking), engine, chat, params, limits, options.in_flight
    )
    # Environments are made and threads started once a run, not once a rollout.
    await runner.run_group(Task("warm", seed=0), options.in_flight, "warm")
    engine.requests = 0
    gc.collect()
    groups = options.rounds * options.in_flight // GROUP
    started, worked = time.perf_counter(), time.process_time()
    played = await asyncio.gather(*(runner.run_group(Task(f"t{i}", seed=i), GROUP, f"g{i}") for i in range(groups)))
    seconds, worked = time.perf_counter() - started, time.process_time() - worked
    await runner.close()
    failed = [t.error for g in played for t in g.trajectories if t.num_turns != options.turns]
    if failed:
        raise SystemExit(f"{len(failed)} episodes failed: {failed[0]}")
    ideal = options.in_flight / (LATENCY_S + TOOL_S)  # the last turn of an episode has its tool call too
    return engine.requests / seconds / ideal, worked / engine.requests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8, help="turns an episode")
    parser.add_argument("--rounds", type=int, default=4, help="episodes a repeat, in multiples of --in-flight")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    words = english()
    chat = make_chat(words)
    played: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(options.repeats):
        for blocking, figures in played.items():
            figures.append(asyncio.run(play(chat, words, options, blocking=blocking)))
    (ratio, cpu), (blocked, blocked_cpu) = (
        tuple(statistics.median(column) for column in zip(*figures, strict=True)) for figures in played.values()
    )
    result = {
        "benchmark": "concurrency",
        "in_flight": options.in_flight,
        "ratio": round(ratio, 3),
        "ratios": [round(a, 3) for a, _ in played[False]],
        "cpu_ms": round(1e3 * cpu, 3),
        "blocking_ratio": round(blocked, 3),
        "blocking_cpu_ms": round(1e3 * blocked_cpu, 3),
        "target": TARGET,
    }
    print(json.dumps(result))
    print(
        f"turns/s at {options.in_flight} in flight / ideal: {ratio:.2f} with coroutines as tools ({1e3 * cpu:.2f} ms "
        f"of CPU a turn), {blocked:.2f} with blocking ones ({1e3 * blocked_cpu:.2f} ms); target {TARGET}"
    )
    return int(result["ratio"] < TARGET)


if __name__ == "__main__":
    sys.exit(main())
