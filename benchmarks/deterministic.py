"""What ``--deterministic`` costs: generated tokens a second of the episode loop with and without it.

Two engines with the embedded demo model, as a training run on this machine would start them: one as by
default (all cores), one in the deterministic mode (one thread). The loop of `rollout_efficiency.py` plays
the same groups of the search environment with each in turn, so that one engine sleeps while the other works;
each pair gives a ratio, the median counts. Every second pair begins with the other engine.

    python benchmarks/deterministic.py [--concurrency 64] [--episodes 256] [--repeats 5]

Prints one JSON object and one line. Target: at least 0.4.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from contextlib import ExitStack
from importlib.resources import files
from typing import Any

from rollout_efficiency import CONTEXT, play

from agentrl.engines.engine import EngineProcess, EngineSpec
from agentrl.rollout.template.chat import ChatTemplate

TARGET = 0.4


async def compare(plain: EngineProcess, deterministic: EngineProcess, model: str, options: Any) -> dict[str, Any]:
    """Interleaved pairs."""
    chat = ChatTemplate(model)
    engines = {"default": plain, "deterministic": deterministic}
    for engine in engines.values():
        await play(engine.url, engine.api_key, chat, options, seed=0)
    pairs = []
    for repeat in range(options.repeats):
        speed = {}
        for name in sorted(engines, reverse=bool(repeat % 2)):
            engine = engines[name]
            speed[name], _ = await play(engine.url, engine.api_key, chat, options, seed=repeat + 1)
        pairs.append((speed["deterministic"], speed["default"]))
    return {
        "benchmark": "deterministic",
        "env": options.env,
        "concurrency": options.concurrency,
        "deterministic_tokens_per_s": round(statistics.median(a for a, _ in pairs), 1),
        "default_tokens_per_s": round(statistics.median(b for _, b in pairs), 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "ratios": [round(a / b, 3) for a, b in pairs],
        "target": TARGET,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(files("agentrl") / "assets" / "demo"), help="HF folder")
    parser.add_argument("--env", default="search")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=256, help="episodes a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with ExitStack() as stack:
        engines = []
        for more in ({"threads": os.cpu_count() or 1}, {"deterministic": True}):
            engine = EngineProcess(EngineSpec(options.model, context_length=CONTEXT + 8, **more))
            stack.callback(engine.stop)
            engine.start()
            engines.append(engine)
        result = asyncio.run(compare(*engines, options.model, options))
    print(json.dumps(result))
    print(
        f"--deterministic: {result['ratio']:.3f} ({result['deterministic_tokens_per_s']:.0f} / "
        f"{result['default_tokens_per_s']:.0f} tokens/s at {options.concurrency} in flight); target {TARGET}"
    )
    return int(result["ratio"] < TARGET)


if __name__ == "__main__":
    sys.exit(main())
