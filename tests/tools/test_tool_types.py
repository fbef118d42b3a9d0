"""Type hints of every kind: what the model sees of them, and the objects a tool gets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NewType, NotRequired

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypedDict

from agentrl.tools import Tool, ToolError, run_calls, tool
from agentrl.tools.arguments import MAX_MATCHED, ArgumentReader, InvalidArguments
from agentrl.tools.schema import describe
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


def read(hint: Any) -> ArgumentReader:
    """What reads arguments ``{"v": ...}`` for a hint."""

    def act(v: Any) -> str:
        return ""

    act.__annotations__["v"] = Annotated[hint, "A value."]
    described = describe(act, skip_self=False, name="act", description="Acts.")
    return ArgumentReader(described.parameters, described.adapter)


def schema_of(hint: Any) -> dict[str, Any]:
    schema = read(hint).schema["properties"]["v"]
    return {key: value for key, value in schema.items() if key != "description"}


LINE = {"points": [{"x": 1}, {"x": "2", "y": 3}]}


def seen(**arguments: Any) -> dict[str, Any]:
    """What the tool got, called as a model calls it."""
    calls = [ToolCall("draw", {"line": LINE, **arguments})]
    (result,) = asyncio.run(run_calls(calls, {"draw": draw}, timeout=5, max_calls=1))
    assert result.observation == "drawn"
    return draw.seen  # type: ignore[attr-defined]


def refusal(**arguments: Any) -> str:
    with pytest.raises(ToolError) as caught:
        draw.read_arguments({"line": LINE, **arguments})
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
                        "y": {"type": "number", "default": 0.0, "description": "North of it."},
                    },
                    "required": ["x"],
                    "additionalProperties": False,
                },
            },
            "color": {"enum": ["red", "blue"], "type": "string", "default": "red"},
            "label": {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "default": None,
                "description": "What to write on it.",
            },
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
        ({"line": {"points": [{"x": "east"}]}}, 'argument "line.points[0].x" must be a valid number, got "east"'),
        ({"line": {**LINE, "lenght": 1}}, 'argument "line.lenght" is unknown'),
        ({"line": {**LINE, "color": "green"}}, "argument \"line.color\" must be 'red' or 'blue', got \"green\""),
        ({"level": 3}, 'argument "level" must be 1 or 2, got 3'),
        ({"order": {"items": [{"sku": "x"}]}}, 'argument "order.items[0].sku": String should match pattern'),
        ({"order": {"items": [{"sku": "AB1", "quantity": 0}]}}, "must be greater than or equal to 1, got 0"),
        ({"people": [{"age": 3}]}, 'argument "people[0].name" is missing'),
        ({"size": [1]}, 'argument "size[1]" is missing'),
        ({"size": [1, 2, 3]}, "at most 2 items"),
        ({"where": "left"}, 'argument "where" must be an object or \'center\', got "left"'),
        ({"share": 0}, 'argument "share" must be greater than 0, got 0'),
        ({"share": 1.5}, "must be less than or equal to 1, got 1.5"),
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

    reader = read(Range)
    with pytest.raises(InvalidArguments, match="low is above high"):
        reader.read({"v": {"low": 2, "high": 1}})
    assert reader.read({"v": {"low": 1, "high": 2}}) == {"v": Range(low=1, high=2)}


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


class Opaque:
    pass


class Twig(pydantic.BaseModel):
    twigs: list[Twig]


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (Tree, "Tree contains itself"),
        (Twig, "Twig contains itself"),
        (list[Opaque], "Use str, int"),
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
    assert read(tuple[int, ...]).read({"v": [1, 2]}) == {"v": (1, 2)}
    assert read(frozenset[str]).read({"v": ["a"]}) == {"v": frozenset({"a"})}
    assert read(dict[int, str]).read({"v": {"1": 2}}) == {"v": {1: "2"}}
    assert schema_of(Sequence[int]) == {"type": "array", "items": {"type": "integer"}}
    assert schema_of(list[dict[str, list[int]]]) == {
        "type": "array",
        "items": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}},
    }


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
        assert taken(text, schema) == text
    else:
        with pytest.raises(InvalidArguments, match="does not match"):
            taken(text, schema)


def taken(value: Any, schema: Any, **root: Any) -> Any:
    """What a tool with a given schema gets for an argument."""
    return ArgumentReader({"type": "object", "properties": {"v": schema}, **root}).read({"v": value})["v"]


@pytest.mark.parametrize(
    ("value", "schema", "result"),
    [
        ("3", {"type": "integer"}, 3),
        (3.0, {"type": ["integer", "null"]}, 3),
        ("null", {"type": ["integer", "null"]}, None),
        (5, {"type": "string"}, "5"),
        ("yes", {"const": "YES"}, "YES"),
        ('["1", 2]', {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ({"a": "1"}, {"type": "object", "additionalProperties": {"type": "number"}}, {"a": 1}),
        (["a", "b"], {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "array"}]}, ["a", "b"]),
        ("1", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1"),
        (["1", "x"], {"type": "array", "prefixItems": [{"type": "integer"}]}, [1, "x"]),
        ("2", {"allOf": [{"type": "integer"}, {"minimum": 2}]}, 2),
        (1, {"$ref": "http://127.0.0.1:9/elsewhere"}, 1),
    ],
)
def test_near_misses_of_a_given_schema(value, schema, result):
    got = taken(value, schema)
    assert got == result
    assert type(got) is type(result)


@pytest.mark.parametrize(
    ("value", "schema", "text"),
    [
        (5, {"type": "integer", "maximum": 4}, "5 is greater than the maximum of 4"),
        (5, {"type": "integer", "multipleOf": 2}, "not a multiple of 2"),
        ("three", {"type": "integer"}, "'three' is not of type 'integer'"),
        (True, {"type": "integer"}, "True is not of type 'integer'"),
        ("ab", {"type": "string", "minLength": 3}, "too short"),
        ([1, 2], {"type": "array", "maxItems": 1}, "too long"),
        ("y", {"const": "x"}, "'x' was expected"),
        ("y", {"type": ["integer", "null"]}, "'integer', 'null'"),
        (1, {"allOf": [{"type": "integer"}, {"minimum": 2, "type": "integer"}]}, "less than the minimum of 2"),
        (1, False, "False schema"),
        (1, {"$ref": "#/$defs/loop"}, "too deeply"),
    ],
)
def test_keywords_of_a_given_schema(value, schema, text):
    with pytest.raises(InvalidArguments, match=text):
        taken(value, schema, **{"$defs": {"loop": {"$ref": "#/$defs/loop"}}})


def test_references_into_the_schema():
    tree = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}, "n": {"type": "integer"}},
    }
    root = {"$defs": {"tree": tree}}
    assert taken({"next": {"next": None, "n": "1"}}, {"$ref": "#/$defs/tree"}, **root) == {
        "next": {"next": None, "n": 1}
    }
    with pytest.raises(InvalidArguments, match=r"v\.next\.next"):
        taken({"next": {"next": 3}}, {"$ref": "#/$defs/tree"}, **root)


def test_options_inside_options_end():
    branch = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/$defs/branch"}] * 3}}}
    value: Any = 3
    for _ in range(40):
        value = {"a": value}
    with pytest.raises(InvalidArguments, match="too long or too deeply nested"):
        taken(value, {"$ref": "#/$defs/branch"}, **{"$defs": {"branch": branch}})


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
    try:
        got = read(hint).read({"v": value})["v"]
    except InvalidArguments as error:
        str(error).encode("utf-8", "replace")
        return
    if isinstance(hint, type) and hint in (str, int, float, bool, Color, Level, Point, Item):
        assert type(got) is hint
    if dataclasses.is_dataclass(got):
        assert type(got.x) is float
