"""``Tool``: what a model may call, its result and its errors."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, overload

from agentrl.tools.arguments import ArgumentReader, InvalidArguments
from agentrl.tools.schema import describe


class ToolErrorType(StrEnum):
    """What can go wrong with a call. The set is closed, so that it can be counted."""

    PARSE = "parse"  # the model's text is not a call
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    TIMEOUT = "timeout"
    EXECUTION = "execution"  # the tool ran and failed
    LIMIT = "limit"  # too many calls, too much output
    UNAVAILABLE = "unavailable"  # infrastructure: never the model's fault, never scored


class ToolError(Exception):
    """An error of a call, told to the model as short text.

    Raise it in a tool, or return it in a :class:`ToolResult`. ``unavailable`` is different: it ends
    the episode as an infrastructure error, and the trajectory is retried, not scored.

    Args:
        message: One sentence for the model: what is wrong and what to do instead.
        type: A :class:`ToolErrorType` or its value.
    """

    def __init__(self, message: str, type: ToolErrorType | str = ToolErrorType.EXECUTION) -> None:
        super().__init__(message)
        self.message = message
        self.type = ToolErrorType(type)

    def __str__(self) -> str:
        return f"Error ({self.type}): {self.message}"


@dataclass(frozen=True)
class ToolResult:
    """What a call gives back.

    ``observation`` is the text for the model. ``reward`` is added to the turn's reward.
    ``terminated`` ends the episode. ``metadata`` (JSON values) goes into the record of the call.
    """

    observation: str = ""
    error: ToolError | None = None
    reward: float = 0.0
    terminated: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


class EpisodeEnv(Protocol):
    """The environment whose episode a tool serves, as far as tools know it; :class:`agentrl.ToolEnv` is one."""

    row: dict[str, Any]
    """The task."""
    sandbox: str
    """How tools run the model's code that do not say it themselves."""


class Tool:
    """Base class of tools: define ``__call__`` (or ``async def __call__``) with typed parameters.

    The schema the model sees comes from the type hints and the Google-style docstring of the class
    or of ``__call__``; a missing description is a ``TypeError`` when the class is defined. The class
    docstring describes the tool, the ``Args:`` section its parameters.

    A subclass that gets its descriptions elsewhere is declared with ``described=False``.

    A tool's state belongs to one episode: an environment gives each episode a fresh copy of the tools
    it lists, calls :meth:`start`, and :meth:`close` when the episode is over. Set ``shared = True`` for a
    tool without such state (an index, a client) that all episodes may use at once, from many threads.

    Example:
        >>> class Add(Tool):
        ...     '''Adds two numbers.'''
        ...     def __call__(self, a: float, b: float) -> str:
        ...         '''Args:
        ...             a: The first number.
        ...             b: The second number.
        ...         '''
        ...         return str(a + b)
        >>> Add().name, sorted(Add().parameters["properties"])
        ('add', ['a', 'b'])
    """

    name: str = ""
    """What the model calls it; from the class name when not set (``WebSearch`` gives ``web_search``)."""
    description: str = ""
    """What the model reads about it; from the docstring when not set."""
    parameters: dict[str, Any]
    """JSON schema of the arguments; from the signature when not set."""
    timeout: float | None = None
    """Seconds a call may take; None: the environment's ``tool_timeout``."""
    shared: bool = False
    """Whether one instance serves all episodes at once."""
    parallel: bool | None = None
    """Whether the calls of one turn may run at once; None: yes when shared or without state."""
    _reader: ArgumentReader | None = None  # of the signature, or of a schema of the author

    def __init_subclass__(cls, *, described: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        call = cls.__dict__.get("__call__")
        if call is None or not described:
            return
        if "name" not in cls.__dict__:
            cls.name = _snake_case(cls.__name__)
        texts = describe(
            call,
            skip_self=True,
            name=cls.name,
            description=cls.__dict__.get("description", ""),
            fallback_doc=cls.__doc__ if "__doc__" in cls.__dict__ else "",
            needs_schema="parameters" not in cls.__dict__,
        )
        cls.description = texts.description
        if texts.parameters is not None:
            cls.parameters = texts.parameters
            cls._reader = ArgumentReader(texts.parameters, texts.adapter)

    if TYPE_CHECKING:  # each tool has a signature of its own
        __call__: Callable[..., Any]
    else:

        def __call__(self, **arguments: Any) -> Any:
            """Does the work; returns text or a :class:`ToolResult`. May be ``async``."""
            raise NotImplementedError(f"{type(self).__name__} defines no `__call__`.")

    def read_arguments(self, arguments: Any) -> dict[str, Any]:
        """The arguments of a call, near misses turned into what the signature or the schema asks for.

        Args:
            arguments: What the model wrote, as JSON values.

        Raises:
            ToolError: Of type ``invalid_arguments``; names the argument, what was given and what is expected.
            ConfigError: ``parameters`` is no JSON schema.
        """
        reader = self._reader
        if reader is None or (reader.schema is not self.parameters and reader.schema != self.parameters):
            reader = ArgumentReader(self.parameters, tool=self.name)  # a schema of the author's own
            holder = self if "parameters" in vars(self) else type(self)
            holder._reader = reader
        try:
            return reader.read(arguments)
        except InvalidArguments as error:
            raise ToolError(f"{self.name}: {error}.", ToolErrorType.INVALID_ARGUMENTS) from None

    def check(self, env: EpisodeEnv) -> None:
        """Called before a run starts: raises ConfigError where this machine lacks what the tool needs."""

    def prepare(self) -> None:
        """Called once where episodes are played, before they begin: for what the first call would wait for."""

    def start(self, env: EpisodeEnv) -> None:
        """Called on the episode's own copy when the episode starts. ``env.row`` is the task."""

    def close(self) -> Any:
        """Called once on the episode's own copy when the episode is over, cut short or not; may be ``async``.

        Frees what the episode held: a process, a folder, a connection. Never called on a shared tool.
        """

    def for_episode(self, env: EpisodeEnv) -> Tool:
        """The instance that serves one episode of ``env``."""
        if self.shared:
            return self
        tool = self.copied()
        tool.start(env)
        return tool

    def copied(self) -> Tool:
        """A copy that shares nothing with this instance."""
        try:
            return copy.deepcopy(self)
        except TypeError as error:
            raise TypeError(
                f"Tool {self.name!r} cannot be copied for an episode ({error}). Open what it holds in `start(env)`, "
                "not in `__init__`; or set `shared = True` if all episodes may use one instance."
            ) from error

    @property
    def runs_in_parallel(self) -> bool:
        """Whether calls of one turn to this instance may overlap."""
        if self.parallel is not None:
            return self.parallel
        return self.shared or not vars(self)

    @property
    def owner(self) -> object:
        """Whose state a call changes: calls with one owner run one after another, in order."""
        return self

    def schema(self) -> dict[str, Any]:
        """The tool as an OpenAI function schema, fresh on every call."""
        function = {"name": self.name, "description": self.description, "parameters": copy.deepcopy(self.parameters)}
        return {"type": "function", "function": function}


class FunctionTool(Tool, described=False):
    """A function, or a method of an environment, as a tool. Made by :func:`tool`."""

    shared = True

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        if not inspect.isroutine(function):
            raise TypeError(
                f"a tool is made of a function, got {function!r:.80}; for an object, write a subclass of Tool."
            )
        self.function = function
        self.is_method = next(iter(inspect.signature(function).parameters), "") == "self"
        self.bound_to: object | None = None
        self.name = options.pop("name", None) or function.__name__
        for option in ("timeout", "parallel"):
            if options.get(option) is not None:
                setattr(self, option, options[option])
        described = describe(
            function, skip_self=self.is_method, name=self.name, description=options.get("description") or ""
        )
        self.description, self.parameters = described.description, described.parameters or {}
        self._reader = ArgumentReader(self.parameters, described.adapter)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_method and self.bound_to is not None:
            return self.function(self.bound_to, *args, **kwargs)
        return self.function(*args, **kwargs)

    def __get__(self, instance: object | None, owner: type | None = None) -> FunctionTool:
        return self if instance is None or not self.is_method else self.bind(instance)

    def bind(self, instance: object) -> FunctionTool:
        """This tool as a method of ``instance``, whose state it may change."""
        bound = copy.copy(self)
        bound.bound_to = instance
        return bound

    def for_episode(self, env: EpisodeEnv) -> Tool:
        return self.bind(env) if self.is_method and self.bound_to is None else self

    @property
    def runs_in_parallel(self) -> bool:
        return self.parallel if self.parallel is not None else not self.is_method

    @property
    def owner(self) -> object:
        return self.bound_to if self.bound_to is not None else self


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    parallel: bool | None = None,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Makes a tool of a function, or of a method in the body of a ``ToolEnv``.

    The schema comes from type hints and docstring; the function stays callable as it is.

    Args:
        function: What to call, sync or async. Every parameter typed and described.
        **options: ``name``, ``description``, ``timeout`` (seconds), ``parallel`` (whether calls of one
            turn may overlap; default: functions yes, methods no).

    Raises:
        TypeError: A description or a type hint is missing.

    Example:
        >>> @tool
        ... def reverse(word: str) -> str:
        ...     '''Spells a word backwards.
        ...
        ...     Args:
        ...         word: The word to spell.
        ...     '''
        ...     return word[::-1]
        >>> reverse(word="abc"), reverse.schema()["function"]["parameters"]["required"]
        ('cba', ['word'])
    """
    unknown = set(options) - {"name", "description", "timeout", "parallel"}
    if unknown:
        raise TypeError(f"tool() got unexpected options {sorted(unknown)}.")
    if function is None:
        return functools.partial(FunctionTool, **options)
    return FunctionTool(function, **options)


def _snake_case(name: str) -> str:
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_")
    return words.removesuffix("_tool") or words
