"""What every process of a run does the same way: where its log goes, what it writes there, how it takes signals."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from agentrl.errors import StorageError
from agentrl.redaction import without_secrets

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as Ctrl-C does."""
LOST_S = 0.1
"""After which a signal whose exception was ignored comes again."""

# C0 but tab and newline, DEL, C1, and what reverses or breaks lines in Unicode.
_UNPRINTABLE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def printable(text: str) -> str:
    """``text`` of strangers as it may go to a terminal or a log: control characters become escapes.

    Left as they are they could move the cursor, change the title or write into the clipboard.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text)


class Terminated(KeyboardInterrupt):
    """A signal asked this process to end, any but a first Ctrl-C. Like that one, no handler of errors swallows it."""

    def __init__(self, signum: int):
        super().__init__(f"asked to end ({signal.Signals(signum).name})")
        self.signum, self.exit_code = signum, 128 + signum


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Within a command: SIGTERM and SIGHUP raise :class:`Terminated`, as Ctrl-C raises KeyboardInterrupt.

    A signal that is ignored (``nohup``) stays so. What is raised where Python ignores errors, as in a finalizer, is
    raised again a moment later.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Terminated(signum)

    def again(ignored: sys.UnraisableHookArgs) -> None:
        error = ignored.exc_value
        if not isinstance(error, KeyboardInterrupt):
            hook(ignored)
            return
        number = error.signum if isinstance(error, Terminated) else signal.SIGINT
        timers.append(threading.Timer(LOST_S, signal.pthread_kill, (threading.main_thread().ident, number)))
        timers[-1].daemon = True
        timers[-1].start()

    timers: list[threading.Timer] = []
    hook = sys.unraisablehook
    with _handled_by(stop, ENDING):
        sys.unraisablehook = again
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            sys.unraisablehook = hook


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Within code of a library that must not be left in the middle: Ctrl-C, SIGTERM and SIGHUP come at its end, where
    our handlers are put back, whatever the library made of them. A second signal comes at once."""

    def note(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        if len(asked) > 1:
            raise Terminated(signum)

    asked: list[int] = []
    try:
        with _handled_by(note, (signal.SIGINT, *ENDING)):
            yield
    finally:
        if len(asked) == 1:
            signal.raise_signal(asked[0])


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Only the main thread may have handlers; in others nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _heeded(numbers)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextlib.contextmanager
def cancel_on_signals() -> Iterator[None]:
    """Within a coroutine: SIGTERM and SIGHUP cancel it like Ctrl-C does, and :class:`Terminated` comes out."""
    import asyncio  # here: every command imports this module first, and signals before that end in Python's own words

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    before = {number: signal.getsignal(number) for number in _heeded()}
    asked: list[int] = []

    def stop(signum: int) -> None:
        asked.append(signum)
        if task is not None:
            task.cancel()

    for number in before:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    except asyncio.CancelledError:
        if asked:
            raise Terminated(asked[0]) from None
        raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)  # the loop would leave the default, which ends without a word


def _heeded(numbers: Sequence[signal.Signals] = ENDING) -> list[signal.Signals]:
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Have what libraries write to standard error, from C++ and threads of theirs, in a file, not on the terminal."""
    sys.stderr.flush()
    terminal, python = os.dup(2), sys.stderr
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1) as file:
            os.dup2(file.fileno(), 2)
            sys.stderr = file
            yield
    finally:
        sys.stderr = python
        os.dup2(terminal, 2)
        os.close(terminal)
        with contextlib.suppress(OSError):  # the disk may be full
            said = path.read_text(encoding="utf-8", errors="replace")
            if said:
                path.write_text(printable(said), encoding="utf-8")
            else:
                path.unlink()


class LogFormatter(logging.Formatter):
    """Lines that show nothing secret, hold no control characters and cannot be taken for lines of others."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(printable(super().format(record))).replace("\n", "\n  ")


class LogFile(logging.FileHandler):
    """A log that cannot be written (the disk is full) loses lines; the run says so where it matters to it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is still in the buffer
            super().close()


def write_log_to(path: str | Path | None, level: str, *, who: str = "", warnings_to: str | Path | None = None) -> None:
    """Send this process's log of ours from ``level`` on to a file (None: standard error), not to a terminal that shows
    progress. ``who`` stands before each line, such as ``rank 0``; ``warnings_to``: a file of another process that gets
    a copy of what is more than information."""
    logger = logging.getLogger("agentrl")
    logger.handlers = [_handler(path, who)]
    if warnings_to is not None:
        copy = _handler(warnings_to, who)
        copy.setLevel(logging.WARNING)
        logger.addHandler(copy)
    logger.propagate = False
    logger.setLevel(level.upper())


def _handler(path: str | Path | None, who: str) -> logging.Handler:
    if path:
        try:
            handler: logging.Handler = LogFile(path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise StorageError(
                f"{path}: the log cannot be written: {error.strerror}; make room, or choose another folder"
            ) from error
    else:
        handler = logging.StreamHandler(sys.stderr)
    name = f" [{who}]" if who else ""
    handler.setFormatter(LogFormatter(f"%(asctime)s %(levelname)s{name} %(name)s: %(message)s"))
    return handler
