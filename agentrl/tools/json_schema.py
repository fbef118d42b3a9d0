"""Fits JSON values to a JSON schema, and turns near misses into the right type.

Models write ``"3"`` for 3 and ``3.0`` for an integer; those are taken. Anything that would need a guess is
a :class:`Mismatch`, which says where and what is expected. The keywords that schemas of function arguments
use are looked at: types, ``enum``, ``const``, ``anyOf``, ``oneOf``, ``allOf``, ``$ref`` into the schema itself,
properties, items and the bounds of numbers, lengths and counts. Others are ignored (:data:`KEYWORDS`).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import re2

KEYWORDS = frozenset(
    {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"}
    | {"properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "uniqueItems"}
    | {"minLength", "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
"""The keywords that are looked at."""
MAX_STEPS = 50_000
"""Comparisons of a value with a schema: options inside options cannot take longer."""
MAX_REFERENCES = 100
"""``$ref`` inside one another."""
MAX_MATCHED = 1000
"""Characters of a text that is compared with a ``pattern``; a longer one does not match."""
MAX_PATTERN = 1 << 18
"""Bytes of a compiled ``pattern``. With the bound on texts a comparison takes less than 0.1 s, whatever both are."""

_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
Path = tuple[str | int, ...]


class Mismatch(Exception):
    """A value does not fit.

    Args:
        path: Where in the value.
        text: What is expected there, such as ``must be an integer, got "x"``; or what makes the text, since most
            mismatches only tell that an option is not the one.
    """

    def __init__(self, path: Path, text: str | Callable[[], str]) -> None:
        super().__init__(path)
        self.path, self._text = path, text

    @property
    def text(self) -> str:
        return self._text if isinstance(self._text, str) else self._text()

    def __str__(self) -> str:
        return self.text


def fit(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, path: Path = ()) -> Any:
    """``value`` in the type ``schema`` asks for.

    Args:
        value: A JSON value, nested no deeper than Python recurses.
        schema: What it should be.
        root: The schema that ``$ref`` points into; default: ``schema`` itself.
        path: Where the value stands, for the text of the error.

    Raises:
        Mismatch: It does not fit.
    """
    return _Fitting(schema if root is None else root).fit(value, schema, path)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether ``value`` is of the type already, nothing turned into anything."""
    try:
        return _same(fit(value, schema), value)
    except Mismatch:
        return False


def expectation(schema: dict[str, Any]) -> str:
    """What ``schema`` asks for, in words."""
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(expectation(option) for option in options))
    if "enum" in schema:
        return "one of " + shorten(", ".join(show(v) for v in schema["enum"]), 400)
    if "const" in schema:
        return show(schema["const"])
    kind = schema.get("type")
    items = schema.get("items")
    if kind == "array" and isinstance(items, dict) and items.get("type") in _NAMES:
        return f"a list, each of it {_NAMES[items['type']]}"
    if isinstance(kind, list):
        return " or ".join(_NAMES.get(k, str(k)) for k in kind)
    return _NAMES.get(str(kind), "a value")


def show(value: Any) -> str:
    """A value as it is quoted in messages."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):  # digits without end, keys that are no text, circles
        text = f"a {type(value).__name__}"
    return shorten(text, 60)


def shorten(text: str, length: int) -> str:
    """At most ``length`` characters of a text, the cut marked."""
    return text if len(text) <= length else f"{text[:length]}…"


def without_titles(schema: Any) -> Any:
    """A copy of a schema without the titles that programs write into it, which repeat names in longer words."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("default", "enum", "const") else without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


class _Fitting:
    """One comparison of a value with a schema, in a bounded number of steps."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.steps = 0

    def fit(self, value: Any, schema: Any, path: Path, references: int = 0) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Mismatch((), "is too long or too deeply nested")
        if schema is True or schema == {}:
            return value
        if schema is False:
            raise Mismatch(path, "is not allowed")
        if "$ref" in schema:
            if references >= MAX_REFERENCES:
                raise Mismatch(path, "cannot be checked: its schema refers to itself")
            named = self._named(schema["$ref"])
            return self.fit(value, named, path, references + 1)
        for part in schema.get("allOf", ()):
            value = self.fit(value, part, path, references + 1)
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            value = self._any(value, options, schema, path, references)
        if "enum" in schema:
            return self._one_of(value, schema["enum"], schema, path)
        if "const" in schema:
            return self._one_of(value, [schema["const"]], schema, path)
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._any(value, [{**schema, "type": k} for k in kind], schema, path, references)
        if kind is None and "properties" in schema:
            kind = "object"
        if kind not in self._READERS:
            return value
        return self._READERS[kind](self, value, schema, path)

    def _named(self, reference: Any) -> Any:
        node: Any = self.root
        for part in str(reference).removeprefix("#").strip("/").split("/"):
            if part:
                node = node.get(part.replace("~1", "/").replace("~0", "~"), True) if isinstance(node, dict) else True
        return node

    def _any(self, value: Any, options: Sequence[Any], schema: dict[str, Any], path: Path, references: int) -> Any:
        deepest: Mismatch | None = None
        near: list[Any] = []
        for option in options:
            try:
                fitted = self.fit(value, option, path, references + 1)
            except Mismatch as problem:
                if self.steps > MAX_STEPS:
                    raise
                if deepest is None or len(problem.path) > len(deepest.path):
                    deepest = problem.with_traceback(None)  # whose frames would be kept, thousands of them
                continue
            # A value that already has the type of an option must not be turned into another one.
            if _same(fitted, value):
                return fitted
            near.append(fitted)
        if near:
            return near[0]
        if deepest is not None and len(deepest.path) > len(path):
            raise deepest
        raise _wrong(value, {**schema, "anyOf": options}, path)

    @staticmethod
    def _one_of(value: Any, allowed: Sequence[Any], schema: dict[str, Any], path: Path) -> Any:
        for option in allowed:
            if type(option) is type(value) and option == value:
                return option
        if isinstance(value, (str, int, float)) and not (isinstance(value, str) and len(value) > MAX_MATCHED):
            written = str(value).strip().lower()
            for option in allowed:
                if isinstance(option, (str, int, float)) and str(option).lower() == written:
                    return option
        raise _wrong(value, schema, path)

    def _string(self, value: Any, schema: dict[str, Any], path: Path) -> str:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise _wrong(value, schema, path)
        if len(value) < schema.get("minLength", 0):
            raise Mismatch(path, f"must have at least {schema['minLength']} characters, got {len(value)}")
        if len(value) > schema.get("maxLength", math.inf):
            raise Mismatch(path, f"must have at most {schema['maxLength']} characters, got {len(value)}")
        if not matches(pattern := schema.get("pattern"), value):
            raise Mismatch(path, f"must match {shorten(pattern, 100)}, got {show(value)}")
        return value

    def _integer(self, value: Any, schema: dict[str, Any], path: Path) -> int:
        number = _as_number(value, schema, path)
        if number != int(number):
            raise _wrong(value, schema, path)
        return _within(int(number), schema, path)

    def _number(self, value: Any, schema: dict[str, Any], path: Path) -> float:
        try:
            return _within(float(_as_number(value, schema, path)), schema, path)
        except OverflowError:
            raise _wrong(value, schema, path) from None

    def _boolean(self, value: Any, schema: dict[str, Any], path: Path) -> bool:
        written = {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else value
        if not isinstance(written, bool):
            raise _wrong(value, schema, path)
        return written

    def _null(self, value: Any, schema: dict[str, Any], path: Path) -> None:
        if value is not None and not (isinstance(value, str) and value.strip().lower() in ("null", "none")):
            raise _wrong(value, schema, path)

    def _array(self, value: Any, schema: dict[str, Any], path: Path) -> list[Any]:
        given, value = value, _from_text(value)
        if not isinstance(value, list):
            raise _wrong(given, schema, path)
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if not least <= len(value) <= most:
            wanted = (
                f"exactly {least}"
                if least == most
                else f"at least {least}"
                if len(value) < least
                else f"at most {most}"
            )
            raise Mismatch(path, f"must have {wanted} items, got {len(value)}")
        first, rest = schema.get("prefixItems", ()), schema.get("items", True)
        items = [
            self.fit(item, first[index] if index < len(first) else rest, (*path, index))
            for index, item in enumerate(value)
        ]
        if schema.get("uniqueItems"):
            # Twice the same is what a set forgives, and what a list that should be one may not have.
            items = list({json.dumps(item, sort_keys=True, default=str): item for item in items}.values())
        return items

    def _object(self, value: Any, schema: dict[str, Any], path: Path) -> dict[str, Any]:
        given, value = value, _from_text(value)
        if not isinstance(value, dict):
            raise _wrong(given, schema, path)
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name in schema.get("required", ()):
            if name not in value:
                raise Mismatch((*path, name), "is missing")
        for name in value:
            if rest is False and name not in properties:
                expected = shorten(", ".join(map(show, properties)), 200) or "no keys"
                raise Mismatch((*path, str(name)), f"is unknown, expected {expected}")
        return {name: self.fit(item, properties.get(name, rest), (*path, str(name))) for name, item in value.items()}

    _READERS: dict[str, Callable[..., Any]] = {
        "string": _string,
        "integer": _integer,
        "number": _number,
        "boolean": _boolean,
        "null": _null,
        "array": _array,
        "object": _object,
    }


def _same(fitted: Any, value: Any) -> bool:
    return type(fitted) is type(value) and fitted == value


def _wrong(value: Any, schema: dict[str, Any], path: Path) -> Mismatch:
    return Mismatch(path, lambda: f"must be {expectation(schema)}, got {show(value)}")


def _as_number(value: Any, schema: dict[str, Any], path: Path) -> int | float:
    number = value
    if isinstance(value, str):
        text = value.strip()
        if len(text) > 64 or "_" in text:
            raise _wrong(value, schema, path)
        try:
            number = int(text) if text.lstrip("+-").isdigit() else float(text)
        except ValueError:
            raise _wrong(value, schema, path) from None
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise _wrong(value, schema, path)
    if isinstance(number, float) and not math.isfinite(number):
        raise _wrong(value, schema, path)
    return number


def _within(number: Any, schema: dict[str, Any], path: Path) -> Any:
    bounds: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
        ("minimum", "at least", lambda n, bound: n >= bound),
        ("maximum", "at most", lambda n, bound: n <= bound),
        ("exclusiveMinimum", "more than", lambda n, bound: n > bound),
        ("exclusiveMaximum", "less than", lambda n, bound: n < bound),
        ("multipleOf", "a multiple of", _is_multiple),
    )
    for keyword, words, holds in bounds:
        bound = schema.get(keyword)
        if isinstance(bound, (int, float)) and not isinstance(bound, bool) and not holds(number, bound):
            raise Mismatch(path, f"must be {words} {bound}, got {show(number)}")
    return number


def _is_multiple(number: Any, of: Any) -> bool:
    if isinstance(number, int) and isinstance(of, int):
        return number % of == 0
    try:
        return abs(number / of - round(number / of)) < 1e-9
    except OverflowError:  # a number beyond all floats
        return False


def matches(pattern: Any, text: str) -> bool:
    """Whether a ``pattern`` is somewhere in a text. It takes time linear in the text: both may be a stranger's.

    RE2's expressions are those of JSON schema but for what needs backtracking (``(?=``, ``\\1``) and ``\\u0041``. A
    pattern that it does not take restricts nothing.
    """
    compiled = _compiled(pattern) if isinstance(pattern, str) else None
    return compiled is None or (len(text) <= MAX_MATCHED and compiled.search(text) is not None)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors, options.max_mem = False, MAX_PATTERN
    try:
        return re2.compile(pattern, options=options)
    except (re2.error, UnicodeError):
        return None


def _from_text(value: Any) -> Any:
    """A list or object the model wrote as a string of JSON."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
