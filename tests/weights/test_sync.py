"""The sync's state machine against engines that fail or hang at each state, in every way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.engines.control import Bucket, EngineControl, SendResult
from agentrl.errors import WeightSyncError
from agentrl.weights.protocol import UNPREDICTED, Deadlines, SyncFailed, SyncReport
from agentrl.weights.sync import WeightSync
from tests.engines.fake_engine import KEY, FakeEngine

FAST = Deadlines(pause=0.8, begin=0.8, connect=0.8, bucket=0.8, disk=0.8, end=0.8, resume=1.5, verify=0.8)
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
DISK_ROUTES = ("/pause_generation", "/update_weights_from_disk", "/continue_generation", "/weights_checker")


class FakeSender:
    """The trainer's end: three buckets of one tensor. ``fail_at`` names a call that raises."""

    def __init__(self, engines: Sequence[FakeEngine] = ()) -> None:
        self.engines = engines
        self.groups: dict[str, int] = {}
        self.position = 0
        self.fail_at: str | None = None
        self.walks = 0
        self.sent = {"a": "sent", "b": "sent", "c": "sent"}
        self.calls: list[str] = []
        self.sent_to: list[list[str]] = []
        self.dropped: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_at == name:
            raise RuntimeError(f"{name} failed on purpose")

    async def listen(self, host: str) -> int:
        self._called("listen")
        return 12345

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

    def _bucket(self) -> Bucket | None:
        if self.position >= 3:
            return None
        name = "abc"[self.position]
        return Bucket((name,), ("float32",), ((1,),), 4, self.position == 2)

    async def start(self) -> Bucket | None:
        self._called("start")
        self.walks += 1
        self.position = 0
        return self._bucket()

    async def broadcast(self, groups: list[str]) -> SendResult:
        self._called("broadcast")
        assert set(groups) <= set(self.groups)
        self.sent_to.append(groups)
        self.position += 1
        return SendResult(self._bucket())

    async def checksums(self) -> list[dict[str, str]]:
        self._called("checksums")
        return [dict(self.sent)]

    async def save(self, path: str) -> int:
        self._called("save")
        return 12

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


def syncing(sender: Any, **options: Any) -> WeightSync:
    return WeightSync(sender, deadlines=FAST, **options)


async def attempt(sync: WeightSync, controls: list[EngineControl], version: int) -> SyncReport:
    try:
        return await sync.sync(controls, version)
    except SyncFailed as error:
        return error.report


def assert_runs(engine: FakeEngine) -> None:
    assert not engine.paused
    assert not engine.session_open


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("transport", ["broadcast", "disk"])
async def test_all_engines_reach_the_version(transport: str, mode: str) -> None:
    async with fake_engines(3) as (engines, controls, sender):
        report = await syncing(sender, transport=transport, pause_mode=mode).sync(controls, 7)
        assert report.failed == {}
        assert sorted(report.synced) == sorted(engine.url for engine in engines)
        assert report.verified == 3
        for engine in engines:
            assert engine.version == "7"
            assert_runs(engine)


async def test_states_come_in_order_and_groups_are_kept() -> None:
    async with fake_engines(1) as (engines, controls, sender):
        sync = syncing(sender)
        await sync.sync(controls, 1)
        update = ["/update_weights_from_distributed"] * 3
        closing = ["/end_weight_update", "/continue_generation", "/weights_checker"]
        opening = ["/pause_generation", "/begin_weight_update"]
        assert engines[0].calls == ["/init_weights_update_group", *opening, *update, *closing]
        engines[0].calls.clear()
        await sync.sync(controls, 2)
        assert engines[0].calls == [*opening, *update, *closing]


async def test_a_sync_of_one_engine_leaves_the_groups_of_the_others() -> None:
    """As when a replacement is brought up to date while the others generate."""
    async with fake_engines(2) as (engines, controls, sender):
        sync = syncing(sender)
        await sync.sync(controls[:1], 1)
        (first,) = sender.groups
        await sync.sync(controls[1:], 1)
        (second,) = set(sender.groups) - {first}
        assert sender.sent_to == [[first]] * 3 + [[second]] * 3
        assert engines[0].calls.count("/pause_generation") == 1
        await sync.sync(controls, 2)
        assert set(sender.groups) == {first, second}
        await controls[0].close()  # given up
        await sync.sync(controls[1:], 3)
        assert set(sender.groups) == {second}
        assert sender.dropped == [first]


@pytest.mark.parametrize(
    ("transport", "route"),
    [*(("broadcast", r) for r in BROADCAST_ROUTES), *(("disk", r) for r in DISK_ROUTES)],
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
            await syncing(sender).sync(controls, 1)
        assert list(caught.value.report.failed) == [controls[0].url]
        assert_runs(engines[0])


@pytest.mark.parametrize("call", ["listen", "connect", "start", "broadcast"])
async def test_the_sender_fails(call: str) -> None:
    """The error says so; engines run; they are named for replacement only if weights were on their way."""
    async with fake_engines(2) as (engines, controls, sender):
        sender.fail_at = call
        with pytest.raises(SyncFailed, match="on purpose") as caught:
            await syncing(sender).sync(controls, 1)
        assert bool(caught.value.report.failed) == (call == "broadcast")
        for engine in engines:
            assert_runs(engine)
        assert "abort" in sender.calls


async def test_save_fails_before_any_engine_is_paused() -> None:
    async with fake_engines(1) as (engines, controls, sender):
        sender.fail_at = "save"
        with pytest.raises(WeightSyncError, match="on purpose"):
            await syncing(sender, transport="disk").sync(controls, 1)
        assert engines[0].calls == []


async def test_cancelled_at_any_state() -> None:
    await all_of(cancelled_at(route) for route in BROADCAST_ROUTES)


async def cancelled_at(route: str) -> None:
    """Ctrl-C while a state hangs: every engine runs again before the cancellation goes on."""
    async with fake_engines(2) as (engines, controls, sender):
        for engine in engines:
            engine.faults[route] = "hang_after"
        slow = Deadlines(pause=20, begin=20, connect=20, bucket=20, end=20, resume=1.5, verify=20)
        sync = WeightSync(sender, deadlines=slow)
        task = asyncio.create_task(sync.sync(controls, 1))
        while not all(route in engine.calls for engine in engines):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        task.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 15
        for engine in engines:
            assert_runs(engine)


async def test_an_engine_that_never_resumes_is_named() -> None:
    async with fake_engines(2) as (engines, controls, sender):
        engines[0].faults["/continue_generation"] = "hang"
        engines[0].fault_times["/continue_generation"] = 99
        report = await syncing(sender).sync(controls, 1)
        assert report.synced == [engines[1].url]
        assert "continue_generation" in report.failed[engines[0].url]


async def test_dead_engine_among_living() -> None:
    async with fake_engines(3) as (engines, controls, sender):
        await engines[1].stop()
        report = await syncing(sender).sync(controls, 1)
        assert list(report.failed) == [controls[1].url]
        assert len(report.synced) == 2


async def test_wrong_weights_in_an_engine_are_an_error() -> None:
    async with fake_engines(2) as (engines, controls, sender):
        sender.sent["b"] = "other"
        with pytest.raises(SyncFailed, match="holds other weights than were sent as version 1: 1 of 3"):
            await syncing(sender).sync(controls, 1)
        for engine in engines:
            assert_runs(engine)


async def test_parameters_the_sender_cannot_predict_are_compared_between_engines() -> None:
    async with fake_engines(2) as (engines, controls, sender):
        sender.sent["experts"] = UNPREDICTED
        for engine in engines:
            engine.weights["experts"] = "same"
        report = await syncing(sender).sync(controls, 1)
        assert report.unverified == ("experts",)
        assert report.verified == 3
        engines[1].weights["experts"] = "different"
        with pytest.raises(SyncFailed, match="experts"):
            await syncing(sender).sync(controls, 2)


async def test_a_parameter_that_was_never_sent_is_an_error() -> None:
    async with fake_engines(2) as (engines, controls, sender):
        for engine in engines:
            engine.weights["layers.0.o_proj.bias"] = "the checkpoint's"
        with pytest.raises(SyncFailed, match=r"1 of 4 parameters that the trainer never sends \(.*o_proj"):
            await syncing(sender).sync(controls, 1)
        for engine in engines:
            assert_runs(engine)


async def test_without_verification_no_checksum_is_asked_for() -> None:
    async with fake_engines(1) as (engines, controls, sender):
        await syncing(sender, verify=False).sync(controls, 1)
        assert "/weights_checker" not in engines[0].calls


async def test_nothing_to_sync() -> None:
    with pytest.raises(WeightSyncError, match="no engine"):
        await syncing(FakeSender()).sync([], 1)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="transport 'pigeon'; expected one of broadcast, disk"):
        WeightSync(FakeSender(), transport="pigeon")
    with pytest.raises(ValueError, match="pause mode 'nap'"):
        WeightSync(FakeSender(), pause_mode="nap")
