"""Tokens that are lost when new weights arrive while requests are in flight.

One engine with the embedded demo model answers requests of a fixed length, streamed, so that each token is seen as it
is sampled. Meanwhile the engine is brought to new weights, again and again, with each ``--pause-mode``. A token that
was seen before an update and is not at its place in the final answer is lost; a request that ``abort`` cut short is
sent again with its tokens, as the rollout's client does.

    python benchmarks/update_in_flight.py [--requests 16] [--tokens 400] [--updates 4]

Prints one JSON object a mode and one line. Target: no token lost with ``in_place`` and ``retract``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import aiohttp
import torch

from agentrl.engines.control import PAUSE_MODES, EngineControl
from agentrl.engines.engine import EngineProcess, EngineSpec
from agentrl.rollout.policies.sglang import new_rid
from agentrl.weights.publisher import Publisher
from agentrl.weights.sender import BroadcastSender, LocalSender
from agentrl.weights.sync import WeightSync
from agentrl.weights.transports.broadcast import Broadcast
from agentrl.weights.transports.files import Files


@dataclass
class Request:
    """One answer as it grows, and what was seen of it at each update."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    sent: int = 0

    async def answered(self, session: aiohttp.ClientSession, url: str, wanted: int) -> None:
        """Ask until all tokens are there."""
        while len(self.tokens) < wanted:
            had, self.sent = list(self.tokens), self.sent + 1
            body = {
                "input_ids": self.prompt + had,
                "sampling_params": {"max_new_tokens": wanted - len(had), "temperature": 1.0, "ignore_eos": True},
                "rid": new_rid(),
                "stream": True,
            }
            async with session.post(url + "/generate", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        self.tokens = had + json.loads(line[6:])["output_ids"]


async def measure(engine: EngineProcess, model: str, mode: str, first: int, args: argparse.Namespace) -> dict[str, Any]:
    """One mode, with versions from ``first`` on."""
    from safetensors.torch import load_file

    weights = {name: tensor.float() for name, tensor in load_file(f"{model}/model.safetensors").items()}
    control = EngineControl(engine.url, engine.api_key)
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        publisher = Publisher(lambda: iter(weights.items()), folder, bucket_bytes=1 << 30, tied_embeddings=True)
        sync = WeightSync(Broadcast(LocalSender(BroadcastSender(publisher))), restore=Files(), pause_mode=mode)

        async def bring(version: int) -> float:
            sync.snapshot = publisher.publish(version)
            return (await sync.update([control])).seconds["transfer"]

        headers, timeout = {"Authorization": f"Bearer {engine.api_key}"}, aiohttp.ClientTimeout(total=300)
        requests = [Request([5 + i, *range(10, 60)]) for i in range(args.requests)]
        paused, in_flight = [], 0
        try:
            await bring(first)
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
                work = [asyncio.create_task(r.answered(session, engine.url, args.tokens)) for r in requests]
                for update in range(1, args.updates + 1):
                    due = args.requests * args.tokens * update // (args.updates + 1)
                    while sum(len(r.tokens) for r in requests) < due:
                        await asyncio.sleep(0.005)
                    for tensor in weights.values():
                        tensor.mul_(1 + 1e-3 * torch.rand_like(tensor))
                    for request in requests:
                        request.seen.append(list(request.tokens))
                    in_flight += sum(not task.done() for task in work)
                    paused.append(await bring(first + update))
                await asyncio.gather(*work)
        finally:
            await sync.close()
            publisher.remove()
            await control.close()
    seen = [(s, r.tokens) for r in requests for s in r.seen]
    lost = sum(now != then for s, tokens in seen for then, now in zip(s, tokens, strict=False))
    return {
        "benchmark": "update_in_flight",
        "mode": mode,
        "updates": args.updates,
        "in_flight_at_updates": in_flight,
        "tokens_seen_before_updates": sum(len(s) for s, _ in seen),
        "tokens_lost": lost,
        "requests_sent_again": sum(r.sent - 1 for r in requests),
        "pause_ms": [round(1e3 * seconds, 1) for seconds in paused],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="in flight at once")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--updates", type=int, default=4)
    args = parser.parse_args()
    model = str(files("agentrl") / "assets" / "demo")
    lost: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as logs:
        engine = EngineProcess(EngineSpec(model), log_dir=logs)
        engine.start()
        try:
            for number, mode in enumerate(PAUSE_MODES):
                result = asyncio.run(measure(engine, model, mode, 1 + number * 100, args))
                lost[mode] = result["tokens_lost"]
                print(json.dumps(result), flush=True)
        finally:
            engine.stop()
    print("tokens lost at updates: " + ", ".join(f"{mode} {n}" for mode, n in lost.items()))
    return int(bool(lost["in_place"] or lost["retract"]))


if __name__ == "__main__":
    sys.exit(main())
