"""Schemas from signatures and docstrings, and arguments checked against them."""

from __future__ import annotations

import functools
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.tools import Tool, ToolError, tool
from agentrl.tools.schema import parse_docstring


@tool
def everything(
    query: str,
    k: int = 3,
    score: float | None = None,
    mode: Literal["fast", "exact"] = "fast",
    tags: list[str] | None = None,
    options: dict[str, int] | None = None,
    strict: bool = False,
    extra: Any = None,
    level: Optional[int] = None,  # noqa: UP045 - the older spelling is part of what is tested
) -> str:
    """Searches.

    Reads everything there is.

    Args:
        query: What to look for,
            on two lines.
        k (int): How many.
        score: Least score.
        mode: How to look.
        tags: Only these.
        options: Numbers by name.
        strict: Whether to be strict.
        extra: Anything.
        level: Depth.

    Returns:
        Text.
    """
    return query


def test_schema_of_a_function():
    schema = everything.schema()
    function = schema["function"]
    properties = function["parameters"]["properties"]
    assert schema["type"] == "function"
    assert function["name"] == "everything"
    assert function["description"] == "Searches.\n\nReads everything there is."
    assert function["parameters"]["required"] == ["query"]
    assert function["parameters"]["additionalProperties"] is False
    assert properties["query"] == {"type": "string", "description": "What to look for, on two lines."}
    assert properties["k"] == {"type": "integer", "description": "How many.", "default": 3}
    assert properties["score"]["anyOf"] == [{"type": "number"}, {"type": "null"}]
    assert properties["mode"] == {
        "enum": ["fast", "exact"],
        "type": "string",
        "description": "How to look.",
        "default": "fast",
    }
    assert properties["tags"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert properties["options"]["anyOf"][0] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert properties["extra"] == {"description": "Anything."}
    assert properties["level"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]


def test_a_schema_handed_out_is_a_copy():
    everything.schema()["function"]["parameters"]["properties"].clear()
    assert everything.schema()["function"]["parameters"]["properties"]


def test_a_tool_class_takes_name_and_description_from_the_class():
    class WebSearch(Tool):
        """Looks in the web."""

        def __call__(self, query: str) -> str:
            """Args:
            query: What to look for.
            """
            return query

    assert WebSearch.name == "web_search"
    assert WebSearch().schema()["function"]["description"] == "Looks in the web."
    assert WebSearch().parameters["properties"]["query"]["description"] == "What to look for."


def test_an_author_may_give_the_schema():
    class Raw(Tool):
        """Takes anything."""

        name = "raw"
        parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}

        def __call__(self, **arguments: object) -> str:
            return str(arguments)

    assert Raw().schema()["function"]["parameters"]["properties"] == {"x": {"type": "integer"}}


def undescribed(x: int) -> str:
    """Does it."""
    return ""


def undocumented(x: int) -> str:
    return ""


def untyped(x) -> str:
    """Does it.

    Args:
        x: A value.
    """
    return ""


def variadic(*x: int) -> str:
    """Does it.

    Args:
        x: Values.
    """
    return ""


class Opaque:
    pass


def odd_type(x: list[Opaque]) -> str:
    """Does it.

    Args:
        x: A value.
    """
    return ""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "'undocumented' has no description"),
        (undescribed, "parameter 'x' has no description"),
        (untyped, "parameter 'x' has no type hint"),
        (variadic, "passes arguments by name"),
        (odd_type, "parameter 'x' has type .*Opaque.*Use str, int"),
    ],
)
def test_what_the_model_could_not_read_is_refused_at_definition(function, message):
    with pytest.raises(TypeError, match=message):
        tool(function)


def test_a_class_is_refused_at_definition_too():
    with pytest.raises(TypeError, match="has no description"):

        class Silent(Tool):
            def __call__(self, x: int) -> str:
                return ""


@pytest.mark.parametrize("made_of", [functools.partial(undescribed, 1), 3, object()])
def test_what_is_no_function_is_refused(made_of):
    with pytest.raises(TypeError, match="a tool is made of a function"):
        tool(made_of)


def test_unknown_options_of_the_decorator_are_refused():
    with pytest.raises(TypeError, match="timout"):
        tool(timout=3)


def test_docstrings():
    assert parse_docstring("One line.", "f") == ("One line.", {})
    assert parse_docstring("", "f") == ("", {})
    assert parse_docstring("Args:\n    x: A value,\n        on two lines.\n    ", "f") == (
        "",
        {"x": "A value, on two lines."},
    )
    with pytest.raises(TypeError, match="Tool 'f' has a docstring that cannot be read as Google style"):
        parse_docstring("Acts.\n\nArgs:\nx: A value.", "f")


# -- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_value", "name", "taken"),
    [
        ("3", "k", 3),
        (3.0, "k", 3),
        (" 7 ", "k", 7),
        (5, "query", "5"),
        ("0.5", "score", 0.5),
        (1, "score", 1.0),
        (None, "score", None),
        ("EXACT", "mode", "exact"),
        ('["a", "b"]', "tags", ["a", "b"]),
        ([1, "b"], "tags", ["1", "b"]),
        ('{"a": "1"}', "options", {"a": 1}),
        ("True", "strict", True),
        ([{"any": None}], "extra", [{"any": None}]),
    ],
)
def test_near_misses_are_taken(given_value, name, taken):
    arguments = {"query": "q", name: given_value}
    result = everything.read_arguments(arguments)[name]
    assert result == taken
    assert type(result) is type(taken)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, 'argument "query" is missing'),
        ({"query": "q", "quary": 1}, 'argument "quary" is unknown, expected "query", "k"'),
        ({"query": ["q"]}, 'argument "query" must be a valid string, got ["q"]'),
        ({"query": True}, 'argument "query" must be a valid string, got true'),
        ({"query": "q", "k": "three"}, 'argument "k" must be a valid integer, got "three"'),
        ({"query": "q", "k": 2.5}, 'argument "k" must be a valid integer, got 2.5'),
        ({"query": "q", "k": True}, 'argument "k" must be a valid integer, got true'),
        ({"query": "q", "k": "1e999"}, 'argument "k" must be a valid integer'),
        ({"query": "q", "k": "9" * 100}, 'argument "k" must be a valid integer'),
        ({"query": "q", "score": "nan"}, 'argument "score" must be a valid number, got "nan"'),
        ({"query": "q", "mode": "slow"}, "argument \"mode\" must be 'fast' or 'exact', got \"slow\""),
        ({"query": "q", "tags": "a"}, 'argument "tags" must be a valid array, got "a"'),
        ({"query": "q", "options": {"a": "x"}}, 'argument "options.a" must be a valid integer, got "x"'),
        ({"query": "q", "strict": 1}, 'argument "strict" must be a valid boolean, got 1'),
        ({"query": "a\0b"}, 'argument "query" contains a null character'),
        ({"query": "a\ud800b"}, "half of a character"),
        ({"query": "q", "extra": float("inf")}, "are no JSON"),
        ({"query": "q", "extra": {1, 2}}, "are no JSON"),
    ],
)
def test_what_needs_a_guess_is_refused_in_words(arguments, message):
    with pytest.raises(ToolError) as caught:
        everything.read_arguments(arguments)
    assert message in caught.value.message
    assert caught.value.type == "invalid_arguments"
    assert len(str(caught.value)) < 400


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
NAMES = st.sampled_from(sorted(everything.parameters["properties"]))


@given(arguments=st.dictionaries(NAMES | st.text(max_size=8), VALUES, max_size=6))
@settings(max_examples=150, deadline=None)
def test_any_arguments_are_taken_or_refused(arguments):
    try:
        taken = everything.read_arguments(arguments)
    except ToolError as error:
        str(error).encode("utf-8", "replace")
        assert error.type == "invalid_arguments"
    else:
        assert taken.keys() == arguments.keys()
        assert isinstance(taken["query"], str)
        assert type(taken.get("k", 0)) is int
        assert type(taken.get("strict", False)) is bool
