"""A pass of the event loop does so much and no more, whatever is ready."""

from __future__ import annotations

import asyncio

from agentrl.concurrency.pace import Pace


async def passes(count: int, pace: Pace, *, cancelled: frozenset[int] = frozenset()) -> list[list[int]]:
    """Who goes on in each pass of the loop, when so many are ready at once."""
    seen: list[list[int]] = [[]]

    async def piece(number: int) -> None:
        await pace.wait()
        seen[-1].append(number)

    tasks = [asyncio.ensure_future(piece(i)) for i in range(count)]
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    while not all(task.done() for task in tasks):
        seen.append([])
        await asyncio.sleep(0)
    return [each for each in seen if each]


async def test_a_pass_takes_so_many_pieces_in_their_order() -> None:
    seen = await passes(20, Pace(6))
    assert max(map(len, seen)) == 6
    assert [number for each in seen for number in each] == list(range(20))


async def test_one_that_was_cancelled_takes_nobodys_place() -> None:
    seen = await passes(12, Pace(4), cancelled=frozenset({5, 6}))
    assert [number for each in seen for number in each] == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert [len(each) for each in seen] == [4, 4, 2]


async def test_timers_run_between_passes_however_much_is_ready() -> None:
    pace, done = Pace(1), 0
    loop = asyncio.get_running_loop()
    rang: list[int] = []

    async def piece() -> None:
        nonlocal done
        await pace.wait()
        done += 1

    tasks = [asyncio.ensure_future(piece()) for _ in range(50)]
    loop.call_later(0, lambda: rang.append(done))
    await asyncio.gather(*tasks)
    assert rang and rang[0] < 50


async def test_few_at_a_time_do_not_wait() -> None:
    pace = Pace(2)
    for _ in range(5):
        waiting = pace.wait()
        try:
            waiting.send(None)
        except StopIteration:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            continue
        raise AssertionError("it waited")
