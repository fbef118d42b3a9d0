"""What processes show to the outside: arguments, environment, listening sockets."""

from __future__ import annotations

import http.client
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


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
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                found.add((_address(host), int(port, 16)))
    return found


def _socket_inodes(pid: int) -> Iterable[str]:
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []
    return [link[8:-1] for link in links if link.startswith("socket:[")]


def _address(text: str) -> str:
    words = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    raw = b"".join(words)
    if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


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
