"""Rewards that are classes: made once, and called with many episodes at a time."""

from __future__ import annotations

import asyncio
import copy
import doctest
import importlib
import pickle
import threading
import time

import numpy as np
import pytest

import agentrl
from agentrl import rewards
from agentrl.errors import ConfigError, EnvError, InfraError
from agentrl.rewards import BatchedReward, RewardItem, RewardSet

SOURCE = """
from agentrl.rewards import BatchedReward

class Model(BatchedReward):
    made = 0
    max_wait = 0.2

    def __init__(self):
        Model.made += 1
        self.weights = 2.0

    def score(self, items):
        return [self.weights * len(item.text) for item in items]

class Plain:
    made = 0

    def __init__(self):
        Plain.made += 1

    def __call__(self, text, answer, row):
        return float(text == answer) + row["bonus"]

class Needy:
    def __init__(self, path):
        pass

    def __call__(self, text):
        return 0.0

class Silent:
    pass

class Broken:
    def __init__(self):
        raise RuntimeError("no weights")

    def __call__(self, text):
        return 0.0
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return f"{tmp_path}/mine.py"


class Lengths(BatchedReward):
    """Scores lengths and notes the batches."""

    max_wait = 0.05

    def __init__(self, **limits):
        super().__init__(**limits)
        self.batches: list[list[RewardItem]] = []

    def score(self, items):
        self.batches.append(items)
        return [float(len(item.text)) for item in items]


async def together(reward, texts, **named):
    return await asyncio.gather(*(reward(text, None, **named) for text in texts), return_exceptions=True)


# -- classes ---------------------------------------------------------------------------------------


def test_a_class_is_made_once_a_process(file):
    reward = rewards.load(f"{file}:Plain")
    assert rewards.load(f"{file}:Plain") is reward and rewards.load(type(reward)) is reward
    assert asyncio.run(RewardSet([(2.0, f"{file}:Plain")])("a", "a", row={"bonus": 0.5})) == {"Plain": 3.0}
    assert type(reward).made == 1


def test_a_set_makes_it_at_the_first_call_in_a_thread_and_only_once():
    class Slow:
        made: list[str] = []

        def __init__(self):
            time.sleep(0.1)
            Slow.made.append(threading.current_thread().name)

        def __call__(self, text):
            return 1.0

    async def many():
        return await asyncio.gather(*(RewardSet(Slow)("t", None) for _ in range(8)))

    RewardSet(Slow)
    assert Slow.made == []
    assert asyncio.run(many()) == [{"Slow": 1.0}] * 8
    assert len(Slow.made) == 1 and Slow.made[0] != threading.current_thread().name


def test_a_class_that_cannot_be_a_reward_is_refused(file):
    with pytest.raises(ConfigError, match="Needy is made without arguments, but needs path"):
        rewards.load(f"{file}:Needy")
    with pytest.raises(ConfigError, match="Silent needs a method `__call__"):
        rewards.load(f"{file}:Silent")
    with pytest.raises(ConfigError, match="Broken could not be made: RuntimeError: no weights"):
        rewards.load(f"{file}:Broken")
    broken = RewardSet(f"{file}:Broken")
    with pytest.raises(ConfigError, match="no weights"):  # ends a run at the first episode
        asyncio.run(broken("a", "b"))


def test_prompt_data_takes_a_class(file, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n')
    envs = [agentrl.PromptEnv(str(tmp_path / "t.jsonl"), reward=f"{file}:Model") for _ in range(3)]
    for env in envs:
        env.reset(options={"split": "train", "index": 0})
    ((_, model),) = envs[0].reward
    assert model.made == 0  # looking at an environment loads no model
    assert [env.step("four")[1] for env in envs] == [8.0] * 3  # from sync code, one after another
    assert model.made == 1


def test_an_environment_takes_a_class_or_an_instance():
    for reward in (Lengths, Lengths(max_wait=0.0), [(1.0, Lengths)]):
        env = agentrl.make(type("Words", (agentrl.ToolEnv,), {"tasks": {"train": ["Say."]}, "reward": reward}))
        env.reset(seed=0)
        assert env.step("four")[4]["rewards"] == {"Lengths": 4.0}


@pytest.mark.parametrize("module", ["batched", "judge"])
def test_examples_run(module):
    result = doctest.testmod(importlib.import_module(f"agentrl.rewards.{module}"))
    assert result.attempted > 0 and result.failed == 0


# -- batches ---------------------------------------------------------------------------------------


def test_concurrent_calls_are_one_batch():
    reward = Lengths(max_batch=8)
    row = {"prompt": "q"}
    values = asyncio.run(together(reward, ["a" * n for n in range(8)], turns=["t"], calls=[{"name": "f"}], row=row))
    assert values == [float(n) for n in range(8)]
    assert len(reward.batches) == 1
    assert reward.batches[0][3] == RewardItem("aaa", None, ["t"], [{"name": "f"}], row)


def test_no_batch_is_larger_than_allowed_and_a_full_one_does_not_wait():
    reward = Lengths(max_batch=4, max_wait=3600.0)
    asyncio.run(together(reward, ["x"] * 12))
    assert [len(batch) for batch in reward.batches] == [4, 4, 4]


def test_a_batch_that_does_not_fill_goes_after_the_wait():
    reward = Lengths(max_batch=100, max_wait=1.5)

    async def late():
        first = asyncio.create_task(reward("a"))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(reward("bb"))
        return await first, await second

    assert asyncio.run(late()) == (1.0, 2.0) and len(reward.batches) == 1


def test_items_that_come_while_a_batch_is_scored_are_the_next_one():
    scoring, go_on = threading.Event(), threading.Event()

    class Slow(Lengths):
        def score(self, items):
            scoring.set()
            go_on.wait(20)
            return super().score(items)

    reward = Slow(max_wait=0.0)

    async def late():
        first = asyncio.create_task(reward("a"))
        while not scoring.is_set():
            await asyncio.sleep(0.01)
        others = [asyncio.create_task(reward("b")) for _ in range(5)]
        await asyncio.sleep(0.01)
        go_on.set()
        return await asyncio.gather(first, *others)

    asyncio.run(late())
    assert [len(batch) for batch in reward.batches] == [1, 5]


def test_the_loop_is_free_while_a_batch_is_scored():
    go_on = threading.Event()

    class Slow(Lengths):
        def score(self, items):
            return [float(go_on.wait(20))] * len(items)

    async def beside():
        call = asyncio.create_task(Slow(max_wait=0.0)("x"))
        await asyncio.sleep(0.1)
        go_on.set()  # never reached if the loop waited for the score
        return await call

    assert asyncio.run(beside()) == 1.0


def test_an_async_score_and_named_parts_and_arrays():
    class Parts(BatchedReward):
        async def score(self, items):
            await asyncio.sleep(0)
            return [{"long": float(len(item.text)), "right": 1.0} for item in items]

    class Array(BatchedReward):
        def score(self, items):
            return np.ones(len(items), np.float32)

    assert asyncio.run(RewardSet([(0.5, Parts), Array()])("four", None)) == {"long": 2.0, "right": 0.5, "Array": 1.0}


@pytest.mark.parametrize(
    ("result", "got"), [([1.0], "1$"), ([1.0] * 4, "4$"), (None, "None"), (1.0, "1.0"), ("abc", "'abc'"), ({}, "{}")]
)
def test_the_wrong_number_of_scores_is_an_error_of_each_caller(result, got):
    class Wrong(BatchedReward):
        def score(self, items):
            return result

    errors = asyncio.run(together(Wrong(max_batch=3), ["a", "b", "c"]))
    assert len({id(error) for error in errors}) == 3
    for error in errors:
        assert isinstance(error, EnvError)
        with pytest.raises(EnvError, match=f"Wrong.score must return a list of 3 scores, got {got}"):
            raise error


def test_errors_reach_each_caller_and_the_next_batch_is_scored():
    class Sometimes(BatchedReward):
        failure: Exception | None = None

        def score(self, items):
            if self.failure is not None:
                raise self.failure
            return [1.0] * len(items)

    reward = Sometimes(max_batch=2)
    for failure, kind, text in (
        (ValueError("bad weights"), EnvError, "Sometimes.score raised ValueError: bad weights"),
        (InfraError("the model server is away"), InfraError, "the model server is away"),
    ):
        reward.failure = failure
        errors = asyncio.run(together(reward, "ab"))
        assert [type(error) for error in errors] == [kind] * 2 and {str(error) for error in errors} == {text}
        assert all(error.__cause__ is failure for error in errors)
    reward.failure = None
    assert asyncio.run(together(reward, "ab")) == [1.0, 1.0]
    with pytest.raises(EnvError, match="does not define `score"):
        asyncio.run(BatchedReward()("a"))


def test_a_batch_that_hangs_is_given_up():
    release = threading.Event()

    class Hanging(BatchedReward):
        def score(self, items):
            if items[0].text == "hang":
                release.wait(20)
            return [1.0] * len(items)

    reward = Hanging(timeout=1.0)

    async def both():
        return await together(reward, ["hang"]), await together(reward, ["go"])

    ((error,), values) = asyncio.run(both())
    release.set()
    assert isinstance(error, EnvError) and "did not return within 1 s" in str(error) and values == [1.0]


def test_an_episode_that_is_cancelled_is_not_scored():
    reward = Lengths(max_wait=1.5)

    async def one_leaves():
        leaving, staying = asyncio.create_task(reward("a")), asyncio.create_task(reward("bb"))
        await asyncio.sleep(0.02)
        leaving.cancel()
        return await asyncio.gather(leaving, staying, return_exceptions=True)

    left, stayed = asyncio.run(one_leaves())
    assert isinstance(left, asyncio.CancelledError) and stayed == 2.0
    assert [item.text for item in reward.batches[0]] == ["bb"]


def test_a_score_that_is_not_a_number_is_refused():
    class Odd(BatchedReward):
        def score(self, items):
            return [float("nan")] * len(items)

    with pytest.raises(EnvError, match="'Odd' gave is nan .* a finite number"):
        asyncio.run(RewardSet(Odd)("a", None))


def test_loops_and_threads_share_the_model_but_never_use_it_twice_at_once():
    class Model(Lengths):
        running = most = 0

        def score(self, items):
            Model.running += 1
            Model.most = max(Model.most, Model.running)
            time.sleep(0.02)
            Model.running -= 1
            return super().score(items)

    reward, found = Model(max_wait=0.0), []
    threads = [
        threading.Thread(target=lambda: found.append(asyncio.run(together(reward, ["a", "bb"])))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [[1.0, 2.0]] * 6 and Model.most == 1 and reward._lines == {}


def test_copies_share_the_model_and_pickles_hold_its_settings():
    reward = Lengths(max_batch=5)
    assert copy.deepcopy({"reward": reward})["reward"] is reward
    again = pickle.loads(pickle.dumps(reward))
    assert again.max_batch == 5 and asyncio.run(again("abc")) == 3.0


@pytest.mark.parametrize("limits", [{"max_batch": 0}, {"max_wait": -1}, {"timeout": 0}])
def test_limits_out_of_range_are_refused(limits):
    with pytest.raises(ConfigError, match="max_batch must be at least 1"):
        asyncio.run(Lengths(**limits)("a"))
