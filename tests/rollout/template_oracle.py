"""An oracle for chat templates: transformers renders the whole history, and its ids are what the engine must have seen.

A dialog is a list of turns, each with what the environment answers. What the model samples for a turn is written as
the template itself writes it behind its generation prompt, so that ids can be compared to the last one; where the
template's history would never write it so, as the model would.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.rollout.conversation import Conversation, EpisodeLimits
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.template.fast_text import byte_alphabet
from agentrl.tools.formats import get_parser
from agentrl.types import Generation, SamplingParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find a page.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
_CONTROL = re.compile(
    r"<[|｜][^|｜<>\s{}]+[|｜]>|</?(?:think|tool_call|tool_response|arg_key|arg_value|s|sop)>"
    r"|\[/?[A-Z][A-Z_]{2,}\]|\[gMASK\]"
)
_THOUGHT = re.compile(r"\s*(<think>|\[THINK\])?(.*?)(</think>|\[/THINK\])\s*", re.DOTALL)


@dataclass
class Turn:
    """What the model says, and what answers it: results for calls, else the user's words."""

    content: str = ""
    queries: tuple[str, ...] = ()
    reasoning: str | None = None  # None: no block; "": an empty one
    answers: tuple[str, ...] = ()

    def message(self, ids: list[str]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.queries:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": "search", "arguments": {"query": query}}}
                for i, query in zip(ids, self.queries, strict=False)
            ]
        return message

    def answer(self, ids: list[str]) -> list[dict[str, Any]]:
        if not self.queries:
            return [{"role": "user", "content": text} for text in self.answers]
        return [
            {"role": "tool", "name": "search", "content": text, "tool_call_id": i}
            for i, text in zip(ids, self.answers, strict=False)
        ]


def dialogs(reasoning: tuple[str | None, ...]) -> dict[str, list[Turn]]:
    """The fixed dialogs; the turns of each think in the given ways, one after the other."""
    first, second = ("And then?",), ("Who else?",)
    made = {
        "plain": [Turn("Ann.", answers=first), Turn("Bea.", answers=second), Turn("Cy.")],
        "call": [Turn("", ("who",), answers=("Ann",)), Turn("It is Ann.", answers=first), Turn("Bea.")],
        "words and call": [Turn("I look.", ("who",), answers=("Ann",)), Turn("It is Ann.", answers=first), Turn("So.")],
        "parallel": [Turn("", ("a", "b"), answers=("Ann", "Bea")), Turn("Both.", answers=first), Turn("So.")],
        "empty result": [Turn("", ("who",), answers=("",)), Turn("Nobody.", answers=first), Turn("So.")],
        "chain": [
            Turn("", ("a",), answers=("Ann",)), Turn("", ("b",), answers=("Bea",)), Turn("Both.", answers=second),
            Turn("", ("c",), answers=("Cy",)), Turn("Cy.", answers=first), Turn("So."),
        ],
    }  # fmt: skip
    for turns in made.values():
        for i, turn in enumerate(turns):
            turn.reasoning = reasoning[i % len(reasoning)]
    return made


def tokenizer(template: str, bos: str = "", eos: str = "") -> Any:
    """One id a byte, and the control tokens that the template's source names."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in byte_alphabet().items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = dict.fromkeys([*filter(None, (bos, eos)), *_CONTROL.findall(template)])
    made.add_special_tokens([AddedToken(text, normalized=False) for text in found])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, bos_token=bos or None, eos_token=eos or None
    )


class _Engine:
    """Samples the given texts; each token has a log-probability and, within a turn, versions of its own."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.requests: list[list[int]] = []
        self.sampled: list[tuple[int, float, int]] = []
        self.says = ""
        self._chat = chat

    async def generate(self, input_ids: np.ndarray, params: SamplingParams, **_: Any) -> Generation:
        self.requests.append(input_ids.tolist())
        ids = self._chat.encoder.encode_after_control(self.says)
        first = len(self.sampled)
        logprobs = -0.001 * np.arange(first + 1, first + 1 + len(ids), dtype=np.float32)
        versions = np.arange(first, first + len(ids), dtype=np.int32)
        self.sampled += zip(ids.tolist(), logprobs.tolist(), versions.tolist(), strict=True)
        return Generation(ids, logprobs, versions, "stop", prompt_tokens=len(input_ids))


@dataclass
class Played:
    """What came of a dialog: the requests as sent and as the oracle wants them."""

    requests: list[list[int]] = field(default_factory=list)
    wanted: list[list[int] | None] = field(default_factory=list)  # None: transformers cannot render it
    segments: int = 0
    needed: int = 1  # segments, by the oracle: one more where its rendering does not go on from what was sampled
    exact: bool = False  # each sampled token once, with its own log-probability and version

    def problems(self, chat: ChatTemplate) -> list[str]:
        found = []
        for number, (request, wanted) in enumerate(zip(self.requests, self.wanted, strict=True)):
            if wanted is not None and request != wanted:
                pairs = enumerate(zip(request, wanted, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), min(len(request), len(wanted)))
                got, want = (chat.decode(np.array(ids[max(0, at - 60) : at + 80])) for ids in (request, wanted))
                found.append(f"request {number + 1}: {got!r} where transformers writes {want!r}")
        if self.segments != self.needed and None not in self.wanted:
            found.append(f"{self.segments} segments, {self.needed} needed")
        if not self.exact:
            found.append("a sampled token is not recorded exactly once, with its own numbers")
        return found


async def play(hf: Any, chat: ChatTemplate, turns: list[Turn], *, system: str = "Be brief.", **kwargs: Any) -> Played:
    """Play ``turns`` and ask the oracle at each request; ``kwargs`` are the template's."""
    engine, played = _Engine(chat), Played()
    conversation = Conversation(
        client=engine, chat=chat, parser=get_parser(chat.call_format), params=SamplingParams(), limits=EpisodeLimits(),
        routing_key="r", name="t",
    )  # fmt: skip
    tools = TOOLS if chat.call_format != "none" else None
    first = [{"role": "system", "content": system}] if system else []
    history: list[dict[str, Any]] = [*first, {"role": "user", "content": "who?"}]
    conversation.prompt(list(history), tools)

    def rendered(messages: list[dict[str, Any]], *, generation: bool = True) -> str:
        return hf.apply_chat_template(
            _in_form(chat, messages), tools=tools, add_generation_prompt=generation, tokenize=False, **kwargs
        )

    sent: list[int] = []
    for number, turn in enumerate(turns):
        prompt = rendered(history)
        wanted = hf.encode(prompt, add_special_tokens=False)
        played.wanted.append(wanted)
        if number and wanted[: len(sent)] != sent:
            played.needed += 1
        so_far = list(history)
        engine.says = _sampled(chat, turn, prompt, lambda *new: rendered([*so_far, *new], generation=False))  # noqa: B023
        got = await conversation.generate()
        ids = [call.id for call in got.parsed.tool_calls]
        queries = [call.arguments.get("query") for call in got.parsed.tool_calls]
        assert queries == list(turn.queries), (engine.says, got.parsed)
        sent = [*engine.requests[-1], *got.tokens.tolist()]
        history += [turn.message(ids), *turn.answer(ids)]
        if turn is not turns[-1]:
            conversation.observe(turn.answer(ids))
    played.requests = engine.requests
    segments = conversation.segments()
    played.segments = len(segments)
    kept = [
        (int(s.tokens[i]), float(s.logprobs[i]), int(s.versions[i]))
        for s in segments
        for i in np.flatnonzero(s.loss_mask)
    ]
    starts_right = all(
        any(s.tokens[: len(r)].tolist() == r[: len(s.tokens)] for s in segments) for r in engine.requests
    )
    played.exact = kept == engine.sampled and starts_right
    return played


def _in_form(chat: ChatTemplate, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls in the form that the template takes, which differs: arguments as text, content as None."""
    from agentrl.rollout.template.rendering import _in_form

    return [_in_form(message, chat.renderer.call_form) for message in messages]


def _sampled(chat: ChatTemplate, turn: Turn, prompt: str, written: Any) -> str:
    """The turn as the model samples it after ``prompt``."""
    ends = [text for text, index in chat.encoder.control_ids.items() if index in chat.eos_token_ids]
    ids = [f"functions.search:{i}" if chat.call_format == "kimi_k2" else f"call0000{i}" for i in range(2)]
    own = written(turn.message(ids))
    opened = chat.opening_of(np.array(chat.encoder.encode(prompt)))
    if own.startswith(prompt):
        said = _cut(own[len(prompt) :], ends)
        block = _THOUGHT.match(said)
        if turn.reasoning and turn.reasoning in said:
            return said
        if (turn.reasoning == "" or opened) and not turn.reasoning and block and not block[2].strip():
            return said
        if turn.reasoning is None and not block:
            return said
    # Not in the history as it is sampled: the words as written without thinking, and a block in front of them.
    bare = written()
    header = _THOUGHT.sub("", prompt[len(bare) :].partition("<think>")[0].partition("</think>")[0]).rstrip()
    plain = written(Turn(turn.content, turn.queries).message(ids))
    if plain.startswith(bare):
        start = plain.index(header, len(bare)) + len(header)
    else:  # the template writes what stood before in another way
        start = plain.rindex(header) + len(header) if header else plain.rindex(bare[-8:]) + 8
    body = _cut(plain[start:], ends)
    body = _THOUGHT.sub("", body, count=1) if _THOUGHT.match(body) else body
    body = body.lstrip("\n")
    if opened:
        return f"{turn.reasoning or ''}\n</think>\n\n{body}"
    return body if turn.reasoning is None else f"<think>\n{turn.reasoning}\n</think>\n\n{body}"


def _cut(text: str, ends: list[str]) -> str:
    """Up to and with the first token that ends a turn."""
    found = [at + len(end) for end in ends if (at := text.find(end)) >= 0]
    return text[: min(found)] if found else text.rstrip("\n")
