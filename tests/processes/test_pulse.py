"""What a process says of the work at hand while another thread does it."""

import asyncio
import logging
import math
import os
import threading

from agentrl.processes.pulse import Work


def test_work_that_comes_no_further_is_told_from_work_that_does(monkeypatch):
    now = 100.0
    monkeypatch.setattr("agentrl.processes.pulse.time.monotonic", lambda: now)
    work = Work()
    assert work.pulse(10) == (os.getpid(), 0.0, "")
    with work.on("the training step"):
        now += 8
        work.mark()  # a micro-batch
        now += 7
        assert work.pulse(10) == (os.getpid(), 7.0, "the training step")
    now += 1000
    assert work.pulse(10).stalled == 0.0


def test_the_stack_of_what_hangs_is_logged_once(caplog):
    work, hanging = Work(), threading.Event()

    def all_reduce_that_never_ends() -> None:
        with work.on("the training step"):
            hanging.wait(60)

    thread = threading.Thread(target=all_reduce_that_never_ends)
    thread.start()
    try:
        with caplog.at_level(logging.ERROR):
            while not work.pulse(math.inf).at:
                pass
            assert [work.pulse(-1.0).at for _ in range(3)] == ["the training step"] * 3
    finally:
        hanging.set()
        thread.join()
    (record,) = caplog.records
    assert "all_reduce_that_never_ends" in record.getMessage()


def test_an_event_loop_that_is_blocked_marks_nothing(monkeypatch):
    monkeypatch.setattr("agentrl.processes.pulse.MARK_S", 0.0)
    work, blocked = Work(), threading.Event()

    async def main() -> None:
        marking = asyncio.create_task(work.marked_by_this_loop("its event loop"))
        await asyncio.sleep(0)
        marked = work._marked
        while work._marked == marked:
            await asyncio.sleep(0)
        marked = work._marked
        blocked.wait(0.01)
        assert work._marked == marked and work.pulse(math.inf).stalled >= 0.01
        marking.cancel()

    asyncio.run(main())
