import asyncio
import threading
import time

import pytest
from rollout_cases import CALL, TASK, LookUp

from agentrl.concurrency.backend import Backend
from agentrl.errors import ConfigError, EngineError, InfraError, LedgerError
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.worker import EpisodeRunner, LoopLag
from agentrl.types import Outcome, SamplingParams, StopReason

SCRIPT = [CALL, CALL, "Ann."]


class Closing(LookUp):
    """Counts its instances and closings."""

    made: list = []

    def __init__(self, **parts):
        super().__init__(**parts)
        self.closed = 0
        self.episodes = 0
        type(self).made.append(self)

    async def areset(self, **kwargs):
        self.episodes += 1
        return await super().areset(**kwargs)

    async def aclose(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def fresh():
    Closing.made = []


def runner_for(chat, make_env=Closing, *, client=None, concurrency=4, **kwargs):
    limits = kwargs.pop("limits", EpisodeLimits(max_turns=8))
    client = client or ScriptedClient(SCRIPT, chat)
    return EpisodeRunner(make_env, client, chat, SamplingParams(), limits, concurrency, **kwargs)


def play(run, runner, n=6, **kwargs):
    async def go():
        try:
            return await runner.run_group(TASK, n, "g7", **kwargs)
        finally:
            await runner.close()

    return run(go())


def test_a_group(run, chat):
    seen = []
    runner = runner_for(chat, concurrency=3)
    group = play(run, runner, on_trajectory=lambda t: seen.append(t.trajectory_id))
    assert [t.trajectory_id for t in group.trajectories] == [f"g7-{i:03d}" for i in range(6)]
    assert {t.group_id for t in group.trajectories} == {"g7"}
    assert group.rewards.tolist() == [1.0] * 6
    assert sorted(seen) == [t.trajectory_id for t in group.trajectories]
    assert len(Closing.made) == 3 and sum(e.episodes for e in Closing.made) == 6  # environments are used again
    assert [e.closed for e in Closing.made] == [1, 1, 1]
    metrics = runner.metrics()
    assert metrics["episodes"] == 6 and metrics["envs_made"] == 3 and metrics["infra_errors"] == 0
    assert metrics["event_loop_lag_p99"] >= 0


def test_concurrency_over_groups_is_bounded(run, chat):
    running = most = 0

    class Counting(LookUp):
        async def astep(self, action):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return await super().astep(action)

    async def go():
        runner = runner_for(chat, Counting, concurrency=2)
        groups = await asyncio.gather(*(runner.run_group(TASK, 2, f"g{i}") for i in range(3)))
        await runner.close()
        return groups

    assert len(run(go())) == 3
    assert most == 2


def test_infra_errors_are_retried_with_a_fresh_environment(run, chat):
    class Flaky(Closing):
        async def astep(self, action):
            if len(self.made) < 3:
                raise InfraError("retrieval server is away")
            return await super().astep(action)

    runner = runner_for(chat, Flaky, max_retries=2)
    # A retried conversation starts over: the script is looked up by turn.
    runner._client = ScriptedClient(lambda prompt, turn: CALL if prompt.count("<tool_response>") < 2 else "Ann.", chat)
    (trajectory,) = play(run, runner, n=1).trajectories
    assert trajectory.outcome is Outcome.COMPLETED and trajectory.info["attempt"] == 2
    assert runner.metrics()["retries"] == 2
    assert [e.closed for e in Flaky.made] == [1, 1, 1]


def test_no_episode_begins_while_a_server_of_its_tools_is_away(run, chat, monkeypatch):
    """One finds it away and is played again; those after it wait, and none is lost."""
    monkeypatch.setattr("agentrl.concurrency.backend.FIRST_PAUSE_S", 0.001)
    begun, back = [], threading.Event()

    def probe():
        if not back.wait(20):
            raise ConnectionError

    wiki = Backend("the wiki", probe)

    class Asking(Closing):
        async def areset(self, **kwargs):
            begun.append(back.is_set())
            return await super().areset(**kwargs)

        async def astep(self, action):
            if not back.is_set():
                asyncio.get_running_loop().call_later(0.5, back.set)
                raise wiki.down("connection refused")
            return await super().astep(action)

    script = ScriptedClient(lambda prompt, turn: CALL if prompt.count("<tool_response>") < 2 else "Ann.", chat)
    group = play(run, runner_for(chat, Asking, client=script, concurrency=1), n=6)
    assert [t.outcome for t in group.trajectories] == [Outcome.COMPLETED] * 6
    assert begun == [False] + [True] * 6
    assert [t.info["attempt"] for t in group.trajectories] == [1] + [0] * 5


def test_each_request_has_a_seed_that_follows_from_run_episode_and_turn(run, chat):
    asked = []

    class Noting(ScriptedClient):
        async def generate(self, input_ids, params, **kwargs):
            asked.append((kwargs["routing_key"], params.seed))
            return await super().generate(input_ids, params, **kwargs)

    class Flaky(Closing):
        async def astep(self, action):
            if len(self.made) < 2:
                raise InfraError("retrieval server is away")
            return await super().astep(action)

    def seeds(seed, make_env=LookUp):
        asked.clear()
        client = Noting(lambda prompt, turn: CALL if prompt.count("<tool_response>") < 2 else "Ann.", chat)
        params, limits = SamplingParams(seed=seed), EpisodeLimits(max_turns=8)
        play(run, EpisodeRunner(make_env, client, chat, params, limits, 1), n=2)
        return list(asked)

    first = seeds(3)
    assert len(first) == 6 and len({seed for _, seed in first}) == 6
    assert first[0] == ("g7-000", 321826738457990617)  # a run of today and one of tomorrow draw alike
    assert seeds(3) == first
    assert {seed for _, seed in seeds(4)}.isdisjoint(seed for _, seed in first)
    assert seeds(3, Flaky) == [first[0], *first]  # the attempt that failed asked once; the next one asks the same
    assert {seed for _, seed in seeds(None)} == {None}


def test_what_stays_broken_is_in_the_group(run, chat):
    class Dead:
        calls = 0

        async def generate(self, *args, **kwargs):
            self.calls += 1
            raise EngineError("away")

    client = Dead()
    runner = runner_for(chat, client=client, max_retries=1)
    group = play(run, runner, n=2)
    assert [t.stop_reason for t in group.trajectories] == [StopReason.ENGINE_ERROR] * 2
    assert client.calls == 4 and runner.metrics()["infra_errors"] == 2
    assert len(Closing.made) == 2  # an engine's trouble does not cost environments


def test_a_prompt_that_never_fits_is_not_retried(run, chat):
    runner = runner_for(chat, limits=EpisodeLimits(max_context_len=20))
    (trajectory,) = play(run, runner, n=1).trajectories
    assert trajectory.stop_reason is StopReason.ENV_ERROR and trajectory.info["attempt"] == 0


def test_an_environment_that_cannot_be_made(run, chat):
    def make():
        raise FileNotFoundError("index.bin")

    (trajectory,) = play(run, runner_for(chat, make, max_retries=0), n=1).trajectories
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "index.bin" in trajectory.error

    def misnamed():
        raise ConfigError("no environment 'serch'")

    with pytest.raises(ConfigError, match="serch"):
        play(run, runner_for(chat, misnamed), n=1)


def test_making_and_closing_block_nobody(run, chat):
    threads = []

    class Slow(LookUp):
        def __init__(self):
            super().__init__()
            threads.append(threading.current_thread())

        def close(self):
            threads.append(threading.current_thread())
            raise RuntimeError("on closing")

    play(run, runner_for(chat, Slow), n=1)
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_cancelling_a_group_closes_its_environments(run, chat):
    asked = 0

    class Hanging(ScriptedClient):
        async def generate(self, ids, params, **kwargs):
            nonlocal asked
            asked += 1
            await asyncio.sleep(60)

    async def go():
        runner = runner_for(chat, client=Hanging([CALL], chat))
        group = asyncio.create_task(runner.run_group(TASK, 3, "g"))
        while asked < 3:
            await asyncio.sleep(0.001)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        await runner.close()

    run(go())
    assert [e.closed for e in Closing.made] == [1, 1, 1]


def test_a_defect_of_ours_ends_the_group(run, chat):
    class Lying(ScriptedClient):
        async def generate(self, ids, params, **kwargs):
            generation = await super().generate(ids, params, **kwargs)
            generation.logprobs[:] = float("nan")
            return generation

    with pytest.raises(LedgerError):
        play(run, runner_for(chat, client=Lying(SCRIPT, chat)))


def test_a_closed_runner_says_so(run, chat):
    async def go():
        runner = runner_for(chat)
        await runner.close()
        with pytest.raises(ConfigError, match="closed"):
            await runner.run_group(TASK, 1, "g")

    run(go())


def test_loop_lag_sees_a_blocking_call(run):
    async def go():
        lag = LoopLag(interval=0.01)
        lag.start()
        await asyncio.sleep(0.05)
        time.sleep(0.2)
        await asyncio.sleep(0.03)
        await lag.stop()
        return lag.metrics()

    assert 0.15 < run(go())["event_loop_lag_max"] < 10


# -- custom generate functions ------------------------------------------------------------------------


async def single_turn(ctx):
    ctx.prompt([{"role": "user", "content": ctx.task.task_id}])
    turn = await ctx.generate()
    ctx.rewards["length"] = len(turn.text)
    ctx.success = True
    return 0.5


async def with_env(ctx):
    observation, info = await ctx.reset()
    ctx.prompt(info["messages"], info["tools"])
    while True:
        turn = await ctx.generate()
        observation, reward, terminated, truncated, info = await ctx.step(turn.text)
        if terminated:
            return
        ctx.observe([*info["messages"], {"role": "user", "content": "Go on."}])


async def swallowing(ctx):
    ctx.prompt([{"role": "user", "content": "again"}])
    while True:
        try:
            await ctx.generate()
            ctx.observe([{"role": "user", "content": "again"}])
        except Exception:
            return 1.0


async def idle(ctx):
    return 1.0


async def hanging(ctx):
    ctx.prompt([{"role": "user", "content": "x"}])
    await ctx.generate()
    await asyncio.sleep(60)


async def wrong_reward(ctx):
    ctx.prompt([{"role": "user", "content": "x"}])
    await ctx.generate()
    ctx.reward = float("nan")


def custom(run, chat, function, **kwargs):
    runner = runner_for(chat, generate=function, max_retries=0, **kwargs)
    (trajectory,) = play(run, runner, n=1).trajectories
    return trajectory


def test_custom_single_turn(run, chat):
    trajectory = custom(run, chat, single_turn)
    assert (trajectory.reward, trajectory.success, trajectory.stop_reason) == (0.5, True, StopReason.DONE)
    assert trajectory.rewards == {"length": float(len(CALL))}
    assert trajectory.num_turns == 1 and trajectory.num_sampled > 10


def test_custom_over_the_environment(run, chat):
    trajectory = custom(run, chat, with_env)
    assert (trajectory.reward, trajectory.success, trajectory.num_turns) == (1.0, True, 3)
    assert [m["role"] for m in trajectory.messages][:4] == ["user", "assistant", "tool", "user"]


def test_custom_functions_cannot_outlive_a_budget(run, chat):
    trajectory = custom(run, chat, swallowing, limits=EpisodeLimits(max_turns=2))
    assert trajectory.stop_reason is StopReason.MAX_TURNS and trajectory.num_turns == 2
    trajectory = custom(run, chat, hanging, limits=EpisodeLimits(timeout_s=1.0))
    assert trajectory.stop_reason is StopReason.TIMEOUT


@pytest.mark.parametrize(("function", "text"), [(idle, "without sampling"), (wrong_reward, "nan")])
def test_custom_functions_that_break_the_contract(run, chat, function, text):
    trajectory = custom(run, chat, function)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and text in trajectory.error


def test_custom_functions_are_found_by_name(run, chat, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "async def generate(ctx):\n    ctx.prompt([{'role': 'user', 'content': 'x'}])\n"
        "    await ctx.generate()\n    ctx.reward = 2\n\ndef blocking(ctx):\n    pass\n"
    )
    assert custom(run, chat, f"{path}:generate").reward == 2.0
    with pytest.raises(ConfigError, match="async def generate"):
        runner_for(chat, generate=f"{path}:blocking")
    with pytest.raises(ConfigError, match="generat"):
        runner_for(chat, generate=f"{path}:generat")
