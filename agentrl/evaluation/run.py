"""``agentrl eval``: held-out tasks with a model, on engines of its own. Needs no Ray, no Megatron, no torch here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.config.schema import EvalConfig
from agentrl.data.files import JsonLines, finite, write_text
from agentrl.data.records import to_record
from agentrl.data.rundir import RunDir
from agentrl.errors import AgentRLError
from agentrl.evaluation.heldout import HeldOutSet, held_out_sets, run_set
from agentrl.evaluation.metrics import EvalSummary
from agentrl.process import terminate_on_sigterm, write_log_to
from agentrl.progress import Progress, shown
from agentrl.rollout.setup import engine_spec, episode_limits, eval_params, make_env, scratch
from agentrl.types import Trajectory
from agentrl.warden import Warden


def evaluate(cfg: EvalConfig) -> dict[str, EvalSummary]:
    """Evaluate and report; returns the summaries by set name.

    Writes ``summary.json`` and ``trajectories.jsonl`` (one line an episode, written as it ends) into the
    run folder.

    Raises:
        AgentRLError: with one message for a person; no process is left by then.
    """
    model = model_folder(cfg)
    sets = held_out_sets(cfg, split=cfg.split)
    with (
        RunDir.create(cfg) as run,
        Progress(f"agentrl eval · {run.path.name}", 0) as progress,
        Warden() as warden,
        scratch(warden),
    ):
        write_log_to(run.logs / "driver.log", cfg.log_level)
        progress.log(Text(f"run folder  {run.path}\nmodel       {model}"))
        summaries = asyncio.run(_until_sigterm(_evaluate(cfg, model, sets, run, progress)))
        write_text(
            run.path / "summary.json",
            json.dumps(finite({name: summary.to_dict() for name, summary in summaries.items()}), indent=2) + "\n",
        )
        progress.log(summary_table(summaries))
        progress.log(Text(f"every episode is in {shown(run.path / 'trajectories.jsonl')}"))
        refuse_if_unscored(summaries)
    return summaries


def refuse_if_unscored(summaries: dict[str, EvalSummary]) -> None:
    """Raises AgentRLError when a set has no score, so that a script does not take its absence for one."""
    for name, summary in summaries.items():
        if not summary.success.n:
            reasons = ", ".join(f"{reason} {count}" for reason, count in summary.stop_reasons.items())
            raise AgentRLError(
                f"{name}: not one of {summary.errors} episodes could be scored ({reasons}); their errors are in "
                "trajectories.jsonl of the run folder"
            )


async def _until_sigterm(work: Coroutine[Any, Any, Any]) -> Any:
    with terminate_on_sigterm():
        return await work


def model_folder(cfg: EvalConfig) -> str:
    """The HF folder to serve: ``--hf-checkpoint``, or that of the newest checkpoint of ``--run``.

    Raises:
        CheckpointError: the run has no complete checkpoint.
    """
    if cfg.run is None:
        return str(cfg.hf_checkpoint)
    from agentrl.trainer.checkpoint import CheckpointStore

    return str(CheckpointStore.open_run(cfg.run).hf_folder)


async def _evaluate(
    cfg: EvalConfig, model: str, sets: list[HeldOutSet], run: RunDir, progress: Progress
) -> dict[str, EvalSummary]:
    from agentrl.rollout.chat import ChatTemplate
    from agentrl.rollout.client import EngineClient
    from agentrl.rollout.pool import EnginePool

    pool = EnginePool(
        engine_spec(cfg, model),
        cfg.rollout_num_engines or 1,
        log_dir=run.logs,
        policy=cfg.router_policy,
        host=cfg.host,
        start_timeout=cfg.engine_timeout,
        health_interval=cfg.rollout_health_check_interval,
        health_timeout=cfg.rollout_health_check_timeout,
    )
    lines = JsonLines(run.path / "trajectories.jsonl")
    try:
        progress.stage("starting engines")
        await pool.start()
        chat = ChatTemplate(model)
        async with EngineClient(pool.router_url, pool.router_key) as client:
            return {held_out.name: await _one_set(cfg, held_out, client, chat, lines, progress) for held_out in sets}
    finally:
        with contextlib.suppress(AgentRLError):
            await asyncio.shield(pool.stop())
        lines.close()


async def _one_set(
    cfg: EvalConfig, held_out: HeldOutSet, client: Any, chat: Any, lines: JsonLines, progress: Progress
) -> EvalSummary:
    from agentrl.rollout.worker import EpisodeRunner

    total = len(held_out.tasks) * cfg.n_samples_per_eval_prompt
    progress.stage(f"evaluating {held_out.name} ({held_out.split})")
    ended: list[Trajectory] = []

    def on_episode(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        lines.append(to_record(trajectory))
        progress.counted(len(ended), total)

    runner = EpisodeRunner(
        lambda: make_env(held_out.spec, held_out.kwargs, tool_timeout=cfg.tool_timeout),
        client,
        chat,
        eval_params(cfg),
        episode_limits(cfg),
        cfg.rollout_concurrency,
        generate=cfg.custom_generate_function_path,
    )
    try:
        summary, _ = await run_set(
            runner, held_out, samples=cfg.n_samples_per_eval_prompt, tag=f"eval-{held_out.name}", on_episode=on_episode
        )
    finally:
        await runner.close()
    return summary


def summary_table(summaries: dict[str, EvalSummary]) -> Table:
    """What ``agentrl eval`` prints: one column a set."""
    table = Table(title="Held-out evaluation", title_justify="left")
    table.add_column("")
    for name, s in summaries.items():
        table.add_column(f"{name} ({s.split})", justify="right")
    rows = {
        "success": lambda s: f"{s.success.mean:.1%}",
        "95 % interval": lambda s: f"{s.success.low:.1%} – {s.success.high:.1%}",
        "reward (± standard error)": lambda s: f"{s.reward.mean:.3f} ± {s.reward.stderr:.3f}",
        "tasks": lambda s: str(s.success.n_tasks),
        "episodes scored": lambda s: str(s.success.n),
        "errors (not scored)": lambda s: str(s.errors),
        "turns": lambda s: f"{s.turns:.1f}",
        "tool calls": lambda s: f"{s.tool_calls:.1f}",
        "tokens generated": lambda s: f"{s.tokens:.0f}",
        "truncated": lambda s: f"{s.truncation_rate:.1%}",
    }
    for label, cell in rows.items():
        table.add_row(label, *(cell(s) for s in summaries.values()))
    return table
