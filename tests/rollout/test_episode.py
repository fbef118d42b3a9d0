import asyncio
import json
import time

import numpy as np
import pytest
from rollout_cases import CALL, TASK, THOUGHT, TOOLS, LookUp

from agentrl.concurrency.backend import Backend
from agentrl.config import load_config, load_eval_config
from agentrl.errors import ConfigError, EngineError, EnvError, InfraError, LedgerError
from agentrl.rollout.episode import EpisodeLimits, run_episode
from agentrl.rollout.options import episode_limits
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.types import Generation, Outcome, SamplingParams, StopReason


def play(run, env, chat, script=(CALL, CALL, "Ann."), *, client=None, params=None, timeout=20.0, **limits):
    limits = EpisodeLimits(**{"max_turns": 8, "max_context_len": 2000, **limits})
    client = client or ScriptedClient(list(script), chat, version=5)
    return run(
        run_episode(
            env, TASK, client=client, chat=chat, params=params or SamplingParams(), limits=limits,
            trajectory_id="g0-0", group_id="g0",
        ),
        timeout,
    )  # fmt: skip


def test_an_episode_from_start_to_end(run, chat):
    env = LookUp()
    trajectory = play(run, env, chat)
    assert env.reset_with == (3, {"split": "train", "index": 3, "call_format": "hermes"})
    assert env.call_format == "auto"  # an author's own attribute is left alone
    assert env.actions == [CALL, CALL, "Ann."]  # text without the end-of-turn token
    assert trajectory.stop_reason is StopReason.DONE and trajectory.outcome is Outcome.COMPLETED
    assert (trajectory.reward, trajectory.success, trajectory.num_turns) == (1.0, True, 3)
    assert trajectory.turn_rewards == [0.0, 0.0, 1.0] and trajectory.rewards == {"match": 1.0}
    assert [c["turn"] for c in trajectory.tool_calls] == [1, 2]
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    (segment,) = trajectory.segments
    whole = chat.prompt(trajectory.messages, TOOLS)
    assert whole[: len(segment)].tolist() == segment.tokens.tolist()
    sampled = chat.decode(segment.tokens[segment.loss_mask == 1])
    assert sampled == f"{CALL}<|im_end|>{CALL}<|im_end|>Ann.<|im_end|>"
    assert set(segment.versions[segment.loss_mask == 1]) == {5}
    assert set(trajectory.timings) == {"total", "engine", "env", "encode"}
    assert len(trajectory.info["turns"]) == 3
    json.dumps(trajectory.info)


def test_each_request_extends_the_one_before(run, chat):
    client = ScriptedClient([CALL, THOUGHT, CALL, "Ann."], chat)
    play(run, LookUp(steps=3), chat, client=client)
    for before, after in zip(client.requests, client.requests[1:], strict=False):
        assert after[: len(before)].tolist() == before.tolist()


def test_stripped_reasoning_opens_a_segment(run, chats):
    chat = chats["stripping"]
    client = ScriptedClient([THOUGHT, "So it is Ann."], chat)
    trajectory = play(run, LookUp(steps=1, role="user"), chat, client=client)
    first, second = trajectory.segments
    assert chat.decode(first.tokens[first.loss_mask == 1]) == THOUGHT + "<|im_end|>"
    assert chat.decode(second.tokens[second.loss_mask == 1]) == "So it is Ann.<|im_end|>"
    assert "<think>" not in chat.decode(second.tokens)
    assert second.tokens[: second.prompt_length].tolist() == client.requests[1].tolist()
    assert trajectory.num_sampled == sum(t["sampled_tokens"] for t in trajectory.info["turns"])


def test_reasoning_two_turns_back_opens_a_segment(run, chats):
    class ToolThenUser(LookUp):
        async def astep(self, action):
            self.role = "tool" if not self.actions else "user"
            return await super().astep(action)

    trajectory = play(run, ToolThenUser(), chats["stripping"], [THOUGHT, CALL, "Ann."])
    assert len(trajectory.segments) == 2
    assert len(play(run, ToolThenUser(), chats["keeping"], [THOUGHT, CALL, "Ann."]).segments) == 1


def test_turn_budget(run, chat):
    trajectory = play(run, LookUp(steps=99), chat, max_turns=2)
    assert trajectory.stop_reason is StopReason.MAX_TURNS and trajectory.outcome is Outcome.TRUNCATED
    assert (trajectory.num_turns, trajectory.success) == (2, False)


def test_turn_token_budget(run, chat):
    env = LookUp()
    trajectory = play(run, env, chat, max_response_len=4)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.num_sampled == 4 and env.actions == []


def test_context_full_while_sampling(run, chat):
    room = len(chat.prompt([{"role": "user", "content": "who wrote it?"}], TOOLS)) + 5
    trajectory = play(run, LookUp(), chat, max_context_len=room)
    assert trajectory.stop_reason is StopReason.MAX_CONTEXT
    assert trajectory.num_tokens == room and trajectory.num_sampled == 5


def test_no_room_for_the_observation_keeps_what_was_sampled(run, chat):
    client = ScriptedClient([CALL], chat)
    trajectory = play(run, LookUp(observation="long " * 2000), chat, client=client)
    assert trajectory.stop_reason is StopReason.MAX_CONTEXT
    assert chat.decode(trajectory.segments[0].tokens).endswith(CALL + "<|im_end|>")
    assert len(client.requests) == 1 and trajectory.messages[-1]["role"] == "tool"


def test_tool_output_budget(run, chat):
    trajectory = play(run, LookUp(steps=99, observation="word " * 20), chat, max_tool_output_tokens=150)
    assert trajectory.stop_reason is StopReason.MAX_TOOL_OUTPUT
    assert 1 <= trajectory.num_turns <= 3


def test_wall_time_between_turns(run, chat):
    client = ScriptedClient([CALL], chat, latency=0.1)
    trajectory = play(run, LookUp(steps=99), chat, client=client, timeout_s=0.25, max_turns=None)
    assert trajectory.stop_reason is StopReason.ENGINE_TIMEOUT and trajectory.outcome is Outcome.TRUNCATED


def test_wall_time_inside_a_request(run, chat):
    client = ScriptedClient([CALL], chat, latency=30)
    trajectory = play(run, LookUp(), chat, client=client, timeout_s=0.3)
    assert trajectory.stop_reason is StopReason.ENGINE_TIMEOUT and "waiting for the engine" in trajectory.error
    assert trajectory.timings["total"] < 10 and client.requests == []


def test_wall_time_inside_a_step(run, chat):
    async def slow(action):
        await asyncio.sleep(30)

    trajectory = play(run, LookUp(astep=slow), chat, timeout_s=1.0)
    assert trajectory.stop_reason is StopReason.TIMEOUT and trajectory.error is None


def test_wall_time_spent_waiting_for_a_server_that_is_away_is_not_the_models(run, chat):
    wiki = Backend("the wiki", lambda: time.sleep(20))

    async def searching(action):
        wiki.down("connection refused")
        await asyncio.sleep(30)

    trajectory = play(run, LookUp(astep=searching), chat, timeout_s=1.0)
    wiki.up()
    assert trajectory.stop_reason is StopReason.TOOL_ERROR and "the wiki is away" in trajectory.error
    assert trajectory.outcome is Outcome.INFRA_ERROR and trajectory.info["retryable"]


@pytest.mark.parametrize("part", ["areset", "astep"])
def test_a_hanging_environment(run, chat, part):
    async def hang(*args, **kwargs):
        await asyncio.sleep(30)

    trajectory = play(run, LookUp(**{part: hang}), chat, step_timeout_s=0.1)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "did not return within 0.1 s (--episode-step-timeout)" in trajectory.error


@pytest.mark.parametrize("load", [load_config, load_eval_config])
def test_the_limits_of_an_episode_follow_from_the_flags(load):
    command = ["--env", "search", "--episode-step-timeout", "900", "--episode-timeout", "1200"]
    limits = episode_limits(load(command))
    assert (limits.step_timeout_s, limits.timeout_s) == (900, 1200)
    with pytest.raises(ConfigError, match="--episode-step-timeout 900 has no effect: --episode-timeout 600"):
        load(command[:4])


def test_blocking_environments_run_in_a_thread(run, chat):
    class Blocking:
        def reset(self, *, seed=None, options=None):
            return "who?", {}

        def step(self, action):
            time.sleep(0.2)
            return "done", 2, True, False, {}

    async def both():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = asyncio.create_task(tick())
        client = ScriptedClient(["x"], chat)
        trajectory = await run_episode(
            Blocking(), TASK, client=client, chat=chat, params=SamplingParams(),
            limits=EpisodeLimits(), trajectory_id="t", group_id="g",
        )  # fmt: skip
        ticker.cancel()
        return trajectory, ticks

    trajectory, ticks = run(both())
    assert trajectory.reward == 2.0 and trajectory.stop_reason is StopReason.DONE
    assert ticks > 2


def _raise(error):
    async def step(*args, **kwargs):
        raise error

    return step


@pytest.mark.parametrize("part", ["areset", "astep"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("page"), StopReason.ENV_ERROR),
        (EnvError("broken"), StopReason.ENV_ERROR),
        (TimeoutError("mine"), StopReason.ENV_ERROR),
        (SystemExit(3), StopReason.ENV_ERROR),
        (asyncio.CancelledError(), StopReason.ENV_ERROR),
        (MemoryError(), StopReason.ENV_ERROR),
        (InfraError("retrieval server is away"), StopReason.TOOL_ERROR),
    ],
)
def test_what_an_environment_raises_is_data(run, chat, part, error, reason):
    trajectory = play(run, LookUp(**{part: _raise(error)}), chat)
    assert trajectory.stop_reason is reason and trajectory.outcome is Outcome.INFRA_ERROR
    assert "test_episode.py:" in trajectory.error or "episode.py:" in trajectory.error
    assert trajectory.num_turns == (0 if part == "areset" else 1)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1.0", [], 1j])
def test_a_reward_that_is_no_number(run, chat, reward):
    async def step(action):
        return "", reward, True, False, {}

    trajectory = play(run, LookUp(astep=step), chat)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert repr(reward) in trajectory.error and "finite number" in trajectory.error
    assert trajectory.reward == 0.0


@pytest.mark.parametrize("result", [None, ("x",), ("x", 0.0, False, False, None), 5])
def test_a_step_of_the_wrong_form(run, chat, result):
    async def step(action):
        return result

    assert play(run, LookUp(astep=step), chat).stop_reason is StopReason.ENV_ERROR


def test_a_prompt_longer_than_the_context(run, chat):
    client = ScriptedClient([CALL], chat)
    trajectory = play(run, LookUp(prompt="word " * 1000), chat, client=client, max_context_len=100)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "train/3" in trajectory.error and "--rollout-max-context-len is 100" in trajectory.error
    assert trajectory.info["retryable"] is False
    assert trajectory.segments == [] and client.requests == []


def test_an_engine_that_does_not_answer(run, chat):
    class Dead:
        async def generate(self, *args, **kwargs):
            raise EngineError("http://x gave no answer within 5 s")

    trajectory = play(run, LookUp(), chat, client=Dead())
    assert trajectory.stop_reason is StopReason.ENGINE_ERROR and "no answer" in trajectory.error


def test_a_defect_of_ours_is_loud(run, chat):
    class Lying:
        async def generate(self, ids, *args, **kwargs):
            n = np.zeros(1, np.int32)
            return Generation(n, n.astype(np.float32), n, "stop", prompt_tokens=len(ids) - 1)

    with pytest.raises(LedgerError):
        play(run, LookUp(), chat, client=Lying())


def test_cancellation_passes(run, chat):
    async def go():
        client = ScriptedClient([CALL], chat, latency=30)
        episode = asyncio.create_task(
            run_episode(
                LookUp(), TASK, client=client, chat=chat, params=SamplingParams(),
                limits=EpisodeLimits(), trajectory_id="t", group_id="g",
            )
        )  # fmt: skip
        await asyncio.sleep(0.05)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    run(go())


@pytest.mark.parametrize(
    ("given", "terminated", "expected"),
    [
        (None, True, StopReason.DONE),
        (None, False, StopReason.ENV_TRUNCATED),
        ("max_turns", False, StopReason.MAX_TURNS),
        ("policy_error", True, StopReason.POLICY_ERROR),
        ("nonsense", False, StopReason.ENV_TRUNCATED),
    ],
)
def test_the_environments_own_stop_reason(run, chat, given, terminated, expected):
    async def step(action):
        info = {} if given is None else {"stop_reason": given}
        return "", 0.0, terminated, not terminated, info

    assert play(run, LookUp(astep=step), chat).stop_reason is expected


def test_tag_formats_keep_their_words_in_the_history(run, chat):
    env = LookUp(steps=1, role="user", call_format="tags:search,answer")
    script = ["<search>it</search>", "<answer>Ann</answer>"]
    trajectory = play(run, env, chat, script)
    assert [m["content"] for m in trajectory.messages if m["role"] == "assistant"] == script


def test_inline_observations_continue_the_turn(run, chat):
    env = LookUp(steps=1, role="inline", observation="\n<information>Ann</information>\n", call_format="tags:search")

    async def reset(**kwargs):
        return "who?", {"stop": ["</search>"]}

    env.areset = reset
    trajectory = play(run, env, chat, ["<search>it</search> and more", "Ann"])
    text = chat.decode(trajectory.segments[0].tokens)
    assert text.endswith("assistant\n<search>it</search>\n<information>Ann</information>\nAnn<|im_end|>")


@pytest.mark.parametrize("stop", ["</search>", [3]])
def test_stop_strings_that_are_none_end_the_episode_with_the_reason(run, chat, stop):
    class Stops(LookUp):
        async def areset(self, **kwargs):
            observation, info = await super().areset(**kwargs)
            return observation, {**info, "stop": stop}

    trajectory = play(run, Stops(steps=1), chat, ["Ann"])
    assert trajectory.stop_reason == "env_error" and "a list of text is expected" in trajectory.error


@pytest.mark.parametrize("bad", [{"max_response_len": 0}, {"timeout_s": 0.0}, {"step_timeout_s": float("inf")}])
def test_limits_are_checked(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        EpisodeLimits(**bad)
