"""Reads a model's arguments by a JSON schema: near misses are taken, everything else is refused in words.

Models write ``"3"`` for 3 and ``3.0`` for an integer. :func:`near` turns such values into what the schema asks for and
leaves the rest as it is; then pydantic checks the arguments of a signature of ours, jsonschema those of a schema that
came from elsewhere.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

MAX_STEPS = 50_000
"""Comparisons of a value with a schema: options inside options cannot take longer."""
MAX_MATCHED = 1000
"""Characters of a text that is compared with a ``pattern``; a longer one does not match."""
MAX_PATTERN = 1 << 18
"""Bytes of a compiled ``pattern``. With the bound on texts a comparison takes less than 0.1 s, whatever both are."""

_NULL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class InvalidArguments(ValueError):
    """Arguments that a tool cannot be called with; the text names the argument, what was given and what is expected."""


class ArgumentReader:
    """What makes a call's arguments of what a model wrote.

    Args:
        schema: JSON schema of type object.
        adapter: Reads arguments into the objects of type hints; None for a schema that came from elsewhere.
        tool: Its name, for the error.

    Raises:
        ConfigError: The schema is none.
    """

    def __init__(
        self, schema: dict[str, Any], adapter: TypeAdapter[dict[str, Any]] | None = None, *, tool: str = ""
    ) -> None:
        self.schema = schema
        self.adapter = adapter
        self._errors = None if adapter is not None else _checker(json.dumps(schema, default=str), tool)

    def read(self, arguments: Any) -> dict[str, Any]:
        """The arguments to call the tool with; nothing in them is part of ``arguments``.

        Args:
            arguments: What the model wrote, as JSON values.

        Raises:
            InvalidArguments: They are not what the schema asks for.
        """
        if not isinstance(arguments, Mapping):
            raise InvalidArguments("the arguments must be an object")
        fitted, properties = dict(arguments), self.schema.get("properties", {})
        try:
            if self.adapter is not None:
                try:  # nearly all arguments are what they are to be
                    return self.adapter.validator.validate_json(_written(fitted), strict=True)
                except ValueError:
                    pass
            rest, steps = self.schema.get("additionalProperties"), iter(range(MAX_STEPS))
            for name, value in arguments.items():
                fitted[name] = near(value, properties.get(name, rest), self.schema, steps)
            written = _written(fitted)
            if self.adapter is None:
                self._check(fitted)
                return json.loads(written)
            return self.adapter.validator.validate_json(written, strict=True)
        except InvalidArguments:
            raise
        except RecursionError:
            raise InvalidArguments("the arguments are nested too deeply") from None
        except UnicodeEncodeError:
            raise InvalidArguments("the arguments contain half of a character (a lone surrogate)") from None
        except (ValueError, TypeError) as error:
            if hasattr(error, "errors"):
                raise InvalidArguments(_in_words(cast("ValidationError", error), fitted, properties)) from None
            raise InvalidArguments(f"the arguments are no JSON: {shorten(str(error), 200)}") from None

    def _check(self, arguments: dict[str, Any]) -> None:
        from jsonschema.exceptions import best_match

        assert self._errors is not None
        error = best_match(self._errors(arguments))
        if error is not None:
            where = error.json_path.removeprefix("$").removeprefix(".")
            place = f"argument {show(where)}: " if where else ""
            raise InvalidArguments(place + shorten(error.message, 300))


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _written(arguments: dict[str, Any]) -> bytes:
    """As JSON. Refuses what no tool can be given: NaN, infinity, lone surrogates, null characters, what is no JSON."""
    written = _encode(arguments).encode()
    if b"\\u0000" in written and _NULL.search(written):
        name = next(name for name in arguments if _NULL.search(json.dumps([name, arguments[name]]).encode()))
        raise InvalidArguments(f"argument {show(name)} contains a null character")
    return written


def _in_words(error: ValidationError, arguments: dict[str, Any], names: Iterable[str]) -> str:
    """What pydantic found: at each place what is wrong and what was given."""
    said: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for found in error.errors(include_url=False, include_context=False):
        path = _path(found["loc"], arguments, found["type"] == "missing")
        text = found["msg"].removeprefix("Value error, ")
        text = text.replace("Input should be", "must be") if text.startswith("Input should be") else f": {text}"
        if found["type"] == "missing":
            text = "is missing"
        elif found["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            expected = shorten(", ".join(map(show, names)), 200) or "no arguments"
            text = f"is unknown, expected {expected}" if path in arguments else "is unknown"
        elif found["type"] not in ("value_error", "assertion_error"):
            given[path] = f", got {show(found['input'])}"
        said.setdefault(path, []).append(text)
    problems = (
        (f"argument {show(path)} " if path else "the arguments ")
        + " or ".join(dict.fromkeys(texts)).replace(" or must be ", " or ")
        + given.get(path, "")
        for path, texts in said.items()
    )
    return "; ".join([shorten(problem.replace(" : ", ": "), 500) for problem in problems][:3])


def _path(location: Sequence[str | int], value: Any, missing: bool) -> str:
    """A place in the arguments, such as ``order.items[0].name``, without the names of types that pydantic puts in."""
    text = ""
    for position, part in enumerate(location):
        there = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
        if there or (missing and position == len(location) - 1):
            text += f"[{part}]" if isinstance(part, int) else f".{part}"
            value = value[part] if there else None
    return text.removeprefix(".")


def near(value: Any, schema: Any, root: dict[str, Any], steps: Iterator[int]) -> Any:
    """A JSON ``value`` with near misses turned into what ``schema`` (or True or False) asks for; what does not fit
    stays as it is. ``root``: what ``$ref`` points into. ``steps``: how many more comparisons may be made.
    Raises InvalidArguments: there were too many of them."""
    if next(steps, None) is None:
        raise InvalidArguments("the arguments are too long or too deeply nested")
    if not isinstance(schema, dict):
        return value
    if isinstance(reference := schema.get("$ref"), str):
        return near(value, _named(reference, root), root, steps)
    for part in schema.get("allOf", ()):
        value = near(value, part, root, steps)
    kind = schema.get("type")
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kind, list):
        options = [{**schema, "type": one} for one in kind]
    if options:
        turned = [(near(value, option, root, steps), option) for option in options]
        same = any(_is(value, option, root) and type(new) is type(value) and new == value for new, option in turned)
        return value if same else next((new for new, option in turned if _is(new, option, root)), value)
    if allowed := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return _one_of(value, allowed)
    if kind in ("array", "object") and isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        value = _from_json(value)
    if isinstance(value, str) and kind in ("integer", "number", "boolean", "null"):
        return _from_text(value, kind)
    if kind == "string" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and kind == "array":
        first, rest = schema.get("prefixItems", ()), schema.get("items")
        return [near(item, first[n] if n < len(first) else rest, root, steps) for n, item in enumerate(value)]
    if isinstance(value, dict) and (kind == "object" or "properties" in schema):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
        return {name: near(item, properties.get(name, rest), root, steps) for name, item in value.items()}
    return value


_PYTHON: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def _is(value: Any, schema: Any, root: dict[str, Any]) -> bool:
    """Whether a value is of the kind that an option asks for, its parts not looked at."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        schema = _named(schema["$ref"], root)
    if not isinstance(schema, dict):
        return schema is not False
    if allowed := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return any(type(option) is type(value) and option == value for option in allowed)
    kind = schema.get("type")
    if kind == "null":
        return value is None
    if kind in _PYTHON and not isinstance(value, _PYTHON[kind]):
        return False
    return not (isinstance(value, bool) and kind in ("integer", "number"))


def _named(reference: str, root: dict[str, Any]) -> Any:
    node: Any = root
    for part in filter(None, reference.removeprefix("#").split("/")):
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def _one_of(value: Any, allowed: Sequence[Any]) -> Any:
    if not isinstance(value, (str, int, float)) or any(type(o) is type(value) and o == value for o in allowed):
        return value
    written = str(value)[:MAX_MATCHED].strip().lower()
    return next((o for o in allowed if isinstance(o, (str, int, float)) and str(o).lower() == written), value)


def _from_text(text: str, kind: str) -> Any:
    """What a text says that stands where a number, a boolean or null is asked for; itself if that is nothing."""
    word = text.strip()
    if kind in ("boolean", "null"):
        words = {"true": True, "false": False} if kind == "boolean" else {"null": None, "none": None}
        return words.get(word.lower(), text)
    if len(word) > 64 or "_" in word:
        return text
    try:
        number = int(word) if word.lstrip("+-").isdigit() else float(word)
    except ValueError:
        return text
    if isinstance(number, float) and (kind == "integer" or not math.isfinite(number)):
        return int(number) if number.is_integer() else text
    return number


def _from_json(text: str) -> Any:
    """A list or object that the model wrote as a string of JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


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


# -- schemas that came from elsewhere -----------------------------------------------------------------

_left = threading.local()
"""How many more comparisons the check that runs in this thread may make."""


@functools.lru_cache(maxsize=256)  # each episode may have a tool of its own
def _checker(written: str, tool: str) -> Callable[[Any], Iterator[Any]]:
    """What finds the errors of a value by a schema, in bounded time whatever both are."""
    import jsonschema
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable

    schema = json.loads(written)
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        draft.check_schema(schema, format_checker=jsonschema.FormatChecker(()))  # patterns are read by RE2
    except jsonschema.SchemaError as error:
        raise ConfigError(f"tool {tool!r}: its parameters are no JSON schema: {shorten(error.message, 200)}") from error

    def bounded(keyword: Callable[..., Any]) -> Callable[..., Any]:
        def check(*given: Any) -> Any:
            _left.steps -= 1
            if _left.steps < 0:
                raise InvalidArguments("the arguments are too long or too deeply nested")
            try:
                yield from keyword(*given) or ()
            except Unresolvable:  # a reference to somewhere else: nothing is fetched, and it restricts nothing
                return

        return check

    def pattern(validator: Any, expression: Any, text: Any, _: Any) -> Any:
        if validator.is_type(text, "string") and not _matches(expression, text):
            yield jsonschema.ValidationError(f"{show(text)} does not match {expression}")

    branching = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if")
    ours = {name: bounded(check) for name, check in draft.VALIDATORS.items() if name in branching}
    validator = jsonschema.validators.extend(draft, {**ours, "pattern": pattern})(schema, registry=REGISTRY)

    def errors(arguments: Any) -> Iterator[Any]:
        _left.steps = MAX_STEPS
        return validator.iter_errors(arguments)

    return errors


def _matches(pattern: Any, text: str) -> bool:
    """Whether a ``pattern`` is somewhere in a text, in time linear in the text: both may be a stranger's.

    RE2's expressions are those of JSON schema but for what needs backtracking (``(?=``, ``\\1``) and ``\\u0041``. A
    pattern that it does not take restricts nothing.
    """
    compiled = _compiled(pattern) if isinstance(pattern, str) else None
    return compiled is None or (len(text) <= MAX_MATCHED and compiled.search(text) is not None)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    import re2

    options = re2.Options()
    options.log_errors, options.max_mem = False, MAX_PATTERN
    try:
        return re2.compile(pattern, options=options)
    except (re2.error, UnicodeError):
        return None
