"""The rollout manager without engines: which tasks count as trained, and what ends a rollout at once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.config import load_config
from agentrl.data.account import TaskAccount
from agentrl.engines.world import World
from agentrl.errors import AgentRLError, DataError, EngineError, EnvError, LostError
from agentrl.orchestrator import manager as module
from agentrl.orchestrator.engine_service import EngineService, weight_sync
from agentrl.orchestrator.manager import RolloutManager
from agentrl.orchestrator.sink import refuse_if_untrainable
from agentrl.tasks.source import TaskSource
from agentrl.types import Group, Segment, StopReason, Task, Trajectory
from agentrl.weights.transports.files import Files


def episode(group_id: str, index: int, task: Task, reason: StopReason = StopReason.DONE) -> Trajectory:
    mask = np.array([0, 1], np.uint8)
    tokens = np.array([1, 2], np.int32)
    segment = Segment(tokens, mask, -mask.astype(np.float32), np.where(mask, 0, -1).astype(np.int32), 1)
    failed = reason is not StopReason.DONE
    return Trajectory(
        f"{group_id}-{index}", group_id, task, [] if failed else [segment], [], reward=float(index), stop_reason=reason
    )


class Pool:
    broken: str | None = None
    stopped = False

    def attach(self, updater: Any) -> None: ...

    async def stop(self) -> None:
        self.stopped = True


def put_together(manager: RolloutManager, buffer: TaskAccount, runner: Any = None) -> None:
    manager._put_together(buffer, runner, [])


def made(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, *flags: str, tasks: int = 10) -> RolloutManager:
    (tmp_path / "logs").mkdir(parents=True, exist_ok=True)
    cfg = load_config(["--env", "search", "--rollout-batch-size", "3", "--n-samples-per-prompt", "2", *flags])
    made = RolloutManager(cfg, str(tmp_path), "model", [{}], World())
    made.engines = EngineService(Pool(), weight_sync(cfg, World(), None))
    put_together(made, TaskAccount(TaskSource("search", tasks)))
    names = ("replayed", "retries", "continuations", "failures", "prompt_tokens", "cached_tokens", "busy_seconds")
    counters = dict.fromkeys(names, 0.0)
    made.workers = SimpleNamespace(metrics=lambda: counters, what_is_away=lambda: asyncio.sleep(0, ""))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=lambda batch: batch))
    return made


@pytest.fixture
def manager(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> RolloutManager:
    return made(tmp_path, monkeypatch)


async def mark_trained(manager: RolloutManager) -> None:
    _, collected = manager.sink._in_training
    await manager.mark_trained({"advantage": np.zeros(collected.batch.num_tokens, np.float32)})


async def test_a_task_of_which_nothing_was_trained_is_not_called_trained(manager: RolloutManager) -> None:
    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Any) -> Group:
        reasons = [StopReason.DONE, StopReason.ENV_ERROR if group_id.endswith("1") else StopReason.DONE]
        return Group(group_id, task, [episode(group_id, i, task, reason) for i, reason in enumerate(reasons)])

    manager.runner = SimpleNamespace(run_group=run_group)
    _, (batch,), *_ = await manager.generate(0)
    assert set(batch.group_ids) == {"g00000000", "g00000002"}
    await mark_trained(manager)
    counts = manager.account.counts
    assert (counts["issued"], counts["trained"], counts["given_back"], counts["in_flight"]) == (3, 2, 1, 0)


async def test_episodes_of_several_agents_count_by_episode_and_group(manager: RolloutManager) -> None:
    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Any) -> Group:
        parts = []
        for index in range(n):
            for agent in ("giver", "taker"):
                part = episode(f"{group_id}/{agent}", index, task)
                part.info["episode_id"] = f"{group_id}-{index}"
                on_trajectory(part)
                parts.append(part)
        return Group(group_id, task, parts)

    manager.runner = SimpleNamespace(run_group=run_group)
    metrics, (batch,), *_ = await manager.generate(0)
    counted, *_ = await manager.peek("rollout 0")
    assert (counted["done"], counted["total"]) == (6, 6)
    assert (batch.num_episodes, batch.num_trajectories) == (6, 12)
    await mark_trained(manager)
    assert manager.account.counts["trained"] == 3 and manager.account.counts["in_flight"] == 0
    assert metrics["data/issued"] == 3


class Finite:
    """A data source that ends."""

    def __init__(self, size: int) -> None:
        self.left = [Task(f"t/{i}", i) for i in range(size)]

    def get_samples(self, num_samples: int) -> list[Task]:
        taken, self.left = self.left[:num_samples], self.left[num_samples:]
        return taken

    def add_samples(self, samples: list[Group]) -> None: ...


def playing(*impossible: str, reason: StopReason = StopReason.DONE) -> SimpleNamespace:
    """A runner that plays any task but the impossible ones."""

    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Any) -> Group:
        never = task.task_id in impossible or "all" in impossible
        parts = [episode(group_id, i, task, StopReason.ENV_ERROR if never else reason) for i in range(n)]
        for part in parts:
            part.info["retryable"] = not never
            part.error = f"task {task.task_id}: the first prompt has 9000 tokens" if never else None
        return Group(group_id, task, parts)

    return SimpleNamespace(run_group=run_group)


async def test_a_source_that_ends_is_no_error_and_its_last_tasks_are_trained(manager: RolloutManager) -> None:
    put_together(manager, TaskAccount(Finite(4)), playing())
    sizes = []
    for step in range(2):
        _, (batch,), *_ = await manager.generate(step)
        sizes.append(batch.num_episodes)
        await mark_trained(manager)
    assert sizes == [6, 2]
    assert await manager.generate(2) is None
    assert manager.account.counts["trained"] == 4


async def test_tasks_that_can_never_be_played_are_dropped_and_the_run_goes_on(manager: RolloutManager) -> None:
    put_together(manager, TaskAccount(Finite(9)), playing("t/0", "t/1", "t/2", "t/4"))
    metrics, (batch,), lost, dropped = await manager.generate(0)  # the whole first batch, and one of the next
    assert lost.startswith("8 of 12 episodes were lost")
    assert set(batch.group_ids) == {"g00000003", "g00000005"}
    assert metrics["rollout/errors"] == 8 and metrics["data/dropped"] == 4
    await mark_trained(manager)
    state = manager.account.state_dict()
    assert (state["issued"], state["trained"], state["dropped"], state["open"]) == (6, 2, 4, [])
    stored = list(manager.store.read("train", step=0))
    assert len(stored) == 12 and {t.task.task_id for t in stored} == {f"t/{i}" for i in range(6)}


async def test_a_single_impossible_task_does_not_stop_a_run_of_one_task_a_rollout(manager: RolloutManager) -> None:
    manager.cfg = manager.cfg.replace(rollout_batch_size=1)
    put_together(manager, TaskAccount(Finite(3)), playing("t/0"))
    _, (batch,), *_ = await manager.generate(0)
    assert set(batch.group_ids) == {"g00000001"}


async def test_nothing_but_impossible_tasks_ends_the_run(manager: RolloutManager) -> None:
    put_together(manager, TaskAccount(Finite(99)), playing("all"))
    with pytest.raises(EnvError, match=r"none of the 9 tasks of 3 rollouts in a row .*18 of 18 .* 9000 tokens"):
        await manager.generate(0)
    assert manager.account.counts["issued"] == 9
    put_together(manager, TaskAccount(Finite(2)), manager.runner)
    assert await manager.generate(0) is None  # none left to try


async def test_failures_that_may_pass_still_end_a_run(manager: RolloutManager) -> None:
    manager.runner = playing(reason=StopReason.ENGINE_ERROR)
    with pytest.raises(EnvError, match="6 of 6 episodes"):
        await manager.generate(0)
    assert manager.account.counts["dropped"] == 0


def failing(*names: str) -> SimpleNamespace:
    """A runner under which the tasks of these names die of themselves; ``broken`` on it: all do."""
    runner = SimpleNamespace(broken=False, played=[])

    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Any) -> Group:
        runner.played.append(task.task_id)
        dies = runner.broken or task.task_id in names
        parts = [episode(group_id, i, task, StopReason.ENV_ERROR if dies else StopReason.DONE) for i in range(n)]
        for part in parts:
            part.info["retryable"], part.error = True, f"no row for {task.task_id}" if dies else None
        return Group(group_id, task, parts)

    runner.run_group = run_group
    return runner


def started_again(manager: RolloutManager, state: dict[str, Any]) -> RolloutManager:
    """The next start of the run, from the same checkpoint."""
    made = RolloutManager(manager.cfg, str(manager.run_dir), "model", [{}], World())
    made.engines, made.workers = manager.engines, manager.workers
    put_together(made, TaskAccount(Finite(60)), manager.runner)
    made.account.source.left = made.account.source.left[state["issued"] :]
    made.account.load_state_dict(state)
    return made


async def test_tasks_that_fail_for_their_own_sake_are_dropped_at_their_third_death(manager: RolloutManager) -> None:
    """Two of the first three tasks fail: others take their place, and the run goes on."""
    put_together(manager, TaskAccount(Finite(60)), failing("t/0", "t/1", "t/7"))
    named, trained = [], 0
    for step in range(9):
        metrics, (batch,), lost, dropped = await manager.generate(step)
        assert batch.num_episodes >= 4 and ("no row for" in lost if metrics["rollout/errors"] else lost is None)
        named += [dropped] if dropped else []
        trained += batch.num_episodes // 2
        await mark_trained(manager)
    assert named == [
        f"dropped, since they cannot be played: t/{n}; the last error: no row for t/{n}" for n in (0, 1, 7)
    ]
    counts = manager.account.counts
    assert (counts["dropped"], counts["given_back"], counts["trained"]) == (3, 0, trained)
    assert all(manager.runner.played.count(name) == 3 for name in ("t/0", "t/1", "t/7"))


async def test_deaths_over_several_starts_count(manager: RolloutManager) -> None:
    put_together(manager, TaskAccount(Finite(60)), failing("t/1"))
    state = manager.account.state_dict()
    for deaths in (1, 2, 3):
        *_, dropped = await manager.generate(0)
        assert (dropped is not None) == (deaths == 3), deaths
        manager = started_again(manager, state)  # killed before it saved


async def test_a_run_that_ends_at_tasks_that_fail_goes_on_after_load(manager: RolloutManager) -> None:
    """Nine of them in a row, three rollouts' worth: it looks like a broken environment, once."""
    put_together(manager, TaskAccount(Finite(60)), failing(*(f"t/{i}" for i in range(9))))
    state = manager.account.state_dict()
    with pytest.raises(EnvError, match="none of the 9 tasks of 3 rollouts in a row could be played: 18 of 18 episodes"):
        await manager.generate(0)
    assert manager.account.counts["dropped"] == 0
    manager = started_again(manager, state)
    for step in range(60):
        result = await manager.generate(step)
        if result is None:
            break
        await mark_trained(manager)
    counts = manager.account.counts
    assert (counts["dropped"], counts["trained"], counts["in_flight"], counts["given_back"]) == (9, 51, 0, 0)


async def test_a_dead_environment_ends_the_run_and_costs_no_task(manager: RolloutManager) -> None:
    put_together(manager, TaskAccount(Finite(60)), failing())
    state = manager.account.state_dict()
    manager.runner.broken = True
    for _ in range(5):  # however often it is started
        with pytest.raises(EnvError, match="18 of 18 episodes failed.*no row for"):
            await manager.generate(0)
        manager = started_again(manager, state)
    manager.runner.broken = False
    for step in range(30):
        if await manager.generate(step) is None:
            break
        await mark_trained(manager)
    assert (manager.account.counts["dropped"], manager.account.counts["trained"]) == (0, 60)


async def test_an_environment_that_dies_in_a_rollout_ends_the_run(manager: RolloutManager) -> None:
    manager.cfg = manager.cfg.replace(rollout_batch_size=8)
    put_together(manager, TaskAccount(Finite(60)), failing(*(f"t/{i}" for i in range(2, 60))))
    with pytest.raises(EnvError, match="last error: no row for"):
        await manager.generate(0)
    assert manager.account.counts["dropped"] == 0


async def test_tasks_that_fail_at_the_end_of_the_data_do_not_keep_the_run(manager: RolloutManager) -> None:
    put_together(manager, TaskAccount(Finite(5)), failing("t/3", "t/4"))
    sizes = []
    for step in range(9):
        result = await manager.generate(step)
        if result is None:
            break
        sizes.append(result[1][0].num_episodes)
        await mark_trained(manager)
    assert sizes == [6] and manager.account.counts["dropped"] == 2
    assert {t.task.task_id for t in manager.store.read("train", step=1)} == {"t/3", "t/4"}


async def test_a_rollout_ends_at_once_when_no_engine_can_be_had(manager: RolloutManager) -> None:
    cancelled = []

    async def run_group(*args: Any, **kwargs: Any) -> Group:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        raise AssertionError

    manager.runner = SimpleNamespace(run_group=run_group)
    manager.engines.pool.broken = "no engine runs"
    with pytest.raises(LostError, match="no engine runs"):
        await asyncio.wait_for(manager.generate(0), 20)
    await asyncio.sleep(0)
    assert len(cancelled) == 3


def test_tools_of_all_environments_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    note = lambda env: prepared.append(type(env.unwrapped).__name__)  # noqa: E731
    monkeypatch.setattr("agentrl.rollout.options.prepare_tools", note)
    flags = ["--env", "calculator", "--eval-env", "search", "guess", "--eval-interval", "1"]
    (tmp_path / "logs").mkdir()
    RolloutManager(load_config(flags), str(tmp_path), "model", [{}], World())._open_data()
    assert prepared == ["CalculatorEnv", "SearchEnv", "GuessEnv"]


async def test_wrong_data_does_not_wait_for_engines(manager: RolloutManager, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowPool(Pool):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.ended = asyncio.Event()
            made.append(self)

        async def start(self) -> None:
            await self.ended.wait()
            raise EngineError("stopped while it started")

        async def stop(self) -> None:
            self.ended.set()

    def no_data() -> None:
        raise DataError("a line is no JSON")

    made: list[SlowPool] = []
    monkeypatch.setattr("agentrl.engines.pool.EnginePool", SlowPool)
    monkeypatch.setattr(module, "engine_spec", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "open_template", lambda cfg, model: (None, []))
    monkeypatch.setattr(manager, "_open_data", no_data)
    with pytest.raises(DataError, match="no JSON"):
        await asyncio.wait_for(manager.start(), 20)
    assert made[0].ended.is_set()


async def test_episodes_of_a_run_that_is_ended_close_their_environments_before_the_engines_go(
    manager: RolloutManager,
) -> None:
    started, closed = asyncio.Event(), []

    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Any) -> Group:
        try:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError
        finally:
            await asyncio.sleep(0)
            closed.append(manager.engines.pool.stopped)

    manager.runner = SimpleNamespace(run_group=run_group, close=lambda: asyncio.sleep(0))
    manager.workers.close = lambda: asyncio.sleep(0)
    rollout = asyncio.ensure_future(manager.generate(0))
    await asyncio.wait_for(started.wait(), 20)
    await asyncio.wait_for(manager.close(), 20)
    assert closed == [False] * 3 and manager.engines.pool.stopped
    with pytest.raises(EngineError, match="the run is ending"):
        await rollout


@pytest.mark.parametrize(("gpu", "ranks"), [(True, 2), (False, 1)])
def test_weight_sync_counts_the_ranks_of_an_engine(manager: RolloutManager, gpu: bool, ranks: int) -> None:
    cfg = manager.cfg.replace(rollout_num_gpus_per_engine=2, weight_sync_transport="broadcast")
    world = World(gpus=4 * gpu)
    sync = weight_sync(cfg, world, None)
    assert (sync.transport._ranks, sync.transport._backend) == (ranks, "nccl" if gpu else "gloo")
    assert sync.restore_from is not None
    several = World(world.gpus, ("10.0.0.7", "10.0.0.8"))
    assert weight_sync(cfg, several, None).restore_from is None, "other machines do not see the shared memory"
    assert weight_sync(cfg.replace(weight_snapshot_dir="/everywhere"), several, None).restore_from is not None
    files = weight_sync(manager.cfg, World(), None)
    assert isinstance(files.transport, Files) and files.transport is files.restore_from


def test_a_rollout_that_waited_out_its_time_for_the_engine_says_so(caplog: pytest.LogCaptureFixture) -> None:
    task = Task("task", 0)
    late = [
        Trajectory(f"t{i}", "g", task, [], [], stop_reason=StopReason.ENGINE_TIMEOUT, error="all of it") for i in (0, 1)
    ]
    with pytest.raises(AgentRLError, match=r"2 episodes a task .* 0 of 2 failed, 2 ran out of time \(all of it\)"):
        refuse_if_untrainable([Group("g", task, late)], set(), compares=True)
    with pytest.raises(AgentRLError, match=r"^no episode of this rollout can be trained on: 0 of 2 failed, 2 ran out"):
        refuse_if_untrainable([Group("g", task, late)], set(), compares=False)
    assert "not trained on: of 2 episodes, 2 ran out of time" in caplog.text


async def test_a_run_that_is_ending_begins_no_other_set(manager: RolloutManager) -> None:
    begun = []

    async def play() -> None:
        begun.append(True)

    await manager.engines.end_episodes()
    with pytest.raises(EngineError, match="the run is ending"):
        await manager.engines.unless_broken(asyncio.ensure_future(play()))
    assert not begun
