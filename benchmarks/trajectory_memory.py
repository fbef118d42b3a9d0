"""Memory of finished trajectories against the bytes of their arrays.

1,000 episodes of 2,000 tokens and 8 turns are played by the real loop (ToolEnv, tool, template, ledger) against a
scripted engine and kept, as the buffer keeps a rollout. Measured is what Python allocated for them in the end
(tracemalloc, which sees numpy's arrays too), messages, records of turns and calls included. Beside it: how much more is
held at the height of writing all of them to the trajectory store.

    python benchmarks/trajectory_memory.py [--trajectories 1000]

Prints one JSON object and one line. Target: at most 2.0 times the bytes of the arrays.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

from client_cpu import english, make_chat
from concurrency import GROUP, ScriptedEngine
from turn_cost import SAMPLED, make_env, pages_of

from agentrl.data.records import SEGMENT_ARRAYS
from agentrl.data.store import TrajectoryStore
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import SamplingParams, Task, Trajectory

TARGET = 2.0
TURNS, OBSERVED = 8, 152  # with the question and what is sampled: 2,000 tokens


def array_bytes(trajectories: list[Trajectory]) -> int:
    """Bytes of tokens, masks, log-probabilities and versions."""
    return sum(getattr(s, name).nbytes for t in trajectories for s in t.segments for name in SEGMENT_ARRAYS)


async def play(chat: ChatTemplate, words: list[str], pages: list[str], count: int, kept: list[Trajectory]) -> None:
    """Play ``count`` episodes and keep their trajectories."""
    engine = ScriptedEngine(chat, words)
    limits = EpisodeLimits(max_turns=TURNS, max_context_len=1 << 16)
    params = SamplingParams(max_new_tokens=SAMPLED)
    runner = EpisodeRunner(lambda: make_env(pages), engine, chat, params, limits, 64)
    for i in range(count // GROUP):
        kept += (await runner.run_group(Task(f"t{i}", seed=i), GROUP, f"g{i:04d}")).trajectories
    await runner.close()


def measure(options: Any) -> dict[str, Any]:
    """One run."""
    words = english()
    chat = make_chat(words)
    pages = [chat.decode(chat.encoder.encode(page)[:OBSERVED]) for page in pages_of(chat, words)]
    warm: list[Trajectory] = []
    asyncio.run(play(chat, words, pages, GROUP, warm))  # caches and imports are not the trajectories'
    kept: list[Trajectory] = []
    with tempfile.TemporaryDirectory() as folder:
        store = TrajectoryStore(Path(folder))
        store.write(0, warm)
        gc.collect()
        tracemalloc.start()
        asyncio.run(play(chat, words, pages, options.trajectories, kept))
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        path = store.write(1, kept)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        stored = path.stat().st_size
    arrays = array_bytes(kept)
    return {
        "benchmark": "trajectory_memory",
        "trajectories": len(kept),
        "mean_tokens": round(sum(t.num_tokens for t in kept) / len(kept)),
        "array_mib": round(arrays / 2**20, 2),
        "held_mib": round(held / 2**20, 2),
        "write_peak_mib": round((peak - held) / 2**20, 2),
        "stored_mib": round(stored / 2**20, 2),
        "ratio": round(held / arrays, 3),
        "ratio_while_writing": round(peak / arrays, 3),
        "target": TARGET,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1000)
    result = measure(parser.parse_args())
    print(json.dumps(result))
    print(
        f"memory of {result['trajectories']} trajectories of {result['mean_tokens']} tokens / bytes of their arrays: "
        f"{result['ratio']:.2f} ({result['held_mib']:.1f} / {result['array_mib']:.1f} MiB; "
        f"{result['ratio_while_writing']:.2f} while they are stored); target {TARGET}"
    )
    return int(max(result["ratio"], result["ratio_while_writing"]) > TARGET)


if __name__ == "__main__":
    sys.exit(main())
