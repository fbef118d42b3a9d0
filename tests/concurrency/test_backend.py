"""A server of tools that is away: no episode begins, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from agentrl.concurrency import backend
from agentrl.concurrency.backend import Backend
from agentrl.errors import InfraError, LostError


class Server:
    """Answers from its ``back`` th probe on."""

    def __init__(self, back: float):
        self.back, self.probes, self.let = back, 0, threading.Event()

    def probe(self) -> None:
        assert self.let.wait(20)
        self.probes += 1
        if self.probes < self.back:
            raise ConnectionError(f"probe {self.probes} refused")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(backend, "LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(backend, "LOOK_S", 0.001)
    yield
    for left in list(Backend.away):
        left.up()


async def test_who_begins_waits_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(back=4)
    wiki = Backend("the wiki", server.probe)
    await asyncio.wait_for(Backend.all_there(), 20)  # nothing is known of it
    errors = [wiki.down("no route to host"), wiki.down("connection refused")]
    assert all(isinstance(error, InfraError) for error in errors)
    assert str(errors[1]) == "the wiki is away: connection refused"
    waiting = asyncio.create_task(Backend.all_there())
    await asyncio.sleep(0.05)
    assert not waiting.done() and Backend.what_is_away().startswith("the wiki is away for ")
    server.let.set()
    await asyncio.wait_for(waiting, 20)
    assert server.probes == 4 and Backend.what_is_away() == ""
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("the wiki is away: no route to host; no episode begins until it answers, for 300 s")
    assert said[1].startswith("the wiki is back after ") and len(said) == 2


async def test_an_answer_to_anybody_is_an_answer() -> None:
    wiki = Backend("the wiki", Server(back=10**9).probe)
    wiki.down("connection refused")
    wiki.up()
    await asyncio.wait_for(Backend.all_there(), 20)
    assert not Backend.away


async def test_one_that_stays_away_ends_the_run_as_another_start_may_cure_it() -> None:
    server = Server(back=10**9)
    server.let.set()
    wiki = Backend("the wiki", server.probe, patience=0.01)
    wiki.down("connection refused")
    with pytest.raises(LostError, match=r"the wiki has been away for \d+ s \(.*refused\), longer than the 0.01 s"):
        await asyncio.wait_for(Backend.all_there(), 20)
    assert LostError.exit_code == 5
