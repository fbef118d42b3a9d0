"""Which addresses of a network a model may reach, and connections that go to a checked address only."""

from __future__ import annotations

import inspect
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import httpcore

from agentrl.concurrency.threads import run_blocking

Resolver = Callable[[str], Sequence[str] | Awaitable[Sequence[str]]]
"""From the name of a host to its addresses, blocking or async; raises OSError when there are none."""

MAX_TRIED = 3
"""Addresses of a host that are tried."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # Azure's host, which is public by its number only
            "192.0.0.0/24",  # protocol assignments, some of which Python calls global
            "192.88.99.0/24",  # 6to4 relays
            "64:ff9b:1::/48",  # NAT64 for local use
            "2001::/32",  # Teredo: somebody's IPv4 address behind a relay
        ),
    )
)


class AddressRefused(Exception):
    """A host has an address that may not be reached."""


def is_public(address: str) -> bool:
    """Whether an address belongs to a machine on the public internet.

    Not public: private, loopback, link-local, multicast, shared (carrier-grade NAT), reserved and unspecified
    addresses, and IPv6 forms that stand for an IPv4 address which is one of these (mapped, compatible, 6to4,
    NAT64, ISATAP). An address with a zone, or text that is no address, is not public either.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if any(ip.version == network.version and ip in network for network in _REFUSED):
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is not None:
            return False
        low = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if ip.ipv4_mapped is not None or ip in _NAT64:
            return is_public(str(low))
        if ip.sixtofour is not None:
            return is_public(str(ip.sixtofour))
        if int(ip) >> 32 == 0:
            return False
        if (int(ip) >> 32) & 0xFDFFFFFF == 0x5EFE and not is_public(str(low)):
            return False
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_private or ip.is_unspecified)


class Guard:
    """Resolves names, by the system's resolver or another, and refuses hosts that are not public, unless their network
    is ``allowed``."""

    def __init__(self, allowed: Iterable[str] = (), resolver: Resolver | None = None) -> None:
        self.allowed = tuple(ipaddress.ip_network(network) for network in allowed)
        self.resolver: Callable[[str], Any] = resolver or resolve

    async def addresses(self, host: str) -> list[str]:
        """The addresses of a host, every one of them checked.
        Raises AddressRefused: one of them may not be reached; a host with both kinds is no honest one.
        Raises OSError: the name has no address."""
        found: Sequence[str] = (
            await self.resolver(host)
            if inspect.iscoroutinefunction(self.resolver)
            else await run_blocking(self.resolver, host)
        )
        for address in found:
            if not is_public(address) and not self._is_allowed(address):
                raise AddressRefused(f"{host} is not a public address")
        if not found:
            raise OSError(f"{host} has no address")
        return list(found)

    def _is_allowed(self, address: str) -> bool:
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(ip.version == network.version and ip in network for network in self.allowed)


def resolve(host: str) -> list[str]:
    """The system's addresses of a host, each once, in its order. Blocks. Raises OSError where there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of the name is empty or too long
        raise OSError(f"{host[:80]!r} is not the name of a host") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections for httpcore: resolves the name once, checks, and dials the checked address itself.

    Between check and connection nothing is looked up again, so a name that changes its address in between
    (DNS rebinding) gains nothing. TLS still asks for the certificate of the name, and ``Host`` is the name.

    Args:
        guard: What may be reached.
        inner: What dials; default: httpcore's own.
    """

    def __init__(self, guard: Guard, inner: httpcore.AsyncNetworkBackend | None = None) -> None:
        self._guard = guard
        self._inner = inner or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        problem: Exception = OSError(f"{host} has no address")
        for address in (await self._guard.addresses(host))[:MAX_TRIED]:
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout=timeout, local_address=local_address, socket_options=socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                problem = error
        raise problem

    async def connect_unix_socket(self, path: str, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise AddressRefused("sockets of this machine are not reached")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)
