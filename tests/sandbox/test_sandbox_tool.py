"""``PythonTool``: what the model reads, state by episode, and the environments it is listed in."""

from __future__ import annotations

import asyncio
import copy
import json
import sys

import pytest
from sandbox_sessions import marked

import agentrl
from agentrl.errors import ConfigError, InfraError
from agentrl.rewards import exact_match
from agentrl.sandbox import Result
from agentrl.tools import ToolError, ToolErrorType
from agentrl.tools.builtin.python import PythonTool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture
def python():
    tool = PythonTool(sandbox="process", timeout=1.0, max_output=200)
    yield tool
    tool.close()


def test_output_then_value_then_error(python: PythonTool):
    assert python(code="print('a')\nprint('b')\n1 + 1").observation == "a\nb\n2"
    assert python(code="x = 1").observation == "(no output)"
    result = python(code="print('a')\n{}['k']")
    assert result.observation == (
        "a\nTraceback (most recent call last):\n  <code>, line 2, in <module>: {}['k']\nKeyError: 'k'"
    )
    assert (result.error.type, result.error.message) == (ToolErrorType.EXECUTION, "KeyError: 'k'")
    assert result.metadata == {"sandbox": "process"}


@pytest.mark.parametrize(
    "code", ["```python\n6 * 7\n```", "```\n6 * 7```", "  ```py\n6 * 7\n```\n", "  x = 6\n  x * 7"]
)
def test_a_fence_around_code_and_its_indentation_are_no_part_of_it(python: PythonTool, code: str):
    assert python(code=code).observation == "42"


def test_the_model_is_told_what_happened_and_what_is_lost(python: PythonTool):
    python(code="x = 1")
    result = python(code="print('so far')\nwhile True: pass")
    assert result.observation == (
        "so far\nError (timeout): the code ran longer than 1 s and was stopped. "
        "Variables, imports and files are lost; the next call starts anew."
    )
    assert (result.error.type, result.metadata) == (ToolErrorType.TIMEOUT, {"sandbox": "process", "state_lost": True})
    assert "NameError" in python(code="x").observation
    crashed = python(code="import ctypes\nctypes.string_at(0)")
    assert "the code's interpreter ended (SIGSEGV)" in crashed.observation
    assert crashed.error.type is ToolErrorType.EXECUTION


@pytest.mark.parametrize(
    ("status", "words", "type"),
    [
        ("output", "printed more than 8 MB", ToolErrorType.LIMIT),
        ("exited", "the code's interpreter ended (SIGSEGV)", ToolErrorType.EXECUTION),
    ],
)
def test_every_limit_has_words(python: PythonTool, status: str, words: str, type: ToolErrorType):
    result = python.show(Result(status, detail="SIGSEGV"))
    assert words in result.observation and result.error.type is type and "are lost" in result.observation
    spent = python.show(Result("exited", detail="SIGXCPU"))
    assert "more than 1 s of CPU time" in spent.observation and spent.error.type is ToolErrorType.LIMIT


def test_cut_output_is_said_to_be_cut(python: PythonTool):
    observation = python(code="print('x' * 1000)").observation
    assert observation == "x" * 200 + "\n[801 more bytes of output cut]"


def test_a_copy_has_a_state_of_its_own(python: PythonTool):
    python(code="x = 1")
    other = copy.deepcopy(python)
    assert "NameError" in other(code="x").observation
    other.close()
    assert python(code="x").observation == "1"


def test_code_may_be_long_but_not_endless(python: PythonTool):
    assert python(code=f"text = '{'a' * 900_000}'\nlen(text)").observation == "900000"
    with pytest.raises(ToolError, match="1,000,001 characters"):
        python(code="#" * 1_000_001)


def test_long_numbers_are_shown(python: PythonTool):
    assert python(code="len(str(7 ** 6000))").observation == "5071", "Python itself stops at 4,300 digits"


def test_after_close_the_tool_can_be_used_again(python: PythonTool):
    python(code="x = 1")
    python.close()
    assert "NameError" in python(code="x").observation


class Coding(agentrl.ToolEnv):
    tools = [PythonTool(sandbox="process", timeout=5)]
    tasks = {"train": [("6 * 7 = ?", "42")], "test": [("6 * 8 = ?", "48")]}
    reward = exact_match


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def test_in_an_environment_of_ones_own_the_interpreter_ends_with_the_episode():
    env = Coding()
    env.reset(seed=0)
    env.step(call("x = 6"))
    mark = env._tools["python"]._session.mark
    assert env.step(call("x * 7") + call("x = 8") + call("x"))[0] == "42\n(no output)\n8"
    assert marked(mark)
    assert env.step("42")[1] == 1.0
    assert not marked(mark)
    env.reset(seed=0)
    assert "NameError" in env.step(call("x"))[0]
    env.close()


def test_episodes_side_by_side_do_not_wait_for_each_other():
    class Patient(Coding):
        tools = [PythonTool(sandbox="process", timeout=120)]

    async def quick_one_beside_slow_ones() -> str:
        envs = [Patient() for _ in range(8)]
        await asyncio.gather(*(env.areset(seed=0) for env in envs))
        await asyncio.gather(*(env.astep(call("import time")) for env in envs))
        slow = [asyncio.ensure_future(env.astep(call("time.sleep(100)"))) for env in envs[1:]]
        await envs[0].astep(call("n = 6"))
        observation = (await envs[0].astep(call("n * 7")))[0]
        assert not any(step.done() for step in slow)
        for env in envs[1:]:
            env._tools["python"].close()  # from another thread: it ends the call that runs
        await asyncio.gather(*slow, return_exceptions=True)
        await asyncio.gather(*(env.aclose() for env in envs))
        return observation

    assert asyncio.run(quick_one_beside_slow_ones()) == "42"


def test_a_sandbox_that_fails_is_nobodys_fault(python: PythonTool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.sandbox.session.base_python", lambda: "/no/such/python")
    env = Coding()
    env.reset(seed=0)
    with pytest.raises(InfraError, match="cannot be started"):
        env.step(call("1"))
    monkeypatch.setattr("agentrl.sandbox.session.base_python", lambda: "/bin/false")
    with pytest.raises(InfraError, match="did not start"):
        python(code="1")


def test_without_linux_the_run_ends_and_the_model_is_not_blamed(monkeypatch: pytest.MonkeyPatch):
    env = Coding()
    monkeypatch.setattr("agentrl.sandbox.tiers.sys.platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        env.reset(seed=0)


def test_settings_are_checked_when_the_tool_is_made():
    for arguments in ({"sandbox": "vm"}, {"timeout": 0}, {"memory_mb": "much"}, {"sandbox": "container"}):
        with pytest.raises(ConfigError):
            PythonTool(**arguments)


def test_the_schema_is_short():
    schema = PythonTool(sandbox="process").schema()["function"]
    assert schema["name"] == "python" and list(schema["parameters"]["properties"]) == ["code"]
    assert len(json.dumps(schema)) < 400
