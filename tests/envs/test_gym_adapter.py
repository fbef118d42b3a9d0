"""Any Gymnasium environment in text: what the model is told, which action a text names, whose reward it is."""

from __future__ import annotations

import asyncio
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl
from agentrl.cli.main import main
from agentrl.envs.adapters.gymnasium_text import ActionError, observation_words, parse_action, without_colors
from agentrl.errors import ConfigError

TOYS = ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"]
CLASSIC = ["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1"]


class Hangman(gymnasium.Env[str, str]):
    """Guess a word letter by letter."""

    observation_space = spaces.Text(8, charset="abc_")
    action_space = spaces.Text(1, charset="abc")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.word = (options or {}).get("word") or "".join(self.np_random.choice(list("abc"), 4))
        self.seen: set[str] = set()
        return self._shown(), {}

    def step(self, action: str) -> Any:
        self.seen.add(action)
        done = "_" not in self._shown()
        return self._shown(), float(done), done, False, {}

    def _shown(self) -> str:
        return "".join(letter if letter in self.seen else "_" for letter in self.word)


class Mixed(gymnasium.Env[Any, Any]):
    """A dict of everything, and several numbers to choose."""

    observation_space = spaces.Dict(
        {
            "place": spaces.Discrete(3),
            "speeds": spaces.Box(-1, 1, (2,)),
            "said": spaces.Text(5),
            "cards": spaces.Tuple([spaces.MultiDiscrete([3, 3]), spaces.MultiBinary(2)]),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3], start=[0, 1])
    meant: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        return self.observation_space.sample(), float(action[1]), False, False, {}


class Graph(gymnasium.Env[Any, Any]):
    observation_space = spaces.Graph(spaces.Discrete(2), None)
    action_space = spaces.Discrete(2)


class Image(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = spaces.Discrete(2)


class Both(gymnasium.Env[Any, Any]):
    observation_space = spaces.Discrete(2)
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])


@pytest.fixture(autouse=True, scope="module")
def ids() -> Any:
    made = {"test/Hangman-v0": Hangman, "test/Mixed-v0": Mixed, "test/Graph-v0": Graph, "test/Image-v0": Image}
    for name, cls in {**made, "test/Both-v0": Both}.items():
        gymnasium.register(name, entry_point=cls, max_episode_steps=6)
    yield
    for name in [*made, "test/Both-v0"]:
        del gymnasium.registry[name]


def play(env: Any, actions: list[str], seed: int = 3, **options: Any) -> list[Any]:
    out: list[Any] = [env.reset(seed=seed, options=options)]
    for action in actions:
        out.append(env.step(action))
        if out[-1][2] or out[-1][3]:
            break
    return out


@pytest.mark.parametrize("id", [*TOYS, "CartPole-v1", "Pendulum-v1", "test/Hangman-v0", "test/Mixed-v0"])
def test_it_is_an_environment_like_any_other(id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(agentrl.make(f"gym:{id}"))
    again = gymnasium.make(agentrl.make(f"gym:{id}", max_turns=3).spec)
    assert again.unwrapped.max_turns == 3


@pytest.mark.parametrize("id", [*TOYS, *CLASSIC, "test/Hangman-v0", "test/Mixed-v0"])
def test_the_same_seed_is_the_same_game_both_ways(id):
    actions = ["what?", "action: 1", "action: b", "", "action: 0.5", "[1, 2]", "action: left"] * 2

    async def asynchronous() -> list[Any]:
        env = agentrl.make(f"gym:{id}")
        out: list[Any] = [await env.areset(seed=3, options={})]
        for action in actions:
            out.append(await env.astep(action))
            if out[-1][2] or out[-1][3]:
                break
        return out

    first = play(agentrl.make(f"gym:{id}"), actions)
    assert first == play(agentrl.make(f"gym:{id}"), actions) == asyncio.run(asynchronous())
    assert any("Nothing was done" in step[0] for step in first[1:])
    assert first != play(agentrl.make(f"gym:{id}"), actions, seed=4)


def test_frozen_lake_is_drawn_and_won():
    env = agentrl.make("gym:FrozenLake-v1", is_slippery=False)
    observation, info = env.reset(seed=0, options={"split": "test", "index": 5})
    system, user = info["messages"]
    assert "0 = left, 1 = down, 2 = right, 3 = up" in system["content"] and "from start to goal" in system["content"]
    assert user["content"] == observation == "[S]FFF\nFHFH\nFFFH\nHFFG\nposition: 0"
    assert info["task_id"] == "FrozenLake-v1/test/5"
    moves = [
        "Down it is.\naction: down",
        "**Action:** Down",
        "<think>action: up</think>action: 2",
        "down",
        "action: 2.",
    ]
    steps = [env.step(move) for move in [*moves, "action: right"]]
    assert "position: 4" in steps[0][0] and "S[" not in steps[0][0]
    _, reward, terminated, truncated, info = steps[-1]
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["rewards"] == {"game": 1.0}
    env.reset(seed=0)
    lost = play(env, ["right", "down"])[-1]
    assert lost[2] and lost[4]["success"] is False


def test_blackjack_and_taxi_say_what_numbers_mean():
    cards = agentrl.make("gym:Blackjack-v1").reset(seed=1)[0]
    assert cards.startswith("your sum: ") and "dealer's card: " in cards
    env = agentrl.make("gym:Taxi-v4", observation="text")
    text = env.reset(seed=1)[0]
    assert text.startswith("taxi row: ") and "possible actions: " in text
    assert "[" not in text


def test_train_and_test_are_different_seeds():
    def first(split: str, index: int) -> str:
        return agentrl.make("gym:Taxi-v4").reset(seed=9, options={"split": split, "index": index})[0]

    assert first("train", 3) == first("train", 3)
    env = agentrl.make("gym:CartPole-v1", train_tasks=200, test_tasks=200)
    assert (env.num_tasks("train"), env.num_tasks("test")) == (200, 200)
    starts = {s: {env.reset(options={"split": s, "index": i})[0] for i in range(200)} for s in env.splits}
    assert not starts["train"] & starts["test"]
    env.reset(seed=0, options={"split": "test"})
    for index, message in (
        (200, "no task 200"),
        (-1, "no task -1"),
        ("3", "number of a task"),
        (True, "number of a task"),
    ):
        with pytest.raises(ConfigError, match=message):
            env.reset(options={"index": index})


def test_the_environments_own_time_limit_truncates():
    steps = play(agentrl.make("gym:test/Mixed-v0"), ["action: 1, 3"] * 9)
    _, reward, terminated, truncated, info = steps[-1]
    assert (len(steps), reward, terminated, truncated, info["stop_reason"]) == (7, 3.0, False, True, "env_truncated")
    info = play(agentrl.make("gym:test/Mixed-v0", max_turns=2), ["action: 1, 3"] * 9)[-1][4]
    assert info["stop_reason"] == "max_turns"


def test_success_is_what_the_settings_say():
    def last(turns: int, action: str = "action: 1, 3", **settings: Any) -> bool:
        env = agentrl.make("gym:test/Mixed-v0", max_turns=turns, **settings)
        return play(env, [action] * 9)[-1][4]["success"]

    assert last(3) is True  # the last reward is above 0
    assert last(3, success="terminated") is False
    assert [last(3, success_return=value) for value in (9.0, 9.5)] == [True, False]
    assert last(3, "nothing", success_return=-1.0) is True
    assert last(3, "nothing") is False
    balanced = agentrl.make("gym:CartPole-v1", max_turns=5, success_return=5)
    assert play(balanced, ["left", "right"] * 3)[-1][4] | {"messages": []} == {
        "messages": [], "rewards": {"game": 1.0}, "stop_reason": "max_turns", "success": True
    }  # fmt: skip
    assert agentrl.make("gym:CartPole-v1").success_return == 475
    with pytest.raises(ConfigError, match="needs success_return"):
        agentrl.make("gym:Blackjack-v1", success="return")


def test_a_turn_without_an_action_costs_what_the_settings_say_and_moves_nothing():
    env = agentrl.make("gym:FrozenLake-v1", is_slippery=False, invalid_action_reward=-0.5)
    before = env.reset(seed=0)[0]
    observation, reward, *_, info = env.step("Maybe left, maybe right.")
    assert observation.startswith("Nothing was done: 'Maybe left, maybe right.' names no action. End your turn with")
    assert (reward, info["rewards"]) == (-0.5, {"invalid_action": -0.5})
    assert env.step("left")[0].endswith("position: 0") and before.endswith("position: 0")


def test_options_reach_the_environment():
    env = agentrl.make("gym:test/Hangman-v0", reset_options={"word": "abba"})
    assert env.reset(seed=0)[0] == "____"
    env.step("action: a")
    assert env.step("b")[1:3] == (1.0, True)
    assert env.reset(seed=0, options={"word": "cc", "split": "train"})[0] == "__"
    assert "Guess a word letter by letter." in env.reset(seed=0)[1]["messages"][0]["content"]
    assert "text of 1 to 1 characters" in env.step("action: zz")[0]


def test_fixed_tasks_are_environment_seed_and_options():
    tasks = [{"options": {"word": "ab"}}, {"index": 3, "split": "train"}]
    env = agentrl.wrappers.FixedTasks(agentrl.make("gym:test/Hangman-v0"), tasks)
    assert env.reset(options={"split": "test", "index": 0})[0] == "__"
    assert env.reset(options={"split": "train", "index": 0})[1]["task_id"] == "test/Hangman-v0/train/3"


@pytest.mark.parametrize(
    ("id", "settings", "message"),
    [
        ("FrozenLak-v1", {}, "cannot be made"),
        ("FrozenLake-v1", {"slippery": False}, "cannot be made: .*slippery"),
        ("FrozenLake-v1", {"observation": "pixels"}, "observation is 'pixels'; expected one of auto, ansi, text"),
        ("FrozenLake-v1", {"success": "win"}, "success is 'win'"),
        ("FrozenLake-v1", {"action_names": ["a", "b"]}, "action_names are .* from 0 to 3"),
        ("Blackjack-v1", {"observation": "ansi"}, "no `ansi` rendering"),
        ("test/Graph-v0", {}, "are not text"),
        ("test/Image-v0", {}, "at most 64 values"),
        ("test/Both-v0", {}, "cannot be named in text"),
        ("agentrl/search-v0", {}, "a text environment already: use --env agentrl/search-v0"),
        ("no.such.package:Env-v0", {}, "no module 'no' can be imported"),
    ],
)
def test_what_cannot_be_played_is_refused_when_it_is_made(id, settings, message):
    with pytest.raises(ConfigError, match=message):
        agentrl.make(f"gym:{id}", **settings)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("left", 0),
        ("LEFT.", 0),
        ("`left`", 0),
        ("3", 3),
        ("(2)", 2),
        ("I think.\nright", 2),
        ("action: right", 2),
        ("Action = 'up'", 3),
        ("action: go left now", 0),
        ("action: left\naction: up", 3),
        ("action: 1 (down)", 1),
        ("**action**: 1.0", 1),
        ("my action: [3]", 3),
        ("action:\n\ndown\nI hope so", 1),
    ],
)
def test_a_text_that_names_an_action(text, action):
    assert parse_action(text, spaces.Discrete(4), ("left", "down", "right", "up")) == action


@pytest.mark.parametrize(
    "text",
    ["", "   ", "hello", "action:", "action: 4", "action: -1", "action: 1.5", "action: left or right", "action: 1, 2",
     "go left", "I am at 0 and go up", "leftmost", "action: 1e99", "\0", "action: \ud800", "not left"],
)  # fmt: skip
def test_a_text_that_names_none(text):
    with pytest.raises(ActionError):
        parse_action(text, spaces.Discrete(4), ("left", "down", "right", "up"))


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(3, start=-1), "action: -1", -1),
        (spaces.Box(-2, 2, (1,)), "action: -1.5", [-1.5]),
        (spaces.Box(-2, 2, (1,)), "action: \u22121.5", [-1.5]),
        (spaces.Box(-2, 2, (2,)), "action: - 1.5, \u20131", [-1.5, -1]),
        (spaces.Discrete(3, start=-1), "action: - 1", -1),
        (spaces.Discrete(3), "action:\n- 1", 1),
        (spaces.Box(-2, 2, (2,)), "[.5, 1e-1]", [0.5, 0.1]),
        (spaces.Box(0, 9, (), np.int64), "7", 7),
        (spaces.Box(-1, 1, (2, 2)), "action: [[1, 0], [0, 1]]", [[1, 0], [0, 1]]),
        (spaces.MultiDiscrete([2, 3]), "action: 1 2", [1, 2]),
        (spaces.MultiBinary(3), "1, 0, 1", [1, 0, 1]),
        (spaces.Text(9), "hello", "hello"),
    ],
)
def test_other_spaces(space, text, action):
    found = parse_action(text, space)
    assert found in space
    assert np.array_equal(found, np.array(action, dtype=getattr(space, "dtype", None)))


@pytest.mark.parametrize(
    ("space", "text", "message"),
    [
        (spaces.Box(-2, 2, (1,)), "action: 3", "outside"),
        (spaces.Box(-2, 2, (1,)), "action: nan", "1 number expected, got 0"),
        (spaces.Box(-2, 2, (1,)), "action: 1 1", "1 number expected, got 2"),
        (spaces.Box(-np.inf, np.inf, (1,), np.float64), "action: 1e999", "outside"),
        (spaces.Box(-2, 2, (1,)), "about 1", "not marked"),
        (spaces.MultiDiscrete([2, 3]), "action: 1 3", "outside"),
        (spaces.MultiDiscrete([2, 3]), "action: 1 0.5", "whole numbers"),
        (spaces.MultiBinary(2), "action: 0 2", "outside"),
        (spaces.Text(3), "action: hello", "text of 1 to 3"),
    ],
)
def test_what_is_wrong_is_said(space, text, message):
    with pytest.raises(ActionError, match=message):
        parse_action(text, space)


@given(st.one_of(st.text(), st.text(alphabet="action:= 0123.e-[],\nleftup<think></think>", max_size=60)))
@settings(max_examples=150)
def test_no_text_raises_anything_else(text):
    for space in (spaces.Discrete(2), spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 2]), spaces.Text(4)):
        try:
            action = parse_action(text, space, ("left", "up"))
        except ActionError as error:
            assert str(error)
        else:
            assert action in space


def test_a_megabyte_is_read_quickly():
    for text in ("action: " * 130_000, "9" * 1_000_000, "action " + " " * 1_000_000, "\n" * 1_000_000):
        with pytest.raises(ActionError):
            parse_action(text, spaces.Discrete(2), ("left", "right"))


def test_observations_in_words():
    value = {"a": np.int64(3), "b": np.array([[0.123456, 2]]), "c": "text", "d": (np.array([1, 0]), 2)}
    assert observation_words(value) == "a: 3, b: [0.1235, 2], c: text, d: [[1, 0], 2]"
    assert observation_words(np.array([1.0, 2.0]), ["x", "y"]) == "x: 1, y: 2"
    assert observation_words((1, 2), ["only"]) == "[1, 2]"


def test_colors_become_brackets():
    drawn = "\n\x1b[41mS\x1b[0mF \x1b[34;1mY\x1b[0m \x1b[35mR\x1b[0m \x1b[32mG\x1b[0m \x1b[1mb\x1b[0m\x1b[2J\n"
    assert without_colors(drawn) == ("[S]F (Y) {R} <G> b", True)
    assert without_colors("plain\n") == ("plain", False)


THIRD_PARTY = """
import gymnasium


class Tiny(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return int(action), float(action), True, False, {}


gymnasium.register("Tiny-v0", entry_point=Tiny)
gymnasium.register("toys/Tiny-v0", entry_point=Tiny)
"""


@pytest.fixture
def tinypkg(tmp_path, monkeypatch):
    """A package that registers its environments when it is imported."""
    (tmp_path / "tinypkg").mkdir()
    (tmp_path / "tinypkg" / "__init__.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "tinypkg"
    sys.modules.pop("tinypkg", None)
    for name in ("Tiny-v0", "toys/Tiny-v0"):
        gymnasium.registry.pop(name, None)


@pytest.mark.parametrize("name", ["Tiny-v0", "toys/Tiny-v0"])
def test_an_environment_of_a_package_that_nobody_imported(tinypkg, name, capsys):
    assert play(agentrl.make(f"gym:tinypkg:{name}"), ["action: 1"])[-1][1] == 1.0
    assert main(["env", "show", f"gym:tinypkg:{name}"]) == 0
    assert "You play Tiny" in capsys.readouterr().out


def test_a_package_that_is_not_there_is_named(tinypkg):
    with pytest.raises(ConfigError, match="gym:nopkg:Tiny-v0: no module 'nopkg' can be imported"):
        agentrl.make("gym:nopkg:Tiny-v0")
    with pytest.raises(ConfigError, match="gym:tinypkg:Tinny-v0 cannot be made"):
        agentrl.make("gym:tinypkg:Tinny-v0")
