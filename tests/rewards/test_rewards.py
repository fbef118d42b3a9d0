"""Reward functions: what they are worth, and how they are found and called."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yardstick import within

import agentrl
from agentrl import rewards
from agentrl.errors import ConfigError, EnvError


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("Paris", ["Lyon", "paris."], 1.0),
        ("It is Paris", "Paris", 0.0),
        ("42", 42, 1.0),
        ("", "", 1.0),
        ("x", [], 0.0),
    ],
)
def test_exact_match(text, answer, value):
    assert rewards.exact_match(text, answer) == value


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("the quick fox", "quick brown fox", 0.8),
        ("cat", "dog", 0.0),
        ("cat cat", "cat", 2 / 3),
        ("a cat", ["dog", "cat"], 1.0),
        ("x", [], 0.0),
    ],
)
def test_f1(text, answer, value):
    assert rewards.f1(text, answer) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("So the answer is \\boxed{42}.", "42", 1.0),
        ("first \\boxed{1}, then \\boxed{2}", "2", 1.0),
        ("first \\boxed{1}, then \\boxed{2}", "1", 0.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{\\dfrac12}", "1/2", 1.0),
        ("\\boxed{-\\frac{3}{4}}", "-0.75", 1.0),
        ("\\boxed{50\\%}", "0.5", 1.0),
        ("\\boxed{1,234,567}", "1234567", 1.0),
        ("\\boxed{$12$}", "12", 1.0),
        ("\\boxed{x = 5}", "5", 1.0),
        ("\\boxed{90^\\circ}", "90", 1.0),
        ("\\boxed{12\\text{ cm}}", "12", 1.0),
        ("\\boxed{\\left( 1, 2 \\right)}", "(1,2)", 1.0),
        ("\\boxed{x^2 + 1}", "x^2+1", 1.0),
        ("\\boxed{2\\sqrt{3}}", "2\\sqrt{3}", 1.0),
        ("the total is 1,250 dollars", "1250", 1.0),
        ("10 apples and 3.50 left.", "3.5", 1.0),
        ("He has 7.", "\\boxed{7}", 1.0),
        ("1/3", "0.333333333", 1.0),
        ("0.3", "1/3", 0.0),
        ("\\boxed{100000000000000000001}", "100000000000000000000", 0.0),
        ("\\boxed{", "1", 0.0),
        ("no number", "1", 0.0),
        ("\\boxed{1/0}", "1", 0.0),
        ("", "", 0.0),
        ("1e999999999", "1", 0.0),
        ("5", ["4", "5"], 1.0),
        ("2", 2.0, 1.0),
    ],
)
def test_math_answer(text, answer, value):
    assert rewards.math_answer(text, answer) == value


@given(text=st.text(alphabet="\\boxed{}0123456789./,-+eE%frac $()x=^", max_size=60), answer=st.text(max_size=10))
@settings(max_examples=150, deadline=None)
def test_no_text_raises(text, answer):
    for name, function in rewards.BUILT_IN.items():
        assert -1.0 <= function(text, answer) <= 1.0, name


def test_a_long_text_is_judged_quickly():
    for text in ("\\boxed{" * 20_000, "1" * 200_000, "1," * 100_000, "{" * 100_000, "1" + " " * 100_000 + "x"):
        for wrapped in (text, f"\\boxed{{{text}}}"):
            within(30, lambda wrapped=wrapped: rewards.math_answer(wrapped, "1"), wrapped[:20])


def test_loading(tmp_path):
    (tmp_path / "mine.py").write_text("def half(text, answer):\n    return 0.5\nNUMBER = 3\n")
    assert rewards.load("exact_match") is rewards.exact_match
    assert rewards.load(f"{tmp_path}/mine.py:half")("", "") == 0.5
    assert rewards.load("agentrl.rewards:f1") is rewards.f1
    with pytest.raises(ConfigError, match="must be callable"):
        rewards.load(f"{tmp_path}/mine.py:NUMBER")
    with pytest.raises(ConfigError, match="Did you mean 'exact_match'"):
        rewards.load("exactmatch")


class Judge:
    """A reward with state."""

    async def __call__(self, text, answer, turns):
        return len(turns)


def run(reward, *, text="t", answer="a"):
    return asyncio.run(rewards.RewardSet(reward)(text, answer, turns=["1", "2"], calls=[], row={"x": 1}))


def test_functions_get_what_they_ask_for():
    assert run(lambda text: len(text)) == {"<lambda>": 1.0}
    assert run(lambda text, answer: text == answer) == {"<lambda>": 0.0}
    assert run(lambda text, answer, row: row["x"]) == {"<lambda>": 1.0}
    assert run(lambda text, answer, **rest: len(rest)) == {"<lambda>": 3.0}
    assert run(lambda *both: len(both)) == {"<lambda>": 2.0}
    assert run((0.5, Judge())) == {"Judge": 1.0}
    assert run(None) == {}


def test_several_rewards_are_found_before_the_first_episode():
    assert rewards.resolve([(0.5, "f1"), "math"]) == [(0.5, rewards.f1), (1.0, rewards.math_answer)]
    assert rewards.resolve([[2, "f1"]]) == [(2, rewards.f1)]  # as JSON says it, in --env-arg
    assert run([[0.5, "exact_match"]], text="a") == {"exact_match": 0.5}
    with pytest.raises(ConfigError, match="Did you mean 'math'"):
        rewards.resolve(["f1", (0.5, "mth")])


def test_values_that_are_no_numbers_are_refused():
    for value in (None, "1", float("nan"), [1]):
        with pytest.raises(EnvError, match="finite number"):
            run(lambda text, value=value: value)


def test_parts_that_add_up_to_one_are_a_success():
    """In binary, 0.7 + 0.2 + 0.1 is a little less than 1."""

    class Weighted(agentrl.ToolEnv):
        tasks = {"train": [("?", "yes")], "test": [("?", "yes")]}
        reward = [(0.7, "exact_match"), (0.2, lambda text: 1.0), (0.1, lambda text: 1.0)]

    env = Weighted()
    for text, solved in (("yes", True), ("no", False)):
        env.reset(options={"split": "test", "index": 0})
        _, reward, _, _, info = env.step(text)
        assert (reward, info["success"]) == (pytest.approx(1.0 if solved else 0.3), solved)
