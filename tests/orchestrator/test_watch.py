"""A lost process ends a run at once, and is what the error names."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator

import pytest

from agentrl.errors import AgentRLError
from agentrl.orchestrator import watch
from agentrl.orchestrator.watch import ProcessLostError, Watch, until_lost
from agentrl.processes.pulse import Pulse
from agentrl.processes.signals import Terminated


class Handle:
    """A Ray actor that gives so many pulses; then it is dead, or stands still."""

    def __init__(
        self,
        pulses: int,
        end: BaseException | None = None,
        *,
        first: asyncio.Event | None = None,
        stalled: Iterable[float] = (),
    ):
        self.left, self.end, self.first = pulses, end, first
        self.pulse = self
        self.asked = 0
        self.stalled: Iterator[float] = iter(stalled)

    def options(self, *, concurrency_group: str) -> Handle:
        assert concurrency_group == watch.PULSE
        return self

    async def remote(self, seconds: float, stall: float) -> Pulse:
        self.asked += 1
        await asyncio.sleep(0)
        if self.first is not None:
            await self.first.wait()
        if self.left:
            self.left -= 1
            return Pulse(4711, next(self.stalled, 0.0), "the training step")
        if self.end is not None:
            raise self.end
        await asyncio.Event().wait()


def died() -> Exception:
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(watch, "PULSE_S", 0.01)
    monkeypatch.setattr(watch, "GRACE_S", 0.2)


async def forever() -> None:
    await asyncio.Event().wait()


def run(body, patience: float = 60.0, *, stall: float = 60.0, **actors: Handle) -> None:
    async def main() -> None:
        async with Watch(patience, stall=stall) as watched:
            for name, handle in actors.items():
                watched.actor(name, handle, "rank.log")
            await body()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_dead_actor_ends_the_run_and_is_named():
    with pytest.raises(ProcessLostError, match=r"^rank \(process 4711\) died: killed, .*; see rank.log$"):
        run(forever, rank=Handle(2, died()), other=Handle(2))


def test_one_that_stands_still_is_told_from_one_that_is_busy():
    with pytest.raises(ProcessLostError, match="stopped .process 4711. gave no sign of life"):
        run(forever, patience=0.1, stopped=Handle(1), busy=Handle(10**9))


def test_who_stood_still_itself_asks_again():
    """Ctrl-Z of the driver, and ``fg``: the answers are there, but were not heard in time."""
    first = asyncio.Event()
    handle = Handle(3, first=first)

    async def stopped() -> None:
        while not handle.asked:
            await asyncio.sleep(0.001)
        time.sleep(0.5)  # nothing of this process runs
        asyncio.get_running_loop().call_later(0.02, first.set)
        while handle.asked < 3:
            await asyncio.sleep(0.001)

    async def main() -> None:
        asking = asyncio.create_task(until_lost("rank 0", handle, "rank.log", 0.1))
        await stopped()
        assert not asking.done()
        asking.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "FIRST_PULSE_S", 0.1)
        asyncio.run(asyncio.wait_for(main(), 60))


def test_work_that_comes_no_further_ends_the_run_though_its_process_has_a_pulse():
    """A collective that never ends."""
    with pytest.raises(ProcessLostError, match=r"rank .process 4711. came no further with the training step for 61 s"):
        run(forever, stall=60.0, rank=Handle(10**9, stalled=(0.0, 59.0, 3.0, 61.0)), other=Handle(10**9))


def test_a_broken_connection_is_asked_again():
    from ray.exceptions import ActorUnavailableError

    class Shaky(Handle):
        async def remote(self, seconds, stall):
            if self.asked == 1:
                self.asked += 1
                raise ActorUnavailableError("a connection broke", None)
            return await super().remote(seconds, stall)

    handle = Shaky(3, died())
    with pytest.raises(ProcessLostError):
        run(forever, rank=handle)
    assert handle.left == 0


def test_an_error_that_follows_from_a_death_gives_way_to_it(monkeypatch):
    """A rank's partner in a collective fails sooner than Ray has word of the death."""
    monkeypatch.setattr(watch, "GRACE_S", 30.0)

    async def collective() -> None:
        asyncio.get_running_loop().call_later(0.05, dead.set)
        raise AgentRLError("the training step failed: RuntimeError: Connection closed by peer")

    dead = asyncio.Event()
    with pytest.raises(ProcessLostError, match="rank died") as caught:
        run(collective, rank=Handle(0, died(), first=dead))
    assert "Connection closed" in str(caught.value.__cause__)


@pytest.mark.parametrize("error", [AgentRLError("the disk is full"), Terminated(15), ValueError("other")])
def test_other_ends_of_a_run_stay_as_they_are(error):
    async def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run(fail, rank=Handle(10**9))
    assert caught.value is error


def test_a_run_that_ends_well_ends_the_watch():
    handle = Handle(10**9)

    async def work() -> None:
        while handle.asked < 3:
            await asyncio.sleep(0)

    run(work, rank=handle)


def test_the_end_of_a_process_of_this_machine_is_noticed():
    process = subprocess.Popen(["sleep", "300"])
    gone = subprocess.Popen(["true"])
    gone.wait()

    async def main(pids: dict[str, int]) -> None:
        async with Watch(60.0) as watched:
            watched.processes(pids)
            process.kill()
            await forever()

    try:
        for pids in ({"the raylet": process.pid}, {"the raylet": gone.pid}):
            with pytest.raises(ProcessLostError, match=rf"^the raylet \(process {pids['the raylet']}\) ended"):
                asyncio.run(asyncio.wait_for(main(pids), 60))
    finally:
        process.kill()
        process.wait()


def test_a_process_of_this_machine_that_was_stopped_is_noticed_unless_it_goes_on():
    process = subprocess.Popen(["sleep", "300"])

    async def main(patience: float) -> None:
        async with Watch(patience) as watched:
            watched.processes({"Ray's head, the GCS": process.pid})
            await asyncio.sleep(0.1)
            if patience > 1:
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.1)
            else:
                await forever()

    try:
        process.send_signal(signal.SIGSTOP)
        asyncio.run(asyncio.wait_for(main(60.0), 60))
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ProcessLostError, match=rf"^Ray's head, the GCS \(process {process.pid}\) has been stopped"):
            asyncio.run(asyncio.wait_for(main(0.1), 60))
    finally:
        process.kill()
        process.wait()
