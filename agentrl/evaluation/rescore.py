"""``agentrl eval --rescore``: rewards as they are now, for episodes that were played before. Nothing is generated.

Two ways, whichever the environment allows:

- A :class:`~agentrl.ToolEnv` is reset to the task, and its reward functions get the turns and calls of the record. No
  tool runs; what tools themselves gave (the part ``tools``) stays as it was.
- Any other environment is reset to the task and stepped through the turns again. Its rewards count only if it answers
  word for word as it did: then it is deterministic, and the episode is the same.

An episode for which neither works keeps its old reward, and the report says how many do and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.concurrency.together import together
from agentrl.config.schema import EvalConfig
from agentrl.data.files import JsonLines
from agentrl.data.records import to_record
from agentrl.data.run_folder import RunDir
from agentrl.envs.core import Env
from agentrl.envs.registry import make_env
from agentrl.envs.tool_env import ToolEnv
from agentrl.envs.wrappers.base import Wrapper
from agentrl.errors import ConfigError, DataError, describe
from agentrl.evaluation.metrics import EvalSummary, summarize
from agentrl.evaluation.report import Report
from agentrl.evaluation.results import SUMMARY, TRAJECTORIES, EvalResult, load
from agentrl.progress import Progress, shown
from agentrl.rewards import load as load_reward
from agentrl.rewards.number import reward_number
from agentrl.rollout.episode import entry_point
from agentrl.tools.arguments import shorten
from agentrl.types import Message, Outcome, StopReason, Trajectory, replace

CATEGORIES_OF_ERRORS = 120
"""Characters of an error by which those that keep their reward are counted."""


class NotRescored(Exception):
    """Why an episode keeps its old reward."""


def rescore(cfg: EvalConfig) -> int:
    """Score the episodes in ``--output-dir`` anew, into the folder ``rescored-<n>`` in it; the old files stay. Exit
    code 0 when every episode that has a score was scored anew, else 1.
    Raises DataError: the folder holds no evaluation.
    Raises ConfigError: the rewards named cannot be used."""
    result = load(str(cfg.output_dir))
    about = result.record.get("evaluation", {}).get("sets")
    if not about or set(result.sets) - set(about):
        raise DataError(f"{cfg.output_dir}: run.json does not say which environments the episodes are of.")
    old = EvalConfig.from_dict(result.config)
    if old.custom_generate_function_path is not None:
        raise ConfigError(
            f"{cfg.output_dir}: its episodes were played and rewarded by {old.custom_generate_function_path}, whose "
            "rewards cannot be had without playing again."
        )
    cfg = cfg.replace(sandbox=cfg.sandbox or old.sandbox)
    for name in result.sets:  # what cannot be made is said before a folder is
        _environment(about[name]["env"], dict(about[name]["env_args"]), cfg).close()
    number = next(n for n in itertools.count(1) if not (result.path / f"rescored-{n}").exists())
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(RunDir.create(old.replace(output_dir=str(result.path / f"rescored-{number}"))))
        run.describe(evaluation=result.record["evaluation"], rescored={"custom_rm_path": cfg.custom_rm_path})
        console = Console(stderr=True, highlight=False) if cfg.json else None
        progress = stack.enter_context(Progress(f"agentrl eval --rescore · {result.path.name}", 0, console=console))
        lines = stack.enter_context(contextlib.closing(JsonLines(run.path / TRAJECTORIES)))
        kept: Counter[str] = Counter()
        summaries = {}
        for name, before in result.sets.items():
            progress.stage(f"scoring {name}")
            spec, kwargs, split = about[name]["env"], dict(about[name]["env_args"]), about[name]["split"]
            rescored_set, reasons = asyncio.run(_rescore_set(cfg, spec, kwargs, before))
            kept += reasons
            lines.append(*(to_record(trajectory, set_name=name) for trajectory in rescored_set))
            was = result.summaries.get(name, {})
            seconds, planned = was.get("seconds") or 0.0, was.get("planned") or 0
            summaries[name] = summarize(name, split, rescored_set, seconds, planned=planned)
        lines.sync()
        return _report(cfg, result, summaries, kept, run, progress)


def _report(
    cfg: EvalConfig,
    result: EvalResult,
    summaries: dict[str, EvalSummary],
    kept: Counter[str],
    run: RunDir,
    progress: Progress,
) -> int:
    report = Report(
        summaries,
        model=json.dumps(result.record["evaluation"].get("model")),
        folder=str(run.path),
        warnings=[f"{count} episodes keep their old reward: {reason}" for reason, count in kept.most_common()],
        extra={"rescored_from": str(result.path), "kept": dict(kept)},
    )
    report.tell(run.path / SUMMARY, progress)
    for name, after in summaries.items():
        before = summarize(name, after.split, result.sets[name], 0.0)
        progress.log(
            Text(
                f"{name}: success {before.success.mean:.1%} → {after.success.mean:.1%}, "
                f"reward {before.reward.mean:.3f} → {after.reward.mean:.3f}"
            )
        )
    progress.log(Text(f"written to {shown(run.path)}; what was there is as it was"))
    if cfg.json:
        report.print_json()
    return 1 if kept else 0


async def _rescore_set(
    cfg: EvalConfig, spec: str, kwargs: dict[str, Any], trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], Counter[str]]:
    """The trajectories with their new rewards, in order, and why some keep the old one."""
    results: list[Trajectory] = list(trajectories)
    kept: Counter[str] = Counter()
    numbers = iter(range(len(trajectories)))

    async def worker() -> None:
        env = _environment(spec, kwargs, cfg)
        try:
            for number in numbers:
                trajectory = trajectories[number]
                if trajectory.outcome is Outcome.INFRA_ERROR:
                    continue  # it has no score to change
                try:
                    async with asyncio.timeout(cfg.episode_timeout):
                        results[number] = await rescored(env, trajectory)
                except NotRescored as reason:
                    kept[str(reason)] += 1
                except TimeoutError:
                    kept[f"its scoring took more than {cfg.episode_timeout:g} s (--episode-timeout)"] += 1
                except ConfigError:
                    raise
                except Exception as error:  # a reward function may raise anything; the episode is as it was
                    kept[shorten(describe(error), CATEGORIES_OF_ERRORS)] += 1
        finally:
            with contextlib.suppress(Exception):  # user code, of an environment that is of no more use
                await entry_point(env, "close")()

    await together(worker() for _ in range(min(cfg.rollout_concurrency, len(trajectories))))
    return results, kept


def _environment(spec: str, kwargs: dict[str, Any], cfg: EvalConfig) -> Env | Wrapper:
    """The environment of a set, with ``--custom-rm-path`` in the place of its own reward."""
    env = make_env(spec, kwargs, sandbox=cfg.sandbox)
    if (reward := cfg.custom_rm_path) is not None:
        if not isinstance(env.unwrapped, ToolEnv):
            env.close()
            raise ConfigError(
                f"--custom-rm-path: {spec} is no ToolEnv, so it has no reward function that could be replaced."
            )
        env.unwrapped.reward = load_reward(reward)
    return env


async def rescored(env: Env | Wrapper, trajectory: Trajectory) -> Trajectory:
    """A copy of ``trajectory`` with the rewards that ``env`` gives now.
    Raises NotRescored: it cannot be said what they would be; the text says why."""
    if trajectory.episode_id != trajectory.trajectory_id:
        raise NotRescored("several agents took part, whose turns depend on each other")
    options = {"split": trajectory.task.split, **trajectory.task.options}
    call_format = getattr(env.unwrapped, "call_format", "none")
    if call_format != "none" and not call_format.startswith("tags"):
        env.call_format = "hermes"  # in which the record's calls are given back
    observation, info = await entry_point(env, "reset")(seed=trajectory.task.seed, options=options)
    opening = info.get("messages") or [Message(role="user", content=observation)]
    if env is env.unwrapped and isinstance(env, ToolEnv) and not _takes_turns_itself(env):
        return await _judged(env, trajectory)
    return await _replayed(env, trajectory, opening)


def _takes_turns_itself(env: ToolEnv) -> bool:
    own = type(env).__mro__[: type(env).__mro__.index(ToolEnv)]
    return any(name in vars(cls) for cls in own for name in ("step", "astep"))


async def _judged(env: ToolEnv, trajectory: Trajectory) -> Trajectory:
    """By the reward functions alone."""
    turns = turn_texts(trajectory)
    calls = [[c for c in trajectory.tool_calls if c.get("turn") == number] for number in range(1, len(turns) + 1)]
    finished = trajectory.stop_reason is StopReason.DONE
    of_turns, final = await env.judge_again(turns, calls, finished=finished)
    parts: dict[str, float] = {}
    _add(parts, *of_turns, final)
    turn_rewards = [math.fsum(given.values()) for given in of_turns]
    if turn_rewards:
        turn_rewards[-1] += math.fsum(final.values())
    if earned := trajectory.rewards.get("tools", 0.0):
        _add(parts, {"tools": earned})
        turn_rewards = []  # by which turn the tools' part was earned is not in the record
    reward = math.fsum(parts.values())
    success = env.is_success(final, reward) if finished else trajectory.success
    return replace(trajectory, reward=reward, rewards=parts, turn_rewards=turn_rewards, success=success)


def _add(parts: dict[str, float], *further: Mapping[str, Any]) -> None:
    for given in further:
        for name, value in given.items():
            parts[name] = parts.get(name, 0.0) + reward_number(value, f"the reward {name!r}")


async def _replayed(env: Env | Wrapper, trajectory: Trajectory, opening: Sequence[Message]) -> Trajectory:
    """By going through the turns again; the environment must answer as it did."""
    recorded = list(trajectory.messages)
    if _words(recorded[: len(opening)]) != _words(opening):
        raise NotRescored("its environment gives another task now")
    position = len(opening)
    rewards: list[float] = []
    parts: dict[str, float] = {}
    success: bool | None = None
    over = False
    for text in turn_texts(trajectory):
        if over:
            raise NotRescored("its environment ends the episode earlier now")
        observation, reward, terminated, truncated, step = await entry_point(env, "step")(text)
        rewards.append(reward_number(reward, "the reward of a step"))
        _add(parts, step.get("rewards") or {})
        success = bool(step["success"]) if step.get("success") is not None else success
        over = terminated or truncated
        answered = step.get("messages") or [Message(role="user", content=observation)]
        position += 1
        if not over:
            followed = recorded[position : position + len(answered)]
            # After the last turn of an episode that a budget ended, there is no answer in the record.
            if followed and _words(followed) != _words(answered):
                raise NotRescored("its environment answers otherwise now, so its turns may not be judged by it")
            position += len(answered)
    if trajectory.stop_reason in (StopReason.DONE, StopReason.ENV_TRUNCATED) and not over:
        raise NotRescored("its environment does not end the episode where it did")
    if success is None and trajectory.outcome is not Outcome.COMPLETED:
        success = False
    return replace(
        trajectory, reward=math.fsum(rewards), rewards=parts, turn_rewards=rewards, success=success
    )  # fmt: skip


def _words(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    return [(m.get("role"), m.get("content") or "") for m in messages]


def turn_texts(trajectory: Trajectory) -> list[str]:
    """What the environment was stepped with: the reasoning, words, and calls (in the hermes format) of each turn.

    Messages of the prompt that a model is said to have written (examples) are not among them, nor is a turn that was
    cut short by the token budget.
    """
    written = [m for m in trajectory.messages if m.get("role") == "assistant"]
    written = written[len(written) - trajectory.num_turns :]
    turns = trajectory.info.get("turns") or [{}]
    cut_short = turns[-1].get("finish_reason") == "length"
    return [_text(m) for m in (written[:-1] if cut_short else written)]


def _text(message: Mapping[str, Any]) -> str:
    parts = []
    if message.get("reasoning_content"):
        parts.append(f"<think>\n{message['reasoning_content']}\n</think>\n")
    if message.get("content"):
        parts.append(str(message["content"]))
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        body = json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body.replace('<', chr(92) + 'u003c')}\n</tool_call>")
    return "\n".join(parts)
