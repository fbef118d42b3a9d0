"""Runs the calls of one turn: validated, side by side where that is safe, each within its time."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import json
import logging
import math
import reprlib
import threading
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.concurrency.event_loop import HeldTooLong, attend, ours
from agentrl.concurrency.threads import (
    MAX_THREADS,
    as_exception,
    await_user_code,
    has_thread,
    own_thread,
    release_thread,
    run_blocking,
)
from agentrl.errors import EnvError, InfraError, is_authors
from agentrl.redaction import redact
from agentrl.tools.base import EpisodeEnv, FunctionTool, Tool, ToolError, ToolErrorType, ToolResult
from agentrl.tools.formats import clean_text
from agentrl.types import ToolCall

logger = logging.getLogger(__name__)

MAX_ERROR = 2000
"""Characters of an error that a tool words itself."""


async def run_calls(
    calls: Sequence[ToolCall], tools: Mapping[str, Tool], *, timeout: float, max_calls: int
) -> list[ToolResult]:
    """Runs the calls of one turn and returns their results in the order of the calls.

    Calls that may change the same state (:attr:`Tool.owner`) run one after another, all others at the
    same time. After a call that ends the episode, later calls on the same state are not run.

    Args:
        calls: As parsed; one with ``error`` set gives a ``parse`` error.
        tools: By name.
        timeout: Seconds a call may take, unless its tool says otherwise.
        max_calls: Calls that are run; the rest give a ``limit`` error.

    Raises:
        InfraError: A tool reported that something outside the episode failed.
        EnvError: A tool returned something that is not a result.
    """
    if len(calls) == 1:
        return [await run_call(calls[0], tools, timeout=timeout)]
    results: list[ToolResult] = [ToolResult()] * len(calls)
    chains: dict[object, list[int]] = {}
    for index, call in enumerate(calls):
        tool = tools.get(call.name)
        key = index if tool is None or tool.runs_in_parallel else ("owner", id(tool.owner))
        chains.setdefault(key, []).append(index)

    async def run_chain(chain: list[int]) -> None:
        over = False
        for index in chain:
            if over or index >= max_calls:
                text = "the episode is over" if over else f"at most {max_calls} calls in one turn"
                results[index] = _failed(ToolError(text, ToolErrorType.LIMIT))
                continue
            results[index] = await run_call(calls[index], tools, timeout=timeout)
            over = results[index].terminated

    if len(chains) == 1:
        await run_chain(next(iter(chains.values())))
        return results
    tasks = [asyncio.ensure_future(run_chain(chain)) for chain in chains.values()]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return results


async def run_call(call: ToolCall, tools: Mapping[str, Tool], *, timeout: float) -> ToolResult:
    """Runs one call. The model's mistakes and the tool's failures come back as results with ``error``.
    Raises InfraError: the tool raised it, or an ``unavailable`` error.
    Raises EnvError: the tool returned something that is not a result."""
    try:
        if call.error is not None:
            raise ToolError(call.error, ToolErrorType.PARSE)
        tool = tools.get(call.name)
        if tool is None:
            raise ToolError(
                f"there is no tool {call.name[:64]!r}; there are: {', '.join(tools) or 'none'}.",
                ToolErrorType.UNKNOWN_TOOL,
            )
        arguments = tool.read_arguments(call.arguments)
        seconds = tool.timeout if tool.timeout is not None else timeout
        result = _as_result(await _call_within(tool, arguments, seconds), tool.name)
    except ToolError as error:
        result = _failed(error)
    except (InfraError, EnvError):
        raise
    except Exception as error:
        _log_failure(call, error)
        result = _failed(ToolError(f"{call.name[:64]}: {_short(error)}", ToolErrorType.EXECUTION))
    if result.error is not None and result.error.type is ToolErrorType.UNAVAILABLE:
        raise InfraError(f"tool {call.name!r} is unavailable: {result.error.message}")
    return result


def unshared(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of which no list or object is another's: a tool may change what it gets, the record may not change."""
    for value in arguments.values():
        if isinstance(value, (list, dict)):
            return copy.deepcopy(arguments)
    return arguments


async def start_tools(tools: Iterable[Tool], env: EpisodeEnv) -> None:
    """Starts the tools of an episode, one after another, each in the thread in which its calls will run."""
    for tool in tools:
        if _has_own_thread(tool):
            await own_thread(tool.owner).run(tool.start, env)
        else:
            tool.start(env)


async def close_tools(tools: Iterable[Tool], *, timeout: float = 10.0) -> None:
    """Closes the tools of an episode that is over, side by side. Shared ones are left alone.

    What goes wrong is logged: the episode is over, nothing depends on it any more.

    Args:
        tools: As :meth:`Tool.for_episode` gave them; an environment calls this once for each episode.
        timeout: Seconds in which all of them must be closed; one that hangs is left behind.
    """
    own = [tool for tool in tools if not tool.shared]
    closing = [tool for tool in own if type(tool).close is not Tool.close]
    try:
        if closing:
            await asyncio.gather(*(_close(tool, timeout) for tool in closing))
    finally:
        for tool in own:
            release_thread(tool.owner)


async def _close(tool: Tool, timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            if inspect.iscoroutinefunction(tool.close):
                await await_user_code(tool.close())
            else:
                run = own_thread(tool.owner).run if has_thread(tool.owner) else run_blocking
                await run(tool.close)
    except Exception as error:  # the author's code
        logger.warning("closing tool %r: %s: %s", tool.name, type(error).__name__, error)


async def _call_within(tool: Tool, arguments: dict[str, Any], seconds: float) -> Any:
    function = tool.function if isinstance(tool, FunctionTool) else type(tool).__call__  # what its author wrote
    started = None
    if not inspect.iscoroutinefunction(function):
        started = threading.Event()
        work = _run_blocking(tool, arguments, started)
    elif ours(function):
        work = tool(**arguments)
    else:
        owner = None if isinstance(tool, FunctionTool) else tool
        work = attend(f"tool {tool.name!r}", tool.__call__, owner=owner, key=function, limit=seconds, **arguments)
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    task = loop.create_task(_deliver(work, answer))
    timer = loop.call_later(seconds, _give_up, answer)
    try:
        return await answer
    except HeldTooLong:
        if started is not None and not started.is_set():
            raise InfraError(
                f"no thread was free for tool {tool.name!r} within {seconds:g} s: {MAX_THREADS} blocking calls run "
                "already. Make slow tools async, give them shorter timeouts, or run fewer episodes at once."
            ) from None
        raise ToolError(f"{tool.name} took longer than {seconds:g} s", ToolErrorType.TIMEOUT) from None
    finally:
        timer.cancel()
        task.cancel()  # not awaited: code that swallows cancellation must not hold up the episode


async def _deliver(work: Awaitable[Any], answer: asyncio.Future[Any]) -> None:
    """Awaits code of others and hands on what comes of it, unless nobody waits for it any more."""
    value: Any = None
    error: BaseException | None = None
    try:
        value = await work
    except asyncio.CancelledError:
        error = RuntimeError("the called code cancelled its own work")
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        error = as_exception(raised)
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)


def _give_up(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(HeldTooLong())


async def _run_blocking(tool: Tool, arguments: dict[str, Any], started: threading.Event) -> Any:
    def call() -> Any:
        started.set()
        return tool(**arguments)

    run = own_thread(tool.owner).run if _has_own_thread(tool) else run_blocking
    value = await run(call)
    return await await_user_code(value) if inspect.isawaitable(value) else value


def _has_own_thread(tool: Tool) -> bool:
    """Whether the blocking calls of a tool run in one thread: what has state may hold what is bound to a thread."""
    if isinstance(tool, FunctionTool):
        if inspect.iscoroutinefunction(tool.function):
            return False
        return tool.bound_to is not None and not tool.runs_in_parallel
    if inspect.iscoroutinefunction(type(tool).__call__):
        return False
    return not tool.shared and (not tool.runs_in_parallel or type(tool).start is not Tool.start)


def _as_result(value: Any, name: str) -> ToolResult:
    if isinstance(value, ToolResult):
        if not isinstance(value.observation, str):
            raise EnvError(
                f"tool {name!r} returned an observation of type {type(value.observation).__name__}; str is expected."
            )
        if value.error is not None and not isinstance(value.error, ToolError):
            raise EnvError(
                f"tool {name!r} returned an error of type {type(value.error).__name__}; ToolError is expected."
            )
        return value
    if isinstance(value, (str, int, float, np.generic)):
        return ToolResult(str(value))
    if hasattr(value, "model_dump") and hasattr(type(value), "__pydantic_validator__"):
        value = value.model_dump(mode="json")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, (dict, list, tuple)):
        return ToolResult(json.dumps(_plain(value), ensure_ascii=False))
    raise EnvError(f"tool {name!r} returned {type(value).__name__}; text, a number, JSON or a ToolResult is expected.")


def _plain(value: Any) -> Any:
    """What JSON has for a value: a list for a set, a number for one of NumPy, text for what it cannot say."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)) and all(isinstance(item, (str, int, float)) for item in value):
        value = sorted(value, key=lambda item: (type(item).__name__, item))
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


_logged: set[tuple[str, type[Exception]]] = set()
_BRIEF = reprlib.Repr()  # arguments may be a megabyte long


def _log_failure(call: ToolCall, error: Exception) -> None:
    """Logs a tool's own exception: loudly once for each kind, since it may be a defect, or just a wrong argument."""
    kind = (call.name, type(error))
    level = logging.DEBUG if kind in _logged else logging.WARNING
    _logged.add(kind)
    trace = error.__traceback__
    while trace is not None and not is_authors(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next  # how the call came to the author's code tells nobody anything
    shown = (type(error), error, trace or error.__traceback__)
    logger.log(level, "tool %r raised on %s", call.name, _BRIEF.repr(call.arguments), exc_info=shown)


def _failed(error: ToolError) -> ToolResult:
    return ToolResult(clean_text(str(error))[:MAX_ERROR], error)


def _short(error: Exception) -> str:
    """Type and first line of an exception, without paths and secrets of this machine."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an exception whose own text raises
        lines = []
    text = redact(lines[0]) if lines else ""
    return clean_text(f"{type(error).__name__}: {text}" if text else type(error).__name__)
