"""Token exactness over model families: what the engine sees, id for id, over several turns with tools.

The transcripts of ``family_dialogues.py`` are literal: ``·`` is given, ``+`` sampled, ``«...»`` a control token.
"""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pytest
from family_cases import FAMILIES, TEMPLATES, TOOLS, checkpoint, shown, tokenizer, transcript
from family_dialogues import DIALOGUES, KIMI_ASSISTANT, LLAMA_ASSISTANT

import agentrl
from agentrl.rollout.conversation import Conversation, EpisodeLimits
from agentrl.rollout.episode import run_episode
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.tools.formats import get_parser
from agentrl.types import SamplingParams, StopReason, Task


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """A :class:`ChatTemplate` a family, loaded as from a checkpoint."""
    return {name: ChatTemplate(checkpoint(name, tmp_path_factory.mktemp(name))) for name in FAMILIES}


def sampled_texts(segments):
    """What the model says in these segments, for the scripted engine."""
    return [line[1:].replace("«", "").replace("»", "") for lines in segments for line in lines if line[0] == "+"]


def converse(chat, script, *, tools=TOOLS, system=True):
    client = ScriptedClient(script, chat)
    conversation = Conversation(
        client=client, chat=chat, parser=get_parser(chat.call_format), params=SamplingParams(), limits=EpisodeLimits(),
        routing_key="r", name="t",
    )  # fmt: skip
    first = [{"role": "system", "content": "Be brief."}] if system else []
    conversation.prompt([*first, {"role": "user", "content": "who?"}], tools)
    return conversation, client


def answers(turn, *contents):
    """Results for the turn's calls, as :class:`agentrl.ToolEnv` gives them."""
    return [
        {"role": "tool", "name": call.name, "content": content, "tool_call_id": call.id}
        for call, content in zip(turn.parsed.tool_calls, contents, strict=True)
    ]


def ask(text="sure?"):
    return [{"role": "user", "content": text}]


def sampled_in(conversation):
    """Ids with mask 1, over all segments."""
    return [t for s in conversation.segments() for t in s.tokens[s.loss_mask == 1].tolist()]


@pytest.mark.parametrize("name", DIALOGUES)
def test_ids_and_masks_of_a_dialogue(families, run, name):
    chat = families[name]

    async def play():
        conversation, client = converse(chat, sampled_texts(DIALOGUES[name]), system=name != "mistral")
        said = []
        turn = await conversation.generate()
        assert [(c.name, c.arguments, c.error) for c in turn.parsed.tool_calls] == [("search", {"query": "x"}, None)]
        said += turn.tokens.tolist()
        conversation.observe(answers(turn, "Ann"))
        turn = await conversation.generate()
        assert (turn.parsed.content, turn.parsed.tool_calls) == ("It is Ann.", [])
        said += turn.tokens.tolist()
        conversation.observe(ask())
        turn = await conversation.generate()
        assert turn.parsed.content == "Yes."
        return conversation, client, said + turn.tokens.tolist()

    conversation, client, said = run(play())
    segments = conversation.segments()
    found = [shown(chat, s.tokens, s.loss_mask) for s in segments]
    for segment, expected in zip(segments, DIALOGUES[name], strict=True):
        ids, mask = transcript(name, expected)
        assert segment.tokens.tolist() == ids, found
        assert segment.loss_mask.tolist() == mask, found
    assert sampled_in(conversation) == said  # each sampled token is trained once, in order

    # What the engine saw last is what the tokenizer itself makes of the whole conversation.
    oracle = tokenizer(name).encode(hf_text(name, conversation.messages[:-1]), add_special_tokens=False)
    assert client.requests[-1].tolist() == oracle
    for request, following in zip(client.requests[:-1], client.requests[1:], strict=True):
        extends = following[: len(request)].tolist() == request.tolist()
        assert extends or len(DIALOGUES[name]) > 1


def hf_text(name, messages):
    """The conversation by transformers alone, in the form that the family publishes."""
    given = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls") and name.startswith("deepseek"):
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [{**f, "arguments": '{"query": "x"}'} for f in functions]
            message["tool_calls"] = [{"type": "function", "id": "0", "function": f} for f in calls]
            message["content"] = message["content"] or None
        given.append(message)
    return tokenizer(name).apply_chat_template(given, tools=TOOLS, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_in_tool_text_are_split(families, run, name):
    chat = families[name]
    evil = "a" + "b".join(FAMILIES[name]["control"]) + "c"
    calm = "a harmless text"

    async def play(result):
        conversation, client = converse(chat, sampled_texts(DIALOGUES[name])[:1], system=False)
        turn = await conversation.generate()
        conversation.observe(answers(turn, result))
        await conversation.generate()
        return client.requests[-1]

    def controls(ids):
        return [i for i in ids.tolist() if i >= 256]

    sent = run(play(evil))
    assert controls(sent) == controls(run(play(calm)))
    assert (evil in chat.decode(sent)) or name == "llama3"  # which quotes it


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_cannot_be_read_is_answered_and_the_episode_goes_on(families, run, name):
    chat = families[name]
    broken = {
        "glm4.5": "<tool_call>search<arg_key></tool_call><|observation|>",
        "llama3": '{"name": "search", "parameters": {"query"',
        "mistral": '[TOOL_CALLS] [{"name": "search"',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>search<|tool_call_end|>",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁call▁end｜>",
        "deepseek_r1": "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁call▁end｜>",
    }.get(name, "<tool_call>\n{oops}\n</tool_call>")

    async def play():
        conversation, _ = converse(chat, [broken, *sampled_texts(DIALOGUES[name])[1:]])
        turn = await conversation.generate()
        (call,) = turn.parsed.tool_calls
        assert call.error
        conversation.observe(answers(turn, "Write it so."))
        said = turn.tokens.tolist() + (await conversation.generate()).tokens.tolist()
        conversation.observe(ask())
        return conversation, said + (await conversation.generate()).tokens.tolist()

    conversation, said = run(play())
    assert sampled_in(conversation) == said
    assert "Write it so." in chat.decode(conversation.segments()[-1].tokens)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "glm4.5", "deepseek_v3", "kimi_k2", "llama3", "mistral"])
def test_two_results_of_one_turn(families, run, name):
    chat = families[name]
    call = {
        "glm4.5": "<tool_call>search\n</tool_call>",
        "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{}\n```<｜tool▁call▁end｜>",
        "llama3": '{"name": "search", "parameters": {}}',
        "mistral": '{"name": "search", "arguments": {}}',
    }.get(name, '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>')
    two = {
        "glm4.5": f"\n<think></think>\n{call}\n{call}<|observation|>",
        "llama3": f"{call}; {call}",
        "mistral": f"[TOOL_CALLS] [{call}, {call}]",
        "deepseek_v3": f"<｜tool▁calls▁begin｜>{call}\n{call}<｜tool▁calls▁end｜>",
        "kimi_k2": "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.search:{i}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for i in (0, 1)
        )
        + "<|tool_calls_section_end|>",
    }.get(name, f"{call}\n{call}")
    given = {
        "glm4.5": "·\n«<tool_response>»\nAnn\n«</tool_response>»\n«<tool_response>»\nBob\n«</tool_response>»"
        "«<|assistant|>»",
        "llama3": '·«<|start_header_id|>»ipython«<|end_header_id|>»\n\n"Ann"«<|eot_id|>»'
        '«<|start_header_id|>»ipython«<|end_header_id|>»\n\n"Bob"«<|eot_id|>»' + LLAMA_ASSISTANT,
        "mistral": '·«[TOOL_RESULTS]» {"content": Ann, "call_id": "call00000"}«[/TOOL_RESULTS]»'
        '«[TOOL_RESULTS]» {"content": Bob, "call_id": "call00001"}«[/TOOL_RESULTS]»',
        "deepseek_v3": "·«<｜tool▁outputs▁begin｜>»«<｜tool▁output▁begin｜>»Ann«<｜tool▁output▁end｜>»\n"
        "«<｜tool▁output▁begin｜>»Bob«<｜tool▁output▁end｜>»«<｜tool▁outputs▁end｜>»",
        "kimi_k2": "·«<|im_system|>»search«<|im_middle|>»## Return of functions.search:0\nAnn«<|im_end|>»"
        "«<|im_system|>»search«<|im_middle|>»## Return of functions.search:1\nBob«<|im_end|>»" + KIMI_ASSISTANT,
    }.get(
        name,
        "·\n«<|im_start|>»user\n«<tool_response>»\nAnn\n«</tool_response>»\n«<tool_response>»\nBob\n«</tool_response>»"
        "«<|im_end|>»\n«<|im_start|>»assistant\n",
    )

    async def play():
        conversation, _ = converse(chat, [two, "Done."], system=False)
        turn = await conversation.generate()
        assert [c.error for c in turn.parsed.tool_calls] == [None, None]
        conversation.observe(answers(turn, "Ann", "Bob"))
        await conversation.generate()
        return conversation

    (segment,) = run(play()).segments()
    lines = shown(chat, segment.tokens, segment.loss_mask)
    assert lines[2] == given


def test_without_reasoning_nothing_is_stripped_and_one_segment_does(families, run):
    async def play():
        conversation, _ = converse(families["qwen3"], ["Ann.", "Yes.", "Yes!"])
        for _ in range(2):
            await conversation.generate()
            conversation.observe(ask())
        await conversation.generate()
        return conversation

    (segment,) = run(play()).segments()
    assert [line[0] for line in shown(families["qwen3"], segment.tokens, segment.loss_mask)] == list("·+·+·+")


def test_what_llama_ends_a_turn_with_when_it_calls(families, run):
    """``<|eom_id|>`` ends the turn as ``<|eot_id|>`` does, and no second end is put after it."""
    chat = families["llama3"]
    eom = chat.encoder.control_ids["<|eom_id|>"]
    bare = ChatTemplate(tokenizer("llama3"))  # without the file that declares what ends a turn
    assert eom in bare.eos_token_ids and eom in chat.eos_token_ids

    async def play():
        conversation, _ = converse(chat, ['<|python_tag|>{"name": "search", "parameters": {}}<|eom_id|>', "Ann."])
        turn = await conversation.generate()
        assert turn.text == '<|python_tag|>{"name": "search", "parameters": {}}'
        conversation.observe(answers(turn, "Ann"))
        await conversation.generate()
        return conversation

    (segment,) = run(play()).segments()
    lines = shown(chat, segment.tokens, segment.loss_mask)
    assert lines[1].endswith("{}}«<|eom_id|>»") and lines[2].startswith("·«<|start_header_id|>»ipython")


def test_a_history_with_several_calls_in_a_turn_can_be_rendered_again_for_llama(families, run):
    """Its template takes one call a turn; words behind a call open a segment, in which the earlier calls stand."""
    one, two = (f'{{"name": "search", "parameters": {{"query": "{query}"}}}}' for query in "xy")

    async def play():
        conversation, _ = converse(families["llama3"], [f"{one}; {two}", f"{one} or so", "Ann."])
        turn = await conversation.generate()
        conversation.observe(answers(turn, "Ann", "Bea"))
        turn = await conversation.generate()
        conversation.observe(answers(turn, "Cy"))
        await conversation.generate()
        return conversation

    first, second = run(play()).segments()
    (given, _) = shown(families["llama3"], second.tokens, second.loss_mask)
    places = [given.index(text) for text in (one, '"Ann"', two, '"Bea"', '"Cy"')]
    assert places == sorted(places) and first.loss_mask.sum() > second.loss_mask.sum() > 0


def test_results_after_results_are_put_as_deepseeks_template_puts_them(families, run):
    """It closes the outputs behind the last one only, so what was sent is written in another way a call later."""
    chat = families["deepseek_r1"]
    call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    script = [f"{thought}{call}<｜tool▁calls▁end｜>" for thought in ("</think>", "", "")]

    async def play():
        conversation, client = converse(chat, [*script, "Noon."], system=False)
        for number, _ in enumerate(script):
            conversation.observe(answers(await conversation.generate(), "12"))
            assert len(conversation.segments()) == number + 1
        await conversation.generate()
        return conversation, client

    conversation, client = run(play())
    rendered = chat.prompt(conversation.messages[:-1], TOOLS)
    assert client.requests[-1].tolist() == rendered.tolist()
    text = chat.decode(rendered)
    assert text.count("<｜tool▁outputs▁begin｜>") == text.count("<｜tool▁outputs▁end｜>") == 1
    assert text.count("<｜end▁of▁sentence｜>\n<｜tool▁output▁begin｜>12<｜tool▁output▁end｜>") == 2


def test_a_system_message_that_moves_behind_results_opens_a_segment(families, run):
    """Mistral's template writes it at the last question, and nowhere while a tool has the word."""
    call = '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x"}, "id": "a1b2c3d4e"}]'

    async def play():
        conversation, _ = converse(families["mistral"], [call, "Ann.", "Yes."], tools=None)
        conversation.observe(answers(await conversation.generate(), "Ann"))
        await conversation.generate()
        conversation.observe(ask())
        await conversation.generate()
        return conversation

    conversation = run(play())
    last = conversation.segments()[-1]
    assert "Be brief.\n\nsure?" in families["mistral"].decode(last.tokens)
    assert len(sampled_in(conversation)) == sum(turn["sampled_tokens"] for turn in conversation.turns)


def test_the_role_tokens_that_end_a_turn_of_glm_need_not_be_declared():
    chat = ChatTemplate(tokenizer("glm4.5"))
    ends = {text for text, index in chat.encoder.control_ids.items() if index in chat.eos_token_ids}
    assert ends == {"<|endoftext|>", "<|user|>", "<|observation|>"}
    assert chat.end_of_turn_id is None


def test_a_template_that_refuses_a_system_message_gets_it_with_the_question(run):
    strict = (
        "{%- for m in messages %}{%- if m.role == 'system' %}{{ raise_exception('no system role') }}{%- endif %}"
        "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{%- endif %}"
        "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{{- '<|im_start|>assistant\n' }}"
    )
    chat = ChatTemplate(tokenizer("qwen2.5"), chat_template=strict)

    async def play():
        conversation, _ = converse(chat, ["Ann.", "Yes."], tools=None)
        await conversation.generate()
        conversation.observe(ask())
        await conversation.generate()
        return conversation

    (segment,) = run(play()).segments()
    assert shown(chat, segment.tokens, segment.loss_mask) == [
        "·«<|im_start|>»user\nBe brief.\n\nwho?«<|im_end|>»\n«<|im_start|>»assistant\n",
        "+Ann.«<|im_end|>»",
        "·\n«<|im_start|>»user\nsure?«<|im_end|>»\n«<|im_start|>»assistant\n",
        "+Yes.«<|im_end|>»",
    ]


def test_a_system_message_that_moves_opens_a_segment(families, run):
    """Mistral's template puts it before the last question, and only when that is the last message."""

    async def play():
        conversation, client = converse(families["mistral"], sampled_texts(DIALOGUES["mistral"]))
        turn = await conversation.generate()
        conversation.observe(answers(turn, "Ann"))
        await conversation.generate()
        return conversation, client

    conversation, client = run(play())
    chat = families["mistral"]
    assert len(conversation.segments()) == 2
    assert ["Be brief." in chat.decode(request) for request in client.requests] == [True, False]
    assert client.requests[-1].tolist() == chat.prompt(conversation.messages[:-1], TOOLS).tolist()


def test_the_date_of_the_day(families):
    source = (TEMPLATES / "llama3.jinja").read_text(encoding="utf-8").replace("and dated is defined ", "")
    chat = ChatTemplate(tokenizer("llama3"), chat_template=source)
    before = datetime.now()
    text = chat.decode(chat.prompt(ask()))
    assert any(f"Today Date: {day.strftime('%d %b %Y')}\n" in text for day in (before, datetime.now()))


def test_a_template_that_hides_the_tools_is_told_of_once(caplog):
    chat = ChatTemplate(tokenizer("deepseek_v3"))
    for text in ("a", "b"):
        chat.prompt(ask(text), TOOLS)
    assert caplog.text.count("does not tell the model which tools there are") == 1
    caplog.clear()
    ChatTemplate(tokenizer("kimi_k2")).prompt(ask(), TOOLS)
    assert not caplog.text


def test_each_family_is_known_by_its_template(families):
    assert {name: chat.call_format for name, chat in families.items()} == {
        "qwen2.5": "hermes", "qwen3": "hermes", "glm4.5": "glm", "llama3": "llama3", "deepseek_v3": "deepseekv3",
        "deepseek_r1": "deepseekv3", "kimi_k2": "kimi_k2", "mistral": "mistral",
    }  # fmt: skip


class Pages(agentrl.ToolEnv):
    """One question, whose answer the tool gives."""

    tasks = {"train": [("who?", "It is Ann.")]}
    reward = "exact_match"

    @agentrl.tool
    def search(self, query: str, page: int = 1) -> str:
        """Finds a page.

        Args:
            query: What for.
            page: Which one.
        """
        return f"Ann of {query}, {page + 1}"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_environment_with_a_tool_in_every_family(families, run, name):
    chat = families[name]
    script = sampled_texts(DIALOGUES[name])
    if name == "glm4.5":  # whose values are typed by the schema
        script[0] = script[0].replace(
            "\n</tool_call>", "\n<arg_key>page</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
        )
    client = ScriptedClient(script, chat)
    trajectory = run(
        run_episode(
            Pages(), Task("t", seed=0, options={"index": 0}), client=client, chat=chat, params=SamplingParams(),
            limits=EpisodeLimits(), trajectory_id="t", group_id="g",
        )
    )  # fmt: skip
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward) == (None, StopReason.DONE, 1.0)
    assert [(c["name"], c.get("error")) for c in trajectory.tool_calls] == [("search", None)]
    assert f"Ann of x, {3 if name == 'glm4.5' else 2}" in chat.decode(client.requests[-1])
    assert trajectory.num_sampled == sum(turn["sampled_tokens"] for turn in trajectory.info["turns"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_longer_dialogue_stays_a_prefix_of_itself(families, run, name):
    """Twelve turns with calls: each request extends the one before or opens a segment; nothing is trained twice."""
    chat = families[name]
    call, *_, last = sampled_texts(DIALOGUES[name])

    async def play():
        script = [last if i % 3 == 2 else call for i in range(12)]
        if name == "deepseek_r1":  # after a tool the reasoning is not open
            script = [text if i % 3 == 0 else text.partition("</think>\n\n")[2] for i, text in enumerate(script)]
        conversation, client = converse(chat, script)
        said = []
        for i in range(12):
            turn = await conversation.generate()
            said += turn.tokens.tolist()
            assert len(turn.parsed.tool_calls) == (i % 3 != 2)
            if i < 11:
                conversation.observe(answers(turn, f"page {i}") if i % 3 != 2 else ask(f"and {i}?"))
        return conversation, client, said

    conversation, client, said = run(play())
    assert sampled_in(conversation) == said
    starts = [s.tokens[: s.prompt_length].tolist() for s in conversation.segments()]
    for before, request in zip([np.empty(0), *client.requests], client.requests, strict=False):
        assert request[: len(before)].tolist() == before.tolist() or request.tolist() in starts
