"""Dynamic sampling: groups that teach nothing are left out, and others are played until the rollout is full."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.data.filters import load_filter
from agentrl.errors import ConfigError, EnvError
from agentrl.orchestrator import sink as module
from agentrl.types import Group, StopReason, Task
from tests.orchestrator.test_manager import Finite, episode, made, mark_trained, put_together


def group(*rewards: float, reason: StopReason = StopReason.DONE) -> Group:
    task = Task("t", 0)
    parts = [episode("g", i, task, reason) for i in range(len(rewards))]
    for part, reward in zip(parts, rewards, strict=True):
        part.reward = reward
    return Group("g", task, parts)


@pytest.mark.parametrize(
    ("spec", "rewards", "kept"),
    [
        ("reward_variance", (1.0, 1.0), False),
        ("reward_variance", (1.0, 0.5), True),
        ("reward_variance", (0.0,), False),
        ("success_band=0.2,0.8", (1, 0, 0, 0, 0), True),
        ("success_band=0.25,0.8", (1, 0, 0, 0, 0), False),
        ("success_band=0,0.5", (1, 1, 0), False),
        ("success_band=0,1", (0, 0), True),
    ],
)
def test_what_is_built_in(spec: str, rewards: tuple[float, ...], kept: bool) -> None:
    assert load_filter(spec)(group(*rewards)) is kept


def test_episodes_lost_to_infrastructure_have_no_part() -> None:
    lost = group(0.0, 0.0, reason=StopReason.ENV_ERROR)
    assert not load_filter("success_band=0,1")(lost) and not load_filter("reward_variance")(lost)


@pytest.mark.parametrize("spec", ["success_band", "success_band=0.8,0.2", "success_band=0.2,1.5", "variance"])
def test_what_is_no_filter_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="--dynamic-sampling-filter-path .*expected .*success_band=LOW,HIGH"):
        load_filter(spec)


def test_a_function_of_ones_own(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "def two(group): return len(group.trajectories) == 2\ndef says(group): return 'yes'\ndef fails(group): 1 / 0\n"
    )
    own = load_filter(f"{tmp_path / 'mine.py'}:two")
    assert own(group(1, 1)) is True and own(group(1)) is False
    with pytest.raises(EnvError, match="says returned 'yes'; expected True or False"):
        load_filter(f"{tmp_path / 'mine.py'}:says")(group(1))
    with pytest.raises(EnvError, match=r"fails, group g: ZeroDivisionError.*mine.py:3"):
        load_filter(f"{tmp_path / 'mine.py'}:fails")(group(1))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--over-sampling-batch-size", "64"], "has no effect without --dynamic-sampling-filter-path"),
        (
            ["--dynamic-sampling-filter-path", "reward_variance", "--over-sampling-batch-size", "2"],
            "--over-sampling-batch-size 2 is less than --rollout-batch-size",
        ),
    ],
)
def test_over_sampling_is_for_a_filter_and_more_than_a_rollout(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["--env", "search", *flags])


FILTER = ("--dynamic-sampling-filter-path", "reward_variance")


def runner(teaches: Callable[[int], bool], handed_out: list[int]) -> SimpleNamespace:
    """The episodes of a group earn 0 and 1 if it ``teaches``, by its number; otherwise 1."""

    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Callable[..., None]) -> Group:
        number = int(group_id[1:])
        handed_out.append(number)
        parts = [episode(group_id, i, task) for i in range(n)]
        for part in parts:
            part.reward = part.reward if teaches(number) else 1.0
        return Group(group_id, task, parts)

    return SimpleNamespace(run_group=run_group)


async def test_a_rollout_is_filled_with_groups_that_teach(tmp_path: Any, monkeypatch: Any) -> None:
    manager, handed_out = made(tmp_path, monkeypatch, *FILTER, tasks=30), list[int]()
    manager.runner = runner(lambda n: n % 3 == 0, handed_out)
    metrics, (batch,), *_ = await manager.generate(0)
    assert list(dict.fromkeys(batch.group_ids)) == ["g00000000", "g00000003", "g00000006"]
    assert handed_out == list(range(len(handed_out))) and metrics["rollout/filtered"] == len(handed_out) - 3
    assert metrics["rollout/reward"] > 0.6, "what was left out was played, too"
    await mark_trained(manager)
    counts = manager.account.counts
    assert (counts["trained"], counts["dropped"], counts["in_flight"]) == (3, len(handed_out) - 3, 0)
    stored = manager.store.read("train", step=0)
    assert {t.group_id for t in stored} == {f"g{n:08d}" for n in handed_out}


async def test_what_is_left_over_is_played_again_and_the_first_handed_out_are_taken(
    tmp_path: Any, monkeypatch: Any
) -> None:
    manager, handed_out = made(tmp_path, monkeypatch, *FILTER, "--over-sampling-batch-size", "6", tasks=30), list[int]()
    manager.runner = runner(lambda n: n != 1, handed_out)
    _, (batch,), *_ = await manager.generate(0)
    assert sorted(handed_out) == [0, 1, 2, 3, 4, 5]
    assert list(dict.fromkeys(batch.group_ids)) == ["g00000000", "g00000002", "g00000003"]
    await mark_trained(manager)
    counts = manager.account.counts
    assert (counts["trained"], counts["dropped"], counts["given_back"]) == (3, 1, 2)
    _, (batch,), *_ = await manager.generate(1)
    assert list(dict.fromkeys(batch.group_ids))[:2] == ["g00000004", "g00000005"]


async def test_a_model_that_solves_everything_does_not_play_for_ever(tmp_path: Any, monkeypatch: Any) -> None:
    manager, handed_out = made(tmp_path, monkeypatch, *FILTER, tasks=60), list[int]()
    manager.runner = runner(lambda n: n == 7, handed_out)
    generated = await manager.generate(0)
    (batch,) = generated.batch
    rounds = module.FILTERED_ROUNDS
    assert f"only 1 of {len(handed_out)} groups passed" in generated.notes and f"in {rounds} rounds" in generated.notes
    assert list(dict.fromkeys(batch.group_ids)) == ["g00000007", "g00000000", "g00000001"]
    await mark_trained(manager)
    assert manager.account.counts["dropped"] == len(handed_out) - 3


async def test_the_last_tasks_of_a_source_are_trained_though_the_rollout_is_not_full(
    tmp_path: Any, monkeypatch: Any
) -> None:
    manager = made(tmp_path, monkeypatch, *FILTER)
    put_together(manager, TaskAccount := manager.account.__class__(Finite(4)), runner(lambda n: n < 2, []))
    _, (batch,), *_ = await manager.generate(0)
    assert sorted(set(batch.group_ids)) == ["g00000000", "g00000001"]
    await mark_trained(manager)
    assert await manager.generate(1) is None
    assert TaskAccount.counts["dropped"] == 2
