"""The built-in game of two agents, with shared and with opposed rewards."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.envs.builtin.hint_game import ATTRIBUTES, HintGameEnv, held_out, make_task
from agentrl.errors import ConfigError
from agentrl.types import StopReason
from tests.envs.playing import first_prompt_tokens, play


def by_name(trajectories):
    return {t.agent: t for t in trajectories}


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_oracle_wins_every_shared_game(split):
    for index in range(25):
        parts = by_name(play(HintGameEnv(), HintGameEnv.oracle, index=index, split=split))
        assert set(parts) == {"hinter", "guesser"}
        assert all((t.reward, t.success, t.stop_reason) == (1.0, True, StopReason.DONE) for t in parts.values())
        assert parts["hinter"].info["category"] in ATTRIBUTES


def test_opposed_rewards_add_up_to_nothing_and_the_hint_matters():
    found = 0
    for index in range(60):
        parts = by_name(play(HintGameEnv(rewards="opposed"), HintGameEnv.oracle, index=index))
        assert parts["hinter"].reward == -parts["guesser"].reward != 0
        assert parts["guesser"].success == (parts["guesser"].reward > 0)
        found += parts["guesser"].success
    assert found < 42  # the guesser plays as well as before: what changed is the word


def test_silence_and_chance_do_not_win():
    assert not any(t.success for i in range(10) for t in play(HintGameEnv(), lambda env: "", index=i))
    blind = [play(HintGameEnv(), lambda e: e.target[0] if e.acting == "hinter" else "1", index=i) for i in range(60)]
    assert sum(t[0].success for t in blind) < 36


def test_the_guesser_sees_one_word_and_never_what_is_meant():
    def talkative(env):
        return f"The word I choose is {env.target[1]}!" if env.acting == "hinter" else env.oracle()

    parts = by_name(play(HintGameEnv(), talkative, index=3))
    told = parts["guesser"].messages[1]["content"]
    assert told.startswith("Objects:\n1. ") and told.endswith(f"Hint: {told.split()[-1]}")
    assert "Meant" not in told and "choose" not in told


def test_wrong_turns_are_answered_once_and_then_lost():
    env = HintGameEnv(rewards="opposed")
    env.reset(options={"split": "train", "index": 1})
    lie = next(w for words in ATTRIBUTES.values() for w in words if w not in env.target)
    observation, reward, terminated, _, info = env.step(lie)
    assert (reward, terminated, info["agent"]) == (0.0, False, "hinter")
    assert lie in observation and env.target[0] in observation
    _, _, terminated, _, info = env.step("nothing of use")
    assert terminated and info["agent_rewards"] == {"hinter": -1.0, "guesser": 1.0}
    env.reset(options={"split": "train", "index": 1})
    env.step(env.target[0])
    observation, _, terminated, _, info = env.step("the ninth: 9")
    assert observation == "Reply with a number from 1 to 4." and info["agent"] == "guesser" and not terminated
    assert env.step("?")[4]["agent_rewards"] == {"hinter": 1.0, "guesser": -1.0}


def test_a_second_round_needs_another_word_and_pays_half():
    env = HintGameEnv(rounds=2)
    env.reset(options={"split": "train", "index": 2})
    env.step(env.target[0])
    wrong = next(i for i, thing in enumerate(env.things, 1) if thing != env.target)
    observation, *_, info = env.step(str(wrong))
    assert info["agent"] == "hinter" and " ".join(env.things[wrong - 1]) in observation
    assert "already" in env.step(env.target[0])[0]
    assert env.step(env.target[1])[0] == f"Next hint: {env.target[1]}"
    _, reward, terminated, _, info = env.step(str(env.things.index(env.target) + 1))
    assert (reward, terminated, info["success"]) == (0.5, True, True)
    assert info["agent_rewards"] == {"hinter": 0.5, "guesser": 0.5}


def test_who_rambles_loses_an_opposed_game():
    for agent, reward in (("hinter", -1.0), ("guesser", -1.0)):
        parts = by_name(
            play(HintGameEnv(rewards="opposed"), lambda e, a=agent: "so " * 400 if e.acting == a else e.oracle())
        )
        assert parts[agent].stop_reason is StopReason.MAX_TOKENS and parts[agent].reward == reward


def test_tasks_are_seeded_solvable_and_disjoint():
    for split in ("train", "test"):
        for index in range(200):
            things, target = make_task(split, index, 4)
            assert (things, target) == make_task(split, index, 4)
            assert len(set(things)) == 4 and target in things
            assert held_out(target) == (split == "test")
            assert any(sum(word in thing for thing in things) == 1 for word in target)
    with pytest.raises(ConfigError, match="task 500"):
        HintGameEnv().reset(options={"split": "test", "index": 500})


def test_prompts_are_short():
    assert max(first_prompt_tokens(HintGameEnv(objects=8), index=i) for i in range(20)) < 300


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_nobody_gets_away_by_wasting_turns(rounds):
    """One fault before every move is allowed; it must not use up the turns before the game is lost."""
    env = agentrl.make("multi_agent", rewards="opposed", rounds=rounds, objects=8)
    env.reset(options={"split": "train", "index": 5})
    game, over, turns = env.unwrapped, False, 0
    while not over:
        wrong = next(i for i, thing in enumerate(game.things, 1) if thing != game.target)
        for action in ("well ...", game.oracle() if game.acting == "hinter" else str(wrong)):
            assert not over
            *_, over, truncated, info = env.step(action)
            turns += 1
            assert not truncated
    assert turns == 4 * rounds
    assert info["agent_rewards"] == {"hinter": 1.0, "guesser": -1.0} and info["success"] is False


@pytest.mark.parametrize(
    "wrong", [{"rewards": "mixed"}, {"objects": 1}, {"objects": 9}, {"rounds": 0}, {"rounds": True}]
)
def test_arguments_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HintGameEnv(**wrong)


def test_it_is_played_by_one_as_any_environment():
    env = agentrl.make("multi_agent", rewards="opposed", objects=3)
    _, info = env.reset(seed=4)
    assert [m["role"] for m in info["messages"]] == ["system", "user"]
    env.step(env.unwrapped.target[0])
    assert env.unwrapped.render().splitlines()[-1].startswith("user: ") or "hinter: " in env.unwrapped.render()
