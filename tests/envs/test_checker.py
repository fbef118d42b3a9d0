"""``check_env`` finds each thing that is wrong, and says what."""

from __future__ import annotations

import itertools
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

import agentrl
from agentrl.concurrency import event_loop
from agentrl.envs.checks import checker
from agentrl.envs.checks.checker import check_env
from agentrl.envs.checks.fuzz import MALFORMED, fuzz_actions
from agentrl.envs.checks.info import CheckFailed, check_tools
from agentrl.errors import ConfigError, InfraError


class Good(agentrl.Env):
    """Repeat a number."""

    max_turns = 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10**6)) * 2 + (self.split_of(options) == "test")
        return f"Say {self.number}.", {}

    def step(self, action: str) -> Any:
        return "No.", float(str(self.number) in action), str(self.number) in action, False, {}


counter = itertools.count()


class Raises(Good):
    def step(self, action: str) -> Any:
        return "", float(action.encode("utf-8") != b""), False, False, {}


class Random(Good):
    def step(self, action: str) -> Any:
        return str(np.random.default_rng().integers(10**9)), 0.0, False, False, {}


class Shares(Good):
    seen: list[str] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seen.clear()
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Any:
        self.seen.append(action)
        return str(len(self.seen)), 0.0, False, False, {}


class Remembers(Good):
    count = 0

    def step(self, action: str) -> Any:
        self.count += 1
        return str(self.count), 0.0, False, False, {}


class TwoWays(Good):
    def step(self, action: str) -> Any:
        return "one", 0.0, False, False, {}


async def _other(self: Any, action: str) -> Any:
    return "other", 0.0, False, False, {"messages": []}


class Leaks(Good):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10**9))
        return f"Say {self.number}.", {}


class Stores(Good):
    def step(self, action: str) -> Any:
        return "", 0.0, False, False, {"extra": {1, 2}}


class NotANumber(Good):
    def step(self, action: str) -> Any:
        return "", 0.0, False, False, {"rewards": {"a": float("nan")}}


class Messages(Good):
    def step(self, action: str) -> Any:
        return "", 0.0, False, False, {"messages": ["text"]}


class Unseeded(Good):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset()
        self.number = next(counter)
        return f"Say {self.number}.", {}


class BadTool(Good):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, "tools": [{"type": "function", "function": {"name": "a b", "parameters": {}}}]}


class StartInfo(Good):
    started: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, **self.started}


class StopsAtLetters(StartInfo):
    started = {"stop": "</x>"}


class NumberedTask(StartInfo):
    started = {"task_id": 7}


class NoContent(StartInfo):
    started = {"messages": [{"role": "user"}]}


class NothingSaid(StartInfo):
    started = {"messages": []}


class KeepsASet(StartInfo):
    started = {"seen": {1, 2}}


class ToolsAsText(StartInfo):
    started = {"tools": "search"}


class Calls(StartInfo):
    """A few-shot turn in the OpenAI form is fine."""

    started = {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "Nothing.", "tool_call_id": "a"},
        ]
    }


class Repeats(Good):
    def step(self, action: str) -> Any:
        said = [{"role": "assistant", "content": action}, {"role": "user", "content": "No."}]
        return "No.", 0.0, False, False, {"messages": [{"role": "user", "content": f"Say {self.number}."}, *said]}


class FewOverlap(agentrl.ToolEnv):
    reward = "exact_match"
    tasks = {"train": [(f"q{i}", "a") for i in range(1000)], "test": [(f"q{i}", "a") for i in range(995, 1300)]}


class FewCountries(agentrl.ToolEnv):
    """So few tasks that they look like those of a game, which begin alike."""

    reward = "exact_match"

    def task(self, rng: Any, split: str) -> Any:
        country = str(rng.choice(["Peru", "Chad", "Laos", "Oman"]))
        return f"What is the capital of {country}?", country


class Down(Good):
    def step(self, action: str) -> Any:
        raise InfraError("nobody is there")


def test_a_good_environment_passes_and_its_report_says_so():
    report = check_env(Good)
    assert report.ok and not report.failed, str(report)
    assert [r.name for r in report.results] == [
        "names", "gymnasium", "any text", "both ways alike", "seed decides", "instances are apart", "tool schemas",
        "splits are disjoint", "never blocks",
    ]  # fmt: skip
    assert "tool schemas         skipped  the environment lists no tools" in str(report)
    assert check_env(agentrl.make(Good, max_turns=2)).ok
    assert check_env("gym:CartPole-v1", max_turns=4).ok


@pytest.mark.parametrize(
    ("cls", "check", "reason"),
    [
        (Raises, "any text", "step raised on .*UnicodeEncodeError"),
        (Random, "seed decides", "differ in turn 1: observation is"),
        (Remembers, "seed decides", "set in reset"),
        (Shares, "instances are apart", "alone and beside another differ"),
        (Leaks, "splits are disjoint", "sampled tasks of 'test' are in 'train' too"),
        (Stores, "any text", r"info\['extra'\] after a step is {1, 2} \(set\), which is no JSON"),
        (NotANumber, "any text", "finite number"),
        (Messages, "any text", "'role' and 'content'|no attribute 'get'"),
        (Unseeded, "gymnasium", "AssertionError"),
        (BadTool, "tool schemas", "'description' is a required property"),
        (Down, "any text", "InfraError: nobody is there"),
        (StopsAtLetters, "any text", r"info\['stop'\] is '</x>'; a list of strings"),
        (NumberedTask, "any text", r"info\['task_id'\] is 7; text"),
        (NoContent, "any text", "'role' and 'content' as text"),
        (NothingSaid, "any text", "is empty"),
        (KeepsASet, "any text", r"info\['seen'\] after a reset is {1, 2} \(set\)"),
        (ToolsAsText, "any text", r"info\['tools'\] is 'search'; a list of schemas"),
        (Repeats, "any text", "repeats the conversation"),
        (FewOverlap, "splits are disjoint", "5 of 305 sampled tasks of 'test'"),
        (FewCountries, "splits are disjoint", "4 of 4 sampled tasks of 'test'"),
    ],
)
def test_what_is_wrong_is_found(cls, check, reason, monkeypatch):
    if cls is FewOverlap:  # all of its tasks, however busy the machine
        monkeypatch.setattr(checker, "SAMPLED_SECONDS", 60.0)
        monkeypatch.setattr(checker, "ALL_SECONDS", 120.0)
    report = check_env(cls)
    found = {result.name: result for result in report.results}[check]
    assert not report.ok and found.outcome == "failed", str(report)
    assert re.search(reason, found.reason), found.reason


def test_turns_in_the_openai_form_may_open_the_conversation():
    found = {result.name: result for result in check_env(Calls).results}
    assert found["any text"].outcome == "passed", found


def test_ways_that_differ_are_found(monkeypatch):
    monkeypatch.setattr(TwoWays, "astep", _other)
    found = {result.name: result for result in check_env(TwoWays).results}["both ways alike"]
    assert found.outcome == "failed" and "observation is 'one' and 'other'" in found.reason


def test_an_environment_that_hangs_does_not_hang_the_checker(monkeypatch):
    gate = threading.Event()

    class Hangs(Good):
        def step(self, action: str) -> Any:
            gate.wait(60)
            return "", 0.0, False, False, {}

    monkeypatch.setattr(checker, "CHECK_SECONDS", 0.5)
    report = check_env(Hangs)
    gate.set()
    (failed,) = report.failed
    pattern = r"hangs: step on '.*' did not come back within 0.5 s \(test_checker.py:\d+ in step\)"
    assert re.fullmatch(pattern, failed.reason), failed.reason
    assert [r.name for r in report.results] == ["names", "gymnasium", "never blocks"]


def test_time_for_all_checks_is_bounded(monkeypatch):
    monkeypatch.setattr(checker, "ALL_SECONDS", 0.0)
    outcomes = {r.outcome for r in check_env(Good).results[:-1]}
    assert outcomes == {"skipped"}


def test_a_failure_is_told_once_with_the_line_of_the_author():
    class Breaks(Good):
        def step(self, action: str) -> Any:
            return {}["colour"]

    report = check_env(Breaks)
    (first, *others) = report.failed
    assert re.search(r"KeyError: 'colour' \(test_checker.py:\d+ in step\)", first.reason)
    assert len(others) <= 1  # and once more with the text that it failed on
    assert any("fails for the same reason as" in r.reason for r in report.results)


def test_what_we_find_wrong_names_no_line_of_ours():
    class Nan(agentrl.ToolEnv):
        tasks = {"train": [("a", "b")], "test": [("c", "d")]}

        def reward(self, text: str, answer: str) -> float:
            return float("nan")

    for result in check_env(Nan).failed:
        assert "what the reward 'reward' gave is nan" in result.reason and ".py:" not in result.reason


@pytest.mark.parametrize(
    ("name", "meant"), [("sytem_prompt", "system_prompt"), ("max_turn", "max_turns"), ("turn_rewards", "turn_reward")]
)
def test_a_misspelt_setting_is_found(name, meant):
    base = {"tasks": {"train": [("a", "b")], "test": [("c", "d")]}, "reward": "exact_match"}
    cls = type("Mine", (agentrl.ToolEnv,), {**base, name: 3})
    (failed,) = check_env(cls).failed
    assert failed.reason == f"Mine.{name} is used by nothing. Did you mean {meant!r}?"


def test_an_attribute_of_ones_own_may_have_a_name_like_ours():
    class Mine(Good):
        max_turn = 3

        def step(self, action: str) -> Any:
            return "No.", 0.0, bool(self.max_turn), False, {}

    assert {r.name: r.outcome for r in check_env(Mine).results}["names"] == "passed"


def test_a_coroutine_that_blocks_fails(monkeypatch):
    monkeypatch.setattr(event_loop, "HELD_SECONDS", 0.02)

    class Blocks(Good):
        async def astep(self, action: str) -> Any:
            time.sleep(0.03)
            return "No.", 0.0, False, False, {}

    failed = [r for r in check_env(Blocks).failed if r.name == "never blocks"]
    assert len(failed) == 1 and "Blocks.astep (test_checker.py:" in failed[0].reason


def test_a_check_that_blocking_coroutines_hold_up_does_not_call_them_hanging(monkeypatch):
    monkeypatch.setattr(event_loop, "HELD_SECONDS", 0.02)
    monkeypatch.setattr(checker, "CHECK_SECONDS", 1.0)

    class Slow(Good):
        async def astep(self, action: str) -> Any:
            time.sleep(0.2)
            return "No.", 0.0, False, False, {}

    report = check_env(Slow)
    assert [r.name for r in report.failed] == ["never blocks"]
    assert report.results[-2].reason == "was not done in time, see 'never blocks'"


def test_long_texts_are_shown_where_they_differ():
    one, other = checker._differing("a" * 200 + "1" + "b" * 200, "a" * 200 + "2" + "b" * 200)
    assert "a1b" in one and "a2b" in other and len(one) < 70


def test_tasks_that_are_drawn_are_sampled_as_many_as_rows():
    class Drawn(agentrl.ToolEnv):
        reward = "exact_match"

        def task(self, rng: Any, split: str) -> Any:
            return f"{split} {rng.integers(10**12)}", "a"

    found = {r.name: r for r in check_env(Drawn).results}["splits are disjoint"]
    assert found.outcome == "passed" and int(found.reason.split()[0]) > checker.SAMPLED_TASKS


def test_a_constructor_that_fails_is_a_finding():
    class Unmade(Good):
        def __init__(self) -> None:
            raise ValueError("no world")

    (result,) = check_env(Unmade).results
    assert (result.name, result.outcome) == ("can be made", "failed")
    assert "ValueError: no world (test_checker.py:" in result.reason


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ConfigError, match="unknown environment 'serch'"):
        check_env("serch")
    with pytest.raises(ConfigError, match="check_env makes several environments"):
        check_env(Good())
    with pytest.raises(ConfigError, match="takes no argument 'maximum'"):
        check_env(Good, maximum=3)


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ({"name": "x"}, "'type' is a required property"),
        ({"type": "function", "function": {"name": "é", "description": "d", "parameters": {}}}, r"function.name: 'é'"),
        ({"type": "function", "function": {"name": "x", "description": " ", "parameters": {}}}, "description: ' '"),
        ({"type": "function", "function": {"name": "x", "description": "d"}}, "'parameters' is a required property"),
        (3, "3 is not of type 'object'"),
    ],
)
def test_tools_in_another_form(tool, problem):
    with pytest.raises(CheckFailed, match=problem):
        check_tools([tool])


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"required": ["a"]}, "'a' is required and not described"),
        ({"properties": {"a": {"type": "int"}}}, "no JSON schema: 'int' is not valid"),
        ({"properties": {"a": "string"}}, "no JSON schema: 'string' is not of type"),
        ({"properties": []}, "is not of type 'object'"),
    ],
)
def test_parameters_that_are_no_schema(parameters, problem):
    function = {"name": "x", "description": "d", "parameters": {"type": "object", **parameters}}
    with pytest.raises(CheckFailed, match=problem):
        check_tools([{"type": "function", "function": function}])
    good = {"name": "x", "description": "d", "parameters": {"type": "object", "properties": {}}}
    check_tools([{"type": "function", "function": good}])
    with pytest.raises(CheckFailed, match="two tools are named 'x'"):
        check_tools([{"type": "function", "function": good}] * 2)


def test_fuzzed_calls_reach_the_tools_own_code():
    asked = []

    @agentrl.tool
    def note(text: str, times: int, kind: str | None = None, tags: list[str] | None = None) -> str:
        """Keeps a note.

        Args:
            text: What.
            times: How often.
            kind: Which kind.
            tags: Some.
        """
        asked.append((text, times))
        return "ok"

    class Noting(agentrl.ToolEnv):
        tools = [note]
        tasks = {"train": [("a", "b")], "test": [("c", "d")]}
        reward = "exact_match"

    env = Noting()
    _, info = env.reset(seed=0)
    for action in fuzz_actions(info["tools"], "auto", np.random.default_rng(0))[:4]:
        env.step(action)
    assert asked
    tagged = fuzz_actions((), "tags:search,answer", np.random.default_rng(0))
    assert "<search>" in tagged and any(a.startswith("<answer>") for a in tagged) and set(MALFORMED) < set(tagged)
