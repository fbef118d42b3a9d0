"""Episodes of several agents: a conversation, a trajectory and a baseline for each, one fate for all."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agentrl import Env
from agentrl.algorithms import load_algorithm
from agentrl.config.schema import AlgorithmOptions
from agentrl.envs.multi_agent import MultiAgentEnv
from agentrl.errors import ConfigError, EngineError, EnvError
from agentrl.orchestrator.metrics import by_episode, rollout_metrics
from agentrl.rollout.episode import EpisodeLimits, play_episode, run_episode
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.worker import EpisodeRunner
from agentrl.trainer.packing import schedule
from agentrl.types import Outcome, SamplingParams, StopReason, Task
from tests.trainer.samples import credited

TASK = Task("train/3", seed=3, options={"index": 3})
RULES = {"giver": "You give hints.", "taker": "You guess."}


class Hints(MultiAgentEnv):
    """The giver hints, the taker guesses, ``rounds`` times; the last guess is worth its own length."""

    agents = ("giver", "taker")
    max_turns = 8

    def __init__(self, rounds=2, opposed=False, prompts=None, lost=0.0):
        self.rounds, self.opposed, self.lost = rounds, opposed, lost
        self.prompts = prompts or RULES

    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return "The word is rain.", {"prompts": self.prompts, "category": "word"}

    def step(self, action):
        self.turns += 1
        if self.acting == "giver":
            return f"Hint: {action}", 0.0, False, False, {"agent_rewards": {"taker": 0.25}}
        if self.turns < 2 * self.rounds:
            return f"Wrong: {action}", 0.0, False, False, {"agent_rewards": {}}
        value = float(len(action))
        info = {"success": action == "rain"}
        if self.opposed:
            info["agent_rewards"] = {"giver": -value, "taker": value}
        return "", value, True, False, info

    def forfeit(self, agent):
        return {agent: -self.lost} if self.lost else {}


def policy(giver, taker):
    """Scripts for the two roles, told apart by their rules. Answers are looked up by the turn of the role."""
    return lambda prompt, turn: (giver if "You give hints." in prompt else taker)[turn]


def play(run, env, chat, *, script=None, client=None, params=None, generate=None, **limits):
    client = client or ScriptedClient(script or policy(["wet", "falls"], ["sea", "rain"]), chat, version=2)
    limits = EpisodeLimits(**{"max_context_len": 2000, **limits})
    return run(
        play_episode(
            env, TASK, client=client, chat=chat, params=params or SamplingParams(), limits=limits,
            trajectory_id="g7-000", group_id="g7", generate=generate,
        )
    )  # fmt: skip


def said(chat, trajectory):
    return [chat.decode(s.tokens[s.loss_mask == 1]) for s in trajectory.segments]


def test_each_agent_has_its_own_conversation(run, chat):
    giver, taker = play(run, Hints(), chat)
    assert [(t.trajectory_id, t.group_id, t.agent) for t in (giver, taker)] == [
        ("g7-000:giver", "g7/giver", "giver"),
        ("g7-000:taker", "g7/taker", "taker"),
    ]
    assert giver.episode_id == taker.episode_id == "g7-000"
    assert [(m["role"], m["content"]) for m in giver.messages] == [
        ("system", "You give hints."),
        ("user", "The word is rain."),
        ("assistant", "wet"),
        ("user", "Wrong: sea"),
        ("assistant", "falls"),
    ]
    assert [(m["role"], m["content"]) for m in taker.messages] == [
        ("system", "You guess."),
        ("user", "Hint: wet"),
        ("assistant", "sea"),
        ("user", "Hint: falls"),
        ("assistant", "rain"),
    ]
    for trajectory, words in ((giver, "wet<|im_end|>falls<|im_end|>"), (taker, "sea<|im_end|>rain<|im_end|>")):
        (segment,) = trajectory.segments
        assert said(chat, trajectory) == [words]
        whole = chat.prompt(trajectory.messages, None)
        assert whole[: len(segment)].tolist() == segment.tokens.tolist()
        assert (trajectory.num_turns, len(trajectory.info["turns"])) == (2, 2)
        assert trajectory.info["category"] == "word" and "prompts" not in trajectory.info
        assert (trajectory.success, trajectory.stop_reason) == (True, StopReason.DONE)


def test_rewards_of_a_turn_go_to_the_last_turn_of_each(run, chat):
    giver, taker = play(run, Hints(), chat)
    # The taker's first quarter comes before its first turn, the second after it.
    assert taker.turn_rewards == [0.5, 4.0] and taker.reward == 4.5
    assert giver.turn_rewards == [0.0, 4.0] and giver.reward == 4.0  # no agent_rewards: everyone earns the reward
    giver, taker = play(run, Hints(opposed=True), chat)
    assert (giver.reward, taker.reward) == (-4.0, 4.5)


def test_times_are_counted_once(run, chat):
    class Slow(Hints):
        async def astep(self, action):
            await asyncio.sleep(0.05)
            return Hints.step(self, action)

    giver, taker = play(run, Slow(), chat)
    assert 0.2 <= giver.timings["env"] + taker.timings["env"] <= giver.timings["total"] + 0.01
    assert giver.timings["total"] == pytest.approx(taker.timings["total"], abs=0.15)


def test_an_agent_may_act_twice_in_a_row_and_have_its_own_tools(run, chat):
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
    prompts = {
        "giver": "You give hints.",
        "taker": {"messages": [{"role": "system", "content": "You guess."}], "tools": [tool], "stop": ["!"]},
    }

    class Twice(Hints):
        def step(self, action):
            if self.acting == "taker" and action == "again!":
                return "Go on.", 0.0, False, False, {"agent": "taker"}
            return super().step(action)

    client = ScriptedClient(policy(["wet"], ["again! and more", "rain"]), chat)
    giver, taker = play(run, Twice(rounds=1, prompts=prompts), chat, client=client)
    assert [m["content"] for m in taker.messages if m["role"] == "assistant"] == ["again!", "rain"]
    assert (giver.num_turns, taker.num_turns) == (1, 2)
    assert "look" in chat.decode(client.requests[1]) and "look" not in chat.decode(client.requests[0])


def test_an_agent_that_never_acted_leaves_no_trajectory(run, chat):
    (giver,) = play(run, Hints(), chat, script=policy(["long " * 80], []), max_response_len=5)
    assert (giver.agent, giver.stop_reason, giver.episode_id) == ("giver", StopReason.MAX_TOKENS, "g7-000")
    assert giver.info["agent_rewards"] == {"giver": 0.0, "taker": 0.0}


class LostAtOnce(Hints):
    """An illegal first move loses a game whose rewards add up to nothing."""

    def step(self, action):
        return "", 0.0, True, False, {"agent_rewards": {"giver": -1.0, "taker": 1.0}}


def test_what_an_agent_earned_that_never_acted_is_in_the_record(run, chat):
    (giver,) = play(run, LostAtOnce(), chat, script=policy(["x"], []))
    assert giver.reward == -1.0 and giver.info["agent_rewards"] == {"giver": -1.0, "taker": 1.0}


@pytest.mark.parametrize(("lost", "rewards"), [(0.0, (0.0, 0.25)), (3.0, (0.0, -2.75))])
def test_who_rambles_forfeits(run, chat, lost, rewards):
    giver, taker = play(run, Hints(lost=lost), chat, script=policy(["wet"], ["long " * 80]), max_response_len=12)
    assert giver.stop_reason is taker.stop_reason is StopReason.MAX_TOKENS
    assert (giver.reward, taker.reward) == rewards
    assert (giver.success, taker.success) == (False, False)


def test_turns_are_limited_for_each_agent_and_by_the_environment_for_all(run, chat):
    script = policy(["wet"] * 9, ["sea"] * 9)
    trajectories = play(run, Hints(rounds=9), chat, script=script, max_turns=2)
    assert [(t.num_turns, t.stop_reason) for t in trajectories] == [(2, StopReason.MAX_TURNS)] * 2
    env = Hints(rounds=9)
    env.max_turns = 3
    trajectories = play(run, env, chat, script=script)
    assert [(t.num_turns, t.stop_reason) for t in trajectories] == [
        (2, StopReason.MAX_TURNS),
        (1, StopReason.MAX_TURNS),
    ]


def test_what_others_wrote_can_fill_a_context_but_a_task_that_never_fits_is_an_error(run, chat):
    prompts = RULES | {"taker": "You guess. " + "word " * 30}
    (giver,) = play(run, Hints(prompts=prompts), chat, script=policy(["long " * 20], []), max_context_len=200)
    assert (giver.agent, giver.stop_reason) == ("giver", StopReason.MAX_CONTEXT)
    assert "the first prompt has" in giver.error
    (giver,) = play(run, Hints(prompts=RULES | {"giver": "word " * 100}), chat, max_context_len=100)
    assert giver.stop_reason is StopReason.ENV_ERROR and giver.info["retryable"] is False


def test_the_engine_of_one_ends_the_episode_of_all(run, chat):
    class Half(ScriptedClient):
        async def generate(self, ids, params, **kwargs):
            if kwargs["routing_key"].endswith(":taker"):
                raise EngineError("away")
            return await super().generate(ids, params, **kwargs)

    client = Half(policy(["wet"] * 9, []), chat)
    runner = EpisodeRunner(Hints, client, chat, SamplingParams(), EpisodeLimits(), 2, max_retries=1)
    (giver,) = play(run, Hints(), chat, client=client)
    assert giver.stop_reason is StopReason.ENGINE_ERROR and giver.num_turns == 1
    client._turns.clear()
    group = run(runner.run_group(TASK, 2, "g7"))
    assert [t.outcome for t in group.trajectories] == [Outcome.INFRA_ERROR] * 2
    assert runner.counters.retries == 2 and runner.counters.episodes == runner.counters.infra_errors == 2
    assert len(credited([group])) == 0


def test_a_custom_generate_function_plays_all_of_it(run, chat):
    async def generate(ctx):
        observation, info = await ctx.reset()
        ctx.prompt(info["messages"], info.get("tools"), info.get("stop") or ())
        while True:
            turn = await ctx.generate()
            _, _, terminated, truncated, info = await ctx.step(turn.text)
            if terminated or truncated:
                return
            ctx.observe(info["messages"])

    (trajectory,) = play(run, Hints(), chat, script=["wet", "sea", "falls", "rain"], generate=generate)
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.agent) == ("g7-000", "g7", "agent")
    assert (trajectory.reward, trajectory.num_turns) == (4.0, 4)


def test_an_environment_of_one_agent_may_have_prompts_of_its_own(run, chat):
    class Single(Env):
        def reset(self, *, seed=None, options=None):
            return "Say hello.", {"prompts": ["a", "b"]}

        def step(self, action):
            return "", 1.0, True, False, {}

    (trajectory,) = play(run, Single(), chat, script=["hello"])
    assert (trajectory.agent, trajectory.stop_reason, trajectory.reward) == ("agent", StopReason.DONE, 1.0)


def test_run_episode_is_for_one_agent(run, chat):
    client = ScriptedClient(policy(["wet", "falls"], ["sea", "rain"]), chat)
    episode = run_episode(
        Hints(), TASK, client=client, chat=chat, params=SamplingParams(), limits=EpisodeLimits(),
        trajectory_id="t", group_id="g",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="giver, taker"):
        run(episode)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"agent_rewards": {"judge": 1.0}}, "judge"),
        ({"agent_rewards": {"giver": float("nan")}}, "nan"),
        ({"agent_rewards": [1.0]}, "must be a dict"),
        ({"agent": "judge"}, "judge"),
    ],
)
def test_mistakes_of_an_author_are_named(run, chat, wrong, text):
    class Wrong(Hints):
        def step(self, action):
            return "", 0.0, False, False, wrong

    (giver,) = play(run, Wrong(), chat)
    assert giver.stop_reason is StopReason.ENV_ERROR and text in giver.error


@pytest.mark.parametrize("prompts", [{"giver": "x"}, {"giver": "x", "taker": 3}, "x", {"giver": "x", "taker": {}}])
def test_prompts_are_checked(prompts):
    with pytest.raises(EnvError, match="prompt"):
        Hints(prompts=prompts).reset(seed=0)


@pytest.mark.parametrize("names", [(), ("a", "a"), ("a b",), ("a:b",)])
def test_names_of_agents_are_checked(names):
    env = Hints()
    env.agents = names
    with pytest.raises(ConfigError, match="agents"):
        env.reset(seed=0)


# -- training on it ------------------------------------------------------------------------------------


def groups_of(run, chat, *, opposed, guesses=("rain", "a")):
    """Two groups of two episodes; in each the second one ends with a shorter guess."""
    asked = []

    def script(prompt, turn):
        if "You give hints." in prompt:
            return ["wet", "falls"][turn]
        if turn == 0:
            return "sea"
        asked.append(1)
        return guesses[(len(asked) - 1) % 2]

    async def go():
        runner = EpisodeRunner(
            lambda: Hints(opposed=opposed), ScriptedClient(script, chat, version=2), chat, SamplingParams(),
            EpisodeLimits(), 1,
        )  # fmt: skip
        return [await runner.run_group(TASK, 2, f"g{i}") for i in range(2)]

    return run(go())


@pytest.mark.parametrize("opposed", [False, True])
def test_a_batch_trains_each_roles_tokens_under_its_own_advantage(run, chat, opposed):
    groups = groups_of(run, chat, opposed=opposed)
    batch = credited(groups, load_algorithm(AlgorithmOptions(grpo_std_normalization=False)))
    advantages = dict(zip(batch.trajectory_ids, batch.means(batch["advantage"]), strict=True))
    sign = -1.0 if opposed else 1.0
    for group in groups:
        assert [t.agent for t in group.trajectories] == ["giver", "taker"] * 2
        a, b, c, d = (advantages[t.trajectory_id] for t in group.trajectories)
        # Lengths of the last guess are 4 and 1: each role is compared with itself alone.
        assert (a, b, c, d) == pytest.approx((sign * 1.5, 1.5, sign * -1.5, -1.5))
    trajectories = [t for g in groups for t in g.trajectories]
    assert batch.trajectory_ids == tuple(t.trajectory_id for t in trajectories)
    assert batch.group_ids == tuple(f"g{i // 4}/{'taker' if i % 2 else 'giver'}" for i in range(8))
    assert batch.episode_ids == tuple(f"g{i // 4}-{i // 2 % 2:03d}" for i in range(8))
    start = 0
    for t in trajectories:
        (segment,) = t.segments
        part = slice(start, start + len(segment))
        start += len(segment)
        assert batch.tokens[part].tolist() == segment.tokens.tolist()
        assert batch.loss_mask[part].tolist() == segment.loss_mask.tolist()
        expected = segment.loss_mask * np.float32(advantages[t.trajectory_id])
        assert batch["advantage"][part].tolist() == expected.tolist()
        own = "".join(m["content"] + "<|im_end|>" for m in t.messages if m["role"] == "assistant")
        assert chat.decode(batch.tokens[part][batch.loss_mask[part] == 1]) == own
    assert start == batch.num_tokens
    assert (batch.num_episodes, batch.num_trajectories) == (4, 8)


def test_the_agents_of_an_episode_train_in_one_step(run, chat):
    groups = groups_of(run, chat, opposed=True)
    batch = credited(groups)
    steps = schedule(batch.lengths.tolist(), max_tokens=500, num_steps=4, keys=batch.episode_ids)
    assert batch.trajectory_of.tolist() == list(range(8))  # a segment each
    assert [{batch.episode_ids[i] for i in step.samples} for step in steps] == [
        {"g0-000"}, {"g0-001"}, {"g1-000"}, {"g1-001"},
    ]  # fmt: skip


def test_metrics_count_episodes_and_show_each_agent(run, chat):
    groups = groups_of(run, chat, opposed=True)
    metrics = rollout_metrics(groups, 2)
    assert [len(e) for e in by_episode(t for g in groups for t in g.trajectories)] == [2] * 4
    assert metrics["rollout/turns"] == 4.0 and metrics["rollout/success"] == 0.5
    assert metrics["rollout/agent/giver/reward"] == -2.5 and metrics["rollout/agent/taker/reward"] == 3.0
    assert metrics["rollout/agent/taker/turns"] == 2.0
    assert metrics["rollout/reward"] == pytest.approx(0.25)
    assert metrics["rollout/stop/done"] == 1.0 and metrics["rollout/errors"] == 0.0
    sampled = sum(t.num_sampled for g in groups for t in g.trajectories)
    assert metrics["rollout/response_tokens"] == sampled / 4
