"""The clock of an episode ends waits as ``asyncio.timeout`` does, on one timer."""

import asyncio

import pytest

from agentrl.concurrency.clock import Clock, OutOfTime


def run(scenario):
    async def played():
        clock = Clock()
        try:
            return await scenario(clock)
        finally:
            clock.close()

    return asyncio.run(asyncio.wait_for(played(), 30))


def test_a_wait_gives_what_it_waits_for():
    assert run(lambda clock: clock.within(10, asyncio.sleep(0, "value"))) == "value"


def test_a_wait_that_takes_too_long_is_cancelled_and_the_task_goes_on():
    async def scenario(clock):
        for _ in range(2):
            with pytest.raises(OutOfTime):
                await clock.within(0.01, asyncio.Event().wait())
        await asyncio.sleep(0)
        return asyncio.current_task().cancelling()

    assert run(scenario) == 0


def test_an_earlier_end_is_heeded_after_a_later_one_and_the_other_way_round():
    async def scenario(clock):
        await clock.within(0.02, asyncio.sleep(0))
        with pytest.raises(OutOfTime):  # the timer rings for the first wait, and is set again
            await clock.within(0.05, asyncio.Event().wait())
        await clock.within(3600, asyncio.sleep(0))
        with pytest.raises(OutOfTime):
            await clock.within(0.01, asyncio.Event().wait())

    run(scenario)


def test_waits_inside_waits_and_beside_them_end_by_themselves():
    async def scenario(clock):
        async def inner():
            with pytest.raises(OutOfTime):
                await clock.within(0.01, asyncio.Event().wait())
            await asyncio.Event().wait()

        with pytest.raises(OutOfTime):
            await clock.within(0.05, inner())
        found = await asyncio.gather(
            clock.within(0.01, asyncio.Event().wait()), clock.within(60, asyncio.sleep(0.05, 1)), return_exceptions=True
        )
        return type(found[0]), found[1]

    assert run(scenario) == (OutOfTime, 1)


def test_cancellation_from_outside_is_no_timeout():
    async def scenario(clock):
        task = asyncio.ensure_future(clock.within(60, asyncio.Event().wait()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario)


def test_a_timeout_of_the_code_that_is_awaited_is_its_own():
    async def raises():
        raise TimeoutError("its own")

    async def scenario(clock):
        with pytest.raises(TimeoutError, match="its own") as caught:
            await clock.within(60, raises())
        return type(caught.value)

    assert run(scenario) is TimeoutError


def test_code_that_swallows_the_cancellation_ends_as_it_likes():
    async def stubborn():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "late"

    async def scenario(clock):
        said = await clock.within(0.01, stubborn())
        return said, asyncio.current_task().cancelling()

    assert run(scenario) == ("late", 0)


def test_a_clock_that_was_not_closed_keeps_time_on_another_loop_too():
    clock = Clock()
    asyncio.run(clock.within(3600, asyncio.sleep(0)))
    with pytest.raises(OutOfTime):
        asyncio.run(asyncio.wait_for(clock.within(0.01, asyncio.sleep(20)), 30))
