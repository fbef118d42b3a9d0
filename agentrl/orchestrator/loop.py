"""The training loop, top to bottom: generate, infer, give credit, update, save, sync, evaluate.

``version`` is the number of rollouts the weights were trained on; engines report it with every token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from agentrl.algorithms import Algorithm, load_algorithm, zero_variance_fraction
from agentrl.concurrency.together import together
from agentrl.config.schema import AlgorithmOptions
from agentrl.data.checkpoint import Best
from agentrl.data.run_folder import scalars_of
from agentrl.engines.world import World
from agentrl.errors import AgentRLError
from agentrl.orchestrator.notices import Lasting, nothing_to_learn, steps_left_out
from agentrl.orchestrator.turns import Turns
from agentrl.progress import Progress
from agentrl.trainer.agreement import AgreementWatch, Bounds

if TYPE_CHECKING:
    from agentrl.config.schema import Config
    from agentrl.data.checkpoint import CheckpointStore
    from agentrl.data.run_folder import RunDir
    from agentrl.orchestrator.handles import RolloutHandle, TrainerHandle
    from agentrl.orchestrator.supervised import SupervisedData
    from agentrl.orchestrator.watch import Watch

log = logging.getLogger(__name__)


async def training_loop(
    cfg: Config,
    *,
    start: int,
    trainer: TrainerHandle,
    rollout: RolloutHandle,
    checkpoints: CheckpointStore,
    run: RunDir,
    progress: Progress,
    world: World,
    turns: Turns | None = None,
) -> None:
    """Train from rollout ``start`` to ``cfg.num_rollout``.

    The model itself is evaluated as the engines have loaded it, while the trainer may still be loading. Stored
    rollouts need no engine: then nothing is synced or evaluated. ``turns`` are those of this trainer and these engines.
    """
    turns = turns or Turns(cfg, trainer, rollout)
    algorithm = load_algorithm(cfg.section(AlgorithmOptions))
    watch = AgreementWatch(Bounds.of(cfg, gpu=world.has_gpu).warn)
    at_start = evaluates_at_start(cfg, run, start)
    if at_start and not start:
        beside = [] if turns.taken else [trainer.ready()]
        await together([evaluate(rollout, 0, run=run, progress=progress), *beside])
    await turns.trainer()
    synced = await sync(start, trainer=trainer, turns=turns, progress=progress) if cfg.plays else {}
    keep_best(cfg, checkpoints=checkpoints, run=run, progress=progress)
    if at_start and start:
        await evaluate(rollout, start, run=run, progress=progress)

    lasting = Lasting()
    async with Beside() as evaluation:
        for step in range(start, cfg.num_rollout):
            began = time.monotonic()
            progress.stage("rollout")
            generated = await rollout.generate(step, progress=progress)
            if generated is None:
                progress.log(no_more(cfg, step))
                await evaluation.done()
                await end_early(
                    cfg, step, trainer=trainer, rollout=rollout, turns=turns, checkpoints=checkpoints, run=run,
                    progress=progress,
                )  # fmt: skip
                return

            checkpoints.check()
            progress.stage("training")
            handed = await turns.trainer()
            checkpoints.unsaved = None
            trained, columns = await train(
                generated.batch,
                algorithm,
                trainer,
                version=step,
                keep=bool(cfg.store_train_tokens),
                critic_only="values" in algorithm.needs and step < cfg.num_critic_only_steps,
                oldest=cfg.oldest_version if cfg.mask_offpolicy_in_partial_rollout else None,
            )
            await rollout.mark_trained(columns)
            await evaluation.done()

            version = step + 1
            if cfg.ref_update_interval and version % cfg.ref_update_interval == 0:
                await trainer.refresh_reference()
            # Before the checkpoint: what a checkpoint holds must be in the metrics, should the run die in between.
            report(version, generated.metrics | handed | trained | synced, began, run=run, progress=progress)
            checkpoints.unsaved = version
            progress.warn(lasting.say("lost", generated.lost))
            progress.warn(generated.notes)
            progress.warn(lasting.say("learning", nothing_to_learn(generated.metrics | trained)))
            progress.warn(lasting.say("gradients", steps_left_out(trained)))
            if warning := watch.warning(version, trained):
                log.warning(warning)
                progress.log(Text(warning, style="yellow"))
            evaluates = due(version, cfg.eval_interval, cfg.num_rollout)
            # What may turn out to be the best is saved before it is evaluated.
            if due(version, cfg.save_interval, cfg.num_rollout) or (evaluates and cfg.best_metric):
                progress.stage("saving a checkpoint")
                await checkpoints.save(version, trainer=trainer, rollout=rollout)

            if cfg.plays and (evaluates or due(version, cfg.update_weights_interval, cfg.num_rollout)):
                synced = await sync(version, trainer=trainer, turns=turns, progress=progress)
            else:
                synced = await turns.engines()
            if evaluates:
                evaluation.begin(
                    judge(cfg, version, rollout=rollout, checkpoints=checkpoints, run=run, progress=progress)
                )
                if not cfg.async_buffer_size:
                    await evaluation.done()
        await evaluation.done()
    await saved(checkpoints, progress)


async def rollout_loop(cfg: Config, *, rollout: RolloutHandle, run: RunDir, progress: Progress) -> None:
    """Play ``cfg.num_rollout`` rollouts and train on none (``--debug-rollout-only``)."""
    lasting = Lasting()
    for step in range(cfg.num_rollout):
        began = time.monotonic()
        progress.stage("rollout")
        generated = await rollout.generate(step, progress=progress)
        if generated is None:
            progress.log(no_more(cfg, step))
            return
        report(step + 1, dict(generated.metrics), began, run=run, progress=progress)
        progress.warn(lasting.say("lost", generated.lost))
        progress.warn(generated.notes)


def no_more(cfg: Config, step: int) -> Text:
    """That there is nothing to go on with after so many rollouts."""
    of = "tasks in the data source" if cfg.plays else f"rollouts in {cfg.load_debug_rollout_data}"
    return Text(f"no more {of}: done after {step} of {cfg.num_rollout} rollouts")


class Beside:
    """Work that goes on beside the loop, one piece at a time; none outlives the context."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Beside:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin it."""
        self._work = asyncio.create_task(work)

    async def done(self) -> None:
        """Wait for what was begun; raises its error."""
        if self._work is not None:
            await self._work
            self._work = None


@contextlib.asynccontextmanager
async def save_before_leaving(
    cfg: Config,
    watch: Watch,
    *,
    trainer: TrainerHandle,
    rollout: RolloutHandle | SupervisedData,
    checkpoints: CheckpointStore,
    progress: Progress,
    seconds: float,
    turns: Turns | None = None,
) -> AsyncIterator[None]:
    """A run that is asked to end within saves what it learned since its newest checkpoint, unless it is training just
    then or has lost a process. In so many seconds, or not at all."""
    try:
        yield
    except asyncio.CancelledError:
        if cfg.save_interval and checkpoints.unsaved is not None and not watch.has_lost:
            progress.stage("saving a checkpoint")
            try:
                async with asyncio.timeout(seconds):
                    if turns is not None:
                        await turns.trainer()
                    await checkpoints.save(checkpoints.unsaved, trainer=trainer, rollout=rollout)
            except (AgentRLError, TimeoutError) as error:
                log.error("the checkpoint before leaving is left out: %s", error)
        raise


async def saved(checkpoints: CheckpointStore, progress: Progress) -> None:
    """Wait until the checkpoint under way is complete."""
    if checkpoints.saving:
        progress.stage("writing the checkpoint")
    await checkpoints.saved()


async def train(
    reference: list[Any],
    algorithm: Algorithm,
    trainer: TrainerHandle,
    *,
    version: int,
    keep: bool,
    critic_only: bool = False,
    oldest: int | None = None,
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Train weights of this ``version`` on a batch; metrics, and the columns it was trained with: all with ``keep``,
    else ``advantage``. Tokens more than ``oldest`` versions old are left out of the loss."""
    began, batch = time.monotonic(), await trainer.fetch(reference)
    inferred = await trainer.infer(reference, algorithm.infers(batch.steps(trainer.num_steps)))
    inferred_at, age = time.monotonic(), np.where(batch.loss_mask == 1, version - batch["versions"], 0)
    columns = inferred | {"age": age.astype(np.int32)}
    if oldest is not None:
        columns["in_loss"] = (age <= oldest).astype(np.uint8)
    batch = batch.with_columns(**columns)
    given = await asyncio.to_thread(algorithm.prepare, batch)
    batch = batch.with_columns(**given)
    metrics, kept = await trainer.update(reference, columns | given, keep=keep, critic_only=critic_only)
    metrics |= algorithm.metrics(batch)
    if oldest is not None:
        metrics["train/offpolicy_masked"] = float((age > oldest).sum() / max(batch.num_sampled, 1))
    metrics["time/log_probs"] = inferred_at - began
    metrics["rollout/zero_variance"] = zero_variance_fraction(batch)
    return metrics, inferred | given | kept if keep else {"advantage": given["advantage"]}


async def end_early(
    cfg: Config,
    version: int,
    *,
    trainer: TrainerHandle,
    rollout: RolloutHandle,
    turns: Turns,
    checkpoints: CheckpointStore,
    run: RunDir,
    progress: Progress,
) -> None:
    """What the last rollout would have brought: an evaluation and a checkpoint, where they are not there yet."""
    if cfg.eval_interval and version not in {evaluation["step"] for evaluation in run.evaluations()}:
        await evaluate(rollout, version, run=run, progress=progress)
    await saved(checkpoints, progress)
    if (cfg.save_interval or cfg.best_metric) and version and version != checkpoints.newest_step():
        progress.stage("saving a checkpoint")
        await turns.trainer()
        await checkpoints.save(version, trainer=trainer, rollout=rollout)
        await saved(checkpoints, progress)
    keep_best(cfg, checkpoints=checkpoints, run=run, progress=progress)


async def sync(version: int, *, trainer: TrainerHandle, turns: Turns, progress: Progress) -> dict[str, float]:
    """Publish the trainer's weights as ``version`` and bring the engines to it: it is their turn then."""
    progress.stage("syncing weights")
    began = time.monotonic()
    snapshot = await trainer.publish(version)
    published = time.monotonic() - began
    metrics = await turns.engines(snapshot)
    log.info("version %d of the weights: published in %.3f s, in the engines %s", version, published, spoken(metrics))
    return metrics | {"time/publish": published}


def spoken(metrics: Mapping[str, float]) -> str:
    """Metrics as a line of a log."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def due(version: int, interval: int, total: int) -> bool:
    """Whether something done every ``interval`` rollouts, and after the last one, is done now."""
    return interval > 0 and (version % interval == 0 or version == total)


def evaluates_at_start(cfg: Config, run: RunDir | None, start: int) -> bool:
    """Whether the weights that a run starts with, after ``start`` rollouts, are evaluated: not if that is on record.
    ``run`` is None where there is no folder yet."""
    wanted = due(start, cfg.eval_interval, cfg.num_rollout) if start else cfg.eval_interval and cfg.eval_before_train
    return bool(wanted) and start not in {evaluation["step"] for evaluation in (run.evaluations() if run else ())}


async def evaluate(rollout: RolloutHandle, step: int, *, run: RunDir, progress: Progress) -> None:
    """Evaluate on every held-out set."""
    progress.stage("evaluating on held-out tasks")
    summaries = await rollout.evaluate(step, progress=progress)
    for name, summary in summaries.items():
        success = summary["success"]
        progress.evaluated(
            step,
            success["mean"],
            f"held-out {name} after step {step}: success {success['mean']:.1%} "
            f"[{success['low']:.1%}, {success['high']:.1%}] on {success['n_tasks']} tasks, "
            f"{summary['turns']:.1f} turns, {summary['errors']} errors",
        )
        log.info("evaluated %s after step %d: success %.3f, %d errors", name, step, success["mean"], summary["errors"])
    run.log_evaluation(step, summaries)


async def judge(
    cfg: Config,
    version: int,
    *,
    rollout: RolloutHandle,
    checkpoints: CheckpointStore,
    run: RunDir,
    progress: Progress,
) -> None:
    """Evaluate, and point to the best checkpoint."""
    await evaluate(rollout, version, run=run, progress=progress)
    if cfg.best_metric:
        await saved(checkpoints, progress)
    keep_best(cfg, checkpoints=checkpoints, run=run, progress=progress)


def keep_best(cfg: Config, *, checkpoints: CheckpointStore, run: RunDir, progress: Progress) -> None:
    """Point to the checkpoint with the best evaluation; the earlier one of two equals.

    Decided anew from what was logged each time, so that an interruption, or going back to an earlier checkpoint,
    leaves it right.
    """
    if cfg.best_metric is None:
        return
    there, found = set(checkpoints.steps()), None
    for evaluation in run.evaluations():
        value = scalars_of(evaluation).get(cfg.best_metric)
        if value is None or value != value or evaluation["step"] not in there:
            continue
        if found is None or value > found.value:
            found = Best(evaluation["step"], cfg.best_metric, value)
    if found != checkpoints.best_so_far():
        checkpoints.mark_best(found)
        if found is not None:
            progress.log(Text(f"best checkpoint so far: step {found.step}, {found.metric} {found.value:.3f}"))


def best_metrics(sets: Iterable[str]) -> list[str]:
    """Names that ``--best-metric`` may have: of these held-out sets, what is better when it is larger."""
    values = ("success", "reward", "success_low", "reward_low")
    return [f"eval/{name}/{value}" for name in sets for value in values]


def report(version: int, metrics: dict[str, float], began: float, *, run: RunDir, progress: Progress) -> None:
    """Write one step's metrics and show its line. The sync in it brought the weights it sampled with."""
    metrics["time/step"] = time.monotonic() - began
    log.info("step %d: %s", version, spoken(metrics))
    run.log_metrics(version, metrics)
    pace = metrics.get("rollout/tokens_per_s")  # not of a stored rollout
    norm = metrics.get("train/grad_norm")
    progress.step_done(
        version,
        metrics["rollout/reward"],
        pace,
        f"step {version}: reward {metrics['rollout/reward']:.3f}  success {metrics['rollout/success']:.1%}  "
        f"turns {metrics['rollout/turns']:.1f}  {'' if pace is None else f'{pace:,.0f} tokens/s  '}"
        f"{'' if norm is None else f'grad norm {norm:.2f}  '}{metrics['time/step']:.1f} s",
    )
