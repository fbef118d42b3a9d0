"""Wrappers: both ways alike, composed, under plain Gymnasium, in the episode loop; the model reads what they say."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from yardstick import within

import agentrl
from agentrl import wrappers
from agentrl.envs.wrappers.base import retold
from agentrl.errors import ConfigError, DataError, EnvError, InfraError
from agentrl.loading import load_object

GUESS_FILE = Path(__file__).parent / "guess_envs.py"
Guess = load_object(f"{GUESS_FILE}:Guess")
AsyncGuess = load_object(f"{GUESS_FILE}:AsyncGuess")

ACTIONS = ["x", "5 " * 40, "\ud800", "no"]


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@agentrl.tool
def echo(text: str, times: int = 1) -> str:
    """Says it again.

    Args:
        text: What to say.
        times: How often.
    """
    return text * times


class Ask(agentrl.ToolEnv):
    tools = [echo]
    reward = "exact_match"

    def task(self, rng, split):
        return f"{split} {rng.integers(1000)}", "gold"


class TagAsk(Ask):
    call_format = "tags:echo,answer"


class Upper(wrappers.Wrapper):
    """Written blocking."""

    def step(self, action: str) -> Any:
        observation, *rest = super().step(action)
        return observation.upper(), *rest


class AsyncUpper(wrappers.Wrapper):
    """The same, written async."""

    async def astep(self, action: str) -> Any:
        observation, *rest = await super().astep(action)
        return observation.upper(), *rest


def length(action, observation):
    return -0.01 * len(action)


WRAPPED: dict[str, Callable[[Any, Path], Any]] = {
    "none": lambda env, tmp: wrappers.Wrapper(env),
    "limit": lambda env, tmp: wrappers.TimeLimit(env, 3),
    "cut": lambda env, tmp: wrappers.TruncateToolOutput(env, 20),
    "history": lambda env, tmp: wrappers.ObservationHistory(env, 2),
    "shape": lambda env, tmp: wrappers.ShapeReward(env, length),
    "record": lambda env, tmp: wrappers.RecordEpisodes(env, tmp),
    "retry": lambda env, tmp: wrappers.RetryOnInfraError(env, attempts=2, backoff=0.0),
    "fixed": lambda env, tmp: wrappers.FixedTasks(env, [{"options": {}}, {"split": "train", "task_id": "mine"}]),
    "upper": lambda env, tmp: Upper(env),
    "async_upper": lambda env, tmp: AsyncUpper(env),
    "gymnasium": lambda env, tmp: wrappers.Wrapper(gymnasium.wrappers.TimeLimit(env, 3)),
    "all": lambda env, tmp: wrappers.RecordEpisodes(
        wrappers.ShapeReward(
            wrappers.ObservationHistory(
                Upper(
                    wrappers.TruncateToolOutput(
                        wrappers.RetryOnInfraError(
                            wrappers.TimeLimit(wrappers.FixedTasks(env, {"train": [{}], "test": [{}]}), 3), backoff=0.0
                        ),
                        30,
                    )
                ),
                1,
            ),
            length,
        ),
        tmp,
    ),
}


@pytest.fixture(params=WRAPPED)
def wrap(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], Any]:
    return lambda env: WRAPPED[request.param](env, tmp_path)


def blocking_episode(env: Any, seed: int) -> list[Any]:
    out: list[Any] = [copy.deepcopy(env.reset(seed=seed))]
    for action in ACTIONS:
        out.append(copy.deepcopy(env.step(action)))
        if out[-1][2] or out[-1][3]:
            break
    return out


async def async_episode(env: Any, seed: int) -> list[Any]:
    out: list[Any] = [copy.deepcopy(await env.areset(seed=seed))]
    for action in ACTIONS:
        out.append(copy.deepcopy(await env.astep(action)))
        if out[-1][2] or out[-1][3]:
            break
    return out


@pytest.mark.parametrize("cls", [Guess, AsyncGuess])
def test_both_ways_of_calling_and_of_writing_give_the_same_transitions(wrap, cls):
    for seed in range(3):
        both = blocking_episode(wrap(cls()), seed), asyncio.run(async_episode(wrap(cls()), seed))
        assert both[0] == both[1]
        assert both[0] == blocking_episode(wrap(Guess()), seed)


def test_the_model_reads_what_the_observation_says(wrap):
    for observation, *_, info in blocking_episode(wrap(Guess()), 1):
        assert "\n".join(message["content"] for message in info["messages"]) == observation


def test_plain_gymnasium_takes_them(wrap):
    def make(**kwargs: Any) -> Any:
        return wrap(Guess(**kwargs))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Gymnasium says of every wrapper that it would rather check what is inside, and of what has no name
        # that it cannot make another.
        warnings.filterwarnings("ignore", message=".*(is different from the unwrapped version|not having a spec).*")
        check_env(make())
        envs = SyncVectorEnv([make] * 2)
        observations, info = envs.reset(seed=0)
        assert len(observations) == len(info["task_id"]) == 2
        for _ in range(6):  # long enough for an autoreset
            envs.step(["x", "y"])
        envs.close()
    assert make().unwrapped.np_random is not None


def test_they_are_copied_and_pickled(wrap):
    env = wrap(Guess())
    env.reset(seed=0)
    env.step("no")
    other = pickle.loads(pickle.dumps(copy.deepcopy(env)))
    assert other.step("x")[:4] == env.step("x")[:4]


def test_a_composed_one_works_in_processes(tmp_path):
    envs = AsyncVectorEnv([lambda: WRAPPED["all"](Guess(), tmp_path)] * 2, shared_memory=False)
    try:
        asynchronous = [envs.reset(seed=0)[0], envs.step(["x", "y"])[0]]
    finally:
        envs.close()
    envs = SyncVectorEnv([lambda: WRAPPED["all"](Guess(), tmp_path)] * 2)
    assert asynchronous == [envs.reset(seed=0)[0], envs.step(["x", "y"])[0]]


def made_for_spec(n: int = 1) -> Any:
    return wrappers.ObservationHistory(wrappers.TimeLimit(Guess(), max_turns=2), n)


def test_gymnasium_makes_the_same_again():
    env = agentrl.make(made_for_spec, n=2)
    assert [w.kwargs for w in env.spec.additional_wrappers] == [{"max_turns": 2}, {"n": 2}]
    for again in (gymnasium.make(env.spec), gymnasium.make(gymnasium.make(env.spec).spec)):
        assert again.get_wrapper_attr("n") == 2
        again.reset(seed=0)
        assert [again.step("no")[3] for _ in range(2)] == [False, True]
    over = wrappers.ShapeReward(agentrl.make(Guess), fn=length)
    assert gymnasium.make(over.spec).reset(seed=0)[0] == over.reset(seed=0)[0]


# -- the base ---------------------------------------------------------------------------------------


def test_what_a_wrapper_does_not_have_is_that_of_the_environment():
    env = wrappers.Wrapper(wrappers.TimeLimit(Ask(max_turns=9), 2))
    assert (env.max_turns, env.splits, env.num_tasks("test"), env.unwrapped.max_turns) == (
        2,
        ("train", "test"),
        None,
        9,
    )
    env.reset(seed=0)
    assert env.row["answer"] == "gold"
    env.call_format = "tags:echo,answer"
    assert env.unwrapped.call_format == "tags:echo,answer" == env.call_format
    with pytest.raises(AttributeError, match="no_such"):
        _ = env.no_such
    assert not hasattr(env, "agents")
    copy.copy(env)


def test_names_that_say_one_thing_and_do_the_other_are_refused():
    with pytest.raises(TypeError, match="name it `astep`"):

        class Wrong(wrappers.Wrapper):
            async def step(self, action: str) -> Any: ...


def test_stepping_and_closing_out_of_turn():
    env = wrappers.Wrapper(Guess())
    with pytest.raises(ResetNeeded, match="episode that is new"):
        env.step("x")
    limited = wrappers.TimeLimit(Guess(), 1)
    limited.reset(seed=0)
    assert limited.step("x")[3]
    with pytest.raises(ResetNeeded, match="episode that is over"):
        limited.step("x")
    limited.close()
    limited.close()
    asyncio.run(limited.aclose())
    with pytest.raises(ResetNeeded, match="episode that is closed"):
        limited.step("x")


@pytest.mark.parametrize("result", [("", 0.0, False, {}), (None, 0.0, False, False, {}), ("", "1", False, False, {})])
def test_a_broken_transition_names_the_wrapper(result):
    class Broken(wrappers.Wrapper):
        def step(self, action: str) -> Any:
            super().step(action)
            return result

    env = Broken(Guess())
    env.reset(seed=0)
    with pytest.raises(EnvError, match="Broken.step"):
        env.step("x")


def test_a_wrapper_that_ends_an_episode_need_not_say_how():
    class Ends(wrappers.Wrapper):
        def step(self, action: str) -> Any:
            observation, reward, *_, info = super().step(action)
            return observation, reward, action == "stop", action == "cut", info

    env = Ends(Guess())
    for action, reason, success in (("stop", "done", None), ("cut", "env_truncated", False)):
        env.reset(seed=0)
        info = env.step(action)[4]
        assert (info["stop_reason"], info.get("success")) == (reason, success)


@pytest.mark.parametrize(
    ("messages", "before", "after", "expected"),
    [
        ([("user", "a")], "a", "b", [("user", "b")]),
        ([("system", "s"), ("user", "a")], "a", "b", [("system", "s"), ("user", "b")]),
        (
            [("user", "q"), ("assistant", "r"), ("user", "a")],
            "a",
            "b",
            [("user", "q"), ("assistant", "r"), ("user", "b")],
        ),
        ([("tool", "1"), ("tool", "2")], "1\n2", "Note. 1\n2", [("tool", "Note. 1"), ("tool", "2")]),
        ([("tool", "1"), ("tool", "2")], "1\n2", "1\n2 End.", [("tool", "1"), ("tool", "2 End.")]),
        ([("tool", "1"), ("tool", "2")], "1\n2", "new", [("tool", "new"), ("tool", "")]),
        ([("system", "s"), ("user", "1"), ("user", "2")], "1\n2", "new", [("system", "s"), ("user", "new")]),
        ([], "", "new", [("user", "new")]),
        ([], "", "", []),
        ([("user", "a <board>")], "a", "", [("user", "")]),
    ],
)
def test_messages_follow_a_changed_observation(messages, before, after, expected):
    said = [{"role": role, "content": content} for role, content in messages]
    told = retold(said, before, after)
    assert [(m["role"], m["content"]) for m in told] == expected
    assert said == [{"role": role, "content": content} for role, content in messages]


words = st.text(max_size=8)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "tool", "assistant"]), words), max_size=4), words, words)
def test_a_changed_observation_is_always_read(messages, prefix, suffix):
    said = [{"role": role, "content": content} for role, content in messages]
    before = "\n".join(content for role, content in messages if role != "system")
    for after in (prefix + before, before + suffix, prefix + suffix):
        told = retold(said, before, after)
        assert after in "\n".join(m["content"] for m in told if m["role"] != "system")
        assert [m for m in told if m["role"] == "system"] == [m for m in said if m["role"] == "system"]


def test_gymnasiums_own_wrappers_change_what_the_model_reads():
    inner = gymnasium.wrappers.TransformObservation(Guess(), lambda text: f"<<{text}>>", None)
    env = wrappers.Wrapper(inner)
    observation, info = env.reset(seed=0)
    assert (
        info["messages"] == [{"role": "user", "content": "<<Guess a digit.>>"}] and observation == "<<Guess a digit.>>"
    )
    assert asyncio.run(env.astep("x"))[4]["messages"][0]["content"].startswith("<<Not")


def test_messages_that_the_author_set_stay():
    class Own(wrappers.Wrapper):
        def step(self, action: str) -> Any:
            observation, *rest, info = super().step(action)
            info["messages"] = [{"role": "user", "content": "mine"}]
            return "theirs", *rest, info

    env = Own(Guess())
    env.reset(seed=0)
    assert env.step("x")[4]["messages"] == [{"role": "user", "content": "mine"}]


def test_a_wrapper_may_answer_a_turn_itself_or_give_an_info_of_its_own():
    class Helpful(wrappers.Wrapper):
        def step(self, action: str) -> Any:
            if action == "help":
                return "Say a digit.", 0.0, False, False, {}
            observation, *rest, _ = super().step(action)
            return observation, *rest, {"mine": 1}

    env = Helpful(Ask())
    env.reset(seed=0)
    _, *_, info = env.step(call("echo", text="a") * 2)
    assert [(m["role"], m["content"]) for m in info["messages"]] == [("tool", "a"), ("tool", "a")] and info["mine"] == 1
    assert env.step("help")[4] == {"messages": [{"role": "user", "content": "Say a digit."}]}


# -- each of them -----------------------------------------------------------------------------------


def test_time_limit():
    env = wrappers.TimeLimit(Guess(), 2)
    for _ in range(2):
        env.reset(seed=0)
        assert env.step("no")[3] is False
        _, _, terminated, truncated, info = env.step("no")
        assert (terminated, truncated, info["stop_reason"], info["success"]) == (False, True, "max_turns", False)
    env.reset(seed=0)
    env.step("no")
    assert env.step(str(env.secret))[2:4] == (True, False)
    with pytest.raises(ConfigError, match="max_turns is 0"):
        wrappers.TimeLimit(Guess(), 0)


def test_truncated_tool_output():
    env = wrappers.TruncateToolOutput(Ask(), 10)
    first = env.reset(seed=0)[0]
    assert first.startswith("train") and len(first) > 6
    two = call("echo", text="ab", times=50) + call("echo", text="cd")
    observation, *_, info = env.step(two)
    assert [m["content"] for m in info["messages"]] == ["ababababab\n[90 more characters cut]", "cd"]
    assert observation == "ababababab\n[90 more characters cut]\ncd"
    env = wrappers.TruncateToolOutput(TagAsk(), 20)
    env.reset(seed=0)
    text = env.step(f"<echo>{'x' * 50}</echo>")[0]
    assert text == "<information>\nxxxxxx\n[44 more characters cut]\n</information>"


def test_a_megabyte_of_white_space_is_cut_in_no_time():
    env = wrappers.TruncateToolOutput(Ask(max_tool_output=2_000_000), 10)
    env.reset(seed=0)
    long = call("echo", text=f"x{' ' * 1_000_000}y")
    assert "more characters cut" in within(150, lambda: env.step(long))[0]


def test_observation_history():
    env = wrappers.ObservationHistory(Ask(), 1)
    task = env.reset(seed=0)[0]
    a, b, c = (call("echo", text=letter) for letter in "abc")
    assert env.step(a)[0] == f"[observation]\n{task}\n[action]\n{a}\n[observation]\na"
    observation, *_, info = env.step(b + c)
    assert observation == f"[observation]\na\n[action]\n{b + c}\n[observation]\nb\nc"
    assert [m["content"] for m in info["messages"]] == [observation.removesuffix("\nc"), "c"]
    assert info["messages"][0]["role"] == "tool"
    assert env.reset(seed=0)[0] == task


async def asked(action, observation, reward, info):
    return {"seen": float("Not" in observation), "unpaid": float(reward < 0)}


def test_shaped_rewards():
    env = wrappers.ShapeReward(Guess(), [(2.0, asked), length])
    env.reset(seed=0)
    _, reward, _, _, info = env.step("12345")
    assert info["rewards"] == {"seen": 2.0, "unpaid": 2.0, "length": -0.05}
    assert reward == pytest.approx(-0.1 + 4.0 - 0.05)
    env = wrappers.ShapeReward(Guess(), lambda action, observation: float("nan"))
    env.reset(seed=0)
    with pytest.raises(EnvError, match="finite number"):
        env.step("x")


def test_shaping_does_not_make_a_success():
    class Silent(agentrl.Env):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "q", {}

        def step(self, action):
            return "", float(action == "right"), True, False, {}

    env = wrappers.ShapeReward(Silent(), lambda action, observation: 5.0)
    for action, success in (("wrong", False), ("right", True)):
        env.reset(seed=0)
        assert env.step(action)[4]["success"] is success


def test_recorded_episodes(tmp_path):
    env = wrappers.RecordEpisodes(wrappers.ShapeReward(Ask(system_prompt="S"), length), tmp_path / "records")
    env.reset(seed=0, options={"split": "test", "index": 3})
    env.step(call("echo", text="naïve 你好"))
    env.step("gold")
    env.reset(seed=1)
    env.step(call("echo", text="b"))
    env.reset(seed=2)
    asyncio.run(env.aclose())
    (file,) = (tmp_path / "records").iterdir()
    done, left, untouched = [json.loads(line) for line in file.read_text().splitlines()]
    assert (done["task_id"], done["seed"], done["options"]) == ("test/3", 0, {"split": "test", "index": 3})
    assert [m["role"] for m in done["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert done["messages"][3]["content"] == "naïve 你好"
    assert done["reward"] == pytest.approx(sum(done["turn_rewards"])) == pytest.approx(sum(done["rewards"].values()))
    assert (done["success"], done["stop_reason"], done["finished"], done["num_turns"]) == (True, "done", True, 2)
    assert done["tool_calls"][0]["name"] == "echo" and done["tool_calls"][0]["turn"] == 0
    assert (left["finished"], left["num_turns"], left["stop_reason"]) == (False, 1, None)
    assert (untouched["num_turns"], untouched["finished"]) == (0, False)


class Flaky(Guess):
    """Fails at the calls whose numbers stand in ``fails``; counts them over resets."""

    fails: tuple[int, ...] = ()
    calls = 0
    drifts = False

    def _count(self) -> None:
        self.calls += 1
        if self.calls in self.fails:
            raise InfraError(f"call {self.calls} found nobody")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._count()
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Any:
        observation, *rest = super().step(action)  # the turn has begun, the random numbers are drawn
        self._count()
        return observation + (str(self.calls) if self.drifts else ""), *rest


@pytest.mark.parametrize("seed", [0, None])
def test_a_retried_step_is_as_if_nothing_had_happened(seed):
    def episodes(*fails: int) -> list[Any]:
        inner = Flaky()
        env = wrappers.RetryOnInfraError(inner, attempts=3, backoff=0.0)
        env.reset(seed=5)  # so that an unseeded reset after it is determined too
        inner.calls, inner.fails = 0, fails
        env.reset(seed=seed)
        return [blocking_episode_from(env), env.reset(), env.step("x"), env.reset(seed=3)]

    def blocking_episode_from(env: Any) -> list[Any]:
        return [env.step(action) for action in ("x", "y", "z")]

    assert episodes() == episodes(1) == episodes(3) == episodes(4) == episodes(3, 4) == episodes(4, 8)


def test_retries_end():
    inner = Flaky()
    env = wrappers.RetryOnInfraError(inner, attempts=2, backoff=0.0)
    inner.fails = (1, 2)
    with pytest.raises(InfraError, match="call 2 found nobody"):
        env.reset(seed=0)
    env.reset(seed=0)
    env.step("a")
    inner.fails = tuple(range(inner.calls + 1, 99))
    with pytest.raises(InfraError, match="found nobody"):
        asyncio.run(env.astep("b"))
    inner.fails, inner.drifts = (), True
    env.reset(seed=0)
    env.step("a")
    inner.fails = (inner.calls + 1,)
    with pytest.raises(InfraError, match="cannot be played again"):
        env.step("b")
    for bad in ({"attempts": 0}, {"backoff": -1.0}, {"backoff": float("nan")}):
        with pytest.raises(ConfigError, match="RetryOnInfraError"):
            wrappers.RetryOnInfraError(Guess(), **bad)


def test_a_retry_does_not_go_on_in_another_task():
    inner = Flaky()
    env = wrappers.RetryOnInfraError(wrappers.FixedTasks(inner, [{"seed": s} for s in range(50)]), backoff=0.0)
    env.reset(seed=0)
    env.reset()
    inner.fails = (inner.calls + 1,)  # the list draws another task when it is asked again without a seed
    with pytest.raises(InfraError, match="cannot be played again"):
        env.step("a")


class Whisper(agentrl.MultiAgentEnv):
    """A word goes from one to the other; what each is told is the other's secret."""

    agents = ("teller", "writer")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return "The word is rain.", {"prompts": {"teller": "Describe.", "writer": "Guess."}}

    def step(self, action: str) -> Any:
        over = action == "rain"
        if self.acting == "teller":
            return f"hint: {action}", 0.5, False, False, {}
        return f"wrong: {action}", 0.0, over, False, {"agent_rewards": {"writer": 2.0 * over}}


def test_histories_of_agents_are_apart():
    env = wrappers.ObservationHistory(Whisper(), 2)
    env.reset(seed=0)
    observation, *_, info = env.step("wet")
    assert observation == "hint: wet" and info["messages"] == [{"role": "user", "content": "hint: wet"}]
    observation = env.step("sea")[0]
    assert observation == "[observation]\nThe word is rain.\n[action]\nwet\n[observation]\nwrong: sea"
    assert env.step("from above")[0].startswith("[observation]\nhint: wet\n[action]\nsea\n[observation]\nhint:")


def test_shaping_goes_to_who_acted():
    env = wrappers.ShapeReward(Whisper(), length)
    env.reset(seed=0)
    _, reward, *_, info = env.step("x" * 10)
    assert reward == pytest.approx(0.4)
    assert info["agent_rewards"] == {"teller": pytest.approx(0.4), "writer": 0.5}
    _, reward, *_, info = env.step("x" * 20)
    assert info["agent_rewards"] == {"teller": 0.0, "writer": pytest.approx(-0.2)}


def test_records_say_who_spoke_and_what_each_earned(tmp_path):
    env = wrappers.RecordEpisodes(wrappers.ShapeReward(Whisper(), length), tmp_path)
    env.reset(seed=0)
    env.step("wet")
    env.step("rain")
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert [m.get("name") for m in record["messages"] if m["role"] == "assistant"] == ["teller", "writer"]
    assert record["prompts"]["writer"]["messages"][0]["content"] == "Guess."
    assert record["agent_rewards"] == {"teller": pytest.approx(0.47), "writer": pytest.approx(2.46)}


def test_a_prompt_is_refused_where_nothing_reads_it():
    with pytest.raises(ConfigError, match="Guess is none"):
        wrappers.FixedTasks(Guess(), [{"prompt": "1 + 1?"}])


def test_fixed_tasks_of_a_tool_env(tmp_path):
    rows = [
        {"prompt": "1 + 1?", "answer": "2", "split": "train"},
        {"prompt": "2 + 2?", "answer": "4", "task_id": "four"},
        {"prompt": [{"role": "user", "content": "3 + 3?"}], "answer": "6"},
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8-sig")
    for tasks in (rows, tmp_path / "tasks.jsonl", {"train": rows[:1], "test": rows[1:]}):
        env = wrappers.FixedTasks(Ask(), tasks)
        assert (env.splits, env.num_tasks("train"), env.num_tasks("test")) == (("train", "test"), 1, 2)
        observation, info = env.reset(options={"split": "test", "index": 0})
        assert (observation, info["task_id"]) == ("2 + 2?", "four")
        assert env.step("4")[1] == 1.0
        assert env.reset(options={"split": "test", "index": 1})[0] == "3 + 3?"
        assert {env.reset(seed=s, options={"split": "test"})[0] for s in range(20)} == {"2 + 2?", "3 + 3?"}
        assert env.reset(seed=3)[0] == env.reset(seed=3)[0] == "1 + 1?"


def test_fixed_tasks_say_how_to_reset():
    env = wrappers.FixedTasks(Guess(), {"hard": [{"seed": 4, "task_id": "h"}, {"seed": 5, "options": {"note": 1}}]})
    assert env.splits == ("hard",)
    observation, info = env.reset(seed=99, options={"index": 0})
    secret = env.secret
    assert info["task_id"] == "h"
    env.reset(seed=7, options={"split": "hard", "index": 0})
    assert env.secret == secret
    env.reset(options={"index": 1})
    assert env.unwrapped._options == {"split": "train", "note": 1}
    indexed = wrappers.FixedTasks(Ask(), [{"index": 7}, {"index": 8, "split": "train"}])
    assert indexed.reset(options={"split": "test", "index": 0})[1]["task_id"] == "test/7"
    assert indexed.reset(options={"split": "train", "index": 0})[1]["task_id"] == "train/8"


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        ([], ConfigError, "no tasks in the list"),
        ({"test": []}, ConfigError, "no tasks in 'test'"),
        ({}, ConfigError, "no tasks in the list"),
        ([{"sed": 1}], ConfigError, "'sed' means nothing here"),
        ([3], ConfigError, "a task is a dict"),
        ([{"seed": "x"}], ConfigError, "'seed' must be a whole number"),
        ("no/such/file.jsonl", DataError, "cannot be read"),
    ],
)
def test_bad_lists_of_tasks_are_refused(tasks, error, message):
    with pytest.raises(error, match=message):
        wrappers.FixedTasks(Ask(), tasks)


def test_task_data_of_any_kind_may_be_the_list(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "label": "2", "category": "sums"}\n')
    env = wrappers.FixedTasks(Ask(), agentrl.load_tasks(tmp_path / "rows.jsonl"))
    assert env.num_tasks("train") == 1 and env.num_tasks("test") == 0
    _, info = env.reset(options={"split": "train", "index": 0})
    assert info["category"] == "sums" and env.step("2")[1] == 1.0
    with pytest.raises(ConfigError, match="no tasks in split 'test'"):
        env.reset(options={"split": "test"})


def test_a_bad_line_is_named(tmp_path):
    bad = (("{}\n{", "tasks.jsonl:2: not JSON"), ("{}\n\n[]", "tasks.jsonl:3: expected a JSON object, got list"))
    for text, message in bad:
        (tmp_path / "tasks.jsonl").write_text(text)
        with pytest.raises(DataError, match=message):
            wrappers.FixedTasks(Ask(), tmp_path / "tasks.jsonl")
    env = wrappers.FixedTasks(Ask(), [{}])
    for options, message in (
        ({"split": "nope"}, "no split 'nope'"),
        ({"index": 1}, "no task 1; split 'test' has 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            env.reset(options=options)
