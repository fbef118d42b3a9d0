"""CPU of a turn in the rollout process: ours, the cheapest client, and the loops of two other projects.

All talk to one stub of an engine in a process of its own; the CPU time is this process's alone (threads included).
An episode has 8 turns; each samples 256 tokens with their log-probabilities, ends with one call of a search tool, and
gets an observation of 200 tokens. Prompts have some 600 ids at first and 4,000 at the end. The tool is a function in
this process that gives a page at once, the same for all.

- ``ours``: the episode loop with a ``ToolEnv`` and its tool: template, tokenization, request, the answer's JSON, the
  model's text and calls, the tool's call, rewards, the ledger.
- ``bare``: posts the bodies that ours sent and parses the answers; a protocol of twenty lines that knows nothing but
  ``Content-Length``, and orjson.
- ``skyrl-gym``: a turn as SkyRL's generator takes it, with skyrl-gym's own ``BaseTextEnv``, ``ToolGroup`` and
  ``tool`` (install ``skyrl-gym`` to have it; it is left out otherwise). Requests as its remote engine sends them: a
  new aiohttp session each, a batch of one prompt as a list of ids, the standard library's JSON, ids decoded by the
  tokenizer; the environment steps in its pool of 32 threads, finds the call by regular expression and keeps the
  history; the observation is encoded by rendering a fixed conversation and the new message through the chat template,
  less the tokens of the fixed part; ids and masks are lists. Log-probabilities are asked for, as in a run with
  importance correction.
- ``search-r1``: a turn as slime's search-r1 example takes it in its manual token tracking: the whole text so far is
  posted by httpx as JSON, the answer is read by the standard library, cut after the first ``</search>``, taken apart
  by a regular expression, its ids and log-probabilities are appended one by one, and the observation is tokenized by
  the transformers tokenizer's own call.

    python benchmarks/client_cpu.py [--in-flight 32] [--repeats 10] [--only ours bare]

Prints one JSON object and one line a figure. Targets: ours ÷ bare at most 6, ÷ skyrl-gym at most 0.5, ÷ search-r1 at
most 0.2, each the median over alternating repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import random
import re
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import numpy as np
import orjson

import agentrl
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.policies.sglang import EngineClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import SamplingParams, Task

TARGETS = {"bare": 6.0, "skyrl-gym": 0.5, "search-r1": 0.2}
TURNS, FIRST_WORDS, OBSERVED, SAMPLED = 8, 400, 200, 256
CALLS = {
    "/generate": '\n<tool_call>\n{"name": "search", "arguments": {"query": "who wrote it", "page": 3}}\n</tool_call>',
    "/tags/generate": "\n<search>who wrote it</search>",
}
"""By path of the stub: what an answer ends with. Ours calls a tool by JSON, the other two by tags."""

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


def make_tokenizer(words: list[str]) -> Any:
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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)


def make_chat(words: list[str]) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(words))


def cut(words: list[str], length: int) -> list[str]:
    """Texts of ``length`` words, in an order of no account."""
    texts = [" ".join(words[i : i + length]) for i in range(0, len(words) - length, max(1, length // 3))]
    random.Random(0).shuffle(texts)
    return texts


def pages_of(chat: ChatTemplate, words: list[str]) -> list[str]:
    """Texts of ``OBSERVED`` tokens."""
    ids = chat.encoder.encode(" ".join(words))
    pages = [chat.decode(ids[i : i + OBSERVED]) for i in range(0, len(ids) - OBSERVED, OBSERVED)]
    random.Random(0).shuffle(pages)
    return pages


# -- the stub engine -----------------------------------------------------------------------------------


def answer(chat: ChatTemplate, words: list[str], call: str) -> bytes:
    """What the engine always says: some thought, one call, 256 tokens in all."""
    ending = chat.encoder.encode(call)
    thought = chat.encoder.encode(" ".join(words[5000 : 5000 + SAMPLED]))[: SAMPLED - len(ending) - 1]
    ids = [*thought.tolist(), *ending.tolist(), chat.end_of_turn_id]
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
    return orjson.dumps({"text": chat.decode(ids[:-1]), "output_ids": ids, "meta_info": meta})


def serve(answers: dict[str, bytes], port: Any) -> None:
    """An HTTP/1.1 server: reads a request, waits 20 ms as an engine would, and says what its path says.

    A batch of prompts (a list of lists of ids) is answered by a list, as SGLang does.
    """

    def reply(body: bytes) -> bytes:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    single = {path: reply(body) for path, body in answers.items()}
    listed = {path: reply(b"[" + body + b"]") for path, body in answers.items()}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                header = await reader.readuntil(b"\r\n\r\n")
                path = header.split(b" ", 2)[1].decode()
                at = header.lower().index(b"content-length:") + 15
                body = await reader.readexactly(int(header[at : header.index(b"\r", at)]))
                await asyncio.sleep(0.02)
                writer.write((listed if b'"input_ids": [[' in body[:64] else single)[path])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1 << 20)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


# -- ours ----------------------------------------------------------------------------------------------


def lookup(result: Callable[[], str], question: Callable[[], str], turns: int) -> type[agentrl.ToolEnv]:
    """Environments with one tool, whose episodes end with a budget. ``result`` and ``question`` are asked each time."""

    @agentrl.tool
    async def search(query: str, page: int = 1) -> str:
        """Finds pages that answer a question.

        Args:
            query: What is looked for.
            page: Which page of results.
        """
        return result()

    class Lookup(agentrl.ToolEnv):
        tools = (search,)
        max_turns = turns

        async def task(self, rng: np.random.Generator, split: str) -> tuple[str, str]:
            return question(), "nobody"

        async def reward(self, text: str, answer: str) -> float:
            return float(text == answer)

    return Lookup


def make_env(pages: list[str], questions: list[str]) -> agentrl.Env:
    drawn = random.Random(1)
    return lookup(lambda: drawn.choice(pages), lambda: drawn.choice(questions), TURNS)()


class Ours:
    def __init__(self, url: str, chat: ChatTemplate, words: list[str]) -> None:
        self.url, self.chat = url, chat
        self.pages, self.questions = pages_of(chat, words), cut(words, FIRST_WORDS)

    async def __call__(self, episodes: int, in_flight: int, bodies: list[bytes] | None = None) -> float:
        """CPU seconds a turn; the bodies sent are appended to ``bodies``."""
        async with EngineClient(self.url, "key") as client:
            if bodies is not None:
                exchange = client._exchange

                async def recording(payload: bytes, *rest: Any) -> bytes:
                    bodies.append(payload)
                    return await exchange(payload, *rest)

                client._exchange = recording  # type: ignore[method-assign]
            runner = EpisodeRunner(
                lambda: make_env(self.pages, self.questions), client, self.chat,
                SamplingParams(max_new_tokens=SAMPLED), EpisodeLimits(max_turns=TURNS, max_context_len=1 << 16),
                in_flight,
            )  # fmt: skip
            await runner.run_group(Task("warm", seed=0), in_flight, "warm")  # makes the environments
            if bodies is not None:
                bodies.clear()
            gc.collect()
            started = time.process_time()
            groups = [runner.run_group(Task(f"t{i}", seed=i), 8, f"g{i:04d}") for i in range(episodes // 8)]
            played = await asyncio.gather(*groups)
            seconds = time.process_time() - started
            await runner.close()
            failed = [t.error or t.stop_reason for g in played for t in g.trajectories if t.num_turns != TURNS]
            if failed:
                raise SystemExit(f"{len(failed)} episodes failed: {failed[0]}")
            return seconds / (episodes * TURNS)


# -- the cheapest client -------------------------------------------------------------------------------


class Bare(asyncio.Protocol):
    """One kept-alive connection: bytes out, the body that ``Content-Length`` announces back."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.data = transport, bytearray()

    def post(self, request: bytes) -> asyncio.Future[bytes]:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.answer

    def data_received(self, data: bytes) -> None:
        self.data += data
        start = self.data.find(b"\r\n\r\n") + 4
        at = self.data.find(b"Content-Length:") + 15
        if len(self.data) >= start + int(self.data[at : self.data.find(b"\r", at)]):
            self.answer.set_result(bytes(self.data[start:]))
            self.data = bytearray()


async def bare(url: str, bodies: list[bytes], in_flight: int) -> float:
    """CPU seconds a request."""
    host, port = url.removeprefix("http://").split(":")
    queue = iter(bodies)
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: ".encode()

    async def worker(connection: Bare) -> None:
        for body in queue:
            orjson.loads(await connection.post(head + b"%d\r\n\r\n" % len(body) + body))

    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(Bare, host, int(port)))[1] for _ in range(in_flight)]
    gc.collect()
    started = time.process_time()
    await asyncio.gather(*map(worker, connections))
    seconds = (time.process_time() - started) / len(bodies)
    for connection in connections:
        connection.transport.abort()
    return seconds


# -- the loops of others -------------------------------------------------------------------------------


async def paced(play: Callable[[int], Awaitable[None]], episodes: int, in_flight: int) -> float:
    """CPU seconds a turn of ``episodes`` episodes, ``in_flight`` at once."""
    slots = asyncio.Semaphore(in_flight)

    async def one(number: int) -> None:
        async with slots:
            await play(number)

    gc.collect()
    started = time.process_time()
    await asyncio.gather(*map(one, range(episodes)))
    return (time.process_time() - started) / (episodes * TURNS)


class SkyrlGym:
    """SkyRL's loop around an environment of skyrl-gym."""

    def __init__(self, url: str, tokenizer: Any, pages: list[str], questions: list[str]) -> None:
        from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
        from skyrl_gym.tools.core import ToolGroup, tool

        drawn = random.Random(1)

        class Pages(ToolGroup):
            def __init__(self) -> None:
                super().__init__(name="Pages")

            @tool
            def search(self, query: str) -> str:
                return drawn.choice(pages)

        class Lookup(BaseTextEnv):
            def __init__(self) -> None:
                super().__init__()
                self.max_turns = TURNS
                self.init_tool_groups([Pages()])
                self.chat_history: list[dict[str, str]] = []

            def step(self, action: str) -> BaseTextEnvStepOutput:
                self.turns += 1
                self.chat_history.append({"role": "assistant", "content": action})
                if self.turns >= self.max_turns or ("<answer>" in action and "</answer>" in action):
                    return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})
                found = re.search(r"<search>(.*?)</search>", action, re.DOTALL)
                text = self._execute_tool("Pages", "search", [found.group(1) if found else None])
                message = {"role": "user", "content": f"\n<information>{text}</information>\n"}
                self.chat_history.append(message)
                return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata={})

        self.url, self.tokenizer, self.questions = f"{url}/tags/generate", tokenizer, questions
        self.make_env, self.threads = Lookup, ThreadPoolExecutor(32)
        self.base = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hi."}]
        base_ids = self.render(self.base, generation=False)
        last = len(base_ids) - base_ids[::-1].index(tokenizer.eos_token_id)
        self.base_length = last  # what follows the last end of a turn belongs to the observation

    def render(self, messages: list[dict[str, str]], *, generation: bool) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=generation, tokenize=True, return_dict=False
        )

    async def __call__(self, episodes: int, in_flight: int) -> float:
        return await paced(self.play, episodes, in_flight)

    async def generate(self, ids: list[int]) -> tuple[str, list[int], list[float]]:
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": SAMPLED}
        payload = {"input_ids": [ids], "sampling_params": sampling, "return_logprob": True}
        headers = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(self.url, json=payload, headers=headers) as response,
        ):
            (output,) = await response.json()
        text = self.tokenizer.decode(output["output_ids"], skip_special_tokens=True)
        return text, output["output_ids"], [t[0] for t in output["meta_info"]["output_token_logprobs"]]

    async def play(self, number: int) -> None:
        env, loop = self.make_env(), asyncio.get_running_loop()
        prompt = [{"role": "user", "content": self.questions[number % len(self.questions)]}]
        prompt, _ = await loop.run_in_executor(self.threads, env.init, prompt)
        ids = self.render(prompt, generation=True)
        mask: list[int] = []
        logprobs: list[float] = []
        done = False
        while not done:
            text, sampled, values = await self.generate(ids)
            step = await loop.run_in_executor(self.threads, env.step, text)
            done = step["done"]
            ids += sampled
            mask += [1] * len(sampled)
            logprobs += values
            if step["observations"]:
                new = self.render([*self.base, *step["observations"]], generation=not done)[self.base_length :]
                ids += new
                mask += [0] * len(new)
                logprobs += [0.0] * len(new)
        await loop.run_in_executor(self.threads, env.close)


class SearchR1:
    """The text loop of slime's search-r1 example."""

    def __init__(self, url: str, tokenizer: Any, pages: list[str], questions: list[str]) -> None:
        self.url, self.tokenizer = f"{url}/tags/generate", tokenizer
        self.pages, self.questions, self.drawn = pages, questions, random.Random(1)
        self.sampling = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": SAMPLED, "stop": ["</search>"]}

    async def __call__(self, episodes: int, in_flight: int) -> float:
        limits = httpx.Limits(max_connections=in_flight)
        async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None)) as self.client:
            return await paced(self.play, episodes, in_flight)

    async def search(self, query: str) -> str:
        return self.drawn.choice(self.pages)

    async def play(self, number: int) -> None:
        prompt = self.questions[number % len(self.questions)]
        prompt_ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        said = ""
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for _ in range(TURNS):
            payload = {"text": prompt + said, "sampling_params": self.sampling, "return_logprob": True}
            response = await self.client.post(self.url, json=payload)
            response.raise_for_status()
            output = response.json()
            text = output["text"].split("</search>")[0] + "</search>"
            sampled: list[int] = []
            for value, index, _ in output["meta_info"]["output_token_logprobs"]:
                sampled.append(index)
                logprobs.append(float(value))
            ids.extend(sampled)
            mask.extend([1] * len(sampled))
            said += text
            found = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
            assert found is not None
            new = f"\n\n<information>{(await self.search(found.group(2).strip())).strip()}</information>\n\n"
            new_ids = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            ids.extend(new_ids)
            logprobs.extend([0.0] * len(new_ids))
            mask.extend([0] * len(new_ids))
            said += new
        assert len(prompt_ids) and len(ids) == len(mask)


async def measure(
    url: str, chat: ChatTemplate, tokenizer: Any, words: list[str], options: argparse.Namespace
) -> dict[str, list[float]]:
    """CPU seconds a turn of each contender, in alternating repeats."""
    play = Ours(url, chat, words)
    bodies: list[bytes] = []
    episodes = max(options.episodes, 2 * options.in_flight)
    await play(episodes, options.in_flight, bodies)  # also the warm-up
    runs: dict[str, Callable[[], Awaitable[float]]] = {
        "ours": lambda: play(episodes, options.in_flight),
        "bare": lambda: bare(url, bodies, options.in_flight),
    }
    for name, loop in (("skyrl-gym", SkyrlGym), ("search-r1", SearchR1)):
        if name in options.only:
            try:
                theirs = loop(url, tokenizer, play.pages, play.questions)
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            await theirs(options.in_flight, options.in_flight)  # warm-up
            runs[name] = lambda theirs=theirs: theirs(episodes, options.in_flight)
    seconds: dict[str, list[float]] = {name: [] for name in runs if name in options.only}
    for _ in range(options.repeats):
        for name, found in seconds.items():
            found.append(await runs[name]())
    return seconds


@contextlib.contextmanager
def stub(chat: ChatTemplate, words: list[str]) -> Any:
    """The address of the stub engine, in a process of its own."""
    receive, send = multiprocessing.Pipe(duplex=False)
    answers = {path: answer(chat, words, call) for path, call in CALLS.items()}
    server = multiprocessing.get_context("fork").Process(target=serve, args=(answers, send), daemon=True)
    server.start()
    try:
        if not receive.poll(30):
            raise SystemExit("the stub engine did not start within 30 s")
        yield f"http://127.0.0.1:{receive.recv()}"
    finally:
        server.terminate()
        server.join(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--episodes", type=int, default=64, help="episodes a repeat, at least")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=["ours", *TARGETS], choices=["ours", *TARGETS])
    options = parser.parse_args()
    words = english()
    tokenizer = make_tokenizer(words)
    chat = ChatTemplate(tokenizer)
    with stub(chat, words) as url:
        seconds = asyncio.run(measure(url, chat, tokenizer, words, options))
    result: dict[str, Any] = {"benchmark": "client_cpu", "in_flight": options.in_flight, "targets": TARGETS}
    result["ms"] = {name: round(1e3 * statistics.median(found), 3) for name, found in seconds.items()}
    ratios = {
        name: [a / b for a, b in zip(seconds["ours"], seconds[name], strict=True)]
        for name in TARGETS
        if name in seconds and "ours" in seconds
    }
    result["ratios"] = {name: round(statistics.median(found), 3) for name, found in ratios.items()}
    result["each"] = {name: [round(ratio, 3) for ratio in found] for name, found in ratios.items()}
    print(json.dumps(result))
    for name, ratio in result["ratios"].items():
        print(
            f"client CPU a turn ÷ {name}: {ratio:.2f} ({result['ms']['ours']:.2f} / {result['ms'][name]:.2f} ms); "
            f"target {TARGETS[name]}"
        )
    return int(any(ratio > TARGETS[name] for name, ratio in result["ratios"].items()))


if __name__ == "__main__":
    sys.exit(main())
