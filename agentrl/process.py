"""What every process of a run does the same way: where its log goes, and how it takes SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import AgentRLError


class Terminated(AgentRLError):
    """The run was asked to end by SIGTERM."""

    exit_code = 143


@contextlib.contextmanager
def terminate_on_sigterm() -> Iterator[None]:
    """Within a coroutine: SIGTERM cancels it like Ctrl-C does, and :class:`Terminated` comes out."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked = False

    def stop() -> None:
        nonlocal asked
        asked = True
        if task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    except asyncio.CancelledError:
        if asked:
            raise Terminated("asked to end (SIGTERM)") from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def write_log_to(path: str | Path | None, level: str, *, who: str = "") -> None:
    """Send this process's log of ours to a file (None: standard error), not to a terminal that shows progress.

    Args:
        path: file to append to.
        level: ``debug``, ``info``, ``warning`` or ``error``.
        who: put before each line, such as ``rank 0``.
    """
    handler = logging.FileHandler(path, encoding="utf-8") if path else logging.StreamHandler(sys.stderr)
    name = f" [{who}]" if who else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s{name} %(name)s: %(message)s"))
    logger = logging.getLogger("agentrl")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
