"""The rollout manager: engines, tasks and episodes of a run, as one Ray actor.

It hands out tasks, plays their groups, turns them into a batch, plays the held-out sets, keeps the engines
alive and brings them to the trainer's weights. The trainer's ranks never see an engine; the driver never
sees a token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from agentrl.algorithms import TrainBatch, load_algorithm
from agentrl.config.schema import AlgorithmOptions, Config
from agentrl.data.account import DataBuffer, Draw, load_source
from agentrl.data.deaths import TASK_DEATHS, FailedTasks, engines_failed, failures, lived, never_fits
from agentrl.data.store import TrajectoryStore
from agentrl.envs.tool_env import check_machine
from agentrl.errors import AgentRLError, EngineError, EnvError
from agentrl.evaluation.heldout import HeldOutSet, held_out_environments, held_out_sets, run_set
from agentrl.orchestrator.metrics import rollout_metrics
from agentrl.orchestrator.notices import lost_episodes
from agentrl.processes.signals import write_log_to
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.policies.sglang import EngineClient
from agentrl.rollout.setup import (
    engine_spec,
    episode_limits,
    eval_params,
    has_gpu,
    make_env,
    open_chat,
    rollout_params,
    template_notes,
)
from agentrl.rollout.worker import EpisodeRunner
from agentrl.tasks.source import TaskSource
from agentrl.types import Group, Outcome, StopReason, Trajectory

log = logging.getLogger(__name__)

EPISODES_END_S = 12.0
"""Time for the environments of cancelled episodes to close, each of which has 10 s."""
FRUITLESS_ROLLOUTS = 3
"""Rollouts' tasks in a row of which none can be played that end a run: the environment is broken, whatever the task."""


class RolloutManager:
    """One per run. All methods are coroutines of one event loop.

    Args:
        cfg: the run's configuration.
        run_dir: folder of the run; trajectories and logs go below it.
        model_dir: HF folder whose tokenizer and architecture the engines serve.
        engine_options: Ray options of each engine's actor, one an engine.
    """

    def __init__(self, cfg: Config, run_dir: str, model_dir: str, engine_options: list[dict[str, Any]]):
        self.cfg = cfg
        self.run_dir = Path(run_dir)
        self.model_dir = model_dir
        self.engine_options = engine_options
        logs = self.run_dir / "logs"
        write_log_to(logs / "rollout-manager.log", cfg.log_level, who="rollout", warnings_to=logs / "driver.log")
        self.store = TrajectoryStore(self.run_dir / "trajectories")
        self.version = -1
        self._count(0)
        self._fresh: deque[Trajectory] = deque(maxlen=1)
        self._want_example = True
        self.algorithm = load_algorithm(cfg.section(AlgorithmOptions))
        self._last: tuple[int, list[Trajectory], TrainBatch] | None = None
        self._last_groups: list[str] = []
        self._last_dropped: list[str] = []
        self.failed = FailedTasks(self.run_dir / "failed_tasks.json")
        self._put_off: list[Draw] = []
        self._has_lived = False
        self._playing: asyncio.Future[Any] | None = None
        self._ending = False

    async def start(self) -> list[str]:
        """Start engines and router, and open everything an episode needs. Raises the errors of each.

        Returns:
            What a person should know of the model's chat template.
        """
        from agentrl.engines.pool import EnginePool

        cfg = self.cfg
        self.pool = EnginePool(
            engine_spec(cfg, self.model_dir),
            len(self.engine_options),
            log_dir=self.run_dir / "logs",
            policy=cfg.router_policy,
            host=cfg.host,
            start_timeout=cfg.engine_timeout,
            health_interval=cfg.rollout_health_check_interval,
            health_timeout=cfg.rollout_health_check_timeout,
            ray_options=self.engine_options,
        )
        starting = asyncio.create_task(self.pool.start())
        try:
            notes = await asyncio.to_thread(self._open_template)
            await asyncio.to_thread(self._open_data)
        except BaseException:
            # Stopped first: engines may take minutes to come up for a run that cannot begin.
            await asyncio.gather(self.pool.stop(), starting, return_exceptions=True)
            raise
        await starting
        self.client = EngineClient(self.pool.router_url, self.pool.router_key)
        self.runner = self._runner(*cfg.env_spec(), rollout_params(cfg), episode_limits(cfg))
        return notes

    def _open_template(self) -> list[str]:
        """The chat template, tried out with the environment and those of the held-out sets."""
        cfg = self.cfg
        self.chat = open_chat(cfg, self.model_dir)
        own = cfg.env_spec()
        others = held_out_environments(cfg) if cfg.eval_interval else []
        acts_in = [own, *(other for other in others if other != own)]
        return template_notes(cfg, self.chat, acts_in, training=True)

    def _open_data(self) -> None:
        cfg = self.cfg
        spec, kwargs = cfg.env_spec()
        if cfg.data_source_path:
            source = load_source(cfg.data_source_path, cfg)
        else:
            env = make_env(spec, kwargs, sandbox=cfg.sandbox)
            check_machine(env)  # here, for what the first check takes would hold up the episodes
            source = TaskSource.of_env(spec, env, seed=cfg.seed)
            env.close()
        self.buffer = DataBuffer(source)
        self.held_out: list[HeldOutSet] = held_out_sets(cfg) if cfg.eval_interval else []

    def _runner(self, spec: str, kwargs: dict[str, Any], params: Any, limits: EpisodeLimits) -> EpisodeRunner:
        return EpisodeRunner(
            lambda: make_env(spec, kwargs, tool_timeout=self.cfg.tool_timeout, sandbox=self.cfg.sandbox),
            self.client,
            self.chat,
            params,
            limits,
            self.cfg.rollout_concurrency,
            generate=self.cfg.custom_generate_function_path,
        )

    # -- rollouts -------------------------------------------------------------------------------------

    async def generate(self, step: int) -> tuple[dict[str, float], list[Any], str | None, str | None] | None:
        """Play one batch of groups.

        Returns:
            Metrics; a list with the reference of the :class:`TrainBatch` in Ray's store (in a list, so
            that Ray passes the reference on and not the batch); what was lost, in a sentence; which tasks were
            dropped, in another. None when the data source has no more tasks.

        Raises:
            AgentRLError: no episode of the batch can be trained on; the text carries the last error.
        """
        began, before = time.monotonic(), self.client.metrics()
        groups, lost, dropped = await self._play(step)
        if not groups:
            if lost:
                await asyncio.to_thread(self.store.write, step, [t for group in lost for t in group.trajectories])
            return None
        seconds = time.monotonic() - began
        chosen = self.algorithm.select(groups)
        compared = {g.group_id for g in groups if any(t.trajectory_id in chosen for t in g.trajectories)}
        self._last_groups = [group.group_id for group in groups if group.group_id in compared]
        self._last_dropped = [group.group_id for group in groups if group.group_id not in compared]
        episodes = [t for group in [*lost, *groups] for t in group.trajectories]
        await asyncio.to_thread(self.store.write, step, episodes)
        self._refuse_if_incomparable(groups, chosen)
        batch = TrainBatch.from_groups(groups, chosen)
        self._last = step, episodes, batch
        metrics = rollout_metrics([*lost, *groups], seconds, self.version)
        after = self.client.metrics()
        metrics |= {f"engine/{k}": after[k] - before[k] for k in ("retries", "continuations", "failures")}
        prompt = after["prompt_tokens"] - before["prompt_tokens"]
        metrics["engine/cached_fraction"] = (after["cached_tokens"] - before["cached_tokens"]) / max(prompt, 1)
        metrics |= {f"data/{name}": float(count) for name, count in self.buffer.counts.items()}
        # From here the trainer's weights move on: a replaced engine must wait for the next sync.
        await self.pool.hold()
        import ray

        return metrics, [ray.put(batch)], lost_episodes([*lost, *groups]), dropped

    async def _play(self, step: int) -> tuple[list[Group], list[Group], str | None]:
        """A rollout's groups to train on, those that gave nothing, and a sentence on tasks that are dropped.

        A task dies when more than half of its episodes fail for reasons that are not the model's. Others take its place
        until half of the rollout lives; the dead are played again in the next rollout, and dropped at their
        third death. A task whose first prompt can never fit is dropped at once.

        Raises:
            EnvError: none of so many rollouts' tasks in a row lived. No death is counted then.
        """
        size, samples = self.cfg.rollout_batch_size, self.cfg.n_samples_per_prompt
        living: list[Group] = []
        dead: list[Group] = []
        never: list[Group] = []
        fruitless, draws = 0, self._draw(size, suspects=max(1, size // 2))
        while draws:
            self._count(len(draws) * samples)
            playing = (
                self.runner.run_group(d.task, samples, d.group_id, on_trajectory=self._on_episode) for d in draws
            )
            groups = await self._unless_broken(asyncio.gather(*playing))
            alive = [group for group in groups if lived(group)]
            self.buffer.add_samples(alive)
            living += alive
            never += [group for group in groups if never_fits(group)]
            dead += [group for group in groups if not lived(group) and not never_fits(group)]
            fruitless = 0 if alive else fruitless + 1
            by_engines = not alive and all(map(engines_failed, groups))  # then others would wait in vain, too
            if fruitless == FRUITLESS_ROLLOUTS or by_engines:
                await self._refuse_dead(step, [*never, *dead], fruitless)
            if 2 * len(living) >= size:
                break
            draws = self._draw(size - len(living))
        if living:
            self._has_lived = True
            self.failed.forget(living)
        elif dead and not self._has_lived:  # all the tasks there are
            await self._refuse_dead(step, [*never, *dead], fruitless)
        dropped = self._bury(never, dead)
        if dead and not living:  # the data source has ended: the dead are all that is left
            played, lost, more = await self._play(step)
            return played, [*never, *dead, *lost], " ".join(filter(None, (dropped, more))) or None
        return self.buffer.take(len(living)), [*never, *dead], dropped

    def _draw(self, number: int, *, suspects: int = 0) -> list[Draw]:
        """The next draws, of which so many may be tasks that failed before: others show whether it is their doing."""
        draws: list[Draw] = []
        while (
            number > (there := len(draws) + min(suspects, len(self._put_off)))
            and (new := self.buffer.get_samples(number - there))
        ):  # fmt: skip
            for draw in new:
                known = draw.task.task_id in self.failed and len(self._put_off) < len(self.failed)
                (self._put_off if known else draws).append(draw)
        if len(draws) < number:
            suspects = number - len(draws) if not draws else min(suspects, number - len(draws))
            draws += self._put_off[:suspects]
            del self._put_off[:suspects]
        return draws

    def _bury(self, never: list[Group], dead: list[Group]) -> str | None:
        """Give dead tasks back, or drop them for good; a sentence that names the latter."""
        gone = {group.task.task_id: group.trajectories[0].error for group in never}
        self.buffer.drop([group.group_id for group in never])
        for group in dead:
            # Of its own, unless the engines failed it: that says nothing of the task.
            if not engines_failed(group) and self.failed.died(group) >= TASK_DEATHS:
                gone[group.task.task_id] = failures([group])[0][-1].error
                self.buffer.drop([group.group_id])
            else:
                self.buffer.give_back([group.group_id])
        if dead:
            self.failed.save()
        for task_id, error in gone.items():
            log.warning("task %s is dropped: %s", task_id, error)
        if not gone:
            return None
        error = list(gone.values())[-1]
        return f"dropped, since they cannot be played: {', '.join(gone)}; the last error: {error}"

    async def _refuse_dead(self, step: int, groups: list[Group], rollouts: int) -> NoReturn:
        """End the run: nothing lived. The next start plays other tasks first."""
        failed, total = failures(groups)
        await asyncio.to_thread(self.store.write, step, [t for group in groups for t in group.trajectories])
        self.failed.suspect(group for group in groups if not never_fits(group))
        raise EnvError(
            f"none of the {len(groups)} tasks of {rollouts} rollouts in a row could be played: {len(failed)} of "
            f"{total} episodes failed for reasons that are not the model's ({failed[-1].stop_reason}); the last error: "
            f"{failed[-1].error}. Nothing was trained on them. All of them are in {self.store.folder}."
        )

    async def _unless_broken(self, episodes: asyncio.Future[Any]) -> Any:
        """The result of playing episodes, unless no engine is left: then they would wait out every deadline."""
        self._playing = episodes
        try:
            while not episodes.done():
                await asyncio.wait([episodes], timeout=1.0)
                if self.pool.broken and not episodes.done():
                    raise EngineError(self.pool.broken)
        finally:
            episodes.cancel()
        try:
            return await episodes
        except asyncio.CancelledError:
            if self._ending:
                raise EngineError("the episodes were cancelled: the run is ending") from None
            raise

    def _refuse_if_incomparable(self, groups: list[Group], chosen: set[str]) -> None:
        failed, total = failures(groups)
        for trajectory in failed[:3]:
            log.warning("episode %s: %s: %s", trajectory.episode_id, trajectory.stop_reason, trajectory.error)
        waited = [t for group in groups for t in group.trajectories if t.stop_reason is StopReason.ENGINE_TIMEOUT]
        late = f", {len(waited)} ran out of time ({waited[-1].error})" if waited else ""
        if waited:
            log.warning("not trained on: of %d episodes%s", total, late)
        if not chosen:
            raise AgentRLError(
                f"no group of this rollout has two episodes that can be compared, so there is nothing to train on: "
                f"{self.cfg.n_samples_per_prompt} episodes a task were asked for (--n-samples-per-prompt, at least 2), "
                f"{len(failed)} of {total} failed{late}"
            )

    def _count(self, total: int) -> None:
        self._counted = {"done": 0, "total": total, "tokens": 0}
        self._ended: set[str] = set()

    def _on_episode(self, trajectory: Trajectory) -> None:
        self._ended.add(trajectory.episode_id)  # its agents come one by one
        self._counted["done"] = len(self._ended)
        self._counted["tokens"] += trajectory.num_sampled
        if self._want_example and trajectory.outcome is not Outcome.INFRA_ERROR:
            self._want_example = False
            self._fresh.append(trajectory)

    async def hold(self) -> None:
        """Replaced engines wait for the next sync from here on; returns when none is being given weights."""
        await self.pool.hold()

    async def peek(self) -> tuple[dict[str, int], Trajectory | None]:
        """How far the batch at hand is; once, the first episode of the run."""
        return dict(self._counted), self._fresh.popleft() if self._fresh else None

    async def pulse(self, seconds: float) -> int:
        """The process id, after ``seconds``, from an event loop of its own; see :mod:`agentrl.orchestrator.watch`."""
        await asyncio.sleep(seconds)
        return os.getpid()

    async def mark_trained(self, columns: dict[str, np.ndarray]) -> None:
        """The optimizer has taken the last batch: its tasks count as trained, those that gave nothing as dropped. Its
        episodes are stored with what they were trained with."""
        if self._last is not None:
            step, episodes, batch = self._last
            self._last = None
            batch.note_trained(episodes, columns, tokens=bool(self.cfg.store_train_tokens))
            await asyncio.to_thread(self.store.write, step, episodes)
        self.buffer.mark_trained(self._last_groups)
        self.buffer.drop(self._last_dropped)
        self._last_groups, self._last_dropped = [], []

    # -- evaluation -----------------------------------------------------------------------------------

    async def evaluate(self, step: int) -> dict[str, dict[str, Any]]:
        """Play all held-out sets; summaries by set name."""
        cfg = self.cfg
        summaries: dict[str, dict[str, Any]] = {}
        self._count(sum(len(s.tasks) for s in self.held_out) * cfg.n_samples_per_eval_prompt)
        for held_out in self.held_out:
            runner = self._runner(held_out.spec, held_out.kwargs, eval_params(cfg), episode_limits(cfg.held_out))
            try:
                playing = run_set(
                    runner,
                    held_out,
                    samples=cfg.n_samples_per_eval_prompt,
                    tag=f"eval-{step:06d}-{held_out.name}",
                    on_episode=self._on_episode,
                )
                summary, trajectories = await self._unless_broken(asyncio.ensure_future(playing))
            finally:
                await runner.close()
            summaries[held_out.name] = summary.to_dict()
            await asyncio.to_thread(self.store.write, step, trajectories, name=f"eval-{held_out.name}")
        return summaries

    # -- weights --------------------------------------------------------------------------------------

    async def update_weights(self, ranks: list[Any], version: int) -> dict[str, float]:
        """Bring every engine to the trainer's weights as ``version``; those that fail are replaced.

        Args:
            ranks: handles of the trainer's ranks; the same at every call.
            version: number of rollouts the weights were trained on.
        """
        if self.version < 0:
            self._attach(ranks)
        began = time.monotonic()
        report = await self.pool.update_weights(version)
        self.version = version
        return {
            "time/sync": time.monotonic() - began,
            "sync/pause_seconds": report.pause_seconds,
            "sync/bytes": float(report.nbytes),
            "sync/verified": float(report.verified),
            "sync/engines": float(len(report.synced)),
        }

    def _attach(self, ranks: list[Any]) -> None:
        from agentrl.orchestrator.handles import RankSender
        from agentrl.weights.sync import WeightSync

        cfg = self.cfg
        self.pool.attach(
            WeightSync(
                RankSender(ranks),
                transport=cfg.weight_sync_transport,
                backend="nccl" if has_gpu() else "gloo",
                host=cfg.host,
                engine_ranks=cfg.rollout_num_gpus_per_engine if has_gpu() else 1,
                pause_mode=cfg.pause_mode,
                disk_dir=self.run_dir if cfg.weight_sync_transport == "disk" else None,
            )
        )

    # -- state ----------------------------------------------------------------------------------------

    async def state(self) -> dict[str, Any]:
        """JSON-ready state for a checkpoint: position in the data, account of every task."""
        return {"buffer": self.buffer.state_dict()}

    async def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.buffer.load_state_dict(state["buffer"])

    async def close(self) -> None:
        """End episodes, engines and router. Episodes first: their environments are closed, and none asks an engine."""
        self._ending = True
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.wait([self._playing], timeout=EPISODES_END_S)
        for name in ("runner", "client"):
            part = getattr(self, name, None)
            if part is not None:
                await part.close()
        if hasattr(self, "pool"):
            await self.pool.stop()
