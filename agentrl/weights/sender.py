"""The trainer's end of a broadcast: rank 0 sends what it published to the engines it formed groups with.

It takes no part of the other ranks, and none of the thread that trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from agentrl.processes.network import LOOPBACK, collectives_on
from agentrl.weights.publisher import Publisher

_POLL_S = 0.0002


class BroadcastSender:
    """Forms process groups with engines and broadcasts buckets to them.

    Safe to call from several threads: :meth:`drop` and :meth:`abort` end a broadcast that another waits in.

    Args:
        publisher: whose buckets are sent.
        backend: ``gloo`` (CPU) or ``nccl``.
        host: address of this machine under which engines reach it.
    """

    def __init__(self, publisher: Publisher, *, backend: str = "gloo", host: str = LOOPBACK) -> None:
        self._publisher = publisher
        self._host = host
        self._backend = backend
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        self._store: dist.TCPStore | None = None
        self._groups: dict[str, Any] = {}
        self._abandoned: list[tuple[Any, Any]] = []  # groups with an operation that is not at its end
        self._working = threading.Lock()
        self._bucket_timeout = 120.0

    def listen(self) -> tuple[str, int]:
        """The address where groups are formed, open from now until :meth:`abort`. Waits for nobody."""
        if self._store is None:
            listener = socket.create_server((self._host, 0), backlog=1024)
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                *(self._host, port), is_master=True, wait_for_workers=False, multi_tenant=True,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        return self._host, self._store.port

    def has(self, version: int) -> bool:
        """Whether this version is the one that is published now."""
        return self._publisher.version == version

    def connect(self, groups: dict[str, int], timeout: float = 30.0, bucket_timeout: float = 120.0) -> dict[str, str]:
        """Form those groups whose engines have come to the rendezvous. Call again for the others.

        Waits half a second at most for engines to come: once a group is being formed nothing
        can stop the wait for a member, so it is formed only when all are there.

        Args:
            groups: name to world size. This process is rank 0 of each.
            timeout: seconds that forming a group may take.
            bucket_timeout: seconds after which a blocked broadcast fails.

        Returns:
            The state of each: ``formed``, ``waiting`` for its engines, or why it could not be formed.
        """
        with self._working:
            self._bucket_timeout = bucket_timeout
            deadline = time.monotonic() + 0.5
            while (present := self._present(groups)) != set(groups) and time.monotonic() < deadline:
                time.sleep(0.005)
            states = dict.fromkeys(groups, "waiting")
            self._rendezvous.set_timeout(timedelta(seconds=timeout))
            # One thread a group: each waits for its own engines.
            with _environment(self._backend_settings()), ThreadPoolExecutor(max_workers=len(groups) or 1) as pool:
                forming = {name: pool.submit(self._form, name, groups[name]) for name in present}
            for name, future in forming.items():
                error = future.exception()
                states[name] = "formed" if error is None else f"{type(error).__name__}: {error}"
                if error is None:
                    self._groups[name] = future.result()
            return states

    def broadcast(self, index: int, groups: list[str]) -> dict[str, str]:
        """Send a published bucket to these groups. Returns those that failed, with the reason; they are left."""
        with self._working:
            self._abandoned = [(group, work) for group, work in self._abandoned if not work.is_completed()]
            flat = self._publisher.flat(index)
            if self._device is not None:
                torch.cuda.set_device(self._device)  # of this thread
                flat = flat.to(self._device)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            works: dict[str, tuple[Any, Any]] = {}
            failed: dict[str, str] = {}
            deadline = time.monotonic() + self._bucket_timeout
            for name in groups:
                try:
                    group = self._groups[name]
                    works[name] = group, self._begin(name, group, flat, options, deadline)
                except (KeyError, RuntimeError) as error:
                    failed[name] = f"{type(error).__name__}: {error}"
            while works:
                for name, (group, work) in list(works.items()):
                    reason = self._outcome(name, work, deadline)
                    if reason is None:
                        continue
                    del works[name]
                    if reason:
                        failed[name] = reason
                        self._abandoned.append((group, work))  # its end would have to be waited for
                if works:
                    time.sleep(_POLL_S)
            for name in failed:
                self.drop(name)
            return failed

    def _begin(self, name: str, group: Any, flat: torch.Tensor, options: Any, deadline: float) -> Any:
        """The work of a broadcast. Over NCCL the first of a group waits for all its members, and for ever where one has
        died since it joined: in a thread of its own, which is left behind then.
        Raises RuntimeError: it cannot begin, was given up, or has not begun at the deadline."""
        if self._backend != "nccl":
            return group.broadcast([flat], options)
        begun: Future[Any] = Future()

        def begin() -> None:
            try:
                if self._device is not None:
                    torch.cuda.set_device(self._device)  # of this thread
                begun.set_result(group.broadcast([flat], options))
            except BaseException as error:
                begun.set_exception(error)

        threading.Thread(target=begin, daemon=True, name="first broadcast").start()
        while not begun.done():
            if name not in self._groups:
                raise RuntimeError("it was given up")
            if time.monotonic() >= deadline:
                raise RuntimeError(f"its members did not meet within {self._bucket_timeout:g} s")
            time.sleep(_POLL_S)
        return begun.result()

    def _outcome(self, name: str, work: Any, deadline: float) -> str | None:
        """How a broadcast ended: empty when well, None while it goes on."""
        if work.is_completed():
            try:
                if self._backend == "nccl":  # there `wait` only orders streams: it neither waits nor fails
                    return "" if work.exception() is None else str(work.exception())
                work.wait()
                return ""
            except RuntimeError as error:
                return str(error)
        if name in self._groups and time.monotonic() < deadline:
            return None
        late = f"no end of the broadcast after {self._bucket_timeout:g} s"
        return late if name in self._groups else "it was given up"

    def drop(self, name: str) -> None:
        """Leave one group, whatever state it is in."""
        group = self._groups.pop(name, None)
        if group is None:
            return
        if self._backend == "nccl":  # a communicator with a lost member can only be aborted
            from torch.distributed.distributed_c10d import _abort_process_group

            _abort_process_group(group)
        else:
            dist.destroy_process_group(group)

    def abort(self) -> None:
        """Leave all groups and close the rendezvous: engines that wait for this end get an error."""
        for name in list(self._groups):
            self.drop(name)
        self._store = None

    @property
    def _rendezvous(self) -> dist.TCPStore:
        assert self._store is not None, "not listening, or aborted"
        return self._store

    def _present(self, groups: dict[str, int]) -> set[str]:
        """Groups all of whose engines have left their address in the store."""
        if self._backend == "nccl":  # members meet at the first broadcast
            return set(groups)
        keys = self._rendezvous.list_keys()
        count = {name: sum(key.startswith(f"{name}/") for key in keys) for name in groups}
        return {name for name, size in groups.items() if count[name] >= size - 1}

    def _form(self, name: str, world_size: int) -> Any:
        """What ``init_process_group`` does, as SGLang's side does it, without becoming the default group."""
        from torch.distributed import distributed_c10d as c10d

        group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            c10d.Backend(self._backend),
            c10d.PrefixStore(name, self._rendezvous),
            group_name=c10d.GroupName(name),
            timeout=timedelta(seconds=self._bucket_timeout),
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        return group

    def _backend_settings(self) -> dict[str, str]:
        """Environment in which a group is made."""
        if self._backend == "nccl":
            # Its watchdog would end the trainer when an engine hangs; deadlines here are our own.
            return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        return collectives_on(self._host)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and set them back."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class LocalSender:
    """A sender of this process as the weight sync sees it: its calls run in threads."""

    def __init__(self, sender: BroadcastSender) -> None:
        self._sender = sender

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return functools.partial(asyncio.to_thread, getattr(self._sender, name))
