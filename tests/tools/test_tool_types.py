"""Type hints of every kind: what the model sees of them, and the objects a tool gets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.tools import Tool, ToolError, run_calls, tool
from agentrl.tools.annotations import read, schema_of
from agentrl.tools.json_schema import MAX_MATCHED, Mismatch, fit
from agentrl.tools.validation import validate
from agentrl.types import ToolCall


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Odd(Enum):
    FIRST = (1, 2)
    SECOND = (3, 4)


@dataclass
class Point:
    """A place on the map.

    More about it that no model needs.

    Attributes:
        x: East of the origin.
        y: North of it.
    """

    x: float
    y: float = 0.0


@dataclass
class Line:
    points: list[Point]
    color: Color = Color.RED
    label: str | None = field(default=None, metadata={"description": "What to write on it."})
    length: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise ValueError(f"a line has at least 2 points, got {len(self.points)}")


class Person(TypedDict):
    """Somebody."""

    name: Annotated[str, "Full name."]
    age: NotRequired[int]


class Item(pydantic.BaseModel):
    sku: str = pydantic.Field(description="Article number.", pattern="^[A-Z]{2}[0-9]+$")
    quantity: int = pydantic.Field(1, ge=1, le=99)


class Order(pydantic.BaseModel):
    """An order."""

    items: list[Item]
    color: Color = Color.BLUE


UserId = NewType("UserId", int)


@tool
def draw(
    line: Line,
    level: Level = Level.LOW,
    order: Order | None = None,
    people: list[Person] | None = None,
    size: tuple[int, str] = (1, "cm"),
    marks: set[int] | None = None,
    corners: dict[str, Point] | None = None,
    where: Point | Literal["center"] = "center",
    user: UserId = UserId(0),
    share: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0,
    note: Annotated[str, "Said beside it."] = "",
) -> str:
    """Draws.

    Args:
        line: What to draw.
        level: How well.
        order: What for.
        people: Who.
        size: How large.
        marks: Where.
        corners: Which.
        where: Around what.
        user: For whom.
        share: How much.
    """
    draw.seen = locals()  # type: ignore[attr-defined]
    return "drawn"


LINE = {"points": [{"x": 1}, {"x": "2", "y": 3}]}


def seen(**arguments: Any) -> dict[str, Any]:
    """What the tool got, called as a model calls it."""
    calls = [ToolCall("draw", {"line": LINE, **arguments})]
    (result,) = asyncio.run(run_calls(calls, {"draw": draw}, timeout=5, max_calls=1))
    assert result.observation == "drawn"
    return draw.seen  # type: ignore[attr-defined]


def refusal(**arguments: Any) -> str:
    with pytest.raises(ToolError) as caught:
        validate({"line": LINE, **arguments}, draw.parameters, "draw", draw.converters)
    assert caught.value.type == "invalid_arguments"
    assert len(caught.value.message) < 400
    return caught.value.message


def test_the_model_sees_every_type():
    properties = draw.parameters["properties"]
    assert properties["line"] == {
        "type": "object",
        "properties": {
            "points": {
                "type": "array",
                "items": {
                    "type": "object",
                    "description": "A place on the map.",
                    "properties": {
                        "x": {"type": "number", "description": "East of the origin."},
                        "y": {"type": "number", "description": "North of it."},
                    },
                    "required": ["x"],
                    "additionalProperties": False,
                },
            },
            "color": {"enum": ["red", "blue"], "type": "string"},
            "label": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "What to write on it."},
        },
        "required": ["points"],
        "additionalProperties": False,
        "description": "What to draw.",
    }
    assert properties["level"] == {"enum": [1, 2], "type": "integer", "description": "How well.", "default": 1}
    person = properties["people"]["anyOf"][0]["items"]
    assert (person["required"], person["description"]) == (["name"], "Somebody.")
    assert person["properties"]["name"] == {"type": "string", "description": "Full name."}
    assert properties["size"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    assert properties["note"]["description"] == "Said beside it."
    assert properties["user"]["type"] == "integer"
    assert properties["share"]["exclusiveMinimum"] == 0
    assert draw.parameters["required"] == ["line"]
    json.dumps(draw.schema())


def test_pydantic_models_are_written_out():
    order = draw.parameters["properties"]["order"]["anyOf"][0]
    assert order["description"] == "An order."
    assert order["properties"]["items"]["items"]["properties"]["sku"] == {
        "type": "string",
        "description": "Article number.",
        "pattern": "^[A-Z]{2}[0-9]+$",
    }
    assert "$ref" not in json.dumps(draw.schema()) and '"title"' not in json.dumps(draw.schema())


def test_the_tool_gets_objects():
    got = seen(
        level="2",
        order={"items": [{"sku": "AB1", "quantity": "3"}], "color": "RED"},
        people='[{"name": "Ada", "age": "36"}]',
        size=["2", "m"],
        marks=[1, "1", 2],
        corners={"a": {"x": 1}},
        where={"x": 5},
        user=7,
        share=0.5,
    )
    assert got["line"] == Line([Point(1.0), Point(2.0, 3.0)])
    assert type(got["line"].points[0].x) is float
    assert got["level"] is Level.HIGH
    assert got["order"] == Order(items=[Item(sku="AB1", quantity=3)], color=Color.RED)
    assert got["people"] == [{"name": "Ada", "age": 36}]
    assert got["size"] == (2, "m")
    assert got["marks"] == {1, 2}
    assert got["corners"] == {"a": Point(1.0)}
    assert got["where"] == Point(5.0)
    assert (got["user"], got["share"]) == (7, 0.5)


def test_what_is_left_out_is_the_default():
    got = seen(where="center", order=None, line={**LINE, "color": "blue"})
    assert got["line"].color is Color.BLUE
    assert (got["where"], got["order"], got["level"]) == ("center", None, Level.LOW)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"line": {}}, 'argument "line.points" is missing'),
        ({"line": "a line"}, 'argument "line" must be an object, got "a line"'),
        ({"line": {"points": [{"x": 1}]}}, 'argument "line": a line has at least 2 points, got 1'),
        ({"line": {"points": [{"x": "east"}]}}, 'argument "line.points[0].x" must be a number, got "east"'),
        ({"line": {**LINE, "lenght": 1}}, 'argument "line.lenght" is unknown, expected "points", "color", "label"'),
        ({"line": {**LINE, "color": "green"}}, 'argument "line.color" must be one of "red", "blue", got "green"'),
        ({"level": 3}, 'argument "level" must be one of 1, 2, got 3'),
        ({"order": {"items": [{"sku": "x"}]}}, 'argument "order.items[0].sku" must match ^[A-Z]{2}[0-9]+$, got "x"'),
        ({"order": {"items": [{"sku": "AB1", "quantity": 0}]}}, "must be at least 1, got 0"),
        ({"people": [{"age": 3}]}, 'argument "people[0].name" is missing'),
        ({"size": [1]}, 'argument "size" must have exactly 2 items, got 1'),
        ({"size": [1, 2, 3]}, "must have exactly 2 items, got 3"),
        ({"where": "left"}, 'argument "where" must be an object or one of "center", got "left"'),
        ({"share": 0}, 'argument "share" must be more than 0, got 0.0'),
        ({"share": 1.5}, "must be at most 1, got 1.5"),
    ],
)
def test_errors_say_where_and_what(arguments, message):
    assert message in refusal(**arguments)


def test_a_model_of_pydantic_speaks_for_itself():
    class Range(pydantic.BaseModel):
        low: int
        high: int

        @pydantic.model_validator(mode="after")
        def ordered(self) -> Range:
            if self.low > self.high:
                raise ValueError("low is above high")
            return self

    schema, converter = read(Range)
    with pytest.raises(ToolError, match="low is above high"):
        validate({"r": {"low": 2, "high": 1}}, {"properties": {"r": schema}}, "t", {"r": converter})
    assert converter({"low": 1, "high": 2}) == Range(low=1, high=2)


def test_a_method_of_a_class_takes_them_too():
    class Plot(Tool):
        """Plots."""

        def __call__(self, point: Point) -> str:
            """Args:
            point: Where.
            """
            return f"{point.x:g} {point.y:g}"

    calls = [ToolCall("plot", {"point": {"x": 1, "y": 2}})]
    assert asyncio.run(run_calls(calls, {"plot": Plot()}, timeout=5, max_calls=1))[0].observation == "1 2"


@dataclass
class Tree:
    children: list[Tree]


class Twig(pydantic.BaseModel):
    twigs: list[Twig]


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (Tree, "Tree contains itself"),
        (Twig, "Twig contains itself"),
        (list[complex], "Use str, int"),
        (dict[int, str], "string keys"),
        (Literal[b"x"], "Literal may hold"),
    ],
)
def test_types_without_a_schema_are_refused(hint, message):
    with pytest.raises(TypeError, match=message):
        schema_of(hint)


def test_a_hint_that_cannot_be_resolved_is_explained():
    class Local:
        pass

    def act(x: Local) -> str:
        """Acts.

        Args:
            x: A value.
        """
        return ""

    with pytest.raises(TypeError, match="top of a module"):
        tool(act)


def test_less_common_types():
    assert schema_of(Odd) == {"enum": ["FIRST", "SECOND"], "type": "string"}
    assert read(Odd).converter("SECOND") is Odd.SECOND
    assert read(tuple[int, ...]).converter([1, 2]) == (1, 2)
    assert read(frozenset[str]).converter(["a"]) == frozenset({"a"})
    assert schema_of(Sequence[int]) == {"type": "array", "items": {"type": "integer"}}
    assert schema_of(tuple) == {"type": "array"}
    assert schema_of(set) == {"type": "array", "uniqueItems": True}
    assert schema_of(Annotated[int, "A number."]) == {"type": "integer", "description": "A number."}
    assert read(list[int]).converter is None


def test_pydantic_is_not_imported_for_tools_that_do_not_use_it():
    program = (
        "import sys, dataclasses\nfrom agentrl.tools import tool\n"
        "@dataclasses.dataclass\nclass P:\n    x: int\n"
        "@tool\ndef f(p: P) -> str:\n    '''F.\n\n    Args:\n        p: P.\n    '''\n    return ''\n"
        "print('pydantic' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


# -- JSON schema ------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        (r"^([a-zA-Z0-9._-]+)*@example\.org$", "a" * 60, False),
        (r"^([a-zA-Z0-9._-]+)*@example\.org$", "me@example.org", True),
        (r"(x+x+)+y", "x" * MAX_MATCHED, False),
        (r"(\pL|.){900}[^a]{90}$", "é" * MAX_MATCHED, True),
        (r"b", "abc", True),
        (r"^(?=.*\d).+$", "no digit", True),  # looks ahead, which takes backtracking: not checked
        (r"[", "any", True),
        ("\ud800", "any", True),
    ],
)
def test_no_pattern_is_slow(pattern: str, text: str, fits: bool):
    """As `re` has it, the first takes years. It holds the interpreter: no timeout could end it, no episode go on."""
    schema = {"type": "string", "pattern": pattern}
    if fits:
        assert fit(text, schema) == text
    else:
        with pytest.raises(Mismatch, match="must match"):
            fit(text, schema)


@pytest.mark.parametrize(
    ("value", "schema", "text"),
    [
        (5, {"type": "integer", "maximum": 4}, "at most 4"),
        (5, {"type": "integer", "exclusiveMaximum": 5}, "less than 5"),
        (5, {"type": "integer", "multipleOf": 2}, "a multiple of 2"),
        (10**1000 + 1, {"type": "integer", "multipleOf": 2}, "a multiple of 2"),
        (10**1000, {"type": "integer", "multipleOf": 0.5}, "a multiple of 0.5"),
        ("ab", {"type": "string", "minLength": 3}, "at least 3 characters"),
        ("abcd", {"type": "string", "maxLength": 3}, "at most 3 characters"),
        ("a" * (MAX_MATCHED + 1), {"type": "string", "pattern": "(a+)+$"}, "must match"),
        ([], {"type": "array", "minItems": 1}, "at least 1 items"),
        ([1, 2], {"type": "array", "maxItems": 1}, "at most 1 items"),
        ("y", {"const": "x"}, 'must be "x"'),
        ("y", {"type": ["integer", "null"]}, "an integer or null"),
        (1, {"allOf": [{"type": "integer"}, {"minimum": 2, "type": "integer"}]}, "at least 2"),
        (1, False, "not allowed"),
        ({"a": 1}, {"$ref": "#/$defs/loop", "$defs": {"loop": {"$ref": "#/$defs/loop"}}}, "refers to itself"),
    ],
)
def test_keywords_of_a_given_schema(value, schema, text):
    with pytest.raises(Mismatch, match=text):
        fit(
            {"v": value},
            {"properties": {"v": schema}, **({"$defs": schema["$defs"]} if "$defs" in (schema or {}) else {})},
        )


def test_references_into_the_schema():
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}
    root = {"properties": {"t": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}
    value = {"t": {"next": {"next": {"next": None}}}}
    assert fit(value, root) == value
    with pytest.raises(Mismatch) as caught:
        fit({"t": {"next": {"next": 3}}}, root)
    assert caught.value.path == ("t", "next", "next")


def test_options_inside_options_end():
    option: dict[str, Any] = {"type": "object", "properties": {}}
    option["properties"]["a"] = {"anyOf": [option, option, option]}
    value: Any = 3
    for _ in range(40):
        value = {"a": value}
    with pytest.raises(Mismatch, match="too long or too deeply nested"):
        fit(value, option)


HINTS = st.recursive(
    st.sampled_from([str, int, float, bool, None, Any, Color, Level, Point, Person, Item, Literal["a", 1]]),
    lambda inner: inner.map(lambda h: list[h]) | inner.map(lambda h: dict[str, h]) | inner.map(lambda h: tuple[h, h]),
    max_leaves=4,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["red", "a", "1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "y", "name", "sku", "k"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(hint=HINTS, value=VALUES)
@settings(max_examples=300, deadline=None)
def test_any_value_for_any_hint_is_taken_or_refused(hint, value):
    schema, converter = read(hint)
    try:
        taken = validate({"v": value}, {"properties": {"v": schema}}, "t", {"v": converter} if converter else {})["v"]
    except ToolError as error:
        assert error.type == "invalid_arguments"
        error.message.encode("utf-8")
        return
    if isinstance(hint, type) and hint in (str, int, float, bool, Color, Level, Point, Item):
        assert type(taken) is hint
    if dataclasses.is_dataclass(taken):
        assert type(taken.x) is float
