"""Our CPU per turn against a bare POST and parse of the same bytes.

Ours: everything that an episode does for one turn (template, tokenization, request, parsing the answer, the
model's text and calls, the ledger), with an environment that costs nothing. Bare: the cheapest client
(aiohttp, orjson) posts the very same bodies and parses the very same answers. Both talk to a canned server
in a process of its own; the CPU time is this process's alone. 256 sampled tokens with log-probabilities a
turn, prompts of about 1,000 ids.

    python benchmarks/client_cpu.py [--in-flight 16 256] [--repeats 5] [--uvloop]

Prints one JSON object and one line. Target: ratio at most 2.0 at 16 and at 256 in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import orjson

from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.policies.sglang import EngineClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import SamplingParams, Task

TARGET = 2.0
TURNS = 4
FIRST_WORDS, OBSERVED_WORDS, SAMPLED = 400, 40, 256

TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}
{{- '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def english() -> list[str]:
    """Words of running English that every Python installation carries."""
    from pydoc_data.topics import topics

    return " ".join(topics.values()).split()


def make_chat(words: list[str]) -> ChatTemplate:
    """A byte-level BPE tokenizer trained on ``words``, with Qwen's control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    markup = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(m, normalized=False) for m in markup])
    return ChatTemplate(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    )


class Lookup:
    """An environment without cost: texts cut beforehand, a fixed number of observations."""

    call_format = "auto"
    function = {
        "name": "search",
        "description": "Find pages that answer a question.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    }
    tools = [{"type": "function", "function": function}]

    def __init__(self, questions: list[str], pages: Iterator[str]) -> None:
        self.questions, self.pages, self.turn = questions, pages, 0

    async def areset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        text = self.questions[seed % len(self.questions)]
        return text, {"messages": [{"role": "user", "content": text}], "tools": self.tools}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        text = next(self.pages)  # another page for each turn of each episode
        return text, 0.0, self.turn == TURNS, False, {"messages": [{"role": "tool", "content": text}]}

    async def aclose(self) -> None:
        pass


def cut(words: list[str], length: int) -> list[str]:
    """Texts of ``length`` words, in an order of no account."""
    texts = [" ".join(words[i : i + length]) for i in range(0, len(words) - length, max(1, length // 3))]
    random.Random(0).shuffle(texts)
    return texts


def canned_answer(chat: ChatTemplate, words: list[str]) -> bytes:
    """What the server always says: some thought, one call, 256 tokens in all."""
    call = chat.encoder.encode(
        '\n<tool_call>\n{"name": "search", "arguments": {"query": "who wrote it"}}\n</tool_call>'
    )
    thought = chat.encoder.encode(" ".join(words[5000 : 5000 + SAMPLED]))[: SAMPLED - len(call) - 1]
    ids = [*thought.tolist(), *call.tolist(), chat.end_of_turn_id]
    logprobs = (-np.random.default_rng(0).gamma(0.5, 1.0, len(ids))).astype(np.float32).tolist()
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "stop", "matched": chat.end_of_turn_id},
        "prompt_tokens": 1000,
        "weight_version": "1",
        "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
        "completion_tokens": len(ids),
        "cached_tokens": 900,
        "e2e_latency": 0.5,
        "output_token_logprobs": [[lp, i, None] for lp, i in zip(logprobs, ids, strict=True)],
    }
    return orjson.dumps({"text": chat.decode(ids), "output_ids": ids, "meta_info": meta})


def serve(answer: bytes, port: Any) -> None:
    """A canned HTTP/1.1 server: reads a request, waits a little as an engine would, writes ``answer``."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n".encode()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                header = await reader.readuntil(b"\r\n\r\n")
                at = header.lower().index(b"content-length:") + 15
                await reader.readexactly(int(header[at : header.index(b"\r", at)]))
                await asyncio.sleep(0.02)
                writer.write(head + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1 << 20)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def ours(
    url: str, chat: ChatTemplate, words: list[str], turns: int, in_flight: int, bodies: list[bytes] | None
) -> float:
    """CPU seconds a turn of the episode loop; the bodies sent are appended to ``bodies``."""
    async with EngineClient(url, "key") as client:
        if bodies is not None:
            exchange = client._exchange

            async def recording(payload: bytes, *rest: Any) -> bytes:
                bodies.append(payload)
                return await exchange(payload, *rest)

            client._exchange = recording  # type: ignore[method-assign]
        questions, pages = cut(words, FIRST_WORDS), itertools.cycle(cut(words, OBSERVED_WORDS))
        runner = EpisodeRunner(
            lambda: Lookup(questions, pages), client, chat, SamplingParams(max_new_tokens=SAMPLED),
            EpisodeLimits(max_context_len=8192), in_flight,
        )  # fmt: skip
        groups = max(1, turns // TURNS // 8)
        gc.collect()
        started = time.process_time()
        played = await asyncio.gather(*(runner.run_group(Task(f"t{i}", seed=i), 8, f"g{i:04d}") for i in range(groups)))
        seconds = time.process_time() - started
        failed = [t.error for g in played for t in g.trajectories if t.num_turns != TURNS]
        if failed:
            raise SystemExit(f"{len(failed)} episodes failed: {failed[0]}")
        await runner.close()
        return seconds / (groups * 8 * TURNS)


async def bare(url: str, bodies: list[bytes], in_flight: int) -> float:
    """CPU seconds a request of the cheapest client."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
    queue = iter(bodies)

    async def worker(session: aiohttp.ClientSession) -> None:
        for body in queue:
            async with session.post(url + "/generate", data=body, headers=headers) as answer:
                orjson.loads(await answer.read())

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        gc.collect()
        started = time.process_time()
        await asyncio.gather(*(worker(session) for _ in range(in_flight)))
        return (time.process_time() - started) / len(bodies)


async def measure(url: str, chat: ChatTemplate, words: list[str], in_flight: int, options: Any) -> dict[str, Any]:
    """Interleaved repeats at one concurrency."""
    turns = max(options.turns, 2 * in_flight * TURNS)
    bodies: list[bytes] = []
    await ours(url, chat, words, turns, in_flight, bodies)  # also the warm-up
    pairs = []
    for _ in range(options.repeats):
        pairs.append((await ours(url, chat, words, turns, in_flight, None), await bare(url, bodies, in_flight)))
    prompts = [len(orjson.loads(b)["input_ids"]) for b in bodies[:: max(1, len(bodies) // 100)]]
    return {
        "in_flight": in_flight,
        "ours_ms": round(1e3 * statistics.median(a for a, _ in pairs), 4),
        "bare_ms": round(1e3 * statistics.median(b for _, b in pairs), 4),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "mean_prompt_ids": round(statistics.mean(prompts)),
        "turns": len(bodies),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2048, help="turns a repeat, at least")
    parser.add_argument("--uvloop", action="store_true", help="both sides on uvloop")
    options = parser.parse_args()
    words = english()
    chat = make_chat(words)
    receive, send = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("fork").Process(
        target=serve, args=(canned_answer(chat, words), send), daemon=True
    )
    server.start()
    try:
        if not receive.poll(30):
            raise SystemExit("the canned server did not start within 30 s")
        url = f"http://127.0.0.1:{receive.recv()}"
        factory = None
        if options.uvloop:
            import uvloop

            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            results = [runner.run(measure(url, chat, words, n, options)) for n in options.in_flight]
    finally:
        server.terminate()
        server.join(10)
    worst = max(r["ratio"] for r in results)
    loop = "uvloop" if options.uvloop else "asyncio"
    print(json.dumps({"benchmark": "client_cpu", "loop": loop, "results": results, "ratio": worst, "target": TARGET}))
    shown = ", ".join(
        f"{r['ratio']:.2f} at {r['in_flight']} ({r['ours_ms']:.2f} / {r['bare_ms']:.2f} ms)" for r in results
    )
    print(f"client CPU per turn / bare POST and parse: {shown}; target {TARGET}")
    return int(worst > TARGET)


if __name__ == "__main__":
    sys.exit(main())
