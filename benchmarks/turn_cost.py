"""CPU time of our own code per turn, late in an episode against early: the cost must not grow with the history.

Ours: all that an episode does for a turn (parsing the model's text and calls, the environment's step with one tool
call, the template, tokenization of the observation, the ledger, the request's JSON, the answer's JSON) with the real
loop, client, ToolEnv and tool. The engine is scripted: it takes the bytes of a request and gives those of an answer,
without a network. CPU time of the process, from an answer to the next request, median over episodes and the turns
around the one measured. Observations of 200 tokens, 64 sampled tokens a turn: about 18,000 ids at turn 64.

    python benchmarks/turn_cost.py [--episodes 30] [--repeats 5]

Prints one JSON object and one line. Target: turn 64 ÷ turn 4 at most 1.5.
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

import orjson
from client_cpu import english, lookup, make_chat, pages_of

import agentrl
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.policies.sglang import EngineClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import SamplingParams, Task

TARGET = 1.5
EARLY, LATE, TURNS, SHORT = 4, 64, 68, 8
SAMPLED = 64
CALL = '\n<tool_call>\n{"name": "search", "arguments": {"query": "who wrote it", "page": 3}}\n</tool_call>'


def make_env(pages: list[str]) -> agentrl.Env:
    """A :class:`agentrl.ToolEnv` with one tool, whose episodes end with a budget."""
    drawn = random.Random(1)

    def page() -> str:
        return " ".join(drawn.choice(pages).split(" "))  # a text of its own, as tools give

    return lookup(page, lambda: drawn.choice(pages), TURNS + 1)()


class ScriptedEngine(EngineClient):
    """The client, save that an answer is made up in place of being asked for; notes CPU time a turn."""

    def __init__(self, chat: ChatTemplate, words: list[str]) -> None:
        super().__init__("http://127.0.0.1:1")
        call = chat.encoder.encode(CALL).tolist()
        thought = chat.encoder.encode(" ".join(words[:SAMPLED]))[: SAMPLED - len(call) - 1].tolist()
        ids = [*thought, *call, chat.end_of_turn_id]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.01 * (i % 50), token, None] for i, token in enumerate(ids)],
        }
        self._answer = orjson.dumps({"text": chat.decode(ids), "output_ids": ids, "meta_info": meta})
        self._left: float | None = None
        self.turns: list[list[float]] = []  # an episode each: seconds from an answer to the next request

    async def _exchange(self, payload: bytes, key: str, seconds: float) -> bytes:
        arrived = time.process_time()
        if self._left is not None:
            self.turns[-1].append(arrived - self._left)
        self._left = time.process_time()
        return self._answer

    def begin(self) -> None:
        """The next request is the first of an episode."""
        self.turns.append([])
        self._left = None


async def play(chat: ChatTemplate, words: list[str], episodes: int, turns: int) -> list[list[float]]:
    """CPU seconds of each turn of each episode; entry t is between turns t+1 and t+2."""
    pages = pages_of(chat, words)
    engine = ScriptedEngine(chat, words)
    params, limits = SamplingParams(max_new_tokens=SAMPLED), EpisodeLimits(max_turns=turns, max_context_len=1 << 17)
    runner = EpisodeRunner(lambda: make_env(pages), engine, chat, params, limits, 1)
    gc.collect()
    for i in range(episodes):
        engine.begin()
        group = await runner.run_group(Task(f"t{i}", seed=i), 1, f"g{i}")
        (trajectory,) = group.trajectories
        if trajectory.num_turns != turns:
            raise SystemExit(f"an episode ended after {trajectory.num_turns} turns: {trajectory.error}")
    await runner.close()
    return engine.turns


def around(episodes: list[list[float]], turn: int) -> float:
    """Median seconds of ``turn`` and its two neighbours on each side."""
    return statistics.median(seconds for e in episodes for seconds in e[max(0, turn - 4) : turn + 1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=30, help="episodes a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    words = english()
    chat = make_chat(words)
    asyncio.run(play(chat, words, 3, TURNS))  # warm-up
    pairs, short = [], []
    for _ in range(options.repeats):
        episodes = asyncio.run(play(chat, words, options.episodes, TURNS))
        pairs.append((around(episodes, EARLY), around(episodes, LATE)))
        brief = asyncio.run(play(chat, words, options.episodes, SHORT))
        short.append(statistics.median(s for e in brief for s in e))
    result: dict[str, Any] = {
        "benchmark": "turn_cost",
        "early_ms": round(1e3 * statistics.median(a for a, _ in pairs), 4),
        "late_ms": round(1e3 * statistics.median(b for _, b in pairs), 4),
        "short_ms": round(1e3 * statistics.median(short), 4),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
        "ratios": [round(b / a, 3) for a, b in pairs],
        "target": TARGET,
    }
    print(json.dumps(result))
    print(
        f"CPU of our own code per turn, turn {LATE} / turn {EARLY}: {result['ratio']:.2f} ({result['late_ms']:.2f} / "
        f"{result['early_ms']:.2f} ms; {result['short_ms']:.2f} ms in episodes of {SHORT} turns); target {TARGET}"
    )
    return int(result["ratio"] > TARGET)


if __name__ == "__main__":
    sys.exit(main())
