"""Wrappers for any agent environment: budgets, shorter text, history, shaped rewards, records, retries, fixed tasks."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np

from agentrl.envs.core import Env, task_index
from agentrl.envs.multi_agent import acting_agent, agents_of, shares
from agentrl.envs.tool_env import ToolEnv
from agentrl.envs.wrappers.base import Start, Transition, Wrapper
from agentrl.errors import ConfigError, InfraError
from agentrl.rewards import RewardSet
from agentrl.rewards.combine import check_signatures
from agentrl.rewards.number import summed
from agentrl.tasks.dataset import row_id
from agentrl.tasks.source import check_split
from agentrl.tasks.task_list import read_task_list
from agentrl.types import StopReason
from agentrl.values import check_number

log = logging.getLogger(__name__)

T = TypeVar("T")


class TimeLimit(Wrapper):
    """Truncates an episode after ``max_turns`` model turns, with ``stop_reason`` ``max_turns``.

    Unlike ``gymnasium.wrappers.TimeLimit`` it says why, and holds under the async loop. The environment's own
    ``max_turns`` counts too: the smaller one decides.
    """

    def __init__(self, env: gymnasium.Env[str, str], max_turns: int) -> None:
        super().__init__(env)
        check_number("TimeLimit: max_turns", max_turns, 1)
        self.max_turns = max_turns
        self._turns = 0

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._turns = 0
        return await super().areset(seed=seed, options=options)

    async def astep(self, action: str) -> Transition:
        self._turns += 1
        observation, reward, terminated, truncated, info = await super().astep(action)
        if self._turns >= self.max_turns and not terminated and not truncated:
            truncated = True
            info["stop_reason"] = str(StopReason.MAX_TURNS)
        return observation, reward, terminated, truncated, info


class TruncateToolOutput(Wrapper):
    """Cuts what a step says to at most ``max_chars`` characters a message, with a mark that says how much is missing.

    A closing tag at the end of a message (``</information>``) stays. The task, that is what a reset says, is never
    cut. To cut by tokens over a whole episode, use ``--max-tool-output-tokens``.
    """

    _END = re.compile(r"</[\w-]+>\s*\Z")

    def __init__(self, env: gymnasium.Env[str, str], max_chars: int) -> None:
        super().__init__(env)
        check_number("TruncateToolOutput: max_chars", max_chars, 0)
        self.max_chars = max_chars

    async def astep(self, action: str) -> Transition:
        observation, reward, terminated, truncated, info = await super().astep(action)
        messages = info["messages"]
        whole = "\n".join(str(message.get("content", "")) for message in messages)
        info["messages"] = [{**m, "content": self._cut(m.get("content", ""))} for m in messages]
        if whole == observation:
            observation = "\n".join(message["content"] for message in info["messages"])
        else:
            observation = self._cut(observation)
        return observation, reward, terminated, truncated, info

    def _cut(self, text: str) -> str:
        match = self._END.search(text)
        end = text[len(text[: match.start()].rstrip()) :] if match else ""
        surplus = len(text) - len(end) - self.max_chars
        return text if surplus <= 0 else f"{text[: self.max_chars]}\n[{surplus} more characters cut]{end}"


class ObservationHistory(Wrapper):
    """Puts the last ``n`` turns before each observation, for policies that see only the current one.

    A model in the episode loop reads the whole conversation as it is. This wrapper is for Gymnasium policies
    without memory, and for custom generate functions that start each turn from an empty conversation. Where several
    agents take turns, each is shown its own.
    """

    def __init__(self, env: gymnasium.Env[str, str], n: int) -> None:
        super().__init__(env)
        check_number("ObservationHistory: n", n, 1)
        self.n = n
        self._past: dict[str, deque[str]] = {}  # by agent
        self._last = ""

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._past.clear()
        self._last, info = await super().areset(seed=seed, options=options)
        return self._last, info

    async def astep(self, action: str) -> Transition:
        actor = acting_agent(self)
        observation, reward, terminated, truncated, info = await super().astep(action)
        turns = self._past.setdefault(actor, deque(maxlen=self.n))
        turns.append(f"[observation]\n{self._last}\n[action]\n{action}\n")
        self._last = observation
        past = "".join(self._past.get(acting_agent(self), ()))
        shown = f"{past}[observation]\n{observation}" if past else observation
        return shown, reward, terminated, truncated, info


class ShapeReward(Wrapper):
    """Adds a reward of yours to each turn's.

    What counts as success stays as it was: an environment that leaves it to the reward is judged by its own. Where
    several agents take turns, the one whose action it was gets what is added.

    Args:
        env: The environment.
        fn: Called as ``fn(action, observation)``, and by name with ``reward``, ``terminated``, ``truncated`` and
            ``info`` if it asks for them. Returns what to add, or a dict of named parts; may be ``async``, or a list
            of ``(weight, function)``. Each part is logged by its name in ``info["rewards"]``.

    Raises:
        EnvError: In a step: ``fn`` returned something that is not a finite number.
    """

    def __init__(self, env: gymnasium.Env[str, str], fn: Callable[..., Any] | Sequence[Any]) -> None:
        super().__init__(env)
        check_signatures(fn, ("reward", "terminated", "truncated", "info"))
        self._shaping = RewardSet(fn)
        self._own = 0.0

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._own = 0.0
        return await super().areset(seed=seed, options=options)

    async def astep(self, action: str) -> Transition:
        actor = acting_agent(self)
        observation, reward, terminated, truncated, info = await super().astep(action)
        self._own += reward
        parts = await self._shaping(
            action, observation, reward=reward, terminated=terminated, truncated=truncated, info=copy.deepcopy(info)
        )
        info["rewards"] = summed(info.get("rewards") or {}, parts)
        added = sum(parts.values())
        if actor:
            each = shares(agents_of(self), reward, info.get("agent_rewards"))
            info["agent_rewards"] = {**each, actor: each[actor] + added}
        if terminated:
            info.setdefault("success", self._own > 0)
        return observation, reward + added, terminated, truncated, info


class RecordEpisodes(Wrapper):
    """Writes each episode as a line of JSON to ``folder/episodes-<host>-<process>.jsonl``.

    A line holds ``task_id``, ``seed``, ``options``, ``messages`` with the model's turns, ``turn_rewards``, their sum
    ``reward``, the named ``rewards``, ``num_turns``, ``tool_calls``, ``success``, ``stop_reason``, and ``finished``:
    false for an episode that was left before its end. Where several agents take turns, also their ``prompts`` and
    ``agent_rewards``, and each turn has the agent's ``name``. Put it outermost to record what the model saw.
    """

    _writing = threading.Lock()

    def __init__(self, env: gymnasium.Env[str, str], folder: str | os.PathLike[str]) -> None:
        super().__init__(env)
        self.folder = Path(folder)
        self._record: dict[str, Any] | None = None

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._write()
        observation, info = await super().areset(seed=seed, options=options)
        self._record = {
            "task_id": info.get("task_id"),
            "seed": seed,
            "options": options,
            "messages": copy.deepcopy(info["messages"]),
            "turn_rewards": [],
            "reward": 0.0,
            "rewards": {},
            "num_turns": 0,
            "tool_calls": [],
            "success": None,
            "stop_reason": None,
            "finished": False,
        }
        if acting_agent(self):
            self._record |= {"prompts": copy.deepcopy(info["prompts"]), "agent_rewards": {}}
        return observation, info

    async def astep(self, action: str) -> Transition:
        actor = acting_agent(self)
        observation, reward, terminated, truncated, info = await super().astep(action)
        record = self._record
        assert record is not None  # a step without a reset was refused above
        turn = {"role": "assistant", "content": action} | ({"name": actor} if actor else {})
        record["messages"] += [turn, *copy.deepcopy(info["messages"])]
        if actor:
            each = shares(agents_of(self), reward, info.get("agent_rewards"))
            record["agent_rewards"] = summed(record["agent_rewards"], each)
        record["turn_rewards"].append(reward)
        record["reward"] += reward
        record["rewards"] = summed(record["rewards"], info.get("rewards") or {})
        record["tool_calls"] += [{"turn": record["num_turns"], **call} for call in info.get("tool_calls") or ()]
        record["num_turns"] += 1
        if terminated or truncated:
            record.update(success=info.get("success"), stop_reason=info.get("stop_reason"), finished=True)
            self._write()
        return observation, reward, terminated, truncated, info

    async def aclose(self) -> None:
        self._write()
        await super().aclose()

    def _write(self) -> None:
        record, self._record = self._record, None
        if record is None:
            return
        line = json.dumps(record, ensure_ascii=True, default=str) + "\n"
        file = self.folder / f"episodes-{socket.gethostname()}-{os.getpid()}.jsonl"
        with self._writing:
            self.folder.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="ascii") as lines:
                lines.write(line)


class RetryOnInfraError(Wrapper):
    """Tries again where a reset or step raised :class:`~agentrl.errors.InfraError`, within the episode.

    The failed step may have changed the episode, so it is played again from its start with the same seed and the
    same actions, then the step is repeated. Where the environment then answers otherwise than before,
    or the attempts are used up, the error passes: the episode loop retries or drops the episode.

    Args:
        env: The environment; its tools are called again when an episode is played again.
        attempts: Tries of one reset or step, at least 1.
        backoff: Seconds before the second try; doubled for each further one.
    """

    _RANDOM = ("_np_random", "_np_random_seed", "_resets_since_seed")

    def __init__(self, env: gymnasium.Env[str, str], attempts: int = 3, backoff: float = 0.5) -> None:
        super().__init__(env)
        check_number("RetryOnInfraError: attempts", attempts, 1)
        self.attempts = attempts
        check_number("RetryOnInfraError: backoff", backoff, 0, whole=False)
        self.backoff = backoff
        self._past: list[tuple[str, Transition]] = []

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._past = []
        self._seed, self._options = seed, copy.deepcopy(options)
        inside = vars(self.unwrapped)
        self._random = copy.deepcopy({name: inside[name] for name in self._RANDOM if name in inside})
        start = await self._tried(lambda attempt: self._begin())
        self._start = copy.deepcopy(_said_first(start))
        return start

    async def astep(self, action: str) -> Transition:
        transition = await self._tried(lambda attempt: self._step(action, again=attempt > 0))
        self._past.append((action, copy.deepcopy(transition)))
        return transition

    async def _tried(self, act: Callable[[int], Awaitable[T]]) -> T:
        for attempt in itertools.count():
            try:
                return await act(attempt)
            except InfraError as error:
                if attempt + 1 >= self.attempts:
                    raise
                seconds, name = self.backoff * 2**attempt, type(self.unwrapped).__name__
                log.info("%s, attempt %d, again in %.1f s: %s", name, attempt + 1, seconds, error)
                await asyncio.sleep(seconds)
        raise AssertionError

    async def _step(self, action: str, *, again: bool) -> Transition:
        if again:
            await self._play_again()
        return await super().astep(action)

    async def _begin(self) -> Start:
        if self._seed is None:  # then the episode follows from the state of the generator
            vars(self.unwrapped).update(copy.deepcopy(self._random))
        return await super().areset(seed=self._seed, options=copy.deepcopy(self._options))

    async def _play_again(self) -> None:
        self._compare(_said_first(await self._begin()), self._start)
        for action, before in self._past:
            self._compare((await super().astep(action))[:4], before[:4])

    def _compare(self, now: tuple[Any, ...], before: tuple[Any, ...]) -> None:
        if now != before:
            raise InfraError(
                f"the episode cannot be played again after a failure: {type(self.unwrapped).__name__} now answers "
                f"{now[0]!r:.80} where it answered {before[0]!r:.80}"
            )


class FixedTasks(Wrapper):
    """Gives an environment a fixed list of tasks, its ``splits`` and ``num_tasks``.

    A task is a dict. With ``prompt`` it is a row for a :class:`~agentrl.envs.tool_env.ToolEnv`: what ``task`` returns.
    Otherwise it says how to reset the environment: ``seed``, ``index``, ``split`` (of the environment) and
    ``options``, all optional. ``task_id`` names it.

    Args:
        env: The environment.
        tasks: Tasks by split, as of :func:`agentrl.load_tasks`; or a list, or the path of a JSON Lines file, of tasks
            that name their ``split`` (``test`` where they do not).

    Raises:
        ConfigError: A task has keys that mean nothing or a prompt that the environment cannot take, or there are none.
        DataError: The file is missing or a line of it is no task.
    """

    def __init__(
        self, env: gymnasium.Env[str, str], tasks: Mapping[str, Sequence[Any]] | Sequence[Any] | str | os.PathLike[str]
    ) -> None:
        super().__init__(env)
        self._tasks = read_task_list(tasks)
        rows = any("prompt" in task for listed in self._tasks.values() for task in listed)
        if rows and not isinstance(self.unwrapped, ToolEnv):
            raise ConfigError(
                f"FixedTasks: a task with a 'prompt' is for a ToolEnv, and {type(self.unwrapped).__name__} is none; "
                "say by 'seed', 'index' or 'options' which of its own tasks is meant."
            )
        self.splits = tuple(self._tasks)
        self._drawing: np.random.Generator | None = None

    def num_tasks(self, split: str) -> int:
        """Number of tasks in ``split``."""
        return len(self._tasks.get(split, ()))

    def id_of_task(self, split: str, index: int) -> str | None:
        """The ``task_id`` of a task, of one with a prompt else the hash of its content; None for others."""
        task = self._tasks[split][index]
        return row_id(task) if "prompt" in task or task.get("task_id") is not None else None

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        split = (options or {}).get("split", self.splits[0])
        check_split(self.splits, split, "FixedTasks")
        if seed is not None or self._drawing is None:
            self._drawing = np.random.default_rng(seed)
        task = copy.deepcopy(self._tasks[split][task_index(self, split, options, self._drawing)])
        inside = getattr(self.env.unwrapped, "splits", Env.splits)
        inner: dict[str, Any] = {"split": task.get("split", split if split in inside else inside[0])}
        if "prompt" in task:
            inner["row"] = {k: v for k, v in task.items() if k not in ("seed", "split")}
        else:
            inner.update(task.get("options", {}))
            inner.update({"index": task["index"]} if "index" in task else {})
        observation, info = await super().areset(seed=task.get("seed", seed), options=inner)
        if "task_id" in task:
            info["task_id"] = str(task["task_id"])
        return observation, info


def _said_first(start: Start) -> tuple[Any, ...]:
    """Of a reset, what tells one task from another."""
    observation, info = start
    return observation, info["messages"], info.get("task_id")
