"""Several coroutines at a time."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.concurrency.together import together


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_results_come_in_order() -> None:
    assert asyncio.run(together(map(give, (3, 1, 2)))) == [3, 1, 2]


def test_an_error_ends_the_others_and_waits_for_them() -> None:
    ended = []

    async def wait() -> int:
        try:
            return await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # an environment that is closed, say
            ended.append("wait")

    async def fail() -> int:
        await asyncio.sleep(0)
        raise KeyError("this one")

    async def both() -> None:
        with pytest.raises(KeyError, match="this one"):
            await together([wait(), together([wait(), fail()])])
        assert ended == ["wait", "wait"]

    asyncio.run(both())
