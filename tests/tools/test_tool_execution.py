"""Calls are run in order, side by side where safe, within their time, and fail in a closed set of ways."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
import traceback
from pathlib import PurePosixPath

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.concurrency import threads
from agentrl.concurrency.threads import DaemonPool, run_blocking, run_coroutine
from agentrl.errors import EnvError, InfraError
from agentrl.redaction import redact
from agentrl.tools import Tool, ToolError, ToolResult, close_tools, run_calls, tool
from agentrl.tools.arguments import ArgumentReader, InvalidArguments
from agentrl.tools.execution import MAX_ERROR
from agentrl.tools.formats import HermesParser
from agentrl.types import ToolCall


def run(calls: list[ToolCall], *tools: Tool, timeout: float = 5.0, max_calls: int = 32) -> list[ToolResult]:
    by_name = {t.name: t for t in tools}
    return asyncio.run(run_calls(calls, by_name, timeout=timeout, max_calls=max_calls))


@tool
def wait(seconds: float, tag: str = "") -> str:
    """Waits.

    Args:
        seconds: How long.
        tag: What to say afterwards.
    """
    time.sleep(seconds)
    return tag


@tool
def fail(how: str) -> object:
    """Fails.

    Args:
        how: In which way.
    """
    if how == "value":
        raise ValueError("bad number in /home/someone/secret/file.py\nand a second line")
    if how == "tool":
        raise ToolError("no such row", "execution")
    if how == "infra":
        raise InfraError("server is down")
    if how == "unavailable":
        return ToolResult(error=ToolError("server is down", "unavailable"))
    if how == "exit":
        sys.exit(3)
    if how == "stop":
        raise StopIteration
    if how == "cancelled":
        raise asyncio.CancelledError
    return object()


class Counter(Tool):
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> str:
        """Counts."""
        seen = self.count
        time.sleep(0.01)
        self.count = seen + 1
        return str(self.count)


def meeting(kind: str) -> Tool:
    """A tool whose calls wait for each other, sixteen of them."""
    threads_meet, tasks_meet = threading.Barrier(16), asyncio.Barrier(16)

    @tool
    def function(tag: str) -> str:
        """Meets.

        Args:
            tag: Said again.
        """
        threads_meet.wait(60)
        return tag

    @tool
    async def coroutine(tag: str) -> str:
        """Meets.

        Args:
            tag: Said again.
        """
        await tasks_meet.wait()
        return tag

    class Stateless(Tool):
        """Meets.

        Args:
            tag: Said again.
        """

        def __call__(self, tag: str) -> str:
            threads_meet.wait(60)
            return tag

    return {"function": function, "coroutine": coroutine, "class": Stateless()}[kind]


@pytest.mark.parametrize("kind", ["function", "coroutine", "class"])
def test_sixteen_calls_run_side_by_side(kind):
    meet = meeting(kind)
    results = run([ToolCall(meet.name, {"tag": str(i)}) for i in range(16)], meet, timeout=60)
    assert [r.observation for r in results] == [str(i) for i in range(16)]


def test_calls_on_the_same_state_run_in_order():
    results = run([ToolCall("counter", {})] * 10 + [ToolCall("wait", {"seconds": 0, "tag": "x"})], Counter(), wait)
    assert [r.observation for r in results] == [str(i) for i in range(1, 11)] + ["x"]


def test_order_of_results_is_the_order_of_calls():
    seconds = [0.2, 0.0, 0.1]
    results = run([ToolCall("wait", {"seconds": s, "tag": str(s)}) for s in seconds], wait)
    assert [r.observation for r in results] == ["0.2", "0.0", "0.1"]


def test_a_call_that_hangs_is_given_up():
    over, ended = threading.Event(), []

    @tool
    def function() -> None:
        """Hangs."""
        ended.append(over.wait(120))

    @tool
    async def coroutine() -> None:
        """Hangs."""
        ended.append(await asyncio.sleep(120))

    for hanging in (function, coroutine):
        (result,) = run([ToolCall(hanging.name, {})], hanging, timeout=0.1)
        assert result.error.type == "timeout"
        assert result.observation == f"Error (timeout): {hanging.name} took longer than 0.1 s"
    assert not ended
    over.set()


def test_a_coroutine_that_swallows_cancellation_is_given_up_too():
    given_up = False

    @tool
    async def stubborn() -> str:
        """Does not stop."""
        while not given_up:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)
        return "late"

    async def main() -> None:
        nonlocal given_up
        (result,) = await run_calls([ToolCall("stubborn", {})], {"stubborn": stubborn}, timeout=0.1, max_calls=1)
        given_up = True
        assert result.error.type == "timeout"

    asyncio.run(main())


def test_a_tool_has_its_own_timeout():
    @tool(timeout=0.05)
    def slow() -> str:
        """Is slow."""
        time.sleep(1)
        return ""

    assert run([ToolCall("slow", {})], slow, timeout=60)[0].error.type == "timeout"


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("value", "execution", "Error (execution): fail: ValueError: bad number in …"),
        ("tool", "execution", "Error (execution): no such row"),
        ("exit", "execution", "SystemExit(3)"),
        ("stop", "execution", "StopIteration()"),
        ("cancelled", "execution", "fail"),
    ],
)
def test_failures_reach_the_model_as_one_short_line(how, kind, text):
    (result,) = run([ToolCall("fail", {"how": how})], fail)
    assert result.error.type == kind
    assert text in result.observation
    assert "\n" not in result.observation
    assert "secret" not in result.observation


def test_an_async_tool_that_exits_does_not_end_the_loop():
    @tool
    async def leave() -> str:
        """Leaves."""
        sys.exit(3)

    (result,) = run([ToolCall("leave", {})], leave)
    assert "SystemExit(3)" in result.observation


@pytest.mark.parametrize("how", ["infra", "unavailable"])
def test_infrastructure_is_never_the_models_fault(how):
    with pytest.raises(InfraError, match="server is down"):
        run([ToolCall("wait", {"seconds": 0.0}), ToolCall("fail", {"how": how})], wait, fail)


def test_a_result_of_no_known_type_is_the_authors_fault():
    with pytest.raises(EnvError, match="returned object"):
        run([ToolCall("fail", {"how": "object"})], fail)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (ToolCall("", {}, error="not JSON"), "parse", "not JSON"),
        (ToolCall("nothing", {}), "unknown_tool", "there is no tool 'nothing'; there are: wait"),
        (ToolCall("wait", {"seconds": "soon"}), "invalid_arguments", 'must be a valid number, got "soon"'),
    ],
)
def test_the_models_mistakes_are_explained(call, kind, text):
    (result,) = run([call], wait)
    assert result.error.type == kind
    assert text in result.observation


def test_calls_beyond_the_limit_are_not_run():
    results = run([ToolCall("counter", {})] * 4, Counter(), max_calls=2)
    assert [r.error.type if r.error else r.observation for r in results] == ["1", "2", "limit", "limit"]


def test_no_call_runs_on_a_state_that_is_over():
    class Quit(Tool):
        """Quits."""

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self) -> ToolResult:
            self.calls += 1
            return ToolResult("bye", terminated=True)

    quitting = Quit()
    results = run([ToolCall("quit", {})] * 3, quitting)
    assert quitting.calls == 1
    assert [bool(r.error) for r in results] == [False, True, True]


def test_what_json_cannot_say_is_still_json():
    @tool
    def odd() -> dict[str, object]:
        """Returns all kinds of things."""
        return {
            "set": {2, 1}, "mixed": {1, "a"}, "frozen": [frozenset({"b"})], "array": np.array([1, 2]),
            "number": np.float32(0.5), "infinite": [float("inf"), -float("inf")], "nan": {"nested": float("nan")},
            "path": PurePosixPath("/a"),
        }  # fmt: skip

    (result,) = run([ToolCall("odd", {}, "c")], odd)
    strict = json.loads(result.observation, parse_constant=lambda word: pytest.fail(f"bare {word}"))
    assert strict == {
        "set": [1, 2], "mixed": [1, "a"], "frozen": [["b"]], "array": [1, 2], "number": 0.5,
        "infinite": ["Infinity", "-Infinity"], "nan": {"nested": "NaN"}, "path": "/a",
    }  # fmt: skip


def test_results_may_be_numbers_or_json():
    @tool
    def rows() -> list[dict[str, object]]:
        """Gives rows."""
        return [{"name": "é", "n": 1}]

    assert run([ToolCall("rows", {})], rows)[0].observation == '[{"name": "é", "n": 1}]'


# -- threads ----------------------------------------------------------------------------------------


def test_blocking_calls_nested_beyond_the_size_of_the_pool_do_not_wait_for_themselves():
    def outer() -> int:
        return run_coroutine(run_blocking(lambda: run_coroutine(run_blocking(lambda: 1))))

    async def main() -> list[int]:
        return await asyncio.gather(*(run_blocking(outer) for _ in range(300)))

    assert sum(asyncio.run(asyncio.wait_for(main(), 30))) == 300


def test_a_pool_keeps_its_bound_and_replaces_threads_that_hang():
    pool = DaemonPool(2)
    release = threading.Event()
    hung = [pool.submit(release.wait) for _ in range(2)]
    waiting = pool.submit(lambda: "ran")
    time.sleep(0.05)
    assert not waiting.done()
    pool.give_up(hung[0])
    assert waiting.result(timeout=5) == "ran"
    never = pool.submit(lambda: "never")
    pool.give_up(never)
    release.set()
    assert pool.submit(lambda: "after").result(timeout=5) == "after"


def test_a_hung_tool_does_not_keep_the_process_alive():
    program = (
        "import asyncio, time\n"
        "from agentrl.concurrency.threads import run_blocking\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(run_blocking(time.sleep, 3600), 0.1)\n"
        "    except TimeoutError:\n"
        "        print('given up')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "given up\n")


def test_run_coroutine_works_inside_a_running_loop():
    async def inner() -> int:
        await asyncio.sleep(0)
        return 7

    async def main() -> int:
        return run_coroutine(inner())

    assert asyncio.run(main()) == 7


# -- the end of an episode --------------------------------------------------------------------------


def test_tools_of_an_episode_are_closed_and_shared_ones_are_not(caplog):
    closed, over = [], threading.Event()

    class Holder(Tool):
        """Holds something."""

        def __init__(self, name: str, how: str = "") -> None:
            self.name, self.how = name, how

        def __call__(self) -> str:
            return ""

        def close(self) -> None:
            if self.how == "fails":
                raise OSError("no")
            if self.how == "hangs":
                over.wait(120)
            closed.append(self.name)

    class AsyncHolder(Holder):
        """Holds something, async."""

        async def close(self) -> None:
            closed.append(self.name)

    shared = Holder("shared")
    shared.shared = True
    tools = [Holder("a"), Holder("b", "fails"), Holder("c", "hangs"), AsyncHolder("d"), shared, wait]
    asyncio.run(close_tools(tools, timeout=1.0))
    assert sorted(closed) == ["a", "d"]
    over.set()
    assert "closing tool 'b': OSError: no" in caplog.text
    assert "closing tool 'c'" in caplog.text


def test_giving_up_a_blocking_call_ends_the_coroutine_it_waits_for():
    ended, inner = threading.Event(), threading.Event()

    async def hang() -> None:
        inner.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.ensure_future(run_blocking(lambda: run_coroutine(hang())))
        await asyncio.to_thread(inner.wait, 5)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(main())
    assert ended.wait(5)


def test_async_code_that_would_wait_for_itself_is_told():
    async def inner() -> int:
        return 1

    async def outer() -> int:
        return run_coroutine(inner())

    with pytest.raises(RuntimeError, match="would wait for itself"):
        run_coroutine(outer())


def test_lost_threads_are_counted_and_their_end_is_an_infrastructure_error(caplog):
    pool, release = DaemonPool(8), threading.Event()
    try:
        for _ in range(16):
            hung = pool.submit(release.wait)
            while not hung.running():
                time.sleep(0.001)
            pool.give_up(hung)
        assert "16 blocking calls were given up" in caplog.text
        with pytest.raises(InfraError, match="no thread is left"):
            pool.submit(release.wait)
    finally:
        release.set()


def test_a_call_that_never_got_a_thread_is_not_the_tools_fault(monkeypatch):
    monkeypatch.setattr(threads, "MAX_THREADS", 1)
    monkeypatch.setattr(threads, "_pools", {})
    over = threading.Event()

    @tool
    def hang() -> None:
        """Hangs."""
        over.wait(120)

    with pytest.raises(InfraError, match="no thread was free for tool 'hang'"):
        run([ToolCall("hang", {})] * 2, hang, timeout=0.3)
    over.set()


# -- whatever a model writes and a tool does --------------------------------------------------------


@tool
def take(text: str = "", number: int = 0, things: list[dict[str, float]] | None = None, any: object = None) -> str:
    """Takes.

    Args:
        text: A text.
        number: A number.
        things: A list.
        any: Anything.
    """
    return f"{len(text)} {number} {things} {len(repr(any))}"


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def test_what_stands_in_a_string_of_json_is_looked_at_too():
    schema = {"type": "object", "properties": {"data": {"type": "object"}}}
    reader = ArgumentReader(schema)
    for data, message in (
        ('{"a": "\\u0000"}', "null character"),
        ('{"a": "\\udc00"}', "lone surrogate"),
        ('{"a": NaN}', "no JSON"),
    ):
        with pytest.raises(InvalidArguments, match=message):
            reader.read({"data": data})
    assert reader.read({"data": '{"a": [1]}'}) == {"data": {"a": [1]}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "x" * 2**20}, None),
        ({"any": ["y" * 1000] * 1000}, None),
        ({"number": "9" * 5000}, "must be a valid integer"),
        ({"number": 10**5000}, "no JSON"),
        ({"text": 10**5000}, "no JSON"),
        ({"any": float("nan")}, "no JSON"),
        ({"things": [{"a": float("inf")}]}, "no JSON"),
        ({"text": "a\0b"}, "null character"),
        ({"any": {"k\0": 1}}, "null character"),
        ({"any": [["a\0b"]]}, "null character"),
        ({"text": "\ud800"}, "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        ({"any": deep(100)}, None),
        ({"any": deep(500)}, "recursion limit"),
        ({"any": deep(100_000)}, "nested too deeply"),
        ({"things": "[" * 100_000}, "must be a valid array"),
        ({"things": '[{"a": NaN}]'}, "no JSON"),
        ({"things": '[{"a\\u0000": 1}]'}, "null character"),
        ({"things": '[{"\\ud800": 1}]'}, "lone surrogate"),
        ({"any": b"bytes"}, "no JSON"),
        ({"text": ["x" * 2**20]}, "must be a valid string"),
        ({"x" * 2**20: 1}, "is unknown"),
        ("text", "must be an object"),
    ],
)
def test_extreme_arguments_are_taken_or_refused_in_short(arguments, message):
    (result,) = run([ToolCall("take", arguments)], take)
    if message is None:
        assert result.error is None
        return
    assert result.error.type == "invalid_arguments"
    assert message in result.observation
    assert len(result.observation) < 600
    result.observation.encode("utf-8")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Abort(BaseException):
    pass


RAISED = {
    "path": FileNotFoundError(2, "No such file", "/home/someone/.ssh/id_rsa"),
    "key": ValueError("401 for sk-abcdefghijklmnopqrstuvwx"),
    "url": ValueError("cannot reach https://user:hunter22@host.example/x"),
    "named": ValueError("api_key='abcdef123456' was refused"),
    "bearer": ValueError("headers: Authorization: Bearer abcdef123456"),
    "environment": ValueError("sent hunter2hunter2"),
    "long": ValueError("x" * 2**20),
    "surrogate": ValueError("\ud800"),
    "unprintable": Unprintable(),
    "recursion": RecursionError("maximum recursion depth exceeded"),
    "memory": MemoryError(),
    "abort": Abort(),
    "group": BaseExceptionGroup("several", [Abort()]),
    "generator": GeneratorExit(),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", sorted(RAISED))
def test_whatever_a_tool_raises_is_one_short_line_without_paths_and_secrets(name, asynchronous, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hunter2hunter2")

    @tool
    def broken() -> str:
        """Breaks."""
        raise RAISED[name]

    @tool(name="broken")
    async def broken_async() -> str:
        """Breaks."""
        raise RAISED[name]

    (result,) = run([ToolCall("broken", {})], broken_async if asynchronous else broken)
    assert result.error.type == "execution"
    assert len(result.observation) < 500 and "\n" not in result.observation
    result.observation.encode("utf-8")
    for hidden in ("/home", "id_rsa", "sk-abc", "hunter2", "abcdef123456", "Traceback"):
        assert hidden not in result.observation


def test_the_log_of_a_failing_tool_begins_in_the_authors_code(caplog):
    @tool
    def breaks_here() -> str:
        """Breaks."""
        raise LookupError("gone")

    run([ToolCall("breaks_here", {})], breaks_here)
    (record,) = caplog.records
    frames = traceback.extract_tb(record.exc_info[2])
    assert [frame.name for frame in frames] == ["breaks_here"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)


@given(
    name=st.sampled_from(["take", "tak", ""]) | st.text(max_size=10),
    arguments=st.dictionaries(
        st.sampled_from(["text", "number", "things", "any"]) | st.text(max_size=5), JSON, max_size=5
    ),
)
@settings(max_examples=200, deadline=None)
def test_nothing_a_model_writes_raises(name, arguments):
    (result,) = run([ToolCall(name, arguments)], take)
    result.observation.encode("utf-8")
    assert len(result.observation) < 2000


@given(text=st.text(max_size=80) | st.builds("<tool_call>{}</tool_call>".format, JSON.map(lambda v: json.dumps(v))))
@settings(max_examples=200, deadline=None)
def test_nothing_in_a_turn_raises(text):
    calls = HermesParser().parse(text).tool_calls
    for result in run(calls, take):
        result.observation.encode("utf-8")


def test_results_of_other_kinds():
    @dataclasses.dataclass
    class Row:
        name: str

    class Model(pydantic.BaseModel):
        n: int

    values = {"row": Row("a"), "model": Model(n=1), "tuple": (1, "b")}

    @tool
    def give(what: str) -> object:
        """Gives.

        Args:
            what: Which.
        """
        return values[what]

    texts = [run([ToolCall("give", {"what": what})], give)[0].observation for what in values]
    assert texts == ['{"name": "a"}', '{"n": 1}', '[1, "b"]']


def test_an_error_that_is_none_is_the_authors_fault():
    @tool
    def wrong() -> ToolResult:
        """Wrong."""
        return ToolResult(error="text")

    with pytest.raises(EnvError, match="ToolError is expected"):
        run([ToolCall("wrong", {})], wrong)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("[Errno 2] No such file: '/home/me/my notes/a b.txt'", "[Errno 2] No such file: '…'"),
        ('cannot open "/data"', 'cannot open "…"'),
        ("say 'yes' / 'no'", "say 'yes' / 'no'"),
        ("'a'/'b' and 1/2", "'a'/'b' and 1/2"),
        ("cannot open file:///etc/ssh/key.pem here", "cannot open … here"),
        ("see https://example.org/a/b for more", "see https://example.org/a/b for more"),
        ("1/2 is not 3/4/5", "1/2 is not 3/4/5"),
        ("Unexpected token: identifier", "Unexpected token: identifier"),
        ("unexpected token 'SELECT'", "unexpected token 'SELECT'"),
        ("token=abc123def456", "token=[secret]"),
        ('{"password": "correcthorse"}', '{"password": "[secret]"}'),
        ("Basic authorization: Basic dXNlcjpwYXNz", "Basic authorization: [secret]"),
    ],
)
def test_what_is_hidden_and_what_is_not(text, kept):
    assert redact(text) == kept


def test_an_error_that_a_tool_words_itself_is_cut():
    @tool
    def wordy() -> str:
        """Says much."""
        raise ToolError("word " * 10_000)

    assert len(run([ToolCall("wordy", {})], wordy)[0].observation) == MAX_ERROR


def test_a_subclass_with_a_schema_of_its_own_converts_nothing():
    class Base(Tool):
        """Takes a set."""

        def __call__(self, items: set[int]) -> str:
            """Args:
            items: Numbers.
            """
            return str(type(items).__name__)

    class Derived(Base):
        """Takes a list."""

        parameters = {"type": "object", "properties": {"items": {"type": "array"}}}

        def __call__(self, items: list) -> str:
            return super().__call__(items)

    assert run([ToolCall("base", {"items": [1]})], Base())[0].observation == "set"
    assert run([ToolCall("derived", {"items": [1]})], Derived())[0].observation == "list"
