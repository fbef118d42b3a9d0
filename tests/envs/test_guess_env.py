"""The built-in environment ``guess``: what can be won, what a reply is, what is held out."""

from __future__ import annotations

import re

import pytest

from agentrl.envs.builtin.guess import NUMBERS, GuessEnv, tasks


def play(split: str, index: int, pick) -> float:
    env = GuessEnv()
    observation, _ = env.reset(options={"split": split, "index": index})
    while True:
        low, high = map(int, re.findall(r"\d+", observation))
        observation, reward, terminated, truncated, info = env.step(pick(low, high))
        if terminated or truncated:
            assert info["success"] is (reward == 1.0) is terminated
            return reward


@pytest.mark.parametrize("split", GuessEnv.splits)
def test_the_middle_finds_every_number_and_nothing_else_does(split):
    every = range(len(tasks(split)))
    assert {play(split, i, lambda low, high: str((low + high) // 2)) for i in every} == {1.0}
    upwards = [play(split, i, lambda low, high: str(low)) for i in every]
    assert upwards.count(1.0) == len(upwards) * 3 // NUMBERS and set(upwards) == {1.0, 0.25}
    assert {play(split, i, lambda low, high: f"{low} or {high}") for i in every} == {0.0}


def test_each_guess_is_answered_with_where_the_number_lies():
    env = GuessEnv()
    index = tasks("test").index((75, 77))
    observation, info = env.reset(options={"split": "test", "index": index})
    assert observation == "Right! From 75 to 81." and info["messages"][-1]["content"] == observation
    assert [m["role"] for m in info["messages"]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert env.step("It is 78.")[0] == "Lower: 75 to 77."
    assert env.step("78")[0] == "From 75 to 77."
    observation, reward, terminated, truncated, info = env.step("76")
    assert (observation, reward, terminated, truncated) == ("Higher: 77 to 77.", 0.5, False, True)
    assert info["success"] is False


@pytest.mark.parametrize("text", ["", "higher", "76 77", "7" * 5000, "٧٧", "77 or so 77"])
def test_other_replies_are_guesses_lost(text):
    env = GuessEnv()
    env.reset(options={"split": "test", "index": tasks("test").index((75, 77))})
    observation, reward, terminated, _, _ = env.step(text)
    assert (observation, reward, terminated) == ("From 75 to 81.", 0.0, False)


def test_no_row_is_in_both_sets():
    first = {split: {low for low, _ in tasks(split)} for split in GuessEnv.splits}
    assert not first["train"] & first["test"] and first["train"] | first["test"] == set(range(10, 94))
    for split, lows in first.items():
        assert len(tasks(split)) == len(set(tasks(split))) == NUMBERS * len(lows)
