"""Hit rate of the prefix cache in episodes of several turns: two engines behind the router against one alone.

Scripted episodes of the embedded demo model: groups of the same first prompt, then in each turn an answer of the engine
and an observation. The rollout's client sends them, with the routing key of the episode, first to one engine behind the
router, then to two. The hit rate is the share of prompt tokens that engines had in their caches.

    python benchmarks/prefix_cache.py [--groups 8] [--turns 6]

Prints one JSON object and one line. Target: two engines reach at least 0.9 of what one reaches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from importlib.resources import files

import numpy as np

from agentrl.engines.engine import EngineSpec
from agentrl.engines.pool import EnginePool
from agentrl.rollout.policies.sglang import EngineClient, new_rid
from agentrl.types import SamplingParams

PROMPT, ANSWER, OBSERVATION = 200, 24, 60
EPISODES = 8  # of a group


async def episode(client: EngineClient, name: str, prompt: list[int], turns: int) -> list[float]:
    """Prompt tokens, and those that were cached."""
    draw, ids, sums = random.Random(name), list(prompt), [0.0, 0.0]
    for _ in range(turns):
        given, params = np.array(ids, np.int32), SamplingParams(max_new_tokens=ANSWER)
        answer = await client.generate(given, params, rid=new_rid(), routing_key=name, timeout=120)
        sums[0] += len(ids)
        sums[1] += answer.cached_tokens
        ids += [*answer.tokens.tolist(), *(draw.randrange(300, 1000) for _ in range(OBSERVATION))]
    return sums


async def hit_rate(model: str, engines: int, args: argparse.Namespace) -> float:
    """Over all episodes, played at once."""
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as logs:
        pool = EnginePool(EngineSpec(model), engines, log_dir=logs)
        try:
            await pool.start()
            async with EngineClient(pool.router_url, pool.router_key) as client:
                draw, playing = random.Random(0), []
                for group in range(args.groups):
                    prompt = [draw.randrange(300, 1000) for _ in range(PROMPT)]
                    playing += [episode(client, f"g{group:08d}-{i:03d}", prompt, args.turns) for i in range(EPISODES)]
                total, cached = np.sum(await asyncio.gather(*playing), axis=0)
        finally:
            await pool.stop()
    return float(cached / total)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8, help=f"of {EPISODES} episodes")
    parser.add_argument("--turns", type=int, default=6)
    args = parser.parse_args()
    model = str(files("agentrl") / "assets" / "demo")
    one, two = (asyncio.run(hit_rate(model, engines, args)) for engines in (1, 2))
    print(json.dumps({"benchmark": "prefix_cache", "one_engine": round(one, 3), "two_engines": round(two, 3)}))
    print(f"prefix-cache hit rate, two engines behind the router ÷ one: {two / one:.3f} ({two:.3f} ÷ {one:.3f})")
    return int(two / one < 0.9)


if __name__ == "__main__":
    sys.exit(main())
