"""The collector runs seldom while episodes are played, and as before afterwards."""

import gc

from rollout_cases import CALL, LookUp

from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.worker import EpisodeRunner, RareCollection
from agentrl.types import SamplingParams, Task


def test_contexts_overlap_and_the_last_one_restores():
    before = gc.get_threshold()
    seldom = RareCollection()
    with seldom:
        with seldom:
            assert gc.get_threshold() == (RareCollection.THRESHOLD, *before[1:])
        assert gc.get_threshold()[0] == RareCollection.THRESHOLD
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off():
    before = gc.get_threshold()
    try:
        gc.set_threshold(0, 10, 10)
        with RareCollection():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_a_group_is_played_with_the_collector_held_back(run, chat):
    before, seen = gc.get_threshold(), []

    class Watching(LookUp):
        async def astep(self, action):
            seen.append(gc.get_threshold()[0])
            return await super().astep(action)

    async def play():
        client = ScriptedClient([CALL], chat)
        runner = EpisodeRunner(Watching, client, chat, SamplingParams(), EpisodeLimits(), 2)
        await runner.run_group(Task("t", seed=0), 2, "g")
        await runner.close()

    run(play())
    assert set(seen) == {RareCollection.THRESHOLD} and gc.get_threshold() == before
