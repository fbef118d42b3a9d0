"""The process groups of the trainer's end, with receivers that do what SGLang's does."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from agentrl.weights.sender import BroadcastSender
from tests.weights.test_publisher import parameters, publisher_of

RECEIVER = textwrap.dedent(
    """
    import sys
    from datetime import timedelta
    import torch, torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    port, names, sizes = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    pg, _ = c10d._new_process_group_helper(2, 1, [], c10d.Backend("gloo"), c10d.PrefixStore(names, store),
                                           group_name=names, timeout=timedelta(seconds=20))
    c10d._world.pg_group_ranks[pg] = {0: 0, 1: 1}
    total = 0
    for size in sizes:
        flat = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=pg)
        total += int(flat.long().sum())
    print(total, flush=True)
    """
)


IDLE = RECEIVER + "import time; time.sleep(60)"


def start_receiver(port: int, name: str, sizes: list[int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RECEIVER, str(port), name, str(sizes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def connect_all(
    sender: BroadcastSender, groups: dict[str, int], timeout: float = 90.0, **options: float
) -> dict[str, str]:
    deadline = time.monotonic() + timeout
    states: dict[str, str] = {}
    waiting = dict(groups)
    while waiting and time.monotonic() < deadline:
        states |= sender.connect(waiting, 10.0, **options)
        waiting = {name: size for name, size in waiting.items() if states[name] == "waiting"}
    return states


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[BroadcastSender]:
    publisher = publisher_of(parameters(), tmp_path, bucket_bytes=1000)
    publisher.publish(0)
    sender = BroadcastSender(publisher)
    yield sender
    sender.abort()


def test_groups_do_not_touch_the_default_group_and_one_that_dies_costs_the_others_nothing(
    sender: BroadcastSender,
) -> None:
    tensors = parameters()
    sizes = [flat.numel() for flat in sender._publisher._flat]
    expected = sum(int(t.view(torch.uint8).long().sum()) for t in tensors.values())
    _, port = sender.listen()
    whole, short = start_receiver(port, "whole", sizes), start_receiver(port, "short", sizes[:1])
    try:
        assert connect_all(sender, {"whole": 2, "short": 2}) == {"whole": "formed", "short": "formed"}
        assert not dist.is_initialized()
        failed: dict[str, str] = {}
        for index in range(len(sizes)):
            failed |= sender.broadcast(index, [name for name in ("whole", "short") if name not in failed])
            short.wait(timeout=20)
        assert set(failed) == {"short"}
        assert whole.communicate(timeout=20)[0].strip() == str(expected)
    finally:
        for process in (whole, short):
            process.kill()
            process.wait()


def test_a_broadcast_that_nobody_takes_is_given_up_on_demand_and_in_time(sender: BroadcastSender) -> None:
    _, port = sender.listen()
    names = ("dropped", "late")
    held = [subprocess.Popen([sys.executable, "-c", IDLE, str(port), name, "[]"]) for name in names]
    try:
        connect_all(sender, {"dropped": 2, "late": 2}, bucket_timeout=3.0)
        threading.Timer(0.3, sender.drop, ["dropped"]).start()
        failed = sender.broadcast(0, ["dropped", "late"])
        assert failed["dropped"] == "it was given up"
        assert "no end of the broadcast after 3 s" in failed["late"] or "Timed out" in failed["late"]
        assert sender.broadcast(0, ["late"])["late"].startswith("KeyError")
    finally:
        for process in held:
            process.kill()
            process.wait()


def test_a_first_broadcast_over_nccl_ends_in_time_though_a_member_never_comes(
    sender: BroadcastSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL makes a group's communicator at its first broadcast, and waits for all members without a limit."""
    end, dropped = threading.Event(), []

    class Group:
        def broadcast(self, tensors: list[torch.Tensor], options: object) -> None:
            if not end.wait(60):
                raise AssertionError

    monkeypatch.setattr(sender, "_backend", "nccl")
    monkeypatch.setattr(sender, "drop", lambda name: dropped.append(sender._groups.pop(name, None)))
    sender._groups, sender._bucket_timeout = {"late": Group(), "given up": Group()}, 0.2
    try:
        assert sender.broadcast(0, ["late"]) == {"late": "RuntimeError: its members did not meet within 0.2 s"}
        sender._bucket_timeout = 60.0
        threading.Timer(0.5, sender.drop, ["given up"]).start()
        assert sender.broadcast(0, ["given up"]) == {"given up": "RuntimeError: it was given up"}
    finally:
        end.set()
    assert not sender._groups and len(dropped) == 3


def test_a_group_whose_engine_does_not_come_is_not_waited_for(sender: BroadcastSender) -> None:
    sender.listen()
    assert sender.connect({"nobody": 2}, 3600.0) == {"nobody": "waiting"}


def test_the_rendezvous_listens_on_loopback_only(sender: BroadcastSender) -> None:
    _, port = sender.listen()
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and address.endswith(f":{port:04X}"):
                listening.append(address)
    assert listening == [f"0100007F:{port:04X}"]
