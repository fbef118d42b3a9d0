"""The contract of ``Env``: either way of writing it, seeding, budgets, what is filled in and refused."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

import agentrl
from agentrl.errors import EnvError
from agentrl.loading import load_object

GUESS_FILE = Path(__file__).parent / "guess_envs.py"
Guess = load_object(f"{GUESS_FILE}:Guess")
AsyncGuess = load_object(f"{GUESS_FILE}:AsyncGuess")

ACTIONS = ["0", "5", "x\ud800\0", ""]


def blocking_episode(env: agentrl.Env, seed: int) -> list[Any]:
    out: list[Any] = [env.reset(seed=seed)]
    for action in ACTIONS:
        out.append(env.step(action))
        if out[-1][2] or out[-1][3]:
            break
    return out


async def async_episode(env: agentrl.Env, seed: int) -> list[Any]:
    out: list[Any] = [await env.areset(seed=seed)]
    for action in ACTIONS:
        out.append(await env.astep(action))
        if out[-1][2] or out[-1][3]:
            break
    return out


def test_both_ways_of_writing_and_of_calling_give_the_same_transitions():
    for seed in range(20):
        ways = [
            blocking_episode(Guess(), seed),
            blocking_episode(AsyncGuess(), seed),
            asyncio.run(async_episode(Guess(), seed)),
            asyncio.run(async_episode(AsyncGuess(), seed)),
        ]
        assert ways[0] == ways[1] == ways[2] == ways[3]


def test_what_an_author_leaves_out_is_filled_in():
    env = Guess()
    observation, info = env.reset(seed=3)
    assert info == {"messages": [{"role": "user", "content": observation}], "task_id": "train/seed-3"}
    assert env.reset()[1]["task_id"] == "train/seed-3.1"
    assert env.reset(options={"split": "test", "index": 4})[1]["task_id"] == "test/4"
    env.reset(seed=3)
    observation, reward, terminated, truncated, info = env.step("none")
    assert info == {"messages": [{"role": "user", "content": observation}]}
    assert (type(reward), terminated, truncated) == (float, False, False)
    info = env.step(str(env.secret))[4]
    assert info == {"messages": [], "stop_reason": "done", "success": True}
    assert env.render().splitlines()[0] == "user: Guess a digit."


@pytest.mark.parametrize("cls", [Guess, AsyncGuess])
def test_the_turn_budget_truncates(cls):
    env = cls(max_turns=2)
    env.reset(seed=0)
    assert env.step("no")[3] is False
    _, _, terminated, truncated, info = env.step("no")
    assert (terminated, truncated, info["stop_reason"], info["success"]) == (False, True, "max_turns", False)


def test_an_answer_on_the_last_turn_terminates():
    env = Guess(max_turns=1)
    env.reset(seed=0)
    _, _, terminated, truncated, info = env.step(str(env.secret))
    assert (terminated, truncated, info["stop_reason"]) == (True, False, "done")


def test_stepping_outside_an_episode_is_refused():
    env = Guess()
    with pytest.raises(ResetNeeded, match="episode that is new"):
        env.step("1")
    env.reset(seed=0)
    env.step(str(env.secret))
    with pytest.raises(ResetNeeded, match="episode that is over"):
        env.step("1")
    env.close()
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_close_runs_once_however_it_is_called():
    class Held(Guess):
        closed = 0

        async def aclose(self) -> None:
            await super().aclose()
            self.closed += 1

    env = Held()
    env.close()
    asyncio.run(env.aclose())
    assert env.closed == 1


def test_a_subclass_may_go_on_in_the_other_style():
    class Louder(Guess):
        async def astep(self, action: str) -> Any:
            observation, *rest = await super().astep(action)
            return (observation.upper(), *rest)

    class Loudest(Louder):
        def step(self, action: str) -> Any:
            observation, *rest = super().step(action)
            return (observation + "!", *rest)

    for cls in (Louder, Loudest):
        both = blocking_episode(cls(), 1), asyncio.run(async_episode(cls(), 1))
        assert both[0] == both[1]
        assert both[0][1][0].startswith("NOT")
        assert len(both[0]) == len(blocking_episode(Guess(), 1))  # a turn is counted once, whoever calls whom


def test_a_mixin_takes_part():
    class Quiet:
        def step(self, action: str) -> Any:
            _, *rest = super().step(action)  # type: ignore[misc]
            return ("shh", *rest)

    class QuietGuess(Quiet, Guess):
        pass

    env = QuietGuess()
    env.reset(seed=0)
    assert env.step("x")[0] == "shh"
    assert asyncio.run(async_episode(QuietGuess(), 0))[1][0] == "shh"


def test_an_environment_may_hold_another():
    class Outer(agentrl.Env):
        def __init__(self) -> None:
            self.inner = Guess(max_turns=1)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return self.inner.reset(seed=seed)

        async def astep(self, action: str) -> Any:
            return await self.inner.astep(action)

    env = Outer(max_turns=5)
    env.reset(seed=0)
    assert env.step("no")[4]["stop_reason"] == "max_turns"


def test_names_that_say_one_thing_and_do_the_other_are_refused():
    with pytest.raises(TypeError, match="name it `astep`"):

        class Wrong(agentrl.Env):
            async def step(self, action: str) -> Any: ...

    with pytest.raises(TypeError, match="must be `async def`"):

        class AlsoWrong(agentrl.Env):
            def astep(self, action: str) -> Any: ...


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (("", 0.0, False, {}), "must return \\(observation, reward"),
        ((None, 0.0, False, False, {}), "observation as str, got None"),
        (("", 0.0, False, False, None), "info as dict, got None"),
        (("", float("nan"), False, False, {}), "reward of Broken.step is nan .* finite number"),
        (("", "1", False, False, {}), "step is '1' .* finite number"),
        (("", None, False, False, {}), "step is None"),
    ],
)
def test_a_broken_transition_names_what_is_wrong(result, message):
    class Broken(Guess):
        def step(self, action: str) -> Any:
            return result

    env = Broken()
    env.reset(seed=0)
    with pytest.raises(EnvError, match=message):
        env.step("1")


def test_errors_of_the_author_pass_through_unchanged():
    class Raises(Guess):
        def step(self, action: str) -> Any:
            raise KeyError("mine")

    env = Raises()
    env.reset(seed=0)
    with pytest.raises(KeyError, match="mine"):
        env.step("1")
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(env.astep("1"))


def test_blocking_steps_of_many_episodes_run_side_by_side():
    all_of_them = threading.Barrier(16)

    class Slow(Guess):
        def step(self, action: str) -> Any:
            all_of_them.wait(60)
            return super().step(action)

    async def main() -> None:
        envs = [Slow() for _ in range(16)]
        await asyncio.gather(*(env.areset(seed=0) for env in envs))
        await asyncio.gather(*(env.astep("x") for env in envs))

    asyncio.run(main())


def test_settings_are_taken_by_every_constructor():
    class Own(Guess):
        def __init__(self, size: int, *, colour: str = "red") -> None:
            self.size = size

    env = Own(3, max_turns=2, call_format="none")
    assert (env.size, env.max_turns, env.call_format, Own.max_turns) == (3, 2, "none", 4)
    with pytest.raises(TypeError):
        Own(3, max_tuns=2)

    class Adapter(Own):
        def __init__(self, **others: Any) -> None:
            super().__init__(3)
            self.max_turns, self.others = 8, others

    env = Adapter(max_turns=2, render_mode="ansi", level=5)
    assert (env.max_turns, env.render_mode, env.others) == (2, "ansi", {"level": 5})
    with pytest.raises(TypeError, match="max_tuns"):
        Guess(max_tuns=2)


def test_an_unknown_split_is_refused_where_it_is_asked_for():
    with pytest.raises(agentrl.ConfigError, match="no split 'dev'; it has train, test"):
        Guess().split_of({"split": "dev"})
