"""``agentrl train --dry-run``: what a start would check and do. No process is started, no folder is made or touched."""

from __future__ import annotations

import os
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.data.account import load_source
from agentrl.data.run_folder import RunDir, new_folder
from agentrl.engines.options import engine_threads
from agentrl.engines.world import World
from agentrl.errors import StorageError
from agentrl.orchestrator.cluster import bundles_of, rollout_workers
from agentrl.orchestrator.launch import checked, find_start, weights_place
from agentrl.orchestrator.loop import due, evaluates_at_start
from agentrl.orchestrator.manager import open_template
from agentrl.orchestrator.notices import at_start
from agentrl.planning import Shape, memory_of

Section = list[tuple[str, str]]
"""Lines of one heading: what, and its value."""
PLAYED = ("an engine rank", "snapshot", "engines", "rollout manager", "rollout workers")
"""Lines that are not there where nothing is played."""
TRAINED = ("a trainer rank", "snapshot", "reference", "checkpoint", "trainer")
"""Lines that are not there where nothing is trained."""


def dry_run(cfg: Config) -> None:
    """Make every check that a start makes, and print what it would start.

    An episode of each environment is played without a model, as before a start; what is learned in its place is read.
    Raises AgentRLError: what the start would end with. That another process has the folder of ``--load`` is not asked.
    """
    cfg = checked(cfg)
    world = None if os.environ.get("RAY_ADDRESS") else World.here()
    if world is not None:
        bundles_of(cfg, world)
    if cfg.data_source_path and cfg.plays:
        load_source(cfg.data_source_path, cfg)
    run, source = find_start(cfg, None)
    start = source.step if source else 0
    folder = run.path if run else new_folder(cfg)
    notes = open_template(cfg, str(cfg.hf_checkpoint))[1] if cfg.plays else []
    paths = _paths(cfg, folder, str(source.path) if source else None)
    memory = memory_of(cfg, Shape.of(str(cfg.hf_checkpoint)), world.device if world else "cuda")
    sections = {
        "placement": _placement(cfg, world),
        "batch": _batch(cfg, run, start),
        "memory": _of_this_run(cfg, memory.lines()),
        "paths": paths,
    }
    for heading, lines in sections.items():
        print(heading)
        for name, value in lines:
            print(f"  {name:<16} {value}")
    for note in (*notes, *at_start(cfg)):
        print(f"note: {note}")
    print("\nEvery check passed; nothing was started.")


def _of_this_run(cfg: Config, lines: Section) -> Section:
    absent = {*(() if cfg.plays else PLAYED), *(() if cfg.trains else TRAINED)}
    return [line for line in lines if line[0] not in absent]


def _placement(cfg: Config, world: World | None) -> Section:
    ranks, engines, per_engine = cfg.world_size, cfg.rollout_num_engines or 1, cfg.rollout_num_gpus_per_engine
    layout = (
        f"tensor {cfg.tensor_model_parallel_size} × pipeline {cfg.pipeline_model_parallel_size} × data "
        f"{cfg.data_parallel_size}"
    )
    if cfg.actor_num_nodes > 1:
        layout += f", on {cfg.actor_num_nodes} machines with {ranks // cfg.actor_num_nodes} each"
    if world is None:
        where = f"the Ray cluster at {os.environ['RAY_ADDRESS']}, which is not asked whether there is room"
        each, of_engine = "1 CPU each, and 1 GPU where there are GPUs", f"{per_engine} GPU each where there are GPUs"
        of_engine += ", those of the ranks" if cfg.takes_turns else ""
    elif world.has_gpu:
        where = f"this machine, {world.gpus} GPU" + ("s" if world.gpus > 1 else "")
        each = "1 GPU each"
        of_engine = f"{per_engine} GPU each" + (", those of the ranks" if world.is_shared(cfg) else "")
    else:
        threads = 1 if cfg.deterministic else cfg.threads or engine_threads(cfg)
        where = f"this machine, no GPU, {os.cpu_count()} CPU cores"
        each = "a process each" + (f" of {cfg.threads} threads" if cfg.threads else "")
        of_engine = f"{threads} thread{'s' if threads > 1 else ''} each"
    players = rollout_workers(cfg)
    servers = "engines, router and " if cfg.plays else ""
    addresses = f"{servers}Ray at 127.0.0.1" if world else "127.0.0.1, or each machine's own where they are several"
    lines = [
        ("on", where),
        ("trainer", f"{ranks} rank{'s' if ranks > 1 else ''} = {layout}; {each}"),
        ("engines", f"{engines} SGLang server{'s' if engines > 1 else ''}; {of_engine}"),
        ("rollout manager", "1 process, with the router"),
        ("rollout workers", f"{players} processes" if players else "none, the manager plays the episodes"),
        ("addresses", f"{addresses}; free ports, keys of the run"),
    ]
    return _of_this_run(cfg, lines)


def _batch(cfg: Config, run: RunDir | None, start: int) -> Section:
    size, steps = cfg.global_batch_size or 1, cfg.num_steps_per_rollout or 1
    episodes, context = size * steps, cfg.rollout_max_context_len
    on_rank = -(-size // cfg.data_parallel_size)
    if cfg.use_dynamic_batch_size:
        longest = max(cfg.max_tokens_per_gpu, context)
        micro = f"packed up to {cfg.max_tokens_per_gpu:,} tokens"
        if context > cfg.max_tokens_per_gpu:
            micro += f"; a longer episode is one of its own, of at most {longest:,}"
    else:
        micro = f"{cfg.micro_batch_size} episodes, at most {cfg.micro_batch_size * context:,} tokens"
    lines = [
        (
            "rule",
            f"{cfg.rollout_batch_size} tasks × {cfg.n_samples_per_prompt} episodes = {episodes} = "
            f"global batch {size} × {steps} step{'s' if steps > 1 else ''}",
        ),
        ("a rollout", f"{episodes} episodes, at most {episodes * context:,} tokens ({context:,} an episode)"),
        ("a step", f"{size} episodes, {on_rank} on each data-parallel rank"),
        ("micro-batches", micro),
        ("the run", f"{cfg.num_rollout - start} rollouts, {(cfg.num_rollout - start) * steps} optimizer steps"),
    ]
    if cfg.eval_interval:
        at = [n for n in range(start + 1, cfg.num_rollout + 1) if due(n, cfg.eval_interval, cfg.num_rollout)]
        at = [start, *at] if evaluates_at_start(cfg, run, start) else at
        listed = ", ".join(map(str, at[:6])) + (f", ... {at[-1]}" if len(at) > 6 else "")
        of = f"the loss of {cfg.eval_data}" if cfg.is_supervised else f"{cfg.eval_tasks} tasks of each set at most"
        what = f"after rollouts {listed}: {of}" if at else "none are left"
        lines.append(("evaluations", what))
    return lines


def _paths(cfg: Config, folder: Path, source: str | None) -> Section:
    synced, saves = cfg.plays and cfg.trains, cfg.trains and (cfg.save_interval or cfg.best_metric)
    weights = weights_place(cfg, folder) if synced else None
    lines = [
        ("model", str(cfg.hf_checkpoint)),
        ("learned", cfg.train_data or cfg.sft_from or cfg.load_debug_rollout_data),
        ("reference", cfg.ref_load),
        ("goes on from", source),
        ("run folder", str(folder)),
        ("checkpoints", str(Path(cfg.save) if cfg.save else folder / "checkpoints") if saves else None),
        ("weights", f"a folder in {weights or 'the folder for temporary files'}" if synced else None),
        ("export", cfg.save_hf),
    ]
    for place in (folder, cfg.save, cfg.save_hf, weights):
        if place is not None:
            refuse_unwritable(Path(place))
    return [(name, path) for name, path in lines if path is not None]


def refuse_unwritable(path: Path) -> None:
    """Raises StorageError where ``path`` could not be made, or nothing written into it."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"{path}: cannot be written ({there} is {'not writable' if there.is_dir() else 'a file'}).")
