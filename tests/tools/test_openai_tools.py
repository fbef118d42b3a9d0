"""OpenAI-style definitions become tools with checked arguments, and tools become such definitions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import agentrl
from agentrl.errors import ConfigError
from agentrl.tools import CalculatorTool, OpenAITool, ToolResult, from_openai, run_calls, to_openai
from agentrl.types import ToolCall


def definition(name: str = "book", parameters: Any = None, **others: Any) -> dict[str, Any]:
    function = {"name": name, "description": "Books a room.", "parameters": parameters, **others}
    return {"type": "function", "function": function}


ROOM = {
    "type": "object",
    "properties": {
        "nights": {"type": "integer", "minimum": 1, "description": "How many."},
        "guests": {"type": "array", "items": {"$ref": "#/$defs/guest"}, "maxItems": 2},
        "kind": {"type": "string", "enum": ["single", "double"]},
    },
    "required": ["nights"],
    "additionalProperties": False,
    "$defs": {"guest": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}


def book(nights: int, guests: list[dict[str, str]] | None = None, kind: str = "single") -> str:
    return f"{nights} {guests} {kind}"


def call(tool: Any, **arguments: Any) -> ToolResult:
    calls = [ToolCall(tool.name, arguments)]
    return asyncio.run(run_calls(calls, {tool.name: tool}, timeout=5, max_calls=1))[0]


def test_a_definition_and_its_function():
    (tool,) = from_openai(definition(parameters=ROOM), book)
    assert tool.schema() == definition(parameters=ROOM)
    result = call(tool, nights="2", guests=[{"name": "Ada"}], kind="DOUBLE")
    assert result.observation == "2 [{'name': 'Ada'}] double"


def test_the_form_of_the_responses_api_and_async_functions():
    async def act(**arguments: Any) -> dict[str, Any]:
        return arguments

    flat = {"type": "function", "name": "act", "description": "Acts.", "parameters": None, "strict": True}
    (tool,) = from_openai([flat], {"act": act})
    assert tool.parameters == {"type": "object", "properties": {}}
    assert call(tool, anything=1).observation == '{"anything": 1}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "'nights' is a required property"),
        ({"nights": 0}, 'argument "nights": 0 is less than the minimum of 1'),
        ({"nights": 1, "guests": [{}]}, "argument \"guests[0]\": 'name' is a required property"),
        ({"nights": 1, "guests": [{"name": "a"}] * 3}, "too long"),
        ({"nights": 1, "kind": "triple"}, "'triple' is not one of ['single', 'double']"),
        ({"nights": 1, "night": 2}, "'night' was unexpected"),
    ],
)
def test_arguments_are_checked(arguments, message):
    (tool,) = from_openai(definition(parameters=ROOM), book)
    result = call(tool, **arguments)
    assert result.error.type == "invalid_arguments"
    assert message in result.observation


UNUSUAL = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"not": {"const": 3}}},
    "dependentRequired": {"a": ["b"]},
    "patternProperties": {"^x_": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": "1"}, "'b' is a dependency of 'a'"),
        ({"a": 1, "b": 3}, 'argument "b":'),
        ({"x_y": 1}, 'argument "x_y": 1 is not of type'),
    ],
)
def test_unusual_keywords_are_checked_too(arguments, message):
    (tool,) = from_openai(definition(parameters=UNUSUAL), lambda **given: json.dumps(given))
    result = call(tool, **arguments)
    assert result.error.type == "invalid_arguments"
    assert message in result.observation
    assert call(tool, a="1", b=2, x_y="z").observation == '{"a": 1, "b": 2, "x_y": "z"}'


@pytest.mark.timeout(20)
def test_no_pattern_is_slow_beside_unusual_keywords():
    slow = {"type": "string", "pattern": "^(x+x+)+y$"}
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}, "anyOf": [slow]}}}
    (tool,) = from_openai(definition(parameters=schema), lambda **given: json.dumps(given))
    assert call(tool, a="x" * 60).error.type == "invalid_arguments"


@pytest.mark.parametrize(
    ("definitions", "functions", "message"),
    [
        (["book"], {"book": book}, "a definition is"),
        ({"type": "web_search"}, book, r"\$.type: 'function' was expected"),
        (definition("no spaces please"), book, "function.name: 'no spaces please' does not match"),
        (definition(description=""), book, "function.description"),
        (definition(parameters={"type": "string"}), book, "'object' was expected"),
        (definition(parameters=["nights"]), book, r"function.parameters: \['nights'\] is not of type 'object'"),
        (definition(parameters={"not": 3}), book, "are no JSON schema"),
        (definition(), {"book": None}, "needs a function"),
        ([definition(), definition("cancel")], book, "2 definitions need their functions by name"),
        ([definition(), definition("cancel")], {"book": book}, "no function for the tool 'cancel'; there are: book"),
        ([definition()], {"book": book, "cancel": book}, "no definition for the function 'cancel'"),
        ([definition(), definition()], {"book": book}, "two definitions have the name 'book'"),
    ],
)
def test_what_does_not_fit_is_explained(definitions, functions, message):
    with pytest.raises(ConfigError, match=message):
        from_openai(definitions, functions)


class Diary:
    def __init__(self) -> None:
        self.entries: list[str] = []

    def write(self, text: str) -> str:
        self.entries.append(text)
        return ",".join(self.entries)


def test_state_of_an_episode():
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    diary = Diary()
    (tool,) = from_openai(definition("write", schema), diary.write, shared=False)
    first, second = tool.for_episode(None), tool.for_episode(None)
    assert (first(text="a"), first(text="b"), second(text="c")) == ("a", "a,b", "c")
    assert diary.entries == []
    assert not first.runs_in_parallel


class Hotel(agentrl.ToolEnv):
    tools = [*from_openai(definition(parameters=ROOM), book), CalculatorTool()]
    tasks = {"train": [("Book 2 nights.", "booked")], "test": [("Book 3 nights.", "booked")]}
    reward = "exact_match"


def test_in_an_environment():
    env = Hotel()
    _, info = env.reset(seed=0)
    assert info["tools"] == to_openai(Hotel.tools)
    turn = json.dumps({"name": "book", "arguments": {"nights": 2}})
    assert env.step(f"<tool_call>{turn}</tool_call>")[0] == "2 None single"


def test_tools_as_definitions_and_back():
    def greet(name: str) -> str:
        """Greets.

        Args:
            name: Whom.
        """
        return f"Hello {name}"

    definitions = to_openai([CalculatorTool, CalculatorTool(), greet, agentrl.tool(greet)])
    assert [d["function"]["name"] for d in definitions] == ["calculator", "calculator", "greet", "greet"]
    (again,) = from_openai(definitions[2], greet)
    assert isinstance(again, OpenAITool)
    assert call(again, name="Ada").observation == "Hello Ada"
    assert to_openai([again]) == [definitions[2]]
