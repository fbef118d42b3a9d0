"""Training, ``eval --base-url`` and ``serve`` show the model the same ids: SGLang's own chat path is the judge."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from published_templates import published_template
from template_oracle import TOOLS, tokenizer

from agentrl.chat_api.reply import Reply, ServerCall
from agentrl.rollout.conversation import Conversation, EpisodeLimits
from agentrl.rollout.policies.openai import ServerChat
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.tools.formats import get_parser
from agentrl.types import SamplingParams

pytestmark = pytest.mark.slow  # SGLang's server code takes tens of seconds to import

SYSTEM = "Reason between <think> and </think>, call with <tool_call>."
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
SCRIPTS = {
    "Qwen-Qwen3-0.6B": ([THOUGHT + CALL, "It is Ann.", "Yes."], {}),
    "Qwen-Qwen3-0.6B, switched off": ([CALL, "It is Ann.", "Yes."], {"enable_thinking": False}),
    "Qwen-QwQ-32B": (
        ["hm\n</think>\n\n" + CALL, "so\n</think>\n\nIt is Ann.", "</think>Yes."],
        {"enable_thinking": True},
    ),
    "Qwen-Qwen2.5-7B-Instruct": ([CALL, "It is Ann.", "Yes."], {}),
}


_SERVER = """
import json, sys
from collections import OrderedDict
from types import SimpleNamespace
from transformers import AutoTokenizer
from agentrl.engines import cpu_backend, server
if cpu_backend.needed():
    cpu_backend.install()
server.leave_tools_as_sent()
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.template_manager import TemplateManager

found = []
for folder, bodies, defaults in json.load(sys.stdin):
    hf = AutoTokenizer.from_pretrained(folder)
    chat = object.__new__(OpenAIServingChat)  # the endpoint, as far as its prompts need it
    chat.__dict__.update(
        tokenizer_manager=SimpleNamespace(tokenizer=hf, served_model_name="m"), template_manager=TemplateManager(),
        default_chat_template_kwargs=defaults, reasoning_parser=None, tool_call_parser=None, _reasoning_detector=None,
        chat_encoding_spec=None, _encoding_adapter=None, is_minimax_m3=False, is_gpt_oss=False, is_gemma4=False,
        _tokenizer_auto_adds_specials=False, _prompt_text_round_trip_is_lossy=False,
        _template_reads_reasoning_content="reasoning_content" in hf.chat_template, _chat_template_cache=OrderedDict(),
    )
    for body in bodies:
        request = ChatCompletionRequest(**body)
        if defaults:  # as _process_messages does it
            request.chat_template_kwargs = {**defaults, **(request.chat_template_kwargs or {})}
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        found.append(chat._apply_jinja_template(request, tools, False).prompt_ids)
print("IDS " + json.dumps(found))
"""
"""Prints what SGLang's chat endpoint makes of requests. A process of its own: what it patches stays there."""


class Recorder:
    """A server that answers what the model said in training; it keeps the bodies of requests."""

    def __init__(self, turns):
        self.bodies, self._turns = [], iter(turns)

    def note(self, text):
        raise AssertionError(text)

    async def complete(self, messages, params, *, tools, seed, timeout, template_kwargs):
        kwargs = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}
        self.bodies.append({"model": "m", "messages": [dict(m) for m in messages], "tools": tools, **kwargs})
        parsed = next(self._turns)
        calls = [ServerCall(c.id, c.name, '{"query": "x"}') for c in parsed.tool_calls]
        kept = {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
        return Reply(
            content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls, kept=kept, finish_reason="stop",
            stopped_by=None, prompt_tokens=None, output_tokens=None, cached_tokens=0,
        )  # fmt: skip


def test_the_ids_of_training_are_those_of_the_server(run, tmp_path):
    """Through ``eval --base-url`` and SGLang's endpoint, with the variables in the requests and set at the server."""
    parts = {"params": SamplingParams(), "limits": EpisodeLimits(), "routing_key": "r", "name": "t"}
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "who?"}]
    observed = [
        [{"role": "tool", "name": "search", "content": "Ann, <b>1</b>", "tool_call_id": "call_0"}],
        [{"role": "user", "content": "sure?"}],
    ]

    async def play(conversation):
        conversation.prompt([dict(m) for m in first], TOOLS)
        turns = []
        for following in [*observed, None]:
            turns.append((await conversation.generate()).parsed)
            if following:
                conversation.observe(following)
        return turns

    asked, expected = [], []
    for number, (case, (script, variables)) in enumerate(SCRIPTS.items()):
        hf = tokenizer(published_template(case.partition(",")[0]), "", "<|im_end|>")
        hf.save_pretrained(tmp_path / str(number))
        chat = ChatTemplate(hf, variables=variables)
        engine = ScriptedClient(script, chat)
        turns = run(play(Conversation(client=engine, chat=chat, parser=get_parser("hermes"), **parts)))
        for sent, at_server in ((variables, {}), ({}, variables)):
            server = Recorder(turns)
            run(play(ServerChat(variables=sent).conversation(client=server, parser=get_parser("hermes"), **parts)))
            asked.append((str(tmp_path / str(number)), server.bodies, at_server))
            expected += [(case, chat.decode(ids), ids.tolist()) for ids in engine.requests]
    done = subprocess.run(
        [sys.executable, "-c", _SERVER], input=json.dumps(asked), capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.rpartition("IDS ")[2])
    for (case, text, ids), theirs in zip(expected, found, strict=True):
        assert ids == theirs, (case, text)
