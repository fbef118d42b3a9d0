"""The interpreter that runs the model's code, kept over the calls of an episode.

One file on its own, handed to Python as text: inside a sandbox there are no files of ours. It takes requests from
descriptor 0 and answers on descriptor 1, and moves both away before any code runs, so that standard input is empty and
standard output is the output pipe. Code that finds and writes to the moved descriptors breaks its own session and
nothing else: whoever reads them trusts no word of it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import struct
import sys
import time
import traceback
import types

HIGH_FD = 100  # above what code opens, below its limit of open files
FRAMES_SHOWN = 8
SOURCES_KEPT = 64
MESSAGE_CHARS = 1000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38


def main(settings: dict) -> None:
    """Serves requests until the pipe closes; never returns.

    Args:
        settings: ``cpu_seconds`` and ``max_output`` of a call; ``limits``: by name of the kernel's limit, its value;
            ``more_path``: folders to import from.
    """
    requests = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    replies = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    confine(settings["limits"])
    sys.dont_write_bytecode = True
    sys.argv = [""]
    sys.set_int_max_str_digits(0)  # long numbers are what code is asked for, and its time is limited anyway
    sys.path += settings["more_path"]
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules that the code wrote
    interpreter = Interpreter(settings)
    try:
        _send(replies, {"ready": True})
        while (request := _receive(requests)) is not None:
            _send(replies, interpreter.run(request))
    finally:
        os._exit(70)  # whatever happened: nothing of this process runs on


def confine(limits: dict[str, int]) -> None:
    """What a process does to itself and all it will start, for good."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # no program, `sudo` for one, gives it rights
    for name, most in limits.items():
        what = getattr(resource, name)
        _, ceiling = resource.getrlimit(what)
        most = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
        resource.setrlimit(what, (most, most))


class Interpreter:
    """Runs code in one namespace, as a REPL does."""

    def __init__(self, settings: dict) -> None:
        self.max_output = settings["max_output"]
        self.cpu_seconds = settings["cpu_seconds"]
        self.pid = os.getpid()
        self.calls = 0
        self.sources: dict[str, list[str]] = {}
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.namespace = module.__dict__
        builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # `site` would define them

    def run(self, request: dict) -> dict:
        """One call: ``value`` is the last expression's, ``error`` what was raised, both as text."""
        self.calls += 1
        self._limit_cpu()
        # Made anew for each call: code may have closed or replaced them.
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        reply: dict = {"ran": True}
        try:
            value = self._execute(request["code"])
            if value is not None:
                self.namespace["_"] = value
                reply["value"] = _cut(repr(value), self.max_output)
        except SystemExit as error:
            if error.code not in (None, 0):
                reply["error"] = _cut(f"SystemExit: {error.code}", MESSAGE_CHARS)
        except BaseException as error:
            reply["error"] = self._describe(error)
        self._flush()
        if os.getpid() != self.pid:
            os._exit(0)  # a fork of the code came to the end of it: only the first process answers
        with contextlib.suppress(OSError):  # closed by the code
            os.write(2, request["fence"].encode())
        return reply

    def _limit_cpu(self) -> None:
        """The kernel's limit, moved on by what a call may use. Code can undo it; wall time is kept outside."""
        used = int(time.process_time()) + 1
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (used + self.cpu_seconds, most))
        # The default does not end the first process of a container; leaving with this status means the same.
        signal.signal(signal.SIGXCPU, _leave if self.pid == 1 else signal.SIG_DFL)

    def _execute(self, code: str):
        name = f"<code {self.calls}>"
        self.sources[name] = code.splitlines()
        if len(self.sources) > SOURCES_KEPT:
            del self.sources[next(iter(self.sources))]
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec", dont_inherit=True), self.namespace)
        if not isinstance(last, ast.Expr):
            return None
        return eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), self.namespace)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (ValueError, OSError, AttributeError):
                continue  # closed or replaced by the code: its output is its own affair

    def _describe(self, error: BaseException) -> str:
        """The traceback of the code's own frames, without paths of this machine."""
        frames, step = [], error.__traceback__
        while step is not None:
            place = step.tb_frame.f_code
            if place.co_filename.startswith("<code "):
                frames.append(self._frame(place.co_filename, step.tb_lineno, place.co_name))
            step = step.tb_next
        if len(frames) > FRAMES_SHOWN:
            half = FRAMES_SHOWN // 2
            frames[half:-half] = [f"  ({len(frames) - 2 * half} more)"]
        text = "".join(traceback.format_exception_only(error)).strip()
        text = text.replace(f"<code {self.calls}>", "<code>")
        for path in sorted({sys.prefix, sys.base_prefix, os.getcwd(), *sys.path}, key=len, reverse=True):
            text = text.replace(path + "/", "") if len(path) > 1 else text
        lines = ["Traceback (most recent call last):", *frames] if frames else []
        return "\n".join([*lines, _cut(text, MESSAGE_CHARS)])

    def _frame(self, name: str, line: int, function: str) -> str:
        current = name == f"<code {self.calls}>"
        lines = self.sources.get(name, [])
        source = lines[line - 1].strip()[:120] if 0 < line <= len(lines) else ""
        where = "<code>" if current else "<code> of an earlier call"
        return f"  {where}, line {line}, in {function}: {source}".rstrip(": ")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most} more characters cut]"


def _leave(signum: int, frame: object) -> None:
    os._exit(128 + signum)


def _send(fd: int, message: dict) -> None:
    body = json.dumps(message).encode("ascii")
    data = memoryview(struct.pack("!I", len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


def _receive(fd: int) -> dict | None:
    header = _read(fd, 4)
    if header is None:
        return None
    body = _read(fd, struct.unpack("!I", header)[0])
    return None if body is None else json.loads(body)


def _read(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            return None
        data += piece
    return data


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
