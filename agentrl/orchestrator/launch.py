"""``agentrl train``: places the processes of a run, runs the loop, reports, and leaves nothing behind.

Processes of a run: this driver, one Ray actor a Megatron rank, one a SGLang engine (with the server process it
owns), one rollout manager (with the router), rollout workers where there are any, Ray's own, and a warden that ends
all of them should the driver be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from agentrl.algorithms import load_algorithm
from agentrl.config.schema import AlgorithmOptions, Config
from agentrl.config.serialize import read_run_config, run_folder_of
from agentrl.data.checkpoint import Checkpoint, CheckpointStore
from agentrl.data.curriculum import load_curriculum
from agentrl.data.experience import load_buffer_filter
from agentrl.data.export import copy_model
from agentrl.data.files import FULL, storage_errors
from agentrl.data.filters import load_filter
from agentrl.data.run_folder import RunDir
from agentrl.engines.engine import engines_ahead
from agentrl.engines.options import engine_spec
from agentrl.engines.world import World
from agentrl.envs.registry import make_env
from agentrl.errors import AgentRLError, CheckpointError, ConfigError, DataError, EngineError, LostError
from agentrl.evaluation.heldout import held_out_sets, rehearse_set
from agentrl.loading import portable, portable_source
from agentrl.orchestrator.cluster import Cluster, bundles_of, check_nodes
from agentrl.orchestrator.handles import RolloutHandle, TrainerHandle, create_ranks
from agentrl.orchestrator.loop import (
    best_metrics,
    due,
    evaluates_at_start,
    keep_best,
    rollout_loop,
    save_before_leaving,
    training_loop,
)
from agentrl.orchestrator.notices import at_start
from agentrl.orchestrator.stored import StoredRollouts
from agentrl.orchestrator.supervised import HELD_OUT, HeldOut, SupervisedData, check_examples, supervised_loop
from agentrl.orchestrator.turns import Turns
from agentrl.orchestrator.watch import ProcessLostError, Watch, with_pulse
from agentrl.processes.signals import cancel_on_signals, stderr_to, write_log_to
from agentrl.processes.supervisor import Attempt
from agentrl.processes.warden import Warden
from agentrl.progress import Progress, before_after, clock, episode_panel, shown, when
from agentrl.rollout.rehearsal import rehearse
from agentrl.types import Trajectory
from agentrl.versions import installed

log = logging.getLogger(__name__)

START_DEADLINE_S = 900.0
TRAIN_DEADLINE_S = 3600.0
CLOSE_DEADLINE_S = 30.0
LAST_SAVE_S = 600.0
"""Longest wait of a run that ends early for the checkpoint that is being written."""
KILLED = (
    "agentrl train ended without a word: killed, perhaps for lack of memory, or ended by a library, see {logs}. "
    "All its processes are gone"
)
GO_ON = "; go on with: agentrl train --load {run}"
ADOPTIONS = 3
"""How often a fork tries to get hold of the newest checkpoint of a run that goes on."""
PATHS = (
    *("weight_snapshot_dir", "save", "save_hf", "hf_checkpoint", "ref_load", "critic_load", "chat_template"),
    *("train_data", "sft_from", "eval_data", "load_debug_rollout_data"),
)
HOOKS = (
    *("dynamic_sampling_filter_path", "buffer_filter_path", "curriculum_path"),
    *("env", "custom_rm_path", "custom_generate_function_path", "data_source_path"),
    *("advantage_estimator", "custom_loss_function_path"),
)


def train(cfg: Config, attempt: Attempt | None = None) -> int:
    """Run a training to its end; returns the exit code.

    Args:
        attempt: of a run that goes on by itself (``--auto-resume``): who is told how. What to type is then not said.

    Raises:
        AgentRLError: with one message for a person; processes and temporary folders are gone by then.
        KeyboardInterrupt: after the same cleaning up.
    """
    cfg = checked(cfg)
    if cfg.deterministic:
        # Of the processes to come: an environment may go through a set of strings.
        os.environ.setdefault("PYTHONHASHSEED", "0")
    with contextlib.ExitStack() as stack:
        run, source = open_run(cfg, stack)
        start = source.step if source else 0
        write_log_to(run.logs / "driver.log", cfg.log_level)
        log.info("start, process %d: %s", os.getpid(), ", ".join(f"{n} {v}" for n, v in installed().items()))
        progress = stack.enter_context(Progress(f"agentrl train · {run.path.name}", cfg.num_rollout))
        last_words = (KILLED + (GO_ON if cfg.trains else "")).format(logs=shown(run.logs), run=shown(run.path))
        if attempt is not None:
            progress.started, last_words = attempt.began, ""
            # That very checkpoint until it is settled: the run may be told to go back to it.
            attempt.tell(run=str(run.path), load=str(source.path if source else run.path), start=start, open=True)
        progress.resume_at(start)
        progress.log(Text(f"run folder  {run.path}"))
        for note in at_start(cfg):
            progress.warn(note)
        for passed_over in source.passed_over if source else ():
            progress.log(Text(f"passed over {passed_over}"))
        try:
            if start < cfg.num_rollout or lacks_evaluation(cfg, run, start):
                with (
                    Warden(last_words=last_words) as warden,
                    stderr_to(run.logs / "stderr.log"),
                    warden.scratch() as temp_dir,
                    weights_folder(cfg, run, warden) as weights_dir,
                    start_engines_ahead(cfg, run),
                    Cluster(
                        partial(bundles_of, cfg),
                        nodes=cfg.actor_num_nodes if cfg.trains else 1,
                        namespace=run.path.name,
                        temp_dir=temp_dir,
                    ) as cluster,
                ):
                    cluster.check_sees(run.path / "config.json", Path(str(cfg.hf_checkpoint)) / "config.json")
                    running = _run if cfg.plays else _run_without_engines
                    settled = partial(tell_load, attempt, run)
                    asyncio.run(running(run.config, cluster, run, progress, source, weights_dir, settled))
            elif source is not None:
                store = CheckpointStore(run.checkpoints)
                settle(run, store, start, progress)
                keep_best(cfg, checkpoints=store, run=run, progress=progress)
                if cfg.save_hf:
                    copy_model(source, Path(cfg.save_hf))
            report(run, progress)
            log.info("ended after step %d, %.0f s", progress.step, progress.elapsed)
            run.describe(ended={"step": progress.step, "save_hf": cfg.save_hf})
            if attempt is not None:
                attempt.tell(done=True)
        except BaseException as error:
            log.error("the run ended early", exc_info=error)
            if attempt is None or not isinstance(error, LostError):
                how_to_go_on(run, progress)
            if isinstance(error, OSError) and error.errno in FULL:
                with storage_errors(error.filename or run.path):
                    raise
            raise
    return 0


def start_engines_ahead(cfg: Config, run: RunDir) -> contextlib.AbstractContextManager[None]:
    """Engines import SGLang while Ray starts. Not where they may be placed on other machines, or there are none."""
    if not cfg.plays or os.environ.get("RAY_ADDRESS"):
        return contextlib.nullcontext()
    return engines_ahead(
        engine_spec(cfg, str(cfg.hf_checkpoint), World.here()), cfg.rollout_num_engines or 1, log_dir=run.logs
    )


def checked(cfg: Config) -> Config:
    """``cfg`` with absolute paths, after all that can be checked before there is a folder. Raises AgentRLError."""
    cfg = with_absolute_paths(cfg)
    check_nodes(cfg.actor_num_nodes)
    load_algorithm(cfg.section(AlgorithmOptions)).check(cfg.n_samples_per_prompt)
    if cfg.dynamic_sampling_filter_path:
        load_filter(cfg.dynamic_sampling_filter_path)
    if cfg.replay_share:
        load_buffer_filter(cfg.buffer_filter_path)
    if cfg.curriculum_path:
        load_curriculum(cfg.curriculum_path)
    if cfg.is_supervised:
        check_examples(cfg)
    elif cfg.plays:
        check_environment(cfg)
    else:
        StoredRollouts(cfg)
    return cfg


def find_start(cfg: Config, stack: contextlib.ExitStack | None) -> tuple[RunDir | None, Checkpoint | None]:
    """The folder of a run that goes on (None: a new one), and the checkpoint it starts from. The folder is held until
    ``stack`` ends; without one it is only looked at, whoever has it.

    Nothing is changed.

    Raises ConfigError: nothing is left to do, or a folder is of another run.
    Raises CheckpointError: there is no checkpoint to go on from.
    Raises StorageError: another process has the folder."""
    owner = run_folder_of(cfg.load) if cfg.load else None
    if owner and cfg.output_dir is not None and owner.resolve() == Path(cfg.output_dir).resolve():
        check_targets(cfg, run=owner)
        # Held before the checkpoint is chosen: nobody else adds one now.
        run = stack.enter_context(RunDir.resume(cfg)) if stack else RunDir.resume(cfg, hold=False)
        source = find_checkpoint(cfg, run, owner)
        refuse_when_done(cfg, run, source)
        return run, source
    source = CheckpointStore.open_run(cfg.load) if cfg.load else None
    check_targets(cfg, run=Path(cfg.output_dir) if cfg.output_dir else None)
    refuse_when_done(cfg, None, source)
    return None, source


def open_run(cfg: Config, stack: contextlib.ExitStack) -> tuple[RunDir, Checkpoint | None]:
    """The run's folder, held until ``stack`` ends, and the checkpoint it goes on from, which is its own.

    Nothing of a run that goes on is changed here but ``config.json`` and ``run.json``; nothing at all where it cannot.

    Raises AgentRLError: as :func:`find_start`; or the folder cannot be written."""
    found, source = find_start(cfg, stack)
    run = found or stack.enter_context(RunDir.reserve(cfg))
    store = CheckpointStore(run.checkpoints)
    stack.enter_context(store.held_by(run.path))
    facts: dict[str, Any] = {}
    for attempt in range(ADOPTIONS):
        if source is None or source.path.parent.resolve() == store.root.resolve():
            break
        try:
            facts = {} if found else {"forked_from": {"checkpoint": str(source.path), "step": source.step}}
            source = store.adopt(source)
        except CheckpointError:  # its run goes on, and removed it
            source = CheckpointStore.open_run(str(cfg.load))
            if attempt == ADOPTIONS - 1:
                raise
    run.note_start(**facts)
    return run, source


def find_checkpoint(cfg: Config, run: RunDir, folder: Path) -> Checkpoint | None:
    """What a run goes on from; None where it ended before its first checkpoint was complete, and begins again.
    Raises CheckpointError: none is complete, or those it had are gone."""
    store = CheckpointStore.of_run(folder)
    named = Path(str(cfg.load))
    if named.resolve() not in (folder.resolve(), store.root.resolve()):
        return CheckpointStore.open_run(named)
    if store.steps():
        return store.newest()
    saved = read_run_config(folder)
    every = [n for n in (saved.get("save_interval"), saved.get("best_metric") and saved.get("eval_interval")) if n]
    logged = max((line["step"] for line in run.metrics()), default=0)
    # One that is written beside the rollouts may be under way until the next is due.
    unsaved = min(every, default=0) * (2 if saved.get("async_save") else 1)
    if logged > unsaved or "ended" in run.description():
        raise CheckpointError(
            f"no checkpoint in {store.root}, though the run has done {logged} rollouts: they are gone, or none were to "
            "be saved (--save-interval 0). Restore one from a copy, or start a new run in another folder"
        )
    return None


def refuse_when_done(cfg: Config, run: RunDir | None, source: Checkpoint | None) -> None:
    """Raises ConfigError when a run that goes on has come to its end, with all that belongs to it."""
    start = source.step if source else 0
    if start < cfg.num_rollout or (start == cfg.num_rollout and run is not None and not is_complete(cfg, run, start)):
        return
    raise ConfigError(
        f"{cfg.load} has done {start} of {cfg.num_rollout} rollouts: nothing is left to train. To go on, give a "
        "larger --num-rollout."
    )


def is_complete(cfg: Config, run: RunDir, step: int) -> bool:
    """Whether the last evaluation, the export and the closing report after ``step`` rollouts were done."""
    ended = {"step": step, "save_hf": cfg.save_hf}
    return run.description().get("ended") == ended and not lacks_evaluation(cfg, run, step)


def lacks_evaluation(cfg: Config, run: RunDir, step: int) -> bool:
    """Whether an evaluation is due after ``step`` rollouts and not on record. A held-out loss is: it comes before the
    checkpoint."""
    if cfg.is_supervised or not due(step, cfg.eval_interval, cfg.num_rollout):
        return False
    return step not in {evaluation["step"] for evaluation in run.evaluations()}


def with_absolute_paths(cfg: Config) -> Config:
    """What is given relative to this folder must be found by every process, and after ``--load`` from another."""
    changes = {name: str(Path(getattr(cfg, name)).absolute()) for name in PATHS if getattr(cfg, name) is not None}
    hooks = {name: portable(getattr(cfg, name)) for name in HOOKS if getattr(cfg, name)}
    if cfg.prompt_data is not None:
        changes["prompt_data"] = portable_source(cfg.prompt_data)
    sets = tuple((name, portable_source(path)) for name, path in cfg.eval_prompt_data)
    return cfg.replace(**changes, **hooks, eval_prompt_data=sets, eval_env=tuple(map(portable, cfg.eval_env)))


def check_targets(cfg: Config, *, run: Path | None) -> None:
    """Raises ConfigError where the run in the folder ``run`` would replace what is not its own; None: a new folder."""
    if cfg.save:
        CheckpointStore(cfg.save).refuse_others(run)
    target = Path(cfg.save_hf) if cfg.save_hf else None
    if target is None or not target.exists():
        return
    models = [Path(model).resolve() for model in (cfg.hf_checkpoint, cfg.ref_load, cfg.critic_load) if model]
    if target.resolve() in models:
        raise ConfigError(f"--save-hf {target} is the model the run starts from: it would be replaced. Choose another.")
    exported = target.is_dir() and (target / "config.json").is_file() and any(target.glob("*.safetensors"))
    if not exported and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--save-hf {target} holds something that is no model: it would be removed. Choose another.")


def check_environment(cfg: Config) -> None:
    """Play one episode without a model, so that what is wrong with the environment is said before anything starts.

    The same goes for the engines, each held-out set of another environment, and the metric of ``--best-metric``.
    """
    engine_spec(cfg, str(cfg.hf_checkpoint), World.here())
    if cfg.env or cfg.prompt_data:
        rehearse(
            lambda: make_env(*cfg.env_spec(), tool_timeout=cfg.tool_timeout, sandbox=cfg.sandbox),
            (),
            cfg.custom_generate_function_path,
            str(cfg.env or cfg.prompt_data),
        )
    if cfg.eval_interval:
        sets = held_out_sets(cfg)
        for held_out in sets:
            if (held_out.spec, held_out.kwargs) != cfg.env_spec():
                rehearse_set(cfg, held_out)
        known = best_metrics(held_out.name for held_out in sets)
        if cfg.best_metric not in (None, *known):
            raise ConfigError(
                f"--best-metric {cfg.best_metric}: the evaluations of this run give no such metric that is better when "
                f"it is larger. Expected one of {', '.join(known)}."
            )


def weights_place(cfg: Config, run: Path) -> Path | None:
    """The folder below which versions of the weights are published; None: the system's for temporary files."""
    shared_memory = Path("/dev/shm")
    if cfg.weight_snapshot_dir:
        return Path(cfg.weight_snapshot_dir)
    if cfg.weight_sync_transport == "disk":
        return run
    return shared_memory if shared_memory.is_dir() else None


@contextlib.contextmanager
def weights_folder(cfg: Config, run: RunDir, warden: Warden) -> Iterator[str]:
    """Where versions of the weights are published: shared memory if nothing else was asked for. Goes with the run.
    Nowhere (empty) where no engine loads them.
    Raises StorageError: there can be no such folder."""
    if not (cfg.plays and cfg.trains):
        yield ""
        return
    base = weights_place(cfg, run.path)
    with storage_errors(base or "a temporary folder"):
        if base is not None:
            base.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f"agentrl-weights-{os.getpid()}-", dir=base)
    warden.add_temp_dir(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tell_load(attempt: Attempt | None, run: RunDir) -> None:
    """From now on the newest checkpoint of the run's own is where it goes on."""
    if attempt is not None:
        attempt.tell(load=str(run.path))


async def _run(
    cfg: Config,
    cluster: Cluster,
    run: RunDir,
    progress: Progress,
    source: Checkpoint | None,
    weights_dir: str,
    settled: Callable[[], None],
) -> None:
    rollout: RolloutHandle | None = None
    checkpoints = CheckpointStore(run.checkpoints, keep_last=cfg.keep_last, async_save=cfg.async_save)
    patience = LAST_SAVE_S
    with cancel_on_signals():
        try:
            async with Watch(2 * cfg.rollout_health_check_timeout, stall=cfg.train_stall_timeout) as watch:
                watch.processes(cluster.processes())
                progress.stage("starting engines and trainer" if cfg.trains else "starting engines")
                trainer, rollout = start_actors(cfg, cluster, run, weights_dir)
                watch_ranks(watch, trainer, run)
                watch.actor("the rollout manager", rollout.manager, run.logs / "rollout-manager.log")
                turns = Turns(cfg, trainer, rollout)
                if not cfg.trains or turns.taken:
                    notes = await start_engines(rollout, again=source is not None)
                elif source is None and evaluates_at_start(cfg, run, 0) and not cluster.world.has_gpu:
                    # The ranks are not needed yet, and would take the cores on which the engines start.
                    notes = await start_engines(rollout, again=False)
                    await trainer.begin()
                else:
                    await trainer.begin()
                    _, notes = await asyncio.gather(trainer.ready(), start_engines(rollout, again=source is not None))
                for note in notes:
                    log.warning(note)
                    progress.log(Text(note))
                log.info("the engines run")
                if source is not None:
                    await turns.trainer()
                start = await load(source, trainer, rollout, progress)
                # Not before the engines run: a start that fails, or is ended as a mistake, has changed nothing.
                settle(run, checkpoints, start, progress)
                settled()
                if not cfg.trains:
                    await rollout_loop(cfg, rollout=rollout, run=run, progress=progress)
                    return
                async with save_before_leaving(
                    cfg, watch, trainer=trainer, rollout=rollout, checkpoints=checkpoints, progress=progress,
                    seconds=LAST_SAVE_S, turns=turns,
                ):  # fmt: skip
                    await training_loop(
                        cfg, start=start, trainer=trainer, rollout=rollout, checkpoints=checkpoints, run=run,
                        progress=progress, world=cluster.world, turns=turns,
                    )  # fmt: skip
                if cfg.save_hf:
                    progress.stage("exporting the model")
                    await turns.trainer()
                    await trainer.save_hf(Path(cfg.save_hf))
        except ProcessLostError:
            rollout = None  # whom to ask is gone or may be: Ray and the warden end what is left
            patience = CLOSE_DEADLINE_S
            raise
        finally:
            progress.stage("stopping")
            if rollout is not None:
                with contextlib.suppress(AgentRLError):  # the warden ends what does not end by itself
                    await asyncio.shield(rollout.close(CLOSE_DEADLINE_S))
            if checkpoints.saving:
                progress.stage("completing the checkpoint")
            await checkpoints.end(patience)


async def _run_without_engines(
    cfg: Config,
    cluster: Cluster,
    run: RunDir,
    progress: Progress,
    source: Checkpoint | None,
    weights_dir: str,
    settled: Callable[[], None],
) -> None:
    checkpoints = CheckpointStore(run.checkpoints, keep_last=cfg.keep_last, async_save=cfg.async_save)
    patience = LAST_SAVE_S
    with cancel_on_signals():
        try:
            async with Watch(2 * cfg.rollout_health_check_timeout, stall=cfg.train_stall_timeout) as watch:
                watch.processes(cluster.processes())
                progress.stage("starting the trainer")
                trainer = start_trainer(cfg, cluster, run, weights_dir)
                watch_ranks(watch, trainer, run)
                await trainer.begin()
                data, loop = await _stored(cfg, run, cluster.world)
                await trainer.ready()
                start = await load(source, trainer, data, progress)
                settle(run, checkpoints, start, progress)
                settled()
                async with save_before_leaving(
                    cfg, watch, trainer=trainer, rollout=data, checkpoints=checkpoints, progress=progress,
                    seconds=LAST_SAVE_S,
                ):  # fmt: skip
                    await loop(
                        cfg, start=start, trainer=trainer, rollout=data, checkpoints=checkpoints, run=run,
                        progress=progress,
                    )  # fmt: skip
                if cfg.save_hf:
                    progress.stage("exporting the model")
                    await trainer.save_hf(Path(cfg.save_hf))
        except ProcessLostError:
            patience = CLOSE_DEADLINE_S
            raise
        finally:
            progress.stage("stopping")
            await checkpoints.end(patience)


async def _stored(
    cfg: Config, run: RunDir, world: World
) -> tuple[SupervisedData | StoredRollouts, Callable[..., Coroutine[Any, Any, None]]]:
    """What is trained on where nothing is played, and the loop over it."""
    if not cfg.is_supervised:
        return StoredRollouts(cfg, run.store), partial(training_loop, world=world)
    data, held_out = await asyncio.gather(
        asyncio.to_thread(SupervisedData.of, cfg), asyncio.to_thread(HeldOut.of, cfg)
    )
    return data, partial(supervised_loop, held_out=held_out)


async def start_engines(rollout: RolloutHandle, *, again: bool) -> list[str]:
    """See :meth:`RolloutHandle.start`. Where engines ran before, one that does not is a fault and no wrong option."""
    try:
        return await rollout.start()
    except EngineError as error:
        if again:
            raise LostError(str(error)) from error
        raise


def watch_ranks(watch: Watch, trainer: TrainerHandle, run: RunDir) -> None:
    """A rank that is lost ends the run."""
    for number, rank in enumerate(trainer.ranks):
        watch.actor(f"trainer rank {number}", rank, run.logs / f"trainer-{number}.log")


async def load(
    source: Checkpoint | None, trainer: TrainerHandle, rollout: RolloutHandle | SupervisedData, progress: Progress
) -> int:
    """Go on from a checkpoint, if there is one; the number of steps done."""
    if source is None:
        return 0
    progress.stage(f"loading the checkpoint after step {source.step}")
    await source.load(trainer=trainer, rollout=rollout)
    return source.step


def settle(run: RunDir, checkpoints: CheckpointStore, start: int, progress: Progress) -> None:
    """Have the folder hold what was done in ``start`` rollouts and nothing else; a kill in between is made up for."""
    log.info("at step %d", start)
    if start:
        checkpoints.go_on_from(start)  # first: the next start then comes here again
    run.go_on(start)
    for mended in run.mended:
        progress.log(Text(mended))


def start_trainer(cfg: Config, cluster: Cluster, run: RunDir, weights_dir: str) -> TrainerHandle:
    """Create the ranks' actors; none where nothing is trained."""
    ranks = []
    if cfg.trains:
        places = [cluster.options(i) for i in range(cfg.world_size)]
        ranks = create_ranks(
            cfg, str(cfg.hf_checkpoint), places, weights_dir=weights_dir, world=cluster.world, log_dir=run.logs
        )
    return TrainerHandle(ranks, num_steps=cfg.num_steps_per_rollout or 1, deadline=TRAIN_DEADLINE_S)


def start_actors(cfg: Config, cluster: Cluster, run: RunDir, weights_dir: str) -> tuple[TrainerHandle, RolloutHandle]:
    """Create all actors; they start at the same time."""
    from agentrl.orchestrator.manager import RolloutManager

    model = str(cfg.hf_checkpoint)
    trainer = start_trainer(cfg, cluster, run, weights_dir)
    places = [cluster.options(i) for i in range(len(trainer.ranks), len(cluster.bundles))]
    engines = cfg.rollout_num_engines or 1
    of_engines, manager_place, of_workers = places[:engines], places[engines], places[engines + 1 :]
    manager = (
        with_pulse(RolloutManager)
        .options(**manager_place, max_concurrency=1000)
        .remote(cfg, str(run.path), model, of_engines, cluster.world, list(trainer.ranks), of_workers)
    )
    episodes = cfg.rollout_batch_size * cfg.n_samples_per_prompt
    sets = 1 + len(cfg.eval_prompt_data) + len(cfg.eval_env)
    held_out = cfg.eval_tasks * cfg.n_samples_per_eval_prompt * sets
    waves = max(episodes, held_out) / cfg.rollout_concurrency + 1
    return (
        trainer,
        RolloutHandle(
            manager,
            deadline=START_DEADLINE_S + cfg.engine_timeout,
            # Each of an episode's three attempts ends by its own timeout, so a batch ends after so many waves of them.
            rollout_deadline=waves * 3 * (cfg.episode_timeout + cfg.engine_timeout),
        ),
    )


def how_to_go_on(run: RunDir, progress: Progress) -> None:
    """After a failure or an interruption: what is saved, and what to type."""
    if not run.config.trains:
        progress.log(Text(f"what was played is stored in {shown(run.path)}"))
        return
    saved = CheckpointStore(run.checkpoints).newest_step()
    if saved:
        progress.log(Text(f"saved up to step {saved}; go on with: agentrl train --load {shown(run.path)}"))
    else:
        progress.log(Text(f"nothing was saved yet; begin again with: agentrl train --load {shown(run.path)}"))


def report(run: RunDir, progress: Progress) -> None:
    """The closing words: before and after, an episode of each, where everything lies, what to type next."""
    supervised = run.config.is_supervised
    evaluations = list(run.evaluations())
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        name = next(iter(last["sets"]))
        try:
            pair = telling_pair(*(list(run.store.read(f"eval-{name}", step=e["step"])) for e in (first, last)))
        except DataError as error:
            progress.log(Text(str(error)))
            pair = None
        if pair is not None:
            progress.log(episode_panel(pair[0], f"a held-out task {when(first['step'])} ({pair[0].task.task_id})"))
            progress.log(episode_panel(pair[1], f"the same task {when(last['step'])}"))
        rows = [(n, first["sets"].get(n), last["sets"][n]) for n in last["sets"]]
        # A set of which no episode could be scored, or that was added on the way, has nothing to compare.
        rows = [row for row in rows if all(side and side["success"]["n"] for side in row[1:])]
        if rows:
            progress.log(before_after(rows, (first["step"], last["step"])))
    if losses := [(line[HELD_OUT], line["step"]) for line in run.metrics() if line.get(HELD_OUT) is not None]:
        (first_loss, _), (last_loss, last_step), (least, best_step) = losses[0], losses[-1], min(losses)
        lowest = f"; lowest {least:.4f} {when(best_step)}" if least < last_loss else ""
        progress.log(Text(f"held-out loss {first_loss:.4f}, {last_loss:.4f} {when(last_step)}{lowest}"))
    folder = shown(run.path)
    places = {"run folder": folder} | ({} if supervised else {"reward curve": shown(run.plot_reward())})
    if run.config.tensorboard:
        places["TensorBoard"] = f"tensorboard --logdir {folder}/tensorboard"
    following = {
        "train on an environment of your own": "agentrl train --env my_env.py:MyEnv",
    }
    if not run.config.trains:
        again = f"agentrl train --load-debug-rollout-data {folder}"
        following = {"look at the episodes": f"agentrl show {folder}", "train on them": again}
    elif CheckpointStore(run.checkpoints).newest_step():
        what_it_does = {
            "look at episodes that failed": f"agentrl show {folder} --failed",
            "evaluate the trained agent": f"agentrl eval --run {folder}",
        }
        if supervised:
            what_it_does = {"evaluate the model as an agent": f"agentrl eval --run {folder} --env NAME"}
            following = {"train it on": "agentrl train --env NAME --hf-checkpoint my-agent"}
        following = {
            **what_it_does,
            "write it as a Hugging Face model": f"agentrl export --run {folder} --output-dir my-agent",
        } | following
        if evaluations and evaluations[0]["step"] != evaluations[-1]["step"]:
            ends = f"{folder}@{evaluations[0]['step']} {folder}@{evaluations[-1]['step']}"
            following = {"what training changed, task by task": f"agentrl compare {ends}"} | following
    if CheckpointStore(run.checkpoints).best_so_far() is not None:
        following = {"evaluate the best checkpoint": f"agentrl eval --run {folder} --checkpoint best"} | following
    lines = [f"  {name:<13} {value}" for name, value in places.items()]
    width = max(map(len, following.values()))
    lines += ["what next:", *(f"  {command:<{width}}  # {what}" for what, command in following.items())]
    progress.log(Text.assemble(("done", "bold green"), f" in {clock(progress.elapsed)}\n", "\n".join(lines)))


def telling_pair(before: list[Trajectory], after: list[Trajectory]) -> tuple[Trajectory, Trajectory] | None:
    """One task before and after: one that was learned, if there is one."""
    then = {t.task.task_id: t for t in after}
    pairs = [(t, then[t.task.task_id]) for t in before if t.task.task_id in then]
    learned = [(b, a) for b, a in pairs if a.success and not b.success]
    return next(iter(learned or pairs), None)
