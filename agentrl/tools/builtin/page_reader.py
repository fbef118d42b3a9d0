"""Reads web pages in processes of their own, each with a limit of CPU time.

A page can be made so that a parser takes minutes for it, in a thread that nobody can stop and with a lock that all
others wait for. So one small process keeps the parser ready and forks for each page: it costs milliseconds, and what
takes too long is ended by the kernel.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading

from agentrl.tools.arguments import shorten
from agentrl.tools.base import ToolError, ToolErrorType

CPU_SHARE = 0.4
"""Of the seconds for a page: so much CPU time may be used to read it."""
_starting = threading.Lock()


def read_page(url: str, content_type: str, body: bytes, seconds: float) -> str:
    """The text of a page, which must be here in ``seconds``. ``url`` is for errors, ``content_type`` as its server gave
    it.
    Raises ToolError: it is not text, or takes too long.
    Raises TimeoutError: it is not here in time."""
    cpu_seconds = max(1, round(CPU_SHARE * seconds))
    head = {"url": url, "content_type": content_type, "cpu_seconds": cpu_seconds}
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            _hand_over(theirs)
        ours.settimeout(seconds)
        try:
            ours.sendall(json.dumps(head).encode() + b"\n" + body)
            ours.shutdown(socket.SHUT_WR)
        except BrokenPipeError:
            pass  # it was ended before it had read all
        answer = _all_of(ours)
    if not answer:
        raise ToolError(f"fetch: {shorten(url, 200)} took more than {cpu_seconds} s to be read.", ToolErrorType.LIMIT)
    told = json.loads(answer)
    if "error" in told:
        raise ToolError(told["error"])
    return told["text"]


def _hand_over(connection: socket.socket) -> None:
    """Has the reader fork for a connection; starts the reader if there is none, or none any more."""
    with _starting:
        try:
            socket.send_fds(_reader()[0], [b"p"], [connection.fileno()])
        except OSError:  # it was killed, for want of memory say
            _reader.cache_clear()
            socket.send_fds(_reader()[0], [b"p"], [connection.fileno()])


@functools.cache
def _reader() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The connection to the reader, and its process, which ends when the connection closes: with this process."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # and no key of ours
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours, process


def serve(control: int) -> None:
    """The reader: forks for each connection that comes over ``control``, until that closes."""
    import trafilatura  # noqa: F401 - before the forks

    import agentrl.tools.builtin.fetch  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(fileno=control) as pages:
        while (received := socket.recv_fds(pages, 1, 1))[0]:
            with socket.socket(fileno=received[1][0]) as connection:
                if os.fork() == 0:
                    try:
                        pages.close()
                        _answer(connection)
                    finally:
                        os._exit(0)


def _answer(connection: socket.socket) -> None:
    from agentrl.tools.builtin.fetch import Page, page_text

    line, _, body = _all_of(connection).partition(b"\n")
    head = json.loads(line)
    resource.setrlimit(resource.RLIMIT_CPU, (head["cpu_seconds"], head["cpu_seconds"]))
    try:
        told = {"text": page_text(Page(head["url"], 200, head["content_type"], body, False))}
    except ToolError as error:
        told = {"error": error.message}
    connection.sendall(json.dumps(told).encode())


def _all_of(connection: socket.socket) -> bytes:
    data = bytearray()
    while piece := connection.recv(1 << 16):
        data += piece
    return bytes(data)
