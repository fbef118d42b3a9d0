"""OpenAI-style tool definitions as tools, and tools as such definitions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigError
from agentrl.tools.arguments import ArgumentReader, shorten
from agentrl.tools.base import FunctionTool, Tool

_FUNCTION = {
    "type": "object",
    "required": ["name", "description", "parameters"],
    "properties": {
        "name": {"type": "string", "pattern": r"^[A-Za-z0-9_-]{1,64}\Z"},
        "description": {"type": "string", "pattern": r"\S"},
        "parameters": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"const": "object"}, "properties": {"type": "object"}},
        },
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}


def problem_of(tool: Any) -> str | None:
    """What is wrong with a tool in the OpenAI form, as chat templates and servers take it; None if nothing is."""
    import jsonschema

    error = next(jsonschema.Draft202012Validator(_TOOL).iter_errors(tool), None)
    return error and f"a tool is {tool!r:.80}: at {error.json_path}: {error.message:.200}"


class OpenAITool(Tool, described=False):
    """A tool with a given definition and a function that does the work. Made by :func:`from_openai`.

    Arguments are checked against the definition's JSON schema, near misses turned into the right type, before
    the function is called with them by name.

    Args:
        definition: ``{"type": "function", "function": {"name", "description", "parameters"}}``, or the same
            without the inner object, as the Responses API has it.
        function: Called with the arguments, sync or async; returns what any tool returns.
        shared: Whether the function keeps no state of an episode. Otherwise its object is copied for each.
        timeout: Seconds a call may take; None: the environment's ``tool_timeout``.

    Raises:
        ConfigError: The definition is none, or its parameters are no JSON schema.
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        function: Callable[..., Any],
        *,
        shared: bool = True,
        timeout: float | None = None,
    ) -> None:
        given = definition.get("function", definition) if isinstance(definition, Mapping) else definition
        if not isinstance(given, Mapping):
            raise ConfigError(f"a definition is {{'type': 'function', 'function': {{...}}}}, got {definition!r:.120}")
        name, parameters = given.get("name"), given.get("parameters") or {}
        if isinstance(parameters, Mapping):
            parameters = {"type": "object", **parameters}
        tool = {"type": definition.get("type", "function"), "function": {**given, "parameters": parameters}}
        if problem := problem_of(tool):
            raise ConfigError(problem)
        if not callable(function):
            raise ConfigError(f"tool {name!r} needs a function that does the work, got {function!r:.100}")
        self.name, self.description = str(name), given["description"].strip()
        self.parameters = {"properties": {}, **copy.deepcopy(parameters)}
        self.function, self.shared, self.timeout = function, shared, timeout
        self._reader = ArgumentReader(self.parameters, tool=self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenAITool:
        tool = copy.copy(self)
        # A bound method carries its object, whose state belongs to one episode; a function has none.
        bound = getattr(self.function, "__self__", None)
        if bound is not None:
            tool.function = getattr(copy.deepcopy(bound, memo), self.function.__name__)
        elif not inspect.isroutine(self.function):
            tool.function = copy.deepcopy(self.function, memo)
        return tool

    @property
    def runs_in_parallel(self) -> bool:
        return self.shared if self.parallel is None else self.parallel

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments)


def from_openai(
    definitions: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    functions: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    *,
    shared: bool = True,
) -> list[Tool]:
    """Tools from OpenAI-style definitions and the functions that do the work.

    Args:
        definitions: One definition, or several.
        functions: By the name of the tool; for one definition also the function itself.
        shared: Whether the functions keep no state of an episode.

    Raises:
        ConfigError: A definition is none, two have one name, or names and functions do not match.

    Example:
        >>> definition = {
        ...     "type": "function",
        ...     "function": {
        ...         "name": "double",
        ...         "description": "Doubles a number.",
        ...         "parameters": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
        ...     },
        ... }
        >>> from_openai(definition, lambda n: 2 * n)[0](n=4)
        8
    """
    listed = [definitions] if isinstance(definitions, Mapping) else list(definitions)
    if not isinstance(functions, Mapping):
        if len(listed) != 1:
            raise ConfigError(f"{len(listed)} definitions need their functions by name: {{'name': function, ...}}")
        return [OpenAITool(listed[0], functions, shared=shared)]
    tools: dict[str, Tool] = {}
    for definition in listed:
        given = definition.get("function", definition) if isinstance(definition, Mapping) else {}
        name = given.get("name") if isinstance(given, Mapping) else None
        if name in tools:
            raise ConfigError(f"two definitions have the name {name!r}")
        if isinstance(name, str) and name not in functions:
            raise ConfigError(f"no function for the tool {name!r}; there are: {shorten(', '.join(functions), 300)}")
        tool = OpenAITool(definition, functions.get(name), shared=shared)  # type: ignore[arg-type]
        tools[tool.name] = tool
    unused = [name for name in functions if name not in tools]
    if unused:
        raise ConfigError(f"no definition for the function {unused[0]!r}")
    return list(tools.values())


def to_openai(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools, as an environment lists them (instances, classes, or plain functions), as OpenAI-style definitions, for a
    chat template or another program."""
    definitions = []
    for entry in tools:
        tool: Any = entry() if inspect.isclass(entry) else entry
        definitions.append((tool if isinstance(tool, Tool) else FunctionTool(tool)).schema())
    return definitions
