"""What is wrong in an author's code is said before an engine starts, in the author's own line."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.errors import ConfigError, EnvError, InfraError
from agentrl.rewards import BatchedReward, Judge
from agentrl.rollout.rehearsal import rehearse
from agentrl.types import Task


class Sums(agentrl.ToolEnv):
    tasks = {"train": [("1 + 1?", "2")], "test": [("2 + 2?", "4")]}
    reward = "exact_match"


def with_reward(reward: Any) -> Any:
    return type("Given", (Sums,), {"reward": reward})


async def generate(ctx: Any) -> float:
    ctx.prompt("A raw prompt.")
    turn = await ctx.generate()
    return float(turn.tokens.mean()) / 0 if turn.text == "no" else 0.5


async def broken_generate(ctx: Any) -> float:
    ctx.prompt([{"role": "user", "content": "Hello."}])
    return {}[(await ctx.generate()).text]


def tried(make: Any, tasks: Any = (), generate: Any = None) -> None:
    rehearse(make, tasks, generate, "sums")


def test_what_works_is_silent(caplog):
    tried(Sums)
    tried(Sums, [Task("t", seed=0, split="test", options={"index": 0})])
    tried(lambda: Sums(call_format="glm"))
    tried(lambda: agentrl.make("gym:FrozenLake-v1"))
    tried(lambda: agentrl.make("multi_agent"))
    tried(Sums, generate=generate)
    assert not caplog.records


@pytest.mark.parametrize("part", ["task", "step", "reward"])
def test_an_exception_of_the_author_ends_it_with_its_line(part):
    def fail(*_: Any) -> Any:
        raise KeyError("colour")

    class Fails(Sums):
        tasks = {"train": [("a", "b")] * 3}
        reward = fail if part == "reward" else "exact_match"

    if part == "task":
        Fails.tasks, Fails.task = None, fail
    if part == "step":

        class Fails(agentrl.Env):  # type: ignore[no-redef]
            def reset(self, *, seed: Any = None, options: Any = None) -> Any:
                return "Go.", {}

            def step(self, action: str) -> Any:
                return fail()

    with pytest.raises(
        EnvError, match=r"^sums: an episode .*KeyError: 'colour' \(test_rehearsal.py:\d+ in fail"
    ):
        tried(Fails)


def test_a_failing_generate_function_ends_it():
    with pytest.raises(EnvError, match=r"KeyError: 'I do not know.' \(test_rehearsal.py:\d+ in broken_generate\)"):
        tried(Sums, generate=broken_generate)


def test_what_fails_once_or_outside_of_the_author_does_not_end_it(caplog):
    answers = iter([0.0])

    def once(text: str) -> float:
        value = next(answers, None)
        if value is not None:
            raise OSError("for the moment")
        return 1.0

    tried(lambda: with_reward(staticmethod(once))())
    assert not caplog.records

    def down(text: str) -> float:
        raise InfraError("the server is away")

    tried(lambda: with_reward(staticmethod(down))())
    assert "the server is away" in caplog.text


def test_models_and_judges_are_left_alone():
    class Model(BatchedReward):
        def __init__(self) -> None:
            raise AssertionError("a model was loaded")

    def plain(text: str) -> float:
        seen.append(text)
        return 1.0

    seen: list[str] = []
    tried(lambda: with_reward([Model, Judge("http://127.0.0.1:9/v1", "m"), (0.5, plain)])())
    assert seen == ["I do not know."]


def slime(args: Any, sample: Any) -> float: ...
def three(text: str, answer: str, extra: str) -> float: ...
def keyword(text: str, *, metadata: dict[str, Any]) -> float: ...
def nothing(turns: list[str]) -> float: ...
def fine(prediction: str, reference: str = "", *, row: Any = None, calls: Any = ()) -> float: ...
def open_ended(*args: Any, **kwargs: Any) -> float: ...


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            slime,
            r"reward 'slime' takes \(args: .*, sample: .*\), as for slime. A reward is called",
        ),
        ((0.5, three), "nothing gives it 'extra'"),
        ([fine, keyword], "nothing gives it 'metadata'"),
        (nothing, "no parameter for the text"),
    ],
)
def test_reward_functions_that_cannot_be_called(reward, message):
    with pytest.raises(ConfigError, match=message):
        with_reward(staticmethod(reward) if callable(reward) else reward)()
    with_reward([fine, open_ended, "f1"])()


def test_generate_functions_that_cannot_be_called(tmp_path: Path):
    file = tmp_path / "hook.py"
    file.write_text(
        textwrap.dedent("""
        async def slime(args, sample, sampling_params): ...
        async def two(ctx, more): ...
        """)
    )
    with pytest.raises(ConfigError, match=r"slime' takes \(args, sample, ...\), as for slime. Here it is `async def"):
        tried(Sums, generate=f"{file}:slime")
    with pytest.raises(ConfigError, match="called with one argument.*'more'"):
        tried(Sums, generate=f"{file}:two")
