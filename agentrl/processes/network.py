"""Addresses of machines: which one is this machine's, and what collectives need to know to use it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit

import psutil

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def node_address() -> str:
    """The address under which Ray's other machines reach this one (``ray start --node-ip-address``)."""
    import ray.util

    return ray.util.get_node_ip_address()


def collectives_on(host: str) -> dict[str, str]:
    """Environment in which gloo and NCCL use the interface of an address of this machine.

    Left to themselves they ask for the address of the machine's name, which may be another network's, or none. Empty
    where no interface has the address: then that is what they do.
    """
    found = [name for name, addresses in psutil.net_if_addrs().items() if host in {a.address for a in addresses}]
    names = ["lo"] if is_loopback(host) else found
    return {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": names[0]} if names else {}


def machine_answers(url: str, timeout: float) -> bool:
    """Whether the machine of a server is there, be it to say that no such server is."""
    where = urlsplit(url)
    try:
        with contextlib.closing(socket.create_connection((where.hostname or "", where.port or 0), timeout)):
            return True
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except OSError:
        return False
