"""Addresses of this machine."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from agentrl.processes.network import collectives_on, machine_answers


def test_collectives_use_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7", "fe80::1"], "ib0": ["192.168.1.7"]}
    found = {name: [SimpleNamespace(address=address) for address in addresses] for name, addresses in of.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert {collectives_on(host)["GLOO_SOCKET_IFNAME"] for host in ("127.0.0.1", "localhost")} == {"lo"}
    assert collectives_on("192.168.1.7") == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert collectives_on("10.0.0.8") == {}, "another machine's: left to themselves"


def test_a_machine_that_refuses_is_there_and_one_that_says_nothing_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert machine_answers(f"http://127.0.0.1:{port}", 5.0)
    assert machine_answers(f"http://127.0.0.1:{port}", 5.0)
    # A full queue of connections is not answered, as a machine that is cut off is not.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        assert not machine_answers(f"http://127.0.0.1:{address[1]}", 0.1)
        for one in waiting:
            one.close()
