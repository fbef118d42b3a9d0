"""Rollouts are played ahead of the one that is trained on: how many, which tasks they have, how old they may be."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.config import load_config
from agentrl.errors import AgentRLError, ConfigError
from agentrl.orchestrator.buffer import Buffer
from agentrl.orchestrator.dispatcher import Ahead
from agentrl.orchestrator.launch import with_absolute_paths
from agentrl.orchestrator.loop import due
from agentrl.types import Group, StopReason, Task
from tests.orchestrator.scripted import FLAGS, Rollout, Trainer, check_run, lines, train  # noqa: F401
from tests.orchestrator.test_manager import episode, made, mark_trained
from tests.trainer.conftest import checkpoint, make_trainer  # noqa: F401


class Played:
    """Rollouts that are over when they are told to be."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.over: dict[int, asyncio.Event] = {}

    async def __call__(self, step: int) -> str:
        self.begun.append(step)
        self.over[step] = asyncio.Event()
        try:
            await self.over[step].wait()
        finally:
            self.ended.append(step)
        if step == 3:
            raise ValueError("rollout 3 is broken")
        return f"rollout {step}"


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("ahead", "begun"), [(0, [0]), (1, [0, 1]), (3, [0, 1, 2, 3]), (9, [0, 1, 2, 3, 4])])
async def test_so_many_are_played_after_the_next_one_and_none_after_the_last(ahead: int, begun: list[int]) -> None:
    play = Played()
    rollouts = Ahead(play, ahead=ahead, end=5)
    taking = asyncio.ensure_future(rollouts.take(0))
    await settle()
    assert play.begun == begun
    for step in begun[1:3]:
        play.over[step].set()
    await settle()
    assert rollouts.ready == len(begun[1:3]) and not taking.done(), "those after it do not come before it"
    play.over[0].set()
    assert await asyncio.wait_for(taking, 20) == "rollout 0"
    await rollouts.close(20.0)
    assert sorted(play.ended) == begun


async def test_the_next_begins_when_one_is_taken_and_an_error_is_raised_where_it_is_due() -> None:
    play = Played()
    rollouts = Ahead(play, ahead=1, end=9)
    for step in range(3):
        taking = asyncio.ensure_future(rollouts.take(step))
        await settle()
        assert play.begun == list(range(step + 2))
        play.over[step].set()
        assert await asyncio.wait_for(taking, 20) == f"rollout {step}"
    play.over[3].set()
    with pytest.raises(ValueError, match="rollout 3 is broken"):
        await asyncio.wait_for(rollouts.take(3), 20)
    await rollouts.close(20.0)
    assert sorted(play.ended) == [0, 1, 2, 3, 4]


async def test_who_stops_waiting_ends_the_rollout_that_was_waited_for() -> None:
    play = Played()
    rollouts = Ahead(play, ahead=1, end=9)
    taking = asyncio.ensure_future(rollouts.take(0))
    await settle()
    taking.cancel()
    await asyncio.wait([taking], timeout=20)
    assert play.ended == [0]
    await rollouts.close(20.0)
    assert sorted(play.ended) == [0, 1]


def slow_runner(seed: int, most: list[int]) -> SimpleNamespace:
    """Groups take their time, each its own; ``most`` gets the number of them in play at once."""
    draw, playing = random.Random(seed), [0]

    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Callable[..., None]) -> Group:
        playing[0] += 1
        most.append(playing[0])
        for _ in range(draw.randrange(40)):
            await asyncio.sleep(0)
        playing[0] -= 1
        return Group(group_id, task, [episode(group_id, i, task) for i in range(n)])

    return SimpleNamespace(run_group=run_group)


async def test_what_is_trained_on_does_not_depend_on_how_far_ahead_is_played(tmp_path: Any, monkeypatch: Any) -> None:
    batches = []
    for ahead in (0, 2):
        flags = ["--async-buffer-size", str(ahead), "--num-rollout", "4"]
        manager, most = made(tmp_path / str(ahead), monkeypatch, *flags, tasks=20), list[int]()
        manager.runner = slow_runner(ahead, most)
        ids = []
        for step in range(4):
            metrics, (batch,), *_ = await manager.generate(step)
            assert (await manager.peek(f"rollout {step}"))[0] == {"done": 0, "total": 6}
            ids.append((batch.trajectory_ids, metrics["rollout/staleness_max"]))
            await mark_trained(manager)
        assert max(most) == 3 * (ahead + 1)
        assert manager.account.counts["trained"] == 12 == manager.account.counts["issued"]
        batches.append(ids)
    assert batches[0] == batches[1]


AHEAD = ("--async-buffer-size", "2", "--num-rollout", "5")


def recording(runner: SimpleNamespace, finished: list[str]) -> SimpleNamespace:
    """The runner; ``finished`` gets the id of each group that it has played."""

    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Callable[..., None]) -> Group:
        group = await runner.run_group(task, n, group_id, on_trajectory=on_trajectory)
        finished.append(group_id)
        return group

    return SimpleNamespace(run_group=run_group)


@pytest.mark.parametrize("passes", range(0, 40, 8))
async def test_what_was_played_ahead_is_not_played_again_after_a_checkpoint(
    tmp_path: Any, monkeypatch: Any, passes: int
) -> None:
    """Wherever the rollouts ahead stand when it is made."""
    first, then, trained = list[str](), list[str](), list[str]()
    manager = made(tmp_path / "a", monkeypatch, *AHEAD, tasks=20)
    manager.runner = recording(slow_runner(0, []), first)
    await manager.generate(0)
    await mark_trained(manager)
    for _ in range(passes):
        await asyncio.sleep(0)
    there, folder = list(first), str(tmp_path / "checkpoint")
    state = json.loads(json.dumps(await manager.state(folder)))
    assert (state["buffer"]["trained"], len(state["buffer"]["open"])) == (3, 6)
    await manager.rollouts.close(20.0)
    again = made(tmp_path / "b", monkeypatch, *AHEAD, tasks=20)
    again.runner = recording(slow_runner(1, []), then)
    await again.load_state(state, folder)
    for step in range(1, 5):
        _, (batch,), *_ = await again.generate(step)
        assert sorted(set(batch.group_ids)) == [f"g{n:08d}" for n in range(3 * step, 3 * step + 3)]
        trained += sorted(set(batch.group_ids))
        await mark_trained(again)
        assert len(json.loads(json.dumps(await again.state(str(tmp_path / f"{step}"))))["buffer"]["open"]) <= 6
    assert sorted([*there, *then]) == [f"g{n:08d}" for n in range(15)], "each is generated once"
    assert again.account.counts["trained"] == 15 == len({*trained}) + 3
    assert len(again.buffer) == 0


async def test_a_batch_that_was_taken_and_not_trained_on_is_not_played_again(tmp_path: Any, monkeypatch: Any) -> None:
    """A run may be asked to end between the two, and saves then."""
    manager = made(tmp_path / "a", monkeypatch, tasks=20)
    manager.runner = slow_runner(0, [])
    await manager.generate(0)
    await mark_trained(manager)
    _, (batch,), *_ = await manager.generate(1)
    state = await manager.state(str(tmp_path / "1"))
    assert state["step"] == 1 and state["played"]["groups"] == 3
    again, played = made(tmp_path / "b", monkeypatch, tasks=20), list[str]()
    again.runner = recording(slow_runner(1, []), played)
    await again.load_state(state, str(tmp_path / "1"))
    metrics, (other,), *_ = await again.generate(1)
    assert other.trajectory_ids == batch.trajectory_ids and not played
    assert metrics["rollout/tokens"] > 0 == metrics["rollout/tokens_per_s"], "none was sampled by this run"


async def test_what_waits_outlives_several_checkpoints_and_is_trained_on_as_it_was_sampled(
    tmp_path: Any, monkeypatch: Any
) -> None:
    manager = made(tmp_path / "a", monkeypatch, *AHEAD, tasks=20)
    manager.runner = slow_runner(0, [])
    await manager.generate(0)
    await mark_trained(manager)
    await asyncio.gather(*manager.rollouts._playing.values())
    state = await manager.state(str(tmp_path / "1"))
    assert state["played"]["groups"] == 6
    again = made(tmp_path / "b", monkeypatch, *AHEAD, tasks=20)
    await again.load_state(state, str(tmp_path / "1"))
    assert (await again.state(str(tmp_path / "2"))) == state, "before anything was played"
    again = made(tmp_path / "c", monkeypatch, *AHEAD, "--max-staleness", "4", tasks=20)
    again.runner = slow_runner(0, [])
    await again.load_state(state, str(tmp_path / "2"))
    (_, (one,), *_), (_, (other,), *_) = await manager.generate(1), await again.generate(1)
    assert one.trajectory_ids == other.trajectory_ids and (one["versions"] == other["versions"]).all()
    assert (one.tokens == other.tokens).all() and (one["rollout"] == other["rollout"]).all()
    await again.rollouts.close(20.0)
    await manager.rollouts.close(20.0)


def test_a_run_that_goes_on_plays_as_it_did(tmp_path: Path) -> None:
    cfg = with_absolute_paths(load_config(["--env", "search", "--env-arg", "n=3", "--rollout-stop", "</x>"]))
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    again = with_absolute_paths(load_config(["--load", str(tmp_path), "--num-rollout", "30"]))
    assert json.loads(json.dumps(Buffer(cfg).save(tmp_path, 0, []))) == Buffer(again).save(tmp_path, 0, [])


async def test_what_was_played_otherwise_or_is_too_old_or_failed_is_played_again(
    tmp_path: Any, monkeypatch: Any, caplog: Any
) -> None:
    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Callable[..., None]) -> Group:
        reason = StopReason.ENV_ERROR if group_id == "g00000004" else StopReason.DONE
        return Group(group_id, task, [episode(group_id, i, task, reason) for i in range(n)])

    manager = made(tmp_path / "a", monkeypatch, *AHEAD, tasks=20)
    manager.runner = SimpleNamespace(run_group=run_group)
    await manager.generate(0)
    await mark_trained(manager)
    await asyncio.gather(*manager.rollouts._playing.values())
    state = await manager.state(str(tmp_path / "1"))
    assert state["played"]["groups"] == 5, "all but the one that failed"
    again = made(tmp_path / "b", monkeypatch, *AHEAD, "--rollout-temperature", "0.7", tasks=20)
    with caplog.at_level("WARNING"), monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("agentrl"), "propagate", True)
        await again.load_state(state, str(tmp_path / "1"))
    assert len(again.buffer) == 0 and "5 groups that were played ahead are played again" in caplog.text
    assert "--rollout-temperature" in caplog.text
    late = made(tmp_path / "c", monkeypatch, *AHEAD, "--max-staleness", "4", tasks=20)
    late.runner = slow_runner(0, [])
    await late.load_state(state, str(tmp_path / "1"))
    with pytest.raises(AgentRLError, match="sampled by weights that are more than --max-staleness 4 versions old"):
        await late.generate(6)
    assert late.account.counts["given_back"] == 6
    await late.rollouts.close(20.0)


async def test_groups_of_weights_that_are_too_old_are_played_again(tmp_path: Any, monkeypatch: Any) -> None:
    version, now = {"g00000001": 0}, 5
    manager = made(tmp_path, monkeypatch, "--async-buffer-size", "1", "--max-staleness", "1", tasks=20)

    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Callable[..., None]) -> Group:
        parts = [episode(group_id, i, task) for i in range(n)]
        for part in parts:
            part.segments[0].versions[1] = version.get(group_id, now)
        return Group(group_id, task, parts)

    manager.runner = SimpleNamespace(run_group=run_group)
    metrics, (batch,), *_ = await manager.generate(5)
    assert set(batch.group_ids) == {"g00000000", "g00000002"}
    assert (metrics["rollout/stale"], metrics["rollout/stale_tokens"]) == (2, 2)
    await mark_trained(manager)
    counts = manager.account.counts
    assert (counts["trained"], counts["given_back"]) == (2, 1)
    version.clear()
    now = 7
    await manager.generate(6)  # in play since before
    await mark_trained(manager)
    _, (batch,), *_ = await manager.generate(7)
    assert "g00000001" in batch.group_ids
    version.update(dict.fromkeys((f"g{n:08d}" for n in range(20)), 2))
    await manager.rollouts.close(20.0)
    with pytest.raises(AgentRLError, match=r"all 3 groups of rollout 8 .* more than --max-staleness 1 versions old"):
        await manager.generate(8)
    await manager.rollouts.close(20.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--async-buffer-size", "2", "--update-weights-interval", "2", "--max-staleness", "2"],
         "--max-staleness 2 would have rollouts played again: .* tokens become 3 versions old"),
        (["--async-buffer-size", "1", "--deterministic"],
         "--async-buffer-size 1 and --deterministic exclude each other"),
        (["--async-buffer-size", "-1"], "--async-buffer-size: expected"),
        (["--update-weights-interval", "0"], "--update-weights-interval: expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_together_is_refused_with_its_numbers(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["--env", "search", *flags])


def test_engines_get_new_weights_at_the_interval_and_before_an_evaluation(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[int] = []
    publish = Trainer.publish

    async def noted(self: Trainer, version: int) -> int:
        published.append(version)
        return await publish(self, version)

    monkeypatch.setattr(Trainer, "publish", noted)
    run = tmp_path / "run"
    flags = ["--num-rollout", "7", "--update-weights-interval", "3", "--eval-interval", "4", "--save-interval", "1"]
    train("--output-dir", str(run), *FLAGS, *flags)
    assert published == [0, 3, 4, 6, 7]
    check = [m["step"] for m in lines(run / "metrics.jsonl") if "eval/search/success" in m]
    assert check == [n for n in range(8) if n == 0 or due(n, 4, 7)]


def test_an_evaluation_goes_on_beside_the_next_step_and_ends_before_new_weights(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    evaluate, generate, update_weights = Rollout.evaluate, Rollout.generate, Rollout.update_weights
    next_is_trained = asyncio.Event()

    async def evaluated(self: Rollout, step: int, **kwargs: Any) -> Any:
        if 0 < step < 3:
            async with asyncio.timeout(30):
                await next_is_trained.wait()
            next_is_trained.clear()
        order.append(f"evaluated {step}")
        return await evaluate(self, step, **kwargs)

    async def generated(self: Rollout, step: int, **kwargs: Any) -> Any:
        order.append(f"rollout {step}")
        if step:
            next_is_trained.set()
        return await generate(self, step, **kwargs)

    async def updated(self: Rollout, snapshot: Any) -> Any:
        order.append(f"weights {snapshot}")
        return await update_weights(self, snapshot)

    monkeypatch.setattr(Rollout, "evaluate", evaluated)
    monkeypatch.setattr(Rollout, "generate", generated)
    monkeypatch.setattr(Rollout, "update_weights", updated)
    flags = ["--num-rollout", "3", "--eval-interval", "1", "--save-interval", "1", "--async-buffer-size", "1"]
    train("--output-dir", str(tmp_path / "run"), *FLAGS, *flags)
    assert order == [
        "evaluated 0", "weights 0", "rollout 0", "weights 1", "rollout 1", "evaluated 1", "weights 2", "rollout 2",
        "evaluated 2", "weights 3", "evaluated 3",
    ]  # fmt: skip
    check_run(tmp_path / "run", 3)


def test_an_evaluation_that_fails_beside_a_step_ends_the_run_with_its_error(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(self: Rollout, step: int, **kwargs: Any) -> Any:
        raise AgentRLError("no held-out episode can be played")

    monkeypatch.setattr(Rollout, "evaluate", fails)
    flags = ["--num-rollout", "3", "--eval-interval", "2", "--no-eval-before-train", "--async-buffer-size", "1"]
    with pytest.raises(AgentRLError, match="no held-out episode"):
        train("--output-dir", str(tmp_path / "run"), *FLAGS, *flags)


def test_a_difference_between_versions_is_not_called_a_disagreement() -> None:
    from agentrl.trainer.agreement import MEAN, AgreementWatch

    watch = AgreementWatch(1e-3)
    assert watch.warning(1, {MEAN: 0.5, "train/age_mean": 1.0, "train/logprob_abs_diff_max": 2.0}) is None
    assert watch.warning(2, {MEAN: 0.5, "train/age_mean": 0.0, "train/logprob_abs_diff_max": 2.0}) is not None


def test_a_batch_of_older_weights_is_trained_on_and_a_new_one_that_differs_is_not(
    make_trainer: Any,  # noqa: F811
) -> None:
    from agentrl.errors import DisagreementError
    from tests.trainer.samples import fresh, random_batch

    batch = fresh(random_batch(4))
    batch = batch.with_columns(advantage=batch.loss_mask.astype(np.float32))
    for age, refused in ((1, False), (0, True)):
        trainer = make_trainer(logprob_abs_diff_stop=1e-6, logprob_abs_diff_warn=1e-7)
        aged = batch.with_columns(age=np.where(batch.loss_mask == 1, age, 0).astype(np.int32))
        if refused:
            with pytest.raises(DisagreementError):
                trainer.update(aged)
        else:
            assert trainer.update(aged)[0]["train/age_mean"] == 1.0
