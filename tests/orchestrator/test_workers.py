"""Episodes in rollout workers: the same batches as in one process, whatever becomes of a worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, answer
from rollout_cases import TEMPLATES, make_tokenizer

from agentrl.algorithms import TrainBatch
from agentrl.config import load_config
from agentrl.config.schema import Config
from agentrl.engines.world import World
from agentrl.errors import AgentRLError, ConfigError, DataError
from agentrl.orchestrator import manager as manager_module
from agentrl.orchestrator import workers as module
from agentrl.orchestrator.cluster import Bundle, Cluster, bundles_of, rollout_workers
from agentrl.orchestrator.engine_service import EngineService, weight_sync
from agentrl.orchestrator.manager import RolloutManager
from agentrl.orchestrator.workers import (
    InProcess,
    RayWorker,
    RolloutWorker,
    Setting,
    WorkerLostError,
    WorkerPool,
    Workers,
    packed,
    packed_task,
    unpacked,
)
from agentrl.rollout.options import episode_limits, open_chat, rollout_params
from agentrl.rollout.policies.sglang import EngineClient
from agentrl.types import Group, Segment, Task, Trajectory

ENV = """
import os, signal
from pathlib import Path
import agentrl

class Handle:
    def __repr__(self):
        return "a handle"

class Count(agentrl.Env):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turns, self.options = 0, options or {}
        return f"count to {seed}", {}

    def step(self, action):
        self.turns += 1
        kill = self.options.get("dies")
        if kill and not Path(kill).exists():
            Path(kill).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.options.get("raises"):
            raise ValueError("the author's own mistake")
        info = {"handle": Handle()} if self.options.get("handle") else {}
        return "go on", float(len(action) % 7), self.turns == 3, False, info
"""


def says(body: dict[str, Any]) -> dict[str, Any]:
    """An engine whose words follow from the prompt and the request's seed alone."""
    drawn = np.random.default_rng([body["sampling_params"]["sampling_seed"], *body["input_ids"][-4:]])
    return answer(body, [*drawn.integers(10, 90, 6).tolist(), 2], version="3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (folder / "chat_template.jinja").write_text(TEMPLATES["keeping"])
    return str(folder)


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    (tmp_path / "counting.py").write_text(ENV)
    flags = ("--env", f"{tmp_path / 'counting.py'}:Count", "--deterministic", "--rollout-concurrency", "8")
    return load_config([*flags, "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"])


def setting_of(cfg: Config) -> Setting:
    return Setting("train", *cfg.env_spec(), rollout_params(cfg), episode_limits(cfg))


class Local:
    """A worker in this process, that can die."""

    def __init__(self, worker: RolloutWorker, log_file: Path) -> None:
        self.worker, self.log_file = worker, log_file
        self.gone = asyncio.Event()
        self.groups: list[str] = []
        self.ended: list[str] = []

    async def call(self, method: str, *args: Any) -> Any:
        if method == "play":
            self.groups.append(args[3])
        if method == "end":
            self.ended.append(args[0])
        work = asyncio.ensure_future(getattr(self.worker, method)(*args))
        death = asyncio.ensure_future(self.gone.wait())
        await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
        if not self.gone.is_set():
            death.cancel()
            return await work
        work.cancel()
        raise WorkerLostError("the worker died")

    async def lost(self) -> str:
        await self.gone.wait()
        return "the worker died"

    def kill(self) -> None:
        self.gone.set()


@asynccontextmanager
async def local_pool(
    cfg: Config, model: str, engine: FakeEngine, number: int, made: list[Local] | None = None
) -> AsyncIterator[WorkerPool]:
    made = [] if made is None else made

    def make(place: int, concurrency: int) -> Local:
        log_file = Path(model) / f"worker-{place}.log"
        log_file.write_text("the stack of a crash")
        made.append(Local(RolloutWorker(cfg, "w", model, engine.url, "key", concurrency, None), log_file))
        return made[-1]

    pool = WorkerPool(make, number, cfg.rollout_concurrency)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def play(workers: Workers, cfg: Config, tasks: list[Task]) -> list[Group]:
    runner = workers.open(setting_of(cfg))
    return await asyncio.wait_for(
        asyncio.gather(*(runner.run_group(task, 2, f"g{i:08d}") for i, task in enumerate(tasks))), 60
    )


def batch_of(groups: list[Group]) -> dict[str, Any]:
    batch = TrainBatch.from_groups(groups, {t.trajectory_id for group in groups for t in group.trajectories})
    told = {name: value.tolist() for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
    return {**told, "ids": batch.trajectory_ids, "groups": batch.group_ids}


TASKS = [Task(f"t{i}", seed=i) for i in range(6)]


async def test_a_batch_is_the_same_whatever_the_number_of_workers(cfg: Config, model: str) -> None:
    async with FakeEngine(says) as engine:
        here = InProcess(cfg, open_chat(cfg, model), EngineClient(engine.url, "key"), 8)
        expected = await play(here, cfg, TASKS)
        totals = here.metrics()
        await here.close()
        assert all(t.num_turns == 3 and t.outcome == "completed" for g in expected for t in g.trajectories)
        for number in (1, 2, 4):
            made: list[Local] = []
            async with local_pool(cfg, model, engine, number, made) as pool:
                groups = await play(pool, cfg, TASKS)
                assert batch_of(groups) == batch_of(expected), number
                assert [g.trajectories[0].messages for g in groups] == [g.trajectories[0].messages for g in expected]
                assert {len(worker.groups) for worker in made} <= {6 // number, -(-6 // number)}, "shared out evenly"
                told = pool.metrics()
                names = ("requests", "output_tokens", "prompt_tokens", "replayed")
                assert [told[name] for name in names] == [totals[name] for name in names]


async def test_a_manager_with_workers_makes_the_batch_of_one_without(
    cfg: Config, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=lambda batch: batch))

    def ray_worker(number: int, options: Any, patience: float, *args: Any, concurrency: int, log_file: Path) -> Local:
        assert (options, log_file.name) == ({"place": number}, f"rollout-worker-{number}.log")
        run, *where = args
        return Local(RolloutWorker(run, "w", *where, concurrency, None), log_file)

    monkeypatch.setattr(manager_module, "RayWorker", ray_worker)
    batches = []
    async with FakeEngine(says) as engine:
        for number in (0, 2):
            (tmp_path / str(number) / "logs").mkdir(parents=True)
            places = [{"place": i} for i in range(number)]
            manager = RolloutManager(cfg, str(tmp_path / str(number)), model, [{}], World(), (), places)
            manager.chat = open_chat(cfg, model)
            engines = SimpleNamespace(attach=lambda updater: None, broken=None)
            manager.engines = EngineService(engines, weight_sync(cfg, World(), None))
            manager.workers = await manager._start_workers(engine.url, "key")
            account, held_out = manager._open_data()
            manager._put_together(account, manager.workers.open(setting_of(cfg)), held_out)
            steps = []
            for step in range(2):
                metrics, (batch,), *_ = await manager.generate(step)
                counted, *_ = await manager.peek(f"rollout {step}")
                assert (counted["done"], metrics["rollout/replayed"], metrics["engine/failures"]) == (8, 0, 0)
                steps.append((batch.trajectory_ids, batch.group_ids, batch.tokens.tolist(), batch.loss_mask.tolist()))
                await manager.mark_trained({"advantage": np.zeros(batch.num_tokens, np.float32)})
            batches.append(steps)
            await manager.runner.close()
            await manager.workers.close()
    assert batches[0] == batches[1]


async def test_what_comes_back_is_the_runs_own_and_may_be_written_to(cfg: Config, model: str) -> None:
    seen: list[str] = []
    async with FakeEngine(says) as engine, local_pool(cfg, model, engine, 1) as pool:
        runner = pool.open(setting_of(cfg))
        group = await runner.run_group(TASKS[0], 2, "g", on_trajectory=lambda t: seen.append(t.trajectory_id))
        assert seen == ["g-000", "g-001"] and all(t.task is TASKS[0] for t in group.trajectories)
        assert all(s.tokens.flags.writeable for t in group.trajectories for s in t.segments)
        await runner.close()


async def test_groups_of_a_worker_that_dies_are_played_again_under_the_same_ids(cfg: Config, model: str) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def waits(body: dict[str, Any]) -> dict[str, Any]:
        started.set()
        await go_on.wait()
        return says(body)

    made: list[Local] = []
    async with FakeEngine(waits) as engine, local_pool(cfg, model, engine, 2, made) as pool:
        playing = asyncio.ensure_future(play(pool, cfg, TASKS))
        await asyncio.wait_for(started.wait(), 20)
        made[0].kill()
        go_on.set()
        groups = await playing
        here = InProcess(cfg, open_chat(cfg, model), EngineClient(engine.url, "key"), 8)
        assert batch_of(groups) == batch_of(await play(here, cfg, TASKS))
        await here.close()
        lost = len(made[0].groups)
        assert lost and sum(len(worker.groups) for worker in made) == 6 + lost
        assert pool.metrics()["replayed"] == lost
        while pool._places[0].worker is not made[-1]:
            await asyncio.sleep(0)
        assert len(made) == 3, "another has taken its place"


async def test_a_worker_that_dies_again_and_again_ends_the_run_with_its_last_words(
    cfg: Config, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeEngine("hang") as engine:
        made: list[Local] = []
        async with local_pool(cfg, model, engine, 1, made) as pool:
            playing = asyncio.ensure_future(play(pool, cfg, TASKS[:1]))
            for death in range(module.DEATHS):
                while len(made) <= death or not made[death].groups:
                    await asyncio.sleep(0)
                made[death].kill()
            with pytest.raises(AgentRLError, match=r"(?s)died.*worker-0.log:\nthe stack of a crash"):
                await playing


async def test_a_worker_that_cannot_start_again_ends_the_run(
    cfg: Config, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeEngine("hang") as engine:
        made: list[Local] = []
        async with local_pool(cfg, model, engine, 1, made) as pool:
            playing = asyncio.ensure_future(play(pool, cfg, TASKS[:1]))
            while not made[0].groups:
                await asyncio.sleep(0)

            async def start(self: Any) -> None:
                raise ConfigError("no such tokenizer")

            monkeypatch.setattr(RolloutWorker, "start", start)
            made[0].kill()
            with pytest.raises(AgentRLError, match="(?s)no such tokenizer.*death number 3 in a row"):
                await playing
        with pytest.raises(ConfigError, match="no such tokenizer"):  # the first start says it as it is
            async with local_pool(cfg, model, engine, 2):
                pass


async def test_a_group_that_is_given_up_is_ended_in_its_worker(cfg: Config, model: str) -> None:
    made: list[Local] = []
    async with FakeEngine("hang") as engine, local_pool(cfg, model, engine, 1, made) as pool:
        playing = asyncio.ensure_future(play(pool, cfg, TASKS[:1]))
        while not made[0].groups or not made[0].worker._playing:
            await asyncio.sleep(0)
        playing.cancel()
        await asyncio.wait([playing], timeout=20)
        assert made[0].ended == ["g00000000"] and not made[0].worker._playing
        assert pool._places[0].playing == 0


async def test_an_authors_error_crosses_with_its_line(cfg: Config, model: str) -> None:
    async with FakeEngine(says) as engine, local_pool(cfg, model, engine, 1) as pool:
        (group,) = await play(pool, cfg, [Task("bad", 1, options={"raises": True})])
        line = ENV.splitlines().index('            raise ValueError("the author\'s own mistake")') + 1
        assert f"ValueError: the author's own mistake (counting.py:{line} in step" in group.trajectories[0].error


async def test_an_error_of_the_runner_crosses_as_it_is(cfg: Config, model: str) -> None:
    cfg = cfg.replace(custom_generate_function_path="agentrl.nowhere:nothing")
    async with FakeEngine(says) as engine, local_pool(cfg, model, engine, 1) as pool:
        with pytest.raises(ConfigError, match="nowhere"):
            await play(pool, cfg, TASKS[:1])


async def test_what_cannot_leave_a_worker_is_named_and_told_as_it_is_stored(
    cfg: Config, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(says) as engine, local_pool(cfg, model, engine, 1) as pool:
        groups = await play(pool, cfg, [Task(f"t{i}", 1, options={"handle": True}) for i in range(2)])
    assert [t.info["handle"] for g in groups for t in g.trajectories] == ["a handle"] * 4
    (warning,) = [record.getMessage() for record in caplog.records if "stays in the worker" in record.getMessage()]
    assert warning.startswith("info['handle'] of episode g0") and "Handle" in warning


def test_plain_data_crosses_unchanged() -> None:
    segment = Segment(*(np.arange(3, dtype=d) for d in (np.int32, np.uint8, np.float32, np.int32)), prompt_length=1)
    info = {"turns": [{"n": 1, "x": None}], "array": np.eye(2), "number": np.float64(2.5), "nested": {"a": (1, b"2")}}
    one = Trajectory("e", "g", Task("t", 0), [segment], [{"role": "user", "content": "é"}], success=True, info=info)
    content, foreign = packed([one])
    (fields,) = unpacked(content, "it")
    back = Trajectory(task=one.task, **fields)
    assert not foreign and back.stop_reason is one.stop_reason and back.messages == one.messages
    assert back.info["turns"] == info["turns"] and back.info["nested"] == info["nested"]
    assert type(back.info["number"]) is np.float64 and np.array_equal(back.info["array"], np.eye(2))
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        ours, theirs = getattr(segment, name), getattr(back.segments[0], name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


def test_a_task_that_cannot_go_to_a_worker_is_named() -> None:
    said = r"task t/1: its option 'open' is a TextIOWrapper, which .*--rollout-num-workers 0"
    with open(os.devnull) as file, pytest.raises(DataError, match=said):
        packed_task(Task("t/1", 1, options={"index": 3, "open": file}))


@pytest.mark.parametrize(
    ("flags", "cores", "workers"),
    [
        ((), 64, 0),
        (("--rollout-concurrency", "2048"), 2, 0),
        (("--rollout-concurrency", "2048"), 16, 4),
        (("--rollout-concurrency", "512"), 64, 2),
        (("--rollout-num-workers", "1"), 2, 1),
    ],
)
def test_the_number_of_workers_follows_from_cores_and_episodes(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], cores: int, workers: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    cfg = load_config(["--env", "search", *flags])
    assert rollout_workers(cfg) == workers
    names = [bundle.name for bundle in bundles_of(cfg, World())]
    assert names == ["rank-0", "engine-0", "rollout-manager", *(f"rollout-worker-{i}" for i in range(workers))]


def test_more_workers_than_episodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="--rollout-num-workers 9 is more than the 8 episodes of --rollout-concurr"):
        load_config(["--env", "search", "--rollout-num-workers", "9", "--rollout-concurrency", "8"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_real_workers_give_the_same_batch_and_survive_a_kill_and_a_stop(
    cfg: Config, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.orchestrator.watch.PULSE_S", 0.2)
    logs = tmp_path / "logs"
    logs.mkdir()

    def make(options: list[dict[str, Any]], url: str) -> Callable[[int, int], RayWorker]:
        return lambda number, concurrency: RayWorker(
            number, options[number], 6.0, *(cfg, model, url, "key"),
            concurrency=concurrency, log_file=logs / f"rollout-worker-{number}.log",
        )  # fmt: skip

    async def main(cluster: Cluster) -> None:
        async with FakeEngine(says) as engine:
            here = InProcess(cfg, open_chat(cfg, model), EngineClient(engine.url, "key"), 8)
            expected = batch_of(await play(here, cfg, TASKS))
            await here.close()
            pool = WorkerPool(make([cluster.options(i) for i in range(2)], engine.url), 2, 8)
            await pool.start()
            try:
                assert batch_of(await play(pool, cfg, TASKS)) == expected
                deadly = [
                    Task(task.task_id, task.seed, options={"dies": str(tmp_path / "died")} if i == 1 else {})
                    for i, task in enumerate(TASKS)
                ]
                assert batch_of(await play(pool, cfg, deadly)) == expected
                assert pool.metrics()["replayed"] >= 1
                pulse = await pool._places[1].worker.call("pulse", 0.0, 60.0) if pool._places[1].worker else None
                if pulse is not None:
                    os.kill(pulse.pid, signal.SIGSTOP)
                assert batch_of(await play(pool, cfg, TASKS)) == expected
            finally:
                await pool.close()

    with (
        tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temp,  # Ray's sockets lie in it: short
        Cluster(lambda world: [Bundle("a"), Bundle("b")], namespace="w", temp_dir=temp) as cluster,
    ):
        asyncio.run(asyncio.wait_for(main(cluster), 330))
    assert "plays 4 episodes at once" in (logs / "rollout-worker-0.log").read_text()
