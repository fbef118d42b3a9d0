"""``agentrl train``: places the processes of a run, runs the loop, reports, and leaves nothing behind.

Processes of a run: this driver, one Ray actor a Megatron rank, one a SGLang engine (with the server process it
owns), one rollout manager (with the router), Ray's own, and a warden that ends all of them should
the driver be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from agentrl.config.schema import Config
from agentrl.data.rundir import RunDir
from agentrl.errors import AgentRLError
from agentrl.loading import portable
from agentrl.progress import Progress, before_after, clock, episode_panel, shown
from agentrl.rollout.setup import has_gpu, make_env, scratch
from agentrl.trainer.checkpoint import Checkpoint, CheckpointStore
from agentrl.trainer.cluster import Bundle, Cluster
from agentrl.trainer.group import RolloutGroup, TrainerGroup
from agentrl.trainer.loop import Evaluation, training_loop
from agentrl.types import Trajectory
from agentrl.warden import Warden

log = logging.getLogger(__name__)

START_DEADLINE_S = 900.0
CLOSE_DEADLINE_S = 30.0


class Terminated(AgentRLError):
    """The run was asked to end by SIGTERM."""

    exit_code = 143


def train(cfg: Config) -> int:
    """Run a training to its end; returns the exit code.

    Raises:
        AgentRLError: with one message for a person; processes and temporary folders are gone by then.
        KeyboardInterrupt: after the same cleaning up.
    """
    if cfg.env:
        cfg = cfg.replace(env=portable(cfg.env))  # a relative file must be found by every process, and after --load
    check_environment(cfg)
    source = CheckpointStore.open_run(cfg.load) if cfg.load else None
    start = source.step if source else 0
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(RunDir.resume(cfg, step=start) if source else RunDir.create(cfg))
        write_log_to(run.logs / "driver.log", cfg.log_level)
        progress = stack.enter_context(Progress(f"agentrl train · {run.path.name}", cfg.num_rollout))
        progress.resume_at(start)
        progress.log(Text(f"run folder  {run.path}"))
        try:
            with (
                Warden() as warden,
                scratch(warden) as temp_dir,
                Cluster(bundles(cfg), namespace=run.path.name, temp_dir=temp_dir) as cluster,
            ):
                first, last = asyncio.run(_run(run.config, cluster, run, progress, source))
        except BaseException as error:
            how_to_go_on(run, progress, error)
            raise
        report(run, progress, first, last)
    return 0


def check_environment(cfg: Config) -> None:
    """Make the environment once, here, so that a wrong name or a broken file is reported before anything starts."""
    if cfg.env or cfg.prompt_data:
        make_env(*cfg.env_spec(), tool_timeout=cfg.tool_timeout).close()


def bundles(cfg: Config) -> list[Bundle]:
    """What the run asks of Ray: ranks, engines, the manager, in this order."""
    gpu = has_gpu()
    ranks = [Bundle(f"rank-{i}", 1, 1 if gpu else 0) for i in range(cfg.world_size)]
    per_engine = cfg.rollout_num_gpus_per_engine if gpu else 0
    engines = [Bundle(f"engine-{i}", 1, per_engine) for i in range(cfg.rollout_num_engines or 1)]
    return [*ranks, *engines, Bundle("rollout-manager", 1)]


async def _run(
    cfg: Config, cluster: Cluster, run: RunDir, progress: Progress, source: Checkpoint | None
) -> tuple[Evaluation | None, Evaluation | None]:
    rollout: RolloutGroup | None = None
    checkpoints = CheckpointStore(run.checkpoints, keep_last=cfg.keep_last)
    with terminate_on_sigterm():
        try:
            progress.stage("starting engines and trainer")
            trainer, rollout = start_actors(cfg, cluster, run)
            await asyncio.gather(trainer.ready(), rollout.start())
            start = 0
            if source is not None:
                progress.stage(f"loading the checkpoint after step {source.step}")
                await source.load(trainer=trainer, rollout=rollout)
                start = source.step
            evaluations = await training_loop(
                cfg, start=start, trainer=trainer, rollout=rollout, checkpoints=checkpoints, run=run, progress=progress
            )
            if cfg.save_hf:
                progress.stage("exporting the model")
                await trainer.save_hf(Path(cfg.save_hf))
            return evaluations
        finally:
            progress.stage("stopping")
            if rollout is not None:
                with contextlib.suppress(AgentRLError):  # the warden ends what does not end by itself
                    await asyncio.shield(rollout.close(CLOSE_DEADLINE_S))


def start_actors(cfg: Config, cluster: Cluster, run: RunDir) -> tuple[TrainerGroup, RolloutGroup]:
    """Create all actors; they start at the same time."""
    import ray

    from agentrl.trainer.actor import create_ranks
    from agentrl.trainer.manager import RolloutManager

    model = str(cfg.hf_checkpoint)
    world, engines = cfg.world_size, cfg.rollout_num_engines or 1
    ranks = create_ranks(cfg, model, [cluster.options(i) for i in range(world)], log_dir=run.logs)
    engine_options = [cluster.options(world + i) for i in range(engines)]
    manager = (
        ray.remote(RolloutManager)
        .options(**cluster.options(world + engines), max_concurrency=1000)
        .remote(cfg, str(run.path), model, engine_options)
    )
    episodes = cfg.rollout_batch_size * cfg.n_samples_per_prompt
    held_out = cfg.eval_tasks * cfg.n_samples_per_eval_prompt * (1 + len(cfg.eval_prompt_data))
    waves = max(episodes, held_out) / cfg.rollout_concurrency + 1
    return (
        TrainerGroup(ranks, num_steps=cfg.num_steps_per_rollout or 1, deadline=max(START_DEADLINE_S, 3600.0)),
        RolloutGroup(
            manager,
            deadline=START_DEADLINE_S + cfg.engine_timeout,
            # Each episode ends by its own timeout, so a batch ends after so many waves of them.
            rollout_deadline=waves * 2 * (cfg.episode_timeout + cfg.engine_timeout),
        ),
    )


@contextlib.contextmanager
def terminate_on_sigterm() -> Iterator[None]:
    """SIGTERM cancels the run like Ctrl-C does, and ends with exit code 143."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked = False

    def stop() -> None:
        nonlocal asked
        asked = True
        if task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    except asyncio.CancelledError:
        if asked:
            raise Terminated("asked to end (SIGTERM)") from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def write_log_to(path: Path, level: str) -> None:
    """Send this process's log to a file, not to the terminal that shows the progress."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("agentrl")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def how_to_go_on(run: RunDir, progress: Progress, error: BaseException) -> None:
    """After a failure or an interruption: what is saved, and what to type."""
    log.error("the run ended early", exc_info=error)
    saved = CheckpointStore(run.checkpoints).newest_step()
    if saved:
        progress.log(Text(f"saved up to step {saved}; go on with: agentrl train --load {shown(run.path)}"))
    else:
        progress.log(Text(f"nothing was saved yet; logs are in {shown(run.logs)}"))


def report(run: RunDir, progress: Progress, first: Evaluation | None, last: Evaluation | None) -> None:
    """The closing words: before and after, an episode of each, where everything lies, what to type next."""
    figure = run.plot_reward()
    if first is not None and last is not None and last.step > first.step:
        pair = telling_pair(first.episodes, last.episodes)
        if pair is not None:
            progress.log(episode_panel(pair[0], f"a held-out task before training ({pair[0].task.task_id})"))
            progress.log(episode_panel(pair[1], f"the same task after {last.step} steps"))
        rows = [(name, first.summaries[name], last.summaries[name]) for name in last.summaries]
        progress.log(before_after(rows))
    folder = shown(run.path)
    places = {"run folder": folder, "reward curve": shown(figure)}
    if run.config.tensorboard:
        places["TensorBoard"] = f"tensorboard --logdir {folder}/tensorboard"
    following = {
        "train on an environment of your own": "agentrl train --env my_env.py:MyEnv",
    }
    if CheckpointStore(run.checkpoints).newest_step():
        following = {
            "evaluate the trained agent": f"agentrl eval --run {folder}",
            "write it as a Hugging Face model": f"agentrl export --run {folder} --output-dir my-agent",
        } | following
    lines = [f"  {name:<13} {value}" for name, value in places.items()]
    lines += ["what next:", *(f"  {command:<58} # {what}" for what, command in following.items())]
    progress.log(Text.assemble(("done", "bold green"), f" in {clock(progress.elapsed)}\n", "\n".join(lines)))


def telling_pair(before: list[Trajectory], after: list[Trajectory]) -> tuple[Trajectory, Trajectory] | None:
    """One task before and after: one that was learned, if there is one."""
    then = {t.task.task_id: t for t in after}
    pairs = [(t, then[t.task.task_id]) for t in before if t.task.task_id in then]
    learned = [(b, a) for b, a in pairs if a.success and not b.success]
    return next(iter(learned or pairs), None)
