"""The rollout manager: engines, tasks and episodes of a run, as one Ray actor.

It joins its parts, none of which knows the driver: the dispatcher hands out tasks and has them played, the sink makes
a batch of the groups that come back, the evaluator plays the held-out sets, the engine service keeps engines alive and
at the trainer's weights. The trainer's ranks never see an engine; the driver never sees a token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agentrl.algorithms import load_algorithm
from agentrl.concurrency.together import together
from agentrl.config.schema import AlgorithmOptions, Config
from agentrl.data.account import PendingGroup, TaskAccount, load_source
from agentrl.data.curriculum import Curriculum, load_curriculum
from agentrl.data.deaths import FailedTasks
from agentrl.data.experience import Experience
from agentrl.data.filters import load_filter
from agentrl.data.store import TrajectoryStore
from agentrl.engines.options import engine_spec
from agentrl.engines.world import World
from agentrl.envs.registry import make_env
from agentrl.errors import DataError
from agentrl.evaluation.heldout import HeldOutSet, held_out_environments, held_out_sets
from agentrl.orchestrator.buffer import Buffer
from agentrl.orchestrator.cluster import on_gpus
from agentrl.orchestrator.dispatcher import Ahead, Carried, Dispatcher
from agentrl.orchestrator.engine_service import EPISODES_END_S, EngineService, weight_sync
from agentrl.orchestrator.evaluator import Evaluator
from agentrl.orchestrator.metrics import apart, pace, rollout_metrics
from agentrl.orchestrator.notices import lost_episodes
from agentrl.orchestrator.sink import Rollout, Sink
from agentrl.orchestrator.tally import Tally, name_of_rollout
from agentrl.orchestrator.workers import InProcess, RayWorker, Setting, WorkerPool, Workers, prepare
from agentrl.processes.network import LOOPBACK, node_address
from agentrl.processes.pulse import WORK, Pulse
from agentrl.processes.signals import write_log_to
from agentrl.rollout.options import episode_limits, eval_params, open_chat, rollout_params, template_notes
from agentrl.rollout.policies.sglang import EngineClient
from agentrl.rollout.worker import Runner
from agentrl.tasks.source import DataSource, TaskSource
from agentrl.types import Group, Trajectory
from agentrl.weights.snapshot import Snapshot

if TYPE_CHECKING:
    from agentrl.rollout.template.chat import ChatTemplate

log = logging.getLogger(__name__)


class Generated(NamedTuple):
    """A rollout as the driver sees it."""

    metrics: dict[str, float]
    batch: list[Any]
    """The reference of the :class:`~agentrl.algorithms.TrainBatch` in Ray's store; in a list, so that Ray passes the
    reference on and not the batch."""
    lost: str | None = None
    """What was lost, in a sentence."""
    notes: str | None = None
    """Which tasks were dropped, and the like, in others."""


def open_template(cfg: Config, model_dir: str) -> tuple[ChatTemplate, list[str]]:
    """The chat template, tried out with the environment and those of the held-out sets, and what is to be said of it.
    Raises ConfigError: calls cannot be read as it writes them, or there is no tokenizer."""
    chat = open_chat(cfg, model_dir)
    own = cfg.env_spec()
    others = held_out_environments(cfg) if cfg.eval_interval else []
    acts_in = [own, *(other for other in others if other != own)]
    return chat, template_notes(cfg, chat, acts_in, training=True)


class RolloutManager:
    """One per run. All methods are coroutines of one event loop.

    Args:
        run_dir: folder of the run; trajectories and logs go below it.
        model_dir: HF folder whose tokenizer and architecture the engines serve.
        engine_options: Ray options of each engine's actor, one an engine.
        ranks: handles of the trainer's ranks, of which the first sends weights.
        worker_options: Ray options of each rollout worker's actor; none: episodes are played in this process.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: str,
        model_dir: str,
        engine_options: list[dict[str, Any]],
        world: World,
        ranks: Sequence[Any] = (),
        worker_options: Sequence[Mapping[str, Any]] = (),
    ):
        self.cfg = cfg
        self.run_dir = Path(run_dir)
        self.model_dir = model_dir
        logs = self.run_dir / "logs"
        write_log_to(logs / "rollout-manager.log", cfg.log_level, who="rollout", warnings_to=logs / "driver.log")
        self.store = TrajectoryStore(self.run_dir / "trajectories")
        self.tally = Tally()
        self.algorithm = load_algorithm(cfg.section(AlgorithmOptions))
        self._engine_options, self._world, self._ranks = engine_options, world, ranks
        self._worker_options = worker_options

    async def start(self) -> list[str]:
        """Start engines and router, and open everything an episode needs. Gives what a person should know of the
        model's chat template. Raises the errors of each."""
        from agentrl.engines.pool import EnginePool

        cfg, world = self.cfg, self._world
        host = LOOPBACK if world.is_one_machine else node_address()
        self._marking = asyncio.create_task(WORK.marked_by_this_loop("its event loop"))
        if world.has_gpu and world.is_shared(cfg):
            gpus = await asyncio.gather(*(rank.gpu.remote() for rank in self._ranks))
            self._engine_options = on_gpus(gpus, self._engine_options, cfg.rollout_num_gpus_per_engine)
        pool = EnginePool(
            engine_spec(cfg, self.model_dir, world),
            len(self._engine_options),
            log_dir=self.run_dir / "logs",
            policy=cfg.router_policy,
            host=host,
            # Its clients are rollout workers, which may be on other machines, or else in this process.
            router_host=host if self._worker_options else LOOPBACK,
            start_timeout=cfg.engine_timeout,
            health_interval=cfg.rollout_health_check_interval,
            health_timeout=cfg.rollout_health_check_timeout,
            min_engines=cfg.rollout_min_engines,
            ray_options=self._engine_options,
        )
        self.engines = EngineService(pool, weight_sync(cfg, world, next(iter(self._ranks), None)))
        starting = asyncio.create_task(pool.start())
        try:
            self.chat, notes = await asyncio.to_thread(open_template, cfg, self.model_dir)
            account, held_out = await asyncio.to_thread(self._open_data)
        except BaseException:
            # Stopped first: engines may take minutes to come up for a run that cannot begin.
            await asyncio.gather(pool.stop(), starting, return_exceptions=True)
            raise
        await starting
        self.workers = await self._start_workers(pool.router_url, pool.router_key)
        runner = self.workers.open(Setting("train", *cfg.env_spec(), rollout_params(cfg), episode_limits(cfg)))
        self._put_together(account, runner, held_out)
        return notes

    async def _start_workers(self, address: str, key: str) -> Workers:
        """What plays episodes, by engines behind the router at ``address``, which keeps it as long as the run."""
        cfg, options = self.cfg, self._worker_options
        if not options:
            return InProcess(cfg, self.chat, EngineClient(address, key), cfg.rollout_concurrency)

        def make(number: int, concurrency: int) -> RayWorker:
            return RayWorker(
                number,
                options[number],
                2 * cfg.rollout_health_check_timeout,
                *(cfg, self.model_dir, address, key),
                concurrency=concurrency,
                log_file=self.run_dir / "logs" / f"rollout-worker-{number}.log",
            )

        workers = WorkerPool(make, len(options), cfg.rollout_concurrency)
        await workers.start()
        return workers

    def _put_together(self, account: TaskAccount, runner: Runner, held_out: list[HeldOutSet]) -> None:
        cfg, failed = self.cfg, FailedTasks(self.run_dir / "failed_tasks.json")
        self.account, self.runner = account, runner
        at_once, keep = cfg.over_sampling_batch_size or cfg.rollout_batch_size, cfg.dynamic_sampling_filter_path
        self.dispatcher = Dispatcher(account, failed=failed)
        self.sink = Sink(
            account,
            self.algorithm,
            failed=failed,
            store=self.store,
            size=cfg.rollout_batch_size,
            keep=load_filter(keep) if keep else None,
            at_once=cfg.rollout_batch_size if cfg.partial_rollout else at_once,
            experience=Experience(cfg) if cfg.replay_share else None,
            max_staleness=cfg.max_staleness,
        )
        self.buffer = Buffer(cfg)
        self._ahead: dict[int, Rollout] = {}
        self.carried, self._spare = Carried(self._play), at_once - cfg.rollout_batch_size
        self._in_turn = asyncio.Lock()
        collect = self._collect_in_turn if cfg.partial_rollout else self._collect
        self.rollouts = Ahead(collect, ahead=cfg.async_buffer_size, end=cfg.num_rollout)
        self._since: tuple[float, Mapping[str, float]] = time.monotonic(), Counter()
        self.evaluator = Evaluator(
            held_out,
            cfg.n_samples_per_eval_prompt,
            open_runner=lambda s: self.workers.open(
                Setting(f"eval-{s.name}", s.spec, s.kwargs, eval_params(cfg), episode_limits(cfg.held_out))
            ),
            store=self.store,
            tally=self.tally,
            unless_broken=self.engines.unless_broken,
        )

    async def _play(self, pending: PendingGroup, name: str | None = None) -> Group:
        """Of the rollout of this name; none where it is known only when the group is taken."""
        count = None if name is None else partial(self.tally.add, name)
        if (group := self.buffer.take(pending)) is not None:
            if count is not None:
                for trajectory in group.trajectories:
                    count(trajectory)
            return group
        return await self.runner.run_group(
            pending.task, self.cfg.n_samples_per_prompt, pending.group_id, on_trajectory=count
        )

    def _open_data(self) -> tuple[TaskAccount, list[HeldOutSet]]:
        cfg = self.cfg
        spec, kwargs = cfg.env_spec()
        if not self._worker_options:
            prepare(cfg)
        source: DataSource
        if cfg.data_source_path:
            source = load_source(cfg.data_source_path, cfg)
        else:
            env = make_env(spec, kwargs, sandbox=cfg.sandbox)
            source = TaskSource.of_env(spec, env, seed=cfg.seed)
            env.close()
        if cfg.curriculum_path:
            source = Curriculum(cfg, source, load_curriculum(cfg.curriculum_path))
        return TaskAccount(source), held_out_sets(cfg) if cfg.eval_interval else []

    async def generate(self, step: int) -> Generated | None:
        """Play one batch of groups; None when the data source has no more tasks.
        Raises AgentRLError: no episode of the batch can be trained on; the text carries the last error."""
        import ray

        self.tally.end(name_of_rollout(step - 1))
        began = time.monotonic()
        if not (self.cfg.async_buffer_size or self.cfg.partial_rollout):
            self._since = began, self.workers.metrics()
        rollout = await self.engines.unless_broken(asyncio.ensure_future(self.rollouts.take(step)))
        collected = await self.sink.take(rollout)
        del self._ahead[step]
        if collected is None:
            return None
        # Beside others, a rollout takes as long as there is between two of them.
        (since, before), now, after = self._since, time.monotonic(), self.workers.metrics()
        self._since, seconds = (now, after), min(rollout.seconds, now - since)
        groups = [*collected.lost, *collected.filtered, *collected.groups]
        metrics = rollout_metrics(groups, step if self.cfg.trains else 0)
        metrics |= pace((group for group in groups if group.group_id not in self.buffer.taken), seconds)
        metrics |= apart("rollout/stale", collected.stale)
        metrics |= apart("rollout/carried", [g for g in collected.groups if g.group_id in rollout.carried])
        if self.sink.keep is not None:
            metrics["rollout/filtered"] = float(len(collected.filtered))
        if self.sink.experience is not None:
            metrics["rollout/trained_again"] = float(len(collected.again))
        metrics |= {"time/rollout_wait": now - began, "data/rollouts_ahead": float(self.rollouts.ready)}
        metrics["rollout/replayed"] = after["replayed"] - before["replayed"]
        metrics |= {f"engine/{k}": after[k] - before[k] for k in ("retries", "continuations", "failures")}
        waited = max(1, len(self._worker_options)) * max(now - since, 1e-9)
        metrics["engine/idle"] = max(0.0, 1 - (after["busy_seconds"] - before["busy_seconds"]) / waited)
        prompt = after["prompt_tokens"] - before["prompt_tokens"]
        metrics["engine/cached_fraction"] = (after["cached_tokens"] - before["cached_tokens"]) / max(prompt, 1)
        metrics |= {f"data/{name}": float(count) for name, count in self.account.counts.items()}
        gave, lost = len(collected.groups), len(collected.lost)
        log.info("rollout %d ended: %d groups for the batch, %d lost, %.1f s", step, gave, lost, seconds)
        return Generated(metrics, [ray.put(collected.batch)], lost_episodes(groups), collected.notes)

    async def _collect(self, step: int) -> Rollout:
        """Hand out tasks, and others for those that die, until there is a rollout or there are no more."""
        rollout, began = self.sink.begin(step), time.monotonic()
        self._ahead[step] = rollout
        play = self._play_first if self.cfg.partial_rollout else self._play_all
        log.info("rollout %d begins", step)
        done = False
        while not done:
            wanted, suspects = rollout.at_once, max(1, rollout.at_once // 2)
            while await play(rollout, wanted, suspects):
                wanted, suspects = await rollout.wanted(), 0
            done = await rollout.settle()
        rollout.seconds = time.monotonic() - began
        return rollout

    async def _collect_in_turn(self, step: int) -> Rollout:
        """One rollout after the other, since each takes what has finished."""
        async with self._in_turn:
            return await self._collect(step)

    async def _play_all(self, rollout: Rollout, wanted: int, suspects: int) -> bool:
        """So many groups more, to their end. Whether there were any."""
        drawn, name = self.dispatcher.draw(wanted, suspects=suspects), name_of_rollout(rollout.step)
        if not drawn:
            return False
        rollout.expect(drawn)
        self.tally.begin(name, len(drawn) * self.cfg.n_samples_per_prompt)

        async def play(pending: PendingGroup) -> None:
            rollout.add(await self._play(pending, name))

        await together(map(play, drawn))
        return True

    async def _play_first(self, rollout: Rollout, wanted: int, suspects: int) -> bool:
        """So many groups more, those that finish first, while others go on (``--partial-rollout``). Whether there were
        any."""
        if not wanted:
            return False
        name, limit = name_of_rollout(rollout.step), self.cfg.max_staleness
        self.tally.begin(name, wanted * self.cfg.n_samples_per_prompt)
        missing = wanted + self._spare - len(self.carried)
        self.carried.begin(self.dispatcher.draw(missing, suspects=suspects), rollout.step)
        # What was begun for this rollout or before it would be too old for the next one.
        due = -math.inf if limit is None else rollout.step + self.cfg.oldest_version - limit
        taken = await self.carried.take(wanted, due=due)
        rollout.expect(group for group, _ in taken)
        for group, begun in taken:
            rollout.add(group)
            if begun < rollout.step:
                rollout.carried.add(group.group_id)
            for trajectory in group.trajectories:
                self.tally.add(name, trajectory)
        return bool(taken)

    async def peek(self, what: str) -> tuple[dict[str, int], Trajectory | None, str]:
        """How far the rollout or the evaluation of this name is; once, the first episode of the run; what server of
        tools is away."""
        return *self.tally.peek(what), await self.workers.what_is_away()

    async def pulse(self, seconds: float, stall: float) -> Pulse:
        """After ``seconds``, how this process is, from another event loop; see :mod:`agentrl.orchestrator.watch`."""
        await asyncio.sleep(seconds)
        return WORK.pulse(stall)

    async def mark_trained(self, columns: dict[str, np.ndarray]) -> None:
        """The optimizer has taken the last batch, with these columns."""
        await self.sink.mark_trained(columns, tokens=bool(self.cfg.store_train_tokens))

    async def evaluate(self, step: int) -> dict[str, dict[str, Any]]:
        """Play all held-out sets; summaries by set name."""
        return await self.evaluator.evaluate(step)

    async def update_weights(self, snapshot: Snapshot) -> dict[str, float]:
        """Bring every engine to published weights; those that fail are replaced."""
        return await self.engines.update_weights(snapshot)

    async def release_memory(self) -> None:
        """See :meth:`EngineService.release_memory`."""
        await self.engines.release_memory()

    async def state(self, folder: str) -> dict[str, Any]:
        """JSON-ready state for a checkpoint: position in the data, account of every task. What was played ahead is
        written into ``folder``. Raises StorageError."""
        account = self.account.state_dict()
        ahead = [group for rollout in self._ahead.values() for group in rollout.played]
        kept, step = self.buffer.to_save([*ahead, *self.carried.finished, *self.sink.untrained]), self.sink.trained
        played = await asyncio.to_thread(self.buffer.save, Path(folder), step, kept)
        return {"buffer": account, "played": played, "step": step}

    async def load_state(self, state: dict[str, Any], folder: str) -> None:
        """Go on from a checkpoint's state. Raises DataError."""
        if "buffer" not in state:
            raise DataError(
                "the checkpoint is of a run with --load-debug-rollout-data, which has no place in the tasks. Start a "
                "new run from its model: --hf-checkpoint with the checkpoint's folder hf."
            )
        self.account.load_state_dict(state["buffer"])
        await asyncio.to_thread(self.buffer.load, Path(folder), state.get("played", {}))
        self.sink.trained = int(state.get("step", 0))
        if self.sink.experience is not None:
            await asyncio.to_thread(self.sink.experience.load, self.store, self.sink.trained)
        if self.buffer:
            log.info("%d groups were played before the checkpoint and wait to be trained on", len(self.buffer))

    async def close(self) -> None:
        """End episodes, engines and router. Episodes first: their environments are closed, and none asks an engine."""
        if not hasattr(self, "engines"):
            return
        await self.engines.end_episodes()
        if hasattr(self, "runner"):
            await self.rollouts.close(EPISODES_END_S)
            await self.carried.close(EPISODES_END_S)
            await self.runner.close()
            await self.workers.close()
        await self.engines.pool.stop()
