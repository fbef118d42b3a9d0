"""The text adventure: its worlds can be finished, its rewards add up, and its answers teach."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.envs.builtin.textgame import TextGameEnv, command_of
from agentrl.envs.builtin.textgame.world import LEVELS, make_world
from agentrl.errors import ConfigError
from agentrl.types import StopReason
from tests.envs.playing import first_prompt_tokens, play


def oracle(env):
    return env.solution()[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_oracle_finishes_every_world_in_the_promised_number_of_turns(level, split):
    for index in range(8):
        (trajectory,) = play(TextGameEnv(difficulty=level), oracle, index=index, split=split)
        assert (trajectory.success, trajectory.stop_reason) == (True, StopReason.DONE)
        assert trajectory.reward == pytest.approx(1.0) and trajectory.info["category"] == level
        assert trajectory.num_turns == trajectory.info["optimal_turns"]
        assert LEVELS[level].shortest <= trajectory.num_turns <= LEVELS[level].longest
        assert all(r == pytest.approx(1 / trajectory.num_turns) for r in trajectory.turn_rewards)


def test_silence_and_running_around_do_not_finish():
    def wander(env):
        ways = list(env.world.exits[env.state.room])
        return f"go {ways[env._turn % len(ways)]}"

    for policy in (lambda env: "", wander):
        played = [play(TextGameEnv(difficulty="medium"), policy, index=i)[0] for i in range(10)]
        assert not any(t.success for t in played)
        assert {t.stop_reason for t in played} == {StopReason.MAX_TURNS}


def test_going_back_costs_what_going_forth_earned():
    env = TextGameEnv(difficulty="hard")
    env.reset(options={"split": "train", "index": 1})
    rewards = []
    while not env.solution()[0].startswith("go"):
        rewards.append(env.step(oracle(env))[1])
    way = env.solution()[0].split(" ")[1]
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[way]
    assert env.step(f"go {way}")[1] == pytest.approx(-env.step(f"go {back}")[1]) != 0
    while not env.world.done(env.state):
        rewards.append(env.step(oracle(env))[1])
    assert sum(rewards) == pytest.approx(1.0)


def test_the_goal_alone_can_be_rewarded_and_nonsense_charged():
    (trajectory,) = play(TextGameEnv(difficulty="easy", reward="goal"), oracle)
    assert trajectory.turn_rewards[:-1] == [0.0] * (trajectory.num_turns - 1) and trajectory.reward == 1.0
    env = TextGameEnv(invalid_reward=-0.1)
    env.reset(seed=0)
    _, reward, _, _, info = env.step("fly away")
    assert reward == -0.1 and info["rewards"] == {"progress": 0.0, "invalid": -0.1}


def locked_game():
    """A medium world, the player before the locked door without its key."""
    for index in range(200):
        env = TextGameEnv(difficulty="medium")
        env.reset(options={"split": "train", "index": index})
        at = [d for d in env.world.exits[env.state.room] if env.world.locked(env.state, d)]
        if at and env.world.key not in env.world.visible(env.state):
            return env, at[0]
    raise AssertionError


def test_what_cannot_be_done_is_explained():
    env, direction = locked_game()
    assert "(locked door)" in env.step("look")[0]
    assert "locked" in env.step(f"go {direction}")[0]
    assert env.step("unlock door")[0] == "You have no key that fits."
    assert env.step("open the chest")[0] == "There is no chest here."
    assert env.step("take crown")[0].startswith("There is no crown here to take. You see:")
    assert env.step("inventory")[0] == "You have: nothing."
    assert env.step("go up")[0].startswith("Go where? Exits:")
    wall = next(d for d in ("north", "south", "east", "west") if d not in env.world.exits[env.state.room])
    assert env.step(wall)[0].startswith(f"You cannot go {wall} from here. Exits: ")
    assert env.step("dance")[0].startswith("That is no command. Commands: go DIRECTION")
    while env.solution()[0] != "unlock door":
        env.step(oracle(env))
    assert "with the" in env.step("Unlock the door with the key.")[0]
    assert env.step("unlock door")[0] == "There is no locked door here."


def test_observations_hold_what_is_new():
    env = TextGameEnv(difficulty="easy")
    first, info = env.reset(options={"split": "train", "index": 2})
    assert first.startswith("Goal: find the ") and [m["role"] for m in info["messages"]] == ["system", "user"]
    way = next(iter(env.world.exits[env.state.room]))
    there = env.step(f"go {way}")[0]
    assert "Goal" not in there and there.startswith(env.state.room.capitalize())


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ("go north", "go north"),
        ("I look for the key.\n\n> Take the brass key!\n", "take brass key"),
        ("Command: unlock the door", "unlock door"),
        ('"LOOK"', "look"),
        ("", ""),
        ("\ud800\n***", "\ud800"),
        ("go " * 200, ("go " * 200)[:80]),
    ],
)
def test_the_command_is_the_last_line(said, command):
    assert command_of(said) == command


def test_a_short_name_is_enough_unless_it_is_ambiguous():
    env = TextGameEnv(difficulty="easy")
    env.reset(options={"split": "train", "index": 0})
    while not env.solution()[0].startswith("take"):
        env.step(oracle(env))
    observation, _, terminated, _, info = env.step(f"take {env.world.wanted.split(' ')[1]}")
    assert observation == f"You take the {env.world.wanted}.\nDone." and terminated and info["success"]


def test_worlds_are_seeded_varied_and_disjoint():
    for level in LEVELS:
        train = [make_world("train", i, level).signature for i in range(60)]
        test = [make_world("test", i, level).signature for i in range(60)]
        assert train == [make_world("train", i, level).signature for i in range(60)]
        assert len(set(train)) > 55 and not set(train) & set(test)
    assert TextGameEnv().num_tasks("test") == 500
    env = TextGameEnv(difficulty="easy+hard")
    categories = [env.reset(options={"split": "test", "index": i})[1]["category"] for i in range(4)]
    assert categories == ["easy", "hard"] * 2


def test_prompts_are_short():
    assert max(first_prompt_tokens(TextGameEnv(difficulty="hard"), index=i) for i in range(20)) < 250


@pytest.mark.parametrize("wrong", [{"difficulty": "harsh"}, {"difficulty": ""}, {"reward": "none"}])
def test_arguments_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TextGameEnv(**wrong)
    with pytest.raises(ConfigError, match="invalid_reward"):
        TextGameEnv(invalid_reward=float("nan")).reset(seed=0)


def test_it_is_built_in():
    assert agentrl.make("textgame", difficulty="hard", max_turns=30).unwrapped.max_turns == 30
