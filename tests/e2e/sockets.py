"""What processes show to the outside: arguments, environment, listening sockets."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterable
from pathlib import Path

import psutil


def command_line(pid: int) -> str:
    """Arguments of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def environment(pid: int) -> list[str]:
    """Environment entries a process was started with."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which any of these processes listens."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port))
    return found


def status_without_key(host: str, port: int, path: str) -> int | None:
    """HTTP status of a GET without any key; None where nobody speaks HTTP."""
    connection = http.client.HTTPConnection(host, port, timeout=1)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
