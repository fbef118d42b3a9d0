"""The sync's state machine against engines that fail or hang at each state, in every way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.control import Bucket, EngineControl
from agentrl.engines.pool import SyncFailed, SyncReport
from agentrl.errors import WeightSyncError
from agentrl.weights.snapshot import Snapshot
from agentrl.weights.sync import WeightSync
from agentrl.weights.transports.base import Deadlines
from agentrl.weights.transports.broadcast import Broadcast
from agentrl.weights.transports.files import Files
from tests.engines.fake_engine import KEY, FakeEngine

FAST = Deadlines(pause=0.8, connect=1.2, bucket=0.8, disk=0.8, resume=1.5, verify=1.2)
BUCKETS = tuple(Bucket((name,), ("float32",), ((1,),), 4) for name in "abc")
HERE = str(Path(__file__).parent)
FAULTS = ("error", "refuse", "drop", "drop_after", "hang", "hang_after")
BROADCAST_ROUTES = (
    "/pause_generation",
    "/begin_weight_update",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/continue_generation",
    "/weights_checker",
)
FILES_ROUTES = ("/pause_generation", "/update_weights_from_disk", "/continue_generation", "/weights_checker")


def snapshot(version: int, *, folder: str = HERE) -> Snapshot:
    """A published version, of which fake engines only look at the number."""
    return Snapshot(version, folder, BUCKETS, digest=0)


class FakeSender:
    """Rank 0's end. ``fail_at`` names a call that raises."""

    def __init__(self, engines: Sequence[FakeEngine] = ()) -> None:
        self.engines = engines
        self.groups: dict[str, int] = {}
        self.published: int | None = 4
        self.fail_at: str | None = None
        self.calls: list[str] = []
        self.sent_to: list[list[str]] = []
        self.dropped: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_at == name:
            raise RuntimeError(f"{name} failed on purpose")

    async def has(self, version: int) -> bool:
        return self.published == version

    async def listen(self) -> tuple[str, int]:
        self._called("listen")
        return "127.0.0.1", 12345

    async def connect(self, groups: dict[str, int], timeout: float, bucket_timeout: float) -> dict[str, str]:
        self._called("connect")
        await asyncio.sleep(0.02)
        states = {}
        for name, size in groups.items():
            joined = sum(name in engine.groups for engine in self.engines)
            states[name] = "formed" if joined >= size - 1 else "waiting"
            if states[name] == "formed":
                self.groups[name] = size
        return states

    async def broadcast(self, index: int, groups: list[str]) -> dict[str, str]:
        self._called("broadcast")
        assert set(groups) <= set(self.groups)
        self.sent_to.append(groups)
        return {}

    async def drop(self, name: str) -> None:
        self.groups.pop(name, None)
        self.dropped.append(name)

    async def abort(self) -> None:
        self.calls.append("abort")
        self.groups.clear()


@asynccontextmanager
async def fake_engines(n: int) -> AsyncIterator[tuple[list[FakeEngine], list[EngineControl], FakeSender]]:
    engines = [await FakeEngine().start() for _ in range(n)]
    controls = [EngineControl(engine.url, KEY) for engine in engines]
    try:
        yield engines, controls, FakeSender(engines)
    finally:
        for control in controls:
            await control.close()
        for engine in engines:
            await engine.stop()


def syncing(sender: Any, *, transport: str = "broadcast", backend: str = "gloo", **options: Any) -> WeightSync:
    """A sync that has been tried before: its first version was."""
    files = Files()
    way = files if transport == "files" else Broadcast(sender, backend=backend)
    made = WeightSync(way, restore=files, **{"deadlines": FAST} | options)
    made._tried = True
    return made


async def bring(sync: WeightSync, controls: list[EngineControl], version: int) -> SyncReport:
    sync.snapshot = snapshot(version)
    return await sync.update(controls)


async def attempt(sync: WeightSync, controls: list[EngineControl], version: int) -> SyncReport:
    try:
        return await bring(sync, controls, version)
    except SyncFailed as error:
        return error.report


def assert_runs(engine: FakeEngine) -> None:
    assert not engine.paused
    assert not engine.session_open


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("transport", ["broadcast", "files"])
async def test_all_engines_reach_the_version(transport: str, mode: str) -> None:
    async with fake_engines(3) as (engines, controls, sender):
        report = await bring(syncing(sender, transport=transport, pause_mode=mode), controls, 7)
        assert report.failed == {}
        assert sorted(report.synced) == sorted(engine.url for engine in engines)
        assert report.verified == 3
        for engine in engines:
            assert engine.version == "7"
            assert_runs(engine)


async def test_states_come_in_order_and_groups_are_kept() -> None:
    async with fake_engines(1) as (engines, controls, sender):
        sync = syncing(sender)
        await bring(sync, controls, 1)
        update = ["/update_weights_from_distributed"] * 3
        closing = ["/end_weight_update", "/continue_generation", "/weights_checker"]
        opening = ["/pause_generation", "/begin_weight_update"]
        assert engines[0].calls == ["/init_weights_update_group", *opening, *update, *closing]
        engines[0].calls.clear()
        await bring(sync, controls, 2)
        assert engines[0].calls == [*opening, *update, *closing]


async def test_a_sync_of_one_engine_leaves_the_groups_of_the_others() -> None:
    """As when a replacement is brought up to date while the others generate."""
    async with fake_engines(2) as (engines, controls, sender):
        sync = syncing(sender)
        await bring(sync, controls[:1], 1)
        (first,) = sender.groups
        await bring(sync, controls[1:], 1)
        (second,) = set(sender.groups) - {first}
        assert sender.sent_to == [[first]] * 3 + [[second]] * 3
        assert engines[0].calls.count("/pause_generation") == 1
        await bring(sync, controls, 2)
        assert set(sender.groups) == {first, second}
        await controls[0].close()  # given up
        await bring(sync, controls[1:], 3)
        assert set(sender.groups) == {second}
        assert sender.dropped == [first]


@pytest.mark.parametrize(
    ("transport", "route"),
    [*(("broadcast", r) for r in BROADCAST_ROUTES), *(("files", r) for r in FILES_ROUTES)],
)
async def test_a_fault_at_any_state_costs_only_its_engine(transport: str, route: str) -> None:
    await all_of(one_fault(transport, route, fault) for fault in FAULTS)


async def all_of(cases: Iterable[Coroutine[Any, Any, None]]) -> None:
    """The cases side by side: most of their time is waiting for a deadline."""
    async with asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(case)


async def one_fault(transport: str, route: str, fault: str) -> None:
    """The other engine is at the version; the faulty one runs again and is named for replacement."""
    async with fake_engines(2) as (engines, controls, sender):
        faulty, healthy = engines
        faulty.faults[route] = fault
        retired: list[str] = []

        async def retire(control: EngineControl) -> None:
            retired.append(control.url)

        report = await attempt(syncing(sender, transport=transport, retire=retire), controls, 3)
        assert healthy.version == "3"
        assert report.synced == [healthy.url]
        assert list(report.failed) == [faulty.url] == retired
        assert "/abort_request" in faulty.calls, "its requests go on elsewhere"
        for engine in engines:
            assert_runs(engine)


@pytest.mark.parametrize("route", BROADCAST_ROUTES)
async def test_a_shared_group_that_breaks_is_formed_again(route: str) -> None:
    await all_of(one_fault_in_a_shared_group(route, fault) for fault in FAULTS)


async def one_fault_in_a_shared_group(route: str, fault: str) -> None:
    """Over NCCL all engines share a group: the healthy one gets the whole walk again."""
    async with fake_engines(2) as (engines, controls, sender):
        faulty, healthy = engines
        faulty.faults[route] = fault
        report = await attempt(syncing(sender, backend="nccl"), controls, 4)
        assert report.synced == [healthy.url]
        assert healthy.version == "4"
        assert set(healthy.weights) == {"a", "b", "c"}
        for engine in engines:
            assert_runs(engine)


async def test_the_only_engine_fails_at_any_state() -> None:
    await all_of(the_only_engine_fails(route, fault) for route in BROADCAST_ROUTES[:-1] for fault in ("error", "hang"))


async def the_only_engine_fails(route: str, state: str) -> None:
    async with fake_engines(1) as (engines, controls, sender):
        engines[0].faults[route] = state
        with pytest.raises(SyncFailed, match=controls[0].url) as caught:
            await bring(syncing(sender), controls, 1)
        assert list(caught.value.report.failed) == [controls[0].url]
        assert_runs(engines[0])


@pytest.mark.parametrize("call", ["listen", "connect", "broadcast"])
async def test_the_sender_fails(call: str) -> None:
    """The error says so; engines run; they are named for replacement only if weights were on their way."""
    async with fake_engines(2) as (engines, controls, sender):
        sender.fail_at = call
        with pytest.raises(SyncFailed, match="on purpose") as caught:
            await bring(syncing(sender), controls, 1)
        assert bool(caught.value.report.failed) == (call == "broadcast")
        for engine in engines:
            assert_runs(engine)
        assert "abort" in sender.calls


async def test_cancelled_at_any_state() -> None:
    await all_of(cancelled_at(route) for route in BROADCAST_ROUTES)


async def cancelled_at(route: str) -> None:
    """Ctrl-C while a state hangs: every engine runs again before the cancellation goes on."""
    async with fake_engines(2) as (engines, controls, sender):
        for engine in engines:
            engine.faults[route] = "hang_after"
        sync = syncing(sender, deadlines=Deadlines(pause=3600, connect=3600, bucket=3600, resume=1.5, verify=3600))
        task = asyncio.create_task(bring(sync, controls, 1))
        while not all(route in engine.calls for engine in engines):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for engine in engines:
            assert_runs(engine)


async def test_an_engine_that_never_resumes_is_named() -> None:
    async with fake_engines(2) as (engines, controls, sender):
        engines[0].faults["/continue_generation"] = "hang"
        engines[0].fault_times["/continue_generation"] = 99
        report = await bring(syncing(sender), controls, 1)
        assert report.synced == [engines[1].url]
        assert "continue_generation" in report.failed[engines[0].url]


async def test_dead_engine_among_living() -> None:
    async with fake_engines(3) as (engines, controls, sender):
        await engines[1].stop()
        report = await bring(syncing(sender), controls, 1)
        assert list(report.failed) == [controls[1].url]
        assert len(report.synced) == 2


async def test_engines_that_hold_different_weights_are_an_error() -> None:
    async with fake_engines(2) as (engines, controls, sender):
        sync = syncing(sender)
        await bring(sync, controls, 1)
        engines[1].suffix = " torn"
        with pytest.raises(SyncFailed, match="other weights as version 2 than an engine before it: 3 of 3"):
            await bring(sync, controls, 2)
        for engine in engines:
            assert_runs(engine)


async def test_an_engine_that_holds_the_old_weights_still_is_an_error() -> None:
    async with fake_engines(1) as (engines, controls, sender):
        sync = syncing(sender)
        await bring(sync, controls, 1)
        sync.snapshot = Snapshot(2, HERE, BUCKETS, digest=1)
        with pytest.raises(SyncFailed, match="still holds the weights of version 1, which are not those of version 2"):
            await sync.update(controls)
        engines[0].suffix = " anew"
        sync.snapshot = Snapshot(3, HERE, BUCKETS, digest=2)
        assert (await sync.update(controls)).verified == 3


@pytest.mark.parametrize("transport", ["broadcast", "files"])
async def test_a_parameter_that_is_never_sent_is_an_error(transport: str) -> None:
    """Whatever the engine calls its parameters: all are overwritten before the first version."""
    async with fake_engines(2) as (engines, controls, sender):
        sync = syncing(sender, transport=transport)
        sync._tried = False
        for engine in engines:
            engine.weights["layers.0.o_proj.bias"] = "the checkpoint's"
        with pytest.raises(SyncFailed, match=r"1 of 4 parameters that the trainer never sends \(.*o_proj"):
            await bring(sync, controls, 1)
        for engine in engines:
            assert_runs(engine)
            del engine.weights["layers.0.o_proj.bias"]
        await bring(sync, controls, 1)
        for engine in engines:
            assert engine.calls.count("/update_weights_from_disk") == 2, "once an attempt, whatever the transport"
            engine.calls.clear()
        await bring(sync, controls, 2)
        assert engines[0].calls.count("/weights_checker") == 1, "once is enough"


async def test_one_engine_takes_the_newest_version_without_the_trainer() -> None:
    async with fake_engines(2) as (engines, controls, sender):
        sync = syncing(sender)
        assert await sync.restore(controls[0]) is None, "nothing was published yet"
        await bring(sync, controls[:1], 4)
        sender.fail_at = "broadcast"
        assert (await sync.restore(controls[1])).synced == [controls[1].url]
        assert [engine.version for engine in engines] == ["4", "4"]
        engines[1].faults["/update_weights_from_disk"] = "error"
        with pytest.raises(SyncFailed, match="broken on purpose"):
            await sync.restore(controls[1])
        assert_runs(engines[1])


async def test_an_engine_waits_where_the_version_is_not_to_be_had(tmp_path: Path) -> None:
    """Files that it cannot see, or that give way to the next version while it reads them."""
    async with fake_engines(1) as (engines, controls, sender):
        sync = syncing(sender)
        sync.snapshot = snapshot(4, folder=str(tmp_path / "gone"))
        assert await sync.restore(controls[0]) is None and engines[0].calls == []
        folder = tmp_path / "version-5"
        folder.mkdir()
        sync.snapshot = snapshot(5, folder=str(folder))

        def gone(body: dict[str, Any]) -> tuple[bool, str]:
            folder.rmdir()
            return False, "no such file"

        engines[0]._update_weights_from_disk = gone
        assert await sync.restore(controls[0]) is None
        assert_runs(engines[0])


async def test_an_engine_that_does_not_see_the_files_gets_them_sent() -> None:
    """On another machine. The others, and their groups, are left alone; what gave way meanwhile is not taken for it."""
    async with fake_engines(2) as (engines, controls, sender):
        sync = syncing(sender)
        sync.restore_from = None
        await bring(sync, controls[:1], 4)
        groups = set(sender.groups)
        engines[0].calls.clear()
        assert (await sync.restore(controls[1])).synced == [controls[1].url]
        assert [engine.version for engine in engines] == ["4", "4"] and not engines[0].calls
        assert set(sender.groups) > groups
        sender.published = 5
        assert await sync.restore(controls[1]) is None
        sender.published, before = 4, sender.broadcast

        async def overtaken(index: int, groups: list[str]) -> dict[str, str]:
            sender.published = None
            return await before(index, groups)

        sender.broadcast = overtaken  # type: ignore[method-assign]
        assert await sync.restore(controls[1]) is None, "its buckets may be of two versions"
        assert_runs(engines[1])


async def test_without_verification_no_checksum_is_asked_for() -> None:
    async with fake_engines(1) as (engines, controls, sender):
        await bring(syncing(sender, verify=False), controls, 1)
        assert "/weights_checker" not in engines[0].calls


async def test_nothing_to_sync() -> None:
    with pytest.raises(WeightSyncError, match="no engine"):
        await bring(syncing(FakeSender()), [], 1)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="pause mode 'nap'"):
        syncing(FakeSender(), pause_mode="nap")
