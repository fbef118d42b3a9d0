"""Prompts without a chat template: sent as they are written, recorded like any other."""

import json

import pytest
from rollout_cases import LookUp

import agentrl
from agentrl.rollout.episode import EpisodeLimits, run_episode
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.types import SamplingParams, StopReason, Task

RAW = "<|im_start|>who wrote it?<|im_end|>\nThe answer is"


@pytest.fixture
def prompts(tmp_path):
    """A PromptEnv over one line, whose text is not to be put into a template."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": RAW, "label": "Ann."}))
    return agentrl.make("agentrl.envs.builtin.prompt:PromptEnv", path=str(path), apply_chat_template=False)


def play(run, env, chat, client, generate=None):
    return run(
        run_episode(
            env, Task("t", seed=0, options={"index": 0}), client=client, chat=chat, params=SamplingParams(),
            limits=EpisodeLimits(), trajectory_id="t", group_id="g", generate=generate,
        )
    )  # fmt: skip


async def own_turns(ctx):
    _, info = await ctx.reset()
    ctx.prompt(info["messages"], info.get("tools"), info.get("stop") or ())
    turn = await ctx.generate()
    await ctx.step(turn.text)


@pytest.mark.parametrize("generate", [None, own_turns])
def test_the_text_of_the_file_is_what_the_engine_gets(run, chat, prompts, hf_tokenizer, generate):
    client = ScriptedClient(["Ann."], chat)
    trajectory = play(run, prompts, chat, client, generate)
    assert (trajectory.error, trajectory.reward, trajectory.stop_reason) == (None, 1.0, StopReason.DONE)
    (request,) = client.requests
    assert chat.decode(request) == RAW
    assert request.tolist() == hf_tokenizer(RAW, add_special_tokens=False)["input_ids"]
    (segment,) = trajectory.segments
    assert segment.prompt_length == len(request) and segment.tokens[: len(request)].tolist() == request.tolist()
    assert chat.decode(segment.tokens[segment.loss_mask == 1]) == "Ann.<|im_end|>"
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant"]


def test_reasoning_is_opened_by_the_text_alone(run, chats):
    """This template's generation prompt opens a reasoning block; a prompt without template has none."""
    seen = []

    async def generate(ctx):
        ctx.prompt("2 + 2 = ")
        seen.append((await ctx.generate()).text)

    async def thinking(ctx):
        ctx.prompt("2 + 2 = <think>\n")
        turn = await ctx.generate()
        seen.extend([turn.parsed.reasoning, turn.parsed.content])

    chat = chats["trimming"]
    for function, script in ((generate, "4"), (thinking, "easy</think>4")):
        assert play(run, LookUp(), chat, ScriptedClient([script], chat), function).error is None
    assert [text.strip() for text in seen] == ["4", "easy", "4"]


def test_the_text_may_be_continued_but_not_by_template_messages(run, chat):
    async def completion(ctx):
        ctx.prompt("one two")
        await ctx.generate()
        ctx.observe([{"role": "inline", "content": " four"}])
        await ctx.generate()
        ctx.reward = 1.0

    async def chatting(ctx):
        ctx.prompt("one two")
        await ctx.generate()
        ctx.observe([{"role": "user", "content": "Go on."}])

    client = ScriptedClient([" three", " five"], chat)
    trajectory = play(run, LookUp(), chat, client, completion)
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    assert chat.decode(client.requests[1]).replace("<|im_end|>", "") == "one two three four"
    trajectory = play(run, LookUp(), chat, ScriptedClient([" three"], chat), chatting)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "need the chat template" in trajectory.error


@pytest.mark.parametrize(("raw", "part"), [("", "is empty"), (["a"], "must be the text to send, got list")])
def test_a_raw_prompt_that_cannot_be_sent(run, chat, raw, part):
    async def reset(**kwargs):
        return "who?", {"raw_prompt": raw}

    trajectory = play(run, LookUp(areset=reset), chat, ScriptedClient(["Ann."], chat))
    assert trajectory.stop_reason is StopReason.ENV_ERROR and part in trajectory.error


def test_own_messages_of_a_generate_function_get_the_template(run, chat):
    async def reset(**kwargs):
        return "who?", {"messages": [{"role": "user", "content": "who?"}], "raw_prompt": "who?"}

    async def generate(ctx):
        _, info = await ctx.reset()
        ctx.prompt([{"role": "system", "content": "Short."}, *info["messages"]])
        await ctx.generate()

    client = ScriptedClient(["Ann."], chat)
    play(run, LookUp(areset=reset), chat, client, generate)
    assert chat.decode(client.requests[0]).startswith("<|im_start|>system\nShort.")
